"""The commands. `main` is the entry point; each command imports what it needs when it runs."""

from forestage.cli.main import main

__all__ = ["main"]
