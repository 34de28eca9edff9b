"""PrefixMap against the definitions of CONTRACT section 1, page by page."""

from hypothesis import given, settings
from hypothesis import strategies as st

from forestage.core.layout import Component, Covers, ModelLayout
from forestage.core.prefix import PageStatus, PrefixMap
from support.engine_driver import model_of

STATUS = st.sampled_from(list(PageStatus))
COSTLY = {PageStatus.STORED, PageStatus.IDLE}


@st.composite
def prefixes(draw: st.DrawFn) -> PrefixMap:
    windows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    parts = [
        Component(f"c{i}", 64, covers=Covers.TAIL if window else Covers.EVERY_PAGE, window=window)
        for i, window in enumerate([*windows, 0])
    ]
    pages = draw(st.integers(0, 12))
    device_pages = draw(st.integers(0, pages))
    status = [bytearray(draw(st.lists(STATUS, min_size=pages, max_size=pages))) for _ in parts]
    for one in status:
        one[:device_pages] = bytes(device_pages)
    return PrefixMap(model_of(*parts), device_pages, status)


def _windows(layout: ModelLayout, device_pages: int, length: int, c: int) -> list[int]:
    component = layout.components[c]
    return [
        page
        for page in range(length)
        if page >= device_pages and not (component.is_tail and page < length - component.window)
    ]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(prefixes(), st.booleans())
def test_everything_is_what_the_definitions_say(prefix: PrefixMap, resident: bool) -> None:
    layout, device_pages, pages = prefix.layout, prefix.device_pages, prefix.requested
    least = PageStatus.IDLE if resident else PageStatus.STORED
    reach = device_pages
    while reach < pages and all(prefix.status[c][reach] >= least for c in layout.every_page):
        reach += 1
    assert prefix.reach(resident=resident) == reach
    boundaries = []
    for length in range(device_pages, pages + 1):
        windows = [_windows(layout, device_pages, length, c) for c in range(len(layout.components))]
        assert [list(pages) for pages in prefix.ranges(length)] == windows
        if all(prefix.status[c][page] >= least for c in layout.tails for page in windows[c]):
            boundaries.append(length)
        assert prefix.is_boundary(length, resident=resident) == (length in boundaries)
        assert prefix.largest_boundary(length, resident=resident) == boundaries[-1]
        for c, window in enumerate(windows):
            assert prefix.cost(c, length) == sum(prefix.status[c][page] in COSTLY for page in window)
            for kept in range(device_pages, length + 1) if layout.components[c].is_tail else ():
                both = {*window, *_windows(layout, device_pages, kept, c)}
                assert prefix.joint_cost(c, length, kept) == sum(prefix.status[c][page] in COSTLY for page in both)
            span = range(window[0], window[-1] + 1) if window else range(0)
            there = [page for page in window if prefix.status[c][page] >= PageStatus.IDLE]
            assert prefix.resident_pages(c, span) == there
            assert prefix.missing_pages(c, span) == [page for page in window if page not in there]
    assert boundaries[0] == device_pages
    known = [all(prefix.status[c][page] for c in layout.every_page) for page in range(pages)]
    assert list(prefix.known_pages()) == known
