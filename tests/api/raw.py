"""Requests over a bare socket, whose end the test decides."""

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, Literal

__all__ = ["Leaving", "exchange", "leave", "send_request"]

Leaving = Literal["fin", "rst"]


def send_request(
    address: tuple[str, int] | str,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    token: str = "",
    version: str = "1.1",
) -> socket.socket:
    """Send one whole request to a port or a unix socket; the answer is left to be read."""
    sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    sock.settimeout(10)
    sock.connect(address)
    content = json.dumps(body).encode() if body is not None else b""
    lines = [f"{method} {path} HTTP/{version}", "Host: test", f"Content-Length: {len(content)}"]
    if body is not None:
        lines.append("Content-Type: application/json")
    if token:
        lines.append(f"Authorization: Bearer {token}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode() + content)
    return sock


def leave(sock: socket.socket, how: Leaving) -> None:
    """Close a socket in an orderly way, or by resetting its connection."""
    if how == "rst":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def exchange(port: int, line: str, *headers: bytes) -> tuple[int, str, str]:
    """Send a request line and headers just as they are; return status, head and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"\r\n".join([f"{line} HTTP/1.1".encode(), b"Host: t", b"Connection: close", *headers, b"", b""]))
        head, _, body = (await reader.read()).decode("latin-1").partition("\r\n\r\n")
        return int(head.split()[1]), head.lower(), body
    finally:
        writer.close()
