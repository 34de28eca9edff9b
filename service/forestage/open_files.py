"""How many files this process may have open: enough for all connections, as far as the machine lets us."""

import logging
import resource

__all__ = ["allow_open_files"]

_OTHERS = 512  # pool, logs, connections to L3, pages that are being read

log = logging.getLogger("forestage.server")


def allow_open_files(num_connections: int) -> None:
    """Raise the soft limit of open files so that so many connections fit; warn where the hard one is lower."""
    wanted = num_connections + _OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning("server.max_connections: need %d open files, have %d allowed (ulimit -H -n)", wanted, most)
