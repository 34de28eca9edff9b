"""The status page in a real Chromium. Not part of the default run, for it needs the browser: `make check-page`.

Pictures of the page go to the folder that PICTURES names, else to the test's own.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from browser.chromium import Tab, find_chromium, open_tab
from forestage.storage.base import ReadOutcome
from support.live import Live, hybrid, live, make_keys, sum_of, until

KEYS = make_keys(120)
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
THEMES = ("light", "dark")
PATIENT = {"stall_timeout_ms": 600_000}  # reads are held for as long as the browser takes
#: What is on the page as a number, by the name of its place.
NUMBERS = (
    "Object.fromEntries([...document.querySelectorAll('[data-number]')].map(e => [e.dataset.number, +e.dataset.value]))"
)
DRAWN = "document.documentElement?.dataset.drawn | 0"


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    chromium = find_chromium()
    assert chromium is not None, "no Chromium: apt-get install chromium, or set CHROMIUM to one"
    with open_tab(chromium, tmp_path) as opened:
        yield opened


async def _work(service: Live) -> None:
    """Have jobs of every kind: ended well and badly, running, waiting."""
    client, storage = service.client, service.storage
    service.store(KEYS, states=[40, 80, 120])
    await client.prefetch("m", KEYS[:40], request_id="conversation-17", wait_ms=5000)
    bad = make_keys(50, "bad")
    service.store(bad, states=[20, 50])
    storage.fault(0, bad[30], outcome=ReadOutcome.CORRUPT)
    await client.prefetch("m", bad, request_id="conversation-18", wait_ms=5000)
    storage.fault()
    await client.prefetch("m", [*KEYS[:80], *make_keys(30, "new")], request_id="conversation-19", wait_ms=5000)
    await client.cancel("conversation-17")
    storage.fault(0, KEYS[100], hold=True)
    await client.prefetch("m", KEYS, request_id="conversation-20", deadline_ms=600_000)
    await until(lambda: service.engine.jobs["conversation-20"].contiguous == 100)
    waiting = make_keys(300, "long")
    service.store(waiting, states=[300])
    await client.prefetch("m", waiting, request_id="conversation-21")


async def _call(tab: Tab, url: str) -> None:
    await asyncio.to_thread(tab.go, url)
    await asyncio.to_thread(tab.until, DRAWN)


async def _settled_numbers(service: Live, tab: Tab) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the numbers of a page that was drawn twice since the last change, and those of `/metrics`."""
    drawn = await asyncio.to_thread(tab.run, DRAWN)
    await asyncio.to_thread(tab.until, DRAWN, lambda now: now >= drawn + 2)
    return await asyncio.to_thread(tab.run, NUMBERS), await service.scrape()


def _agree(shown: Mapping[str, float], metrics: Mapping[str, float]) -> None:
    for component in ("kv", "state"):
        for state in ("free", "resident", "leased", "loading", "dirty"):
            label = f'component="{component}"', f'state="{state}"'
            assert shown[f"m/{component}/{state}"] == sum_of(metrics, "pool_slots", *label), (component, state)
        assert shown[f"m/{component}/evicted so far"] == sum_of(
            metrics, "evicted_pages_total", f'component="{component}"'
        )
    for name in ("requested", "ready", "loaded", "joined"):
        assert shown[name] == sum_of(metrics, f"{name}_pages_total"), name
    assert shown["read_bytes"] == sum_of(metrics, "storage_read_bytes_total")
    reasons = {name: pages for name, pages in shown.items() if name.startswith("short/")}
    assert {"short/not_stored", "short/corrupt"} <= set(reasons)
    for name, pages in reasons.items():
        assert pages == sum_of(metrics, "shortfall_pages_total", f'reason="{name.removeprefix("short/")}"')
    assert sum(reasons.values()) == sum_of(metrics, "shortfall_pages_total")
    assert shown["error/corrupt"] == sum_of(metrics, "storage_errors_total", 'kind="corrupt"') == 1


