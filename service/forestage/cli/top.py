"""`forestage top`: the status page in a terminal."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forestage.cli.ask import with_client
from forestage.cli.exits import Exit
from forestage.cli.top_frame import draw_frame
from forestage_client import Client, DeadlineExceeded, Unreachable

__all__ = ["top"]

_FASTEST_S = 0.1
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def top(arguments: argparse.Namespace) -> int:
    """Show the service at work until interrupted; once only, where the output is no terminal or `--once` is given."""
    return with_client(arguments, _top)


def _top(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps(dict(client.status())))
        return Exit.OK
    if arguments.once or not sys.stdout.isatty():
        width, _ = shutil.get_terminal_size((100, 50))
        print("\n".join(draw_frame(client.status(), width, 1000, colour=_wants_colour())))
        return Exit.OK
    client.status()  # what is wrong with address or token is told before the screen is taken
    with _screen():
        while True:
            _show(client)
            time.sleep(max(_FASTEST_S, arguments.interval))


def _show(client: Client) -> None:
    width, height = shutil.get_terminal_size()
    try:
        lines = draw_frame(client.status(), width, height - 1, colour=_wants_colour())
    except (Unreachable, DeadlineExceeded) as error:
        lines = [f"no answer: {error}"[:width]]
    sys.stdout.write(_HOME + "".join(f"{line}{_REST_OF_LINE}\n" for line in lines) + _REST_OF_SCREEN)
    sys.stdout.flush()


def _wants_colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


@contextmanager
def _screen() -> Iterator[None]:
    """Take the terminal's other screen, and give it back however this ends."""
    sys.stdout.write(_ENTER)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(Exit.OK) from None  # the way to leave, not a failure
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
