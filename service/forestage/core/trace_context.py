"""On whose behalf a request is made: W3C's `traceparent`, version 00.

Law: what `checked_traceparent` returns has exactly four parts in lower-case hex, or is empty; so its parts may go
into logs and traces as they are.
"""

import re

__all__ = ["checked_traceparent", "trace_id_of"]

_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def checked_traceparent(header: str) -> str:
    """Return a `traceparent` that can be relied on, empty if the header is none.

    One of a later version is taken as far as version 00 defines it.
    """
    head = header.strip()[:55]
    rest = header.strip()[55:]
    if _FORM.fullmatch(head) is None or head.startswith("ff") or (rest and (head.startswith("00") or rest[0] != "-")):
        return ""
    _, trace_id, span_id, flags = head.split("-")
    if not int(trace_id, 16) or not int(span_id, 16):
        return ""
    return f"00-{trace_id}-{span_id}-{flags}"


def trace_id_of(traceparent: str) -> str:
    """Return the trace id of a checked `traceparent`, empty for an empty one."""
    return traceparent[3:35]
