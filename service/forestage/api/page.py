"""The status page at `/`: one file with its style and script inside, which asks this service and nobody else.

Law: the page holds no data of the service, so that it may be shown to somebody who has yet to give a token.
"""

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Response
from starlette.datastructures import Headers

__all__ = ["Page", "build_page", "wants_page"]


@dataclass(frozen=True, slots=True)
class Page:
    """The document, and the headers that allow it nothing but its own parts and this service."""

    document: str
    headers: dict[str, str]

    @classmethod
    def load(cls) -> "Page":
        """Read the parts that are installed with the package, and put them together."""
        assets = files("forestage.api") / "assets"
        style, script = (assets.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
        document = assets.joinpath("page.html").read_text("utf-8")
        document = document.replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
        policy = (
            f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return cls(document, headers)

    def answer(self) -> Response:
        """Answer with the page."""
        return Response(self.document, 200, self.headers, "text/html; charset=utf-8")

    def refusal(self) -> Response:
        """Answer with the page that asks for a token first."""
        document = self.document.replace("<html ", '<html data-token="wanted" ', 1)
        return Response(document, 401, {**self.headers, "WWW-Authenticate": "Bearer"}, "text/html; charset=utf-8")


def wants_page(method: str, path: str, headers: Headers) -> bool:
    """Say whether a request is a browser's that opens the page, without having been given a token to send."""
    accepts = "text/html" in headers.get("accept", "")
    return method == "GET" and path == "/" and accepts and "authorization" not in headers


def build_page(page: Page) -> APIRouter:
    """Build `/`."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def get_page() -> Response:
        return page.answer()

    return router


def _hash(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"
