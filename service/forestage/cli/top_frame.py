"""One picture of the status feed in letters, as `forestage top` shows it. Pure: a feed in, lines out.

Law: no line is wider than asked for, there are at most as many as asked for, and whatever the feed says, no control
character but our own colours is among them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["LETTERS", "draw_frame"]

#: How slots are drawn, by state.
LETTERS = {"free": ".", "resident": "o", "leased": "#", "loading": "+", "dirty": "d"}
_COLOURS = {"free": "2", "resident": "36", "leased": "32", "loading": "33", "dirty": "35", "bad": "31", "title": "1"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MIN_WIDTH = 40

# A line is its parts, each with the name of a colour or none; they are cut to the width before they are coloured.
_Line = list[tuple[str, str]]


def draw_frame(status: Mapping[str, Any], width: int, height: int, *, colour: bool) -> list[str]:
    """Draw a feed into lines for a terminal; the least important ones, at the end, are left out where it is low."""
    width = max(width, _MIN_WIDTH)
    lines = [*_head(status), *_pool(status, width), *_lately(status), *_running(status, width), *_finished(status)]
    return [_fit(line, width, colour) for line in lines[: max(1, height)]]


def _head(status: Mapping[str, Any]) -> Iterator[_Line]:
    storage, jobs = status["storage"], status["jobs"]
    up = storage["state"] == "up"
    yield [
        (f"forestage {status['version']}", "title"),
        (f"  up {_span(status['uptime_s'] * 1e3)}  {status['state']}  ", ""),
        (f"storage {storage['kind']}: {storage['state']} for {_span(storage['since_ms'])}", "" if up else "bad"),
    ]
    by_state = ", ".join(f"{count} {state}" for state, count in jobs.items())
    promised = f"{_size(status['inflight_bytes'])} of {_size(status['inflight_limit_bytes'])}"
    yield [(f"jobs: {by_state}; promised {promised}; {status['leases']} leases, {status['pins']} pins", "")]
    yield []


def _pool(status: Mapping[str, Any], width: int) -> Iterator[_Line]:
    for part in status["pool"]:
        name = f"{part['model']} {part['component']}"
        yield [(name, "title"), (f"  {part['slots']} slots of {_size(part['slot_bytes'])}", "")]
        legend: _Line = []
        for state, slots in part["states"].items():
            legend += [(f"{LETTERS.get(state, '?')} ", state), (f"{state} {slots}  ", "")]
        yield legend
        yield _strip(part["map"]["states"], part["map"]["cells"], width)
    yield []


def _strip(states: Sequence[str], cells: Sequence[Sequence[int]], width: int) -> _Line:
    """Draw a map as one line: each letter is the state that most of its slots have."""
    drawn: _Line = []
    num = min(width, len(cells))
    for i in range(num):
        merged = cells[i * len(cells) // num : (i + 1) * len(cells) // num]
        slots = [sum(cell[s] for cell in merged) for s in range(len(states))]
        # Of two equal ones that which says more: states are listed from idle to busy.
        state = states[max(range(len(states)), key=lambda s: (slots[s], s))]
        drawn.append((LETTERS.get(state, "?"), state))
    return drawn


def _lately(status: Mapping[str, Any]) -> Iterator[_Line]:
    recent = status["recent"]
    buckets, seconds = recent["buckets"], recent["bucket_ms"] / 1e3
    requested, ready = (sum(bucket[name] for bucket in buckets) for name in ("requested_pages", "ready_pages"))
    short = Counter[str]()
    for bucket in buckets:
        short.update(bucket["shortfall_pages"])
    share = f" ({ready / requested:.1%})" if requested else ""
    minutes = round(len(buckets) * seconds / 60)
    yield [
        (f"last {minutes} min", "title"),
        (f"  ready {ready} of {requested} pages{share}", ""),
        ("".join(f", {reason} {pages}" for reason, pages in short.most_common()), "bad"),
    ]
    last = buckets[-3:]
    rate = sum(bucket["read_bytes"] for bucket in last) / (len(last) * seconds)
    errors = sum(bucket["errors"] for bucket in buckets)
    yield [(f"L3 read {_size(rate)}/s lately, {_size(status['totals']['read_bytes'])} in all", "")] + (
        [(f"; errors {errors}", "bad")] if errors else []
    )
    yield []


def _running(status: Mapping[str, Any], width: int) -> Iterator[_Line]:
    more = status["running_not_shown"]
    yield [("running", "title"), (f"  and {more} more" if more else "", "")]
    for job in status["running"]:
        pages, size = job["pages"], max(10, width // 4)
        text = f"  {pages['ready']} ready, {job['contiguous']} come of {pages['granted']} granted, "
        text += f"{pages['stored']} stored, {pages['requested']} requested"
        head = f"  {job['request_id'][:24]:<24} {job['model'][:12]:<12} {job['state']:<8}{_span(job['age_ms']):>8} "
        yield [(head, ""), *_bar(job, size), (text, "")]


def _bar(job: Mapping[str, Any], size: int) -> _Line:
    pages, all_pages = job["pages"], max(1, job["pages"]["requested"])
    ends = [round(length * size / all_pages) for length in (pages["ready"], job["contiguous"], pages["granted"])]
    stored = round(pages["stored"] * size / all_pages)
    letters = "".join(
        "#" if i < ends[0] else "+" if i < ends[1] else "-" if i < ends[2] else "." if i < stored else " "
        for i in range(size)
    )
    return [("[", ""), (letters, "leased"), ("]", "")]


def _finished(status: Mapping[str, Any]) -> Iterator[_Line]:
    yield []
    yield [("ended last", "title")]
    for job in status["finished"]:
        short = "".join(f", {reason} {pages}" for reason, pages in job["shortfall"].items())
        head = f"  {job['request_id'][:24]:<24} {job['model'][:12]:<12} {job['outcome']:<9}{_span(job['total_ms']):>8} "
        yield [(head, ""), (f" {job['pages']['ready']} of {job['pages']['requested']} pages", ""), (short, "bad")]


def _fit(line: _Line, width: int, colour: bool) -> str:
    drawn, left = "", width
    for text, name in line:
        shown = "".join(letter if letter.isprintable() else "?" for letter in text)[:left]
        left -= len(shown)
        code = _COLOURS.get(name) if colour else None
        drawn += f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown
    return drawn


def _size(num_bytes: float) -> str:
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.1f} {_UNITS[unit]}" if unit and num_bytes < 10 else f"{num_bytes:.0f} {_UNITS[unit]}"


def _span(ms: float) -> str:
    for below, unit_ms, form, unit in ((1e3, 1, ".0f", "ms"), (9e4, 1e3, ".1f", "s"), (5.4e6, 6e4, ".0f", "min")):
        if ms < below:
            return f"{ms / unit_ms:{form}} {unit}"
    return f"{ms / 3.6e6:.0f} h"
