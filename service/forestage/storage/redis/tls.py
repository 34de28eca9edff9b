"""TLS settings, made into a context once and again whenever a file that they name has changed.

Making one reads every trusted certificate, too slow for each connection. Files change when certificates are renewed.
"""

import os
import ssl
import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["TLS_FILES", "TLS_OPTIONS", "TlsSettings"]

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS = frozenset(
    {*TLS_FILES, "ssl_ca_path", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers"}
)
_VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_Stamp = tuple[int, int]


class TlsSettings:
    """The options that redis-py calls `ssl_...`; where they name authorities, only those are trusted."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._made: tuple[list[_Stamp], ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection. Blocking; from any thread. Raises OSError."""
        with self._lock:
            stamps = [_stamp(self._options[name]) for name in TLS_FILES if name in self._options]
            if self._made is None or self._made[0] != stamps:
                self._made = stamps, self._make()
            return self._made[1]

    def _make(self) -> ssl.SSLContext:
        options = self._options
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"), capath=options.get("ssl_ca_path"))
        verify = _VERIFY[options.get("ssl_cert_reqs", "required")]
        context.check_hostname = options.get("ssl_check_hostname", True) and verify is not ssl.CERT_NONE
        context.verify_mode = verify
        if "ssl_ciphers" in options:
            context.set_ciphers(options["ssl_ciphers"])
        if "ssl_certfile" in options:
            # Without a password OpenSSL would ask for one on the terminal.
            password = options.get("ssl_password", "")
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password)
        return context


def _stamp(path: str) -> _Stamp:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_ino
