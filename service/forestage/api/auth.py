"""Bearer tokens, checked before anything else; probes and metrics stay open."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forestage.api.problems import problem

__all__ = ["OPEN_ROUTES", "BearerToken"]

OPEN_ROUTES = frozenset({"/healthz", "/readyz", "/metrics"})


class BearerToken:
    """ASGI middleware; a plain one, so that a handler still learns that its client has left."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            scheme, _, secret = given.partition(b" ")
            if not hmac.compare_digest(scheme.lower().capitalize() + b" " + secret.strip(), self._expected):
                refusal = problem(
                    401, "unauthorized", "a valid bearer token is required", headers={"WWW-Authenticate": "Bearer"}
                )
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