async def test_the_page_during_a_run(tmp_path: Path, tab: Tab) -> None:
    pictures = Path(os.environ.get("PICTURES") or tmp_path)
    await asyncio.to_thread(pictures.mkdir, parents=True, exist_ok=True)
    async with live(tmp_path, hybrid(320, 24), prefetch={"max_inflight_fraction": 0.5}, storage=PATIENT) as service:
        await _work(service)
        url = f"http://127.0.0.1:{service.port}/"
        for size, (width, height) in SIZES.items():
            for theme in THEMES:
                await asyncio.to_thread(tab.show, width, height, theme)
                await _call(tab, url)
                shown, metrics = await _settled_numbers(service, tab)
                _agree(shown, metrics)
                wide = await asyncio.to_thread(tab.run, "document.documentElement.scrollWidth")
                assert wide <= width, (size, theme, wide)
                await asyncio.to_thread(tab.picture, pictures / f"page-{size}-{theme}.png")
        jobs = await asyncio.to_thread(tab.run, "({...document.getElementById('jobs-facts').dataset})")
        assert {state: int(number) for state, number in jobs.items()} == {"queued": 1, "probing": 0, "loading": 1}
        text = await asyncio.to_thread(tab.run, "document.getElementById('running').innerText")
        assert "conversation-20, m: loading" in text
        assert "conversation-21, m: queued" in text
        service.storage.release()
        await until(lambda: not service.engine.live)
        _agree(*await _settled_numbers(service, tab))
        assert tab.complaints == []
        asked = {url for url in tab.requests if not url.startswith("data:")}
        assert asked == {url, f"{url}v1/status"}


async def test_everything_has_a_name_and_enough_contrast(tmp_path: Path, tab: Tab) -> None:
    async with live(tmp_path, hybrid(320, 24), storage=PATIENT) as service:
        await _work(service)
        for theme in THEMES:
            await asyncio.to_thread(tab.show, 1280, 900, theme)
            await _call(tab, f"http://127.0.0.1:{service.port}/")
            assert await asyncio.to_thread(tab.run, _LOW_CONTRAST) == []
        nodes: list[dict[str, Any]] = (await asyncio.to_thread(tab.call, "Accessibility.getFullAXTree"))["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in ("button", "img", "image", "link", "heading", "region")
        ]
        assert all(name for _, name in named), named
        assert {"Pool", "Running jobs", "Storage"} <= {name for role, name in named if role == "heading"}
        assert [name for role, name in named if role == "button"] == ["Pause"]
        await asyncio.to_thread(tab.run, "document.getElementById('pause').click()")
        drawn = await asyncio.to_thread(tab.run, DRAWN)
        await asyncio.to_thread(tab.run, "new Promise(done => setTimeout(done, 1500))")
        assert await asyncio.to_thread(tab.run, DRAWN) == drawn
        await asyncio.to_thread(tab.run, "document.getElementById('pause').click()")
        await asyncio.to_thread(tab.until, DRAWN, lambda now: now > drawn)


async def test_a_token_is_asked_for_once(tmp_path: Path, tab: Tab) -> None:
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(
            live(tmp_path, hybrid(320, 24), token="open sesame".replace(" ", "-"))
        )
        url = f"http://127.0.0.1:{service.port}/"
        await asyncio.to_thread(tab.show, 390, 844, "light")
        await asyncio.to_thread(tab.go, url)
        form = "!document.getElementById('sign-in').hidden"
        await asyncio.to_thread(tab.until, f"document.getElementById('sign-in') && {form}")
        assert f"{url}v1/status" not in tab.requests  # it does not even try
        give = "document.getElementById('token').value = '%s'; document.getElementById('sign-in').requestSubmit()"
        await asyncio.to_thread(tab.run, give % "wrong")
        await asyncio.to_thread(
            tab.until, "document.getElementById('sign-in-why').textContent.includes('did not take')"
        )
        await asyncio.to_thread(tab.run, give % "open-sesame")
        await asyncio.to_thread(tab.until, f"!({form}) && {DRAWN}")
        await _call(tab, url)  # the tab remembers
        assert not await asyncio.to_thread(tab.run, form)
        await asyncio.to_thread(tab.run, "sessionStorage.clear()")
        await asyncio.to_thread(tab.go, "about:blank")
        await _call(tab, f"{url}#token=open-sesame")
        assert await asyncio.to_thread(tab.run, "location.href") == url  # not left in the address
        assert not any("sesame" in asked for asked in tab.requests)


#: Texts whose contrast with what is behind them is below 4.5, by WCAG's formula.
_LOW_CONTRAST = """
(() => {
  const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = (rgb) => {
    const [r, g, b] = rgb.map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.body.querySelectorAll('*')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.offsetParent) continue;
    const text = light(parse(getComputedStyle(e).color).slice(0, 3)), back = light(behind(e));
    const ratio = (Math.max(text, back) + .05) / (Math.min(text, back) + .05);
    if (ratio < 4.5) low.push([e.textContent.slice(0, 40), ratio]);
  }
  return low;
})()
"""
