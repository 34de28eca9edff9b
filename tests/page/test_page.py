"""The page as it is served: whole in itself, allowed nothing else, and what it is before there is a token."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from support.live import kv_only, live, make_keys

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class _Parts(HTMLParser):
    """What a document would load, and the ids and labels in it."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        self.ids += [given["id"] or ""] if "id" in given else []
        if tag in ("script", "img", "link", "iframe", "source"):
            self.loaded += [address for name in ("src", "href") if (address := given.get(name)) is not None]


async def test_it_is_one_file_that_asks_nobody_else(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16)) as service:
        answer = await service.http.get("/", headers=BROWSER)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert len(answer.content) < 40_000
        parts = _Parts(answer.text)
        assert all(address.startswith("data:") for address in parts.loaded)
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", answer.text) == []
        policy = answer.headers["content-security-policy"]
        for tag, directive in (("script", "script-src"), ("style", "style-src")):
            (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
            digest = b64encode(sha256(inside.encode()).digest()).decode()
            assert f"{directive} 'sha256-{digest}'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert (await service.http.post("/")).status_code == 405


async def test_the_document_is_sound(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16)) as service:
        text = (await service.http.get("/", headers=BROWSER)).text
        parts = _Parts(text)
        assert len(parts.ids) == len(set(parts.ids))
        asked_for = set(re.findall(r'by\("([a-z-]+)"\)', text))
        assert asked_for <= set(parts.ids)  # what the script draws into is there
        labelled = [given for tag, given in parts.tags if "aria-labelledby" in given]
        assert labelled
        assert {given["aria-labelledby"] for given in labelled} <= set(parts.ids)
        assert [given.get("lang") for tag, given in parts.tags if tag == "html"] == ["en"]
        assert "<noscript>" in text


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16), server={"page": False}) as service:
        answer = await service.http.get("/", headers=BROWSER)
        assert (answer.status_code, answer.json()["type"]) == (404, "not-found")
        assert (await service.http.get("/v1/status")).status_code == 200


async def test_without_a_token_a_browser_gets_a_form_and_no_data(tmp_path: Path) -> None:
    async with live(tmp_path, kv_only(16, "secret-model"), token="t0ken") as service:
        await service.client.prefetch("secret-model", make_keys(2), request_id="secret-id", wait_ms=5000)
        nobody = {"Authorization": ""}
        service.http.headers.pop("Authorization")
        answer = await service.http.get("/", headers=BROWSER)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert 'data-token="wanted"' in answer.text
        assert "secret" not in answer.text
        assert "t0ken" not in answer.text
        assert (await service.http.get("/v1/status", headers=BROWSER)).status_code == 401
        refused = [(BROWSER | {"Authorization": "Bearer wrong"}), nobody, {"Accept": "*/*"}]
        for headers in refused:
            answer = await service.http.get("/", headers=headers)
            assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
        answer = await service.http.get("/", headers=BROWSER | {"Authorization": "Bearer t0ken"})
        assert (answer.status_code, "data-token=" in answer.text) == (200, False)


@pytest.mark.parametrize("path", ["/index.html", "/assets/page.js", "/page.html"])
async def test_there_is_no_other_file(tmp_path: Path, path: str) -> None:
    async with live(tmp_path, kv_only(16), token="t0ken") as service:
        assert (await service.http.get(path, headers=BROWSER)).status_code == 404
        service.http.headers.pop("Authorization")
        assert (await service.http.get(path, headers=BROWSER)).status_code == 401
