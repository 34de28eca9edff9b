"""`python -m forestage`."""

import sys

from forestage.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
