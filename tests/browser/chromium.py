"""A headless Chromium, driven over its own debugging pipe: no driver and no package beside the browser is needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Tab", "find_chromium", "open_tab"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_DEADLINE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which a container does not let it have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
)


def find_chromium() -> str | None:
    """Return the path of a Chromium; the variable CHROMIUM wins."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


@dataclass
class Tab:
    """One page of one browser. `requests` are the addresses that it asked for, `complaints` what its console said."""

    _to_browser: int
    _from_browser: int
    _session: str = ""
    _sent: int = 0
    _unread: bytes = b""
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Have the browser do something, and return what it answers."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._sent:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from_browser], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._from_browser, 1 << 20)
            assert chunk, "the browser has ended"
            self._unread += chunk
        head, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(head)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                self.complaints.append(told["entry"]["text"])

    def attach(self) -> None:
        """Make a page to work with."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def show(self, width: int, height: int, theme: str) -> None:
        """Set the size of the window, in pixels of a style sheet, and the theme: light or dark."""
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str, check: Callable[[Any], bool] = bool) -> Any:
        """Wait until an expression has a value that `check` likes, and return it."""
        deadline = time.monotonic() + _DEADLINE_S
        while not check(value := self.run(condition)):
            assert time.monotonic() < deadline, f"{condition} stays {value}"
            time.sleep(0.02)
        return value

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_tab(chromium: str, folder: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile below `folder`; it is ended here."""
    child_reads, we_write = os.pipe()
    we_read, child_writes = os.pipe()
    # The browser wants its pipe at 3 and 4, whatever numbers ours have.
    line = f'exec "$0" "$@" 3<&{child_reads} 4>&{child_writes}'
    command = ["bash", "-c", line, chromium, *_FLAGS, f"--user-data-dir={folder / 'profile'}"]
    with (folder / "chromium.log").open("wb") as log:
        browser = subprocess.Popen(command, pass_fds=(child_reads, child_writes), stdout=log, stderr=log)
    os.close(child_reads)
    os.close(child_writes)
    try:
        tab = Tab(we_write, we_read)
        tab.attach()
        yield tab
    finally:
        os.close(we_write)  # it ends with its pipe
        os.close(we_read)
        try:
            browser.wait(10)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait(10)
