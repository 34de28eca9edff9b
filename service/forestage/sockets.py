"""The sockets the API listens on: bound before anything slow, so that a taken port is known at once."""

import errno
import os
import socket
import stat

from forestage.core.errors import StartError

__all__ = ["bind_tcp", "bind_unix"]


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bind a TCP socket without listening; port 0 lets the system choose. Raises StartError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise StartError(f"server.host: {host} is no address of this machine ({error.strerror})") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        key = "server.port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "server.host"
        raise StartError(f"{key}: cannot listen on {host}:{port} ({error.strerror})") from error
    return sock


def bind_unix(path: str, mode: int = 0o660, key: str = "server.uds") -> socket.socket:
    """Bind a unix socket, replacing one that nobody listens on any more. Raises StartError naming the setting `key`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path, key)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        os.fchmod(sock.fileno(), mode)  # which bind takes over: at no moment may more callers connect
        sock.bind(path)
        os.chmod(path, mode)
    except OSError as error:
        sock.close()
        raise StartError(f"{key}: cannot listen on {path} ({error.strerror or error})") from error
    except StartError:
        sock.close()
        raise
    return sock


def _remove_dead(path: str, key: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StartError(f"{key}: {path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(path)
        except OSError:
            os.unlink(path)
            return
    raise StartError(f"{key}: another service listens on {path}")
