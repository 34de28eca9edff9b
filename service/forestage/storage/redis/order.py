"""Commands that change values: SET and UNLINK, pipelined, a value sent from where it lies."""

from collections.abc import Sequence

from forestage.storage.base import Buffer
from forestage.storage.redis.errand import Errand
from forestage.storage.redis.errors import ReplyError
from forestage.storage.redis.link import Link
from forestage.storage.redis.node import Node

__all__ = ["Command", "Order", "set_command", "unlink_command"]


class Command:
    """One command for one key: its bytes, and whether it answers with a number."""

    __slots__ = ("answers_number", "asking", "buffers", "name")

    def __init__(self, name: bytes, buffers: tuple[Buffer, ...], *, answers_number: bool) -> None:
        self.name = name
        self.buffers = buffers
        self.answers_number = answers_number
        self.asking = False


def set_command(name: bytes, payload: Buffer, trailer: bytes, ttl_s: int) -> Command:
    """Return the command that stores a value, for `ttl_s` seconds if that is not 0."""
    size = len(payload) + len(trailer)
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(name), name, size)
    end = b"$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s) if ttl_s else b""
    return Command(name, (head, payload, trailer + b"\r\n" + end), answers_number=False)


def unlink_command(name: bytes) -> Command:
    """Return the command that removes a value."""
    return Command(name, (b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%b\r\n" % (len(name), name),), answers_number=True)


class Order(Errand):
    """Has one node carry out commands. `run` in a writer thread of that node, then look at `numbers` and `errors`."""

    def __init__(self, node: Node, commands: Sequence[Command]) -> None:
        super().__init__(node)
        self.commands = commands
        self.total = 0
        self.errors: list[tuple[Command, ReplyError]] = []

    def _use(self, link: Link) -> None:
        for command in self.commands:
            link.send(*command.buffers)
        for command in self.commands:
            try:
                if command.answers_number:
                    self.total += link.replies.read_number()
                else:
                    link.replies.read_ok()
            except ReplyError as error:
                self.errors.append((command, error))
