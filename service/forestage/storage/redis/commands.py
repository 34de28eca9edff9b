"""The commands that are sent, as bytes."""

from forestage.storage.base import Buffer

__all__ = ["ASKING", "exists", "get", "set_value", "unlink"]

ASKING = b"*1\r\n$6\r\nASKING\r\n"


def get(name: bytes) -> bytes:
    """Return the command that fetches a value."""
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)


def exists(name: bytes) -> bytes:
    """Return the command that asks whether a value is there."""
    return b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(name), name)


def unlink(name: bytes) -> bytes:
    """Return the command that removes a value."""
    return b"*2\r\n$6\r\nUNLINK\r\n$%d\r\n%b\r\n" % (len(name), name)


def set_value(name: bytes, payload: Buffer, trailer: bytes, ttl_s: int) -> tuple[Buffer, ...]:
    """Return the pieces of the command that stores a value, for `ttl_s` seconds if that is not 0.

    The payload is one of them and is not copied.
    """
    size = len(payload) + len(trailer)
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (5 if ttl_s else 3, len(name), name, size)
    end = b"$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s) if ttl_s else b""
    return head, payload, trailer + b"\r\n" + end
