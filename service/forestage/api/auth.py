"""Bearer tokens, checked before anything else; probes and metrics stay open.

Law: a request that comes through has `tenant` in its state: the tenant whose token it sent, None if the service-wide
one, or none at all was wanted.
"""

import hmac
from collections.abc import Mapping

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forestage.api.bodies import TenantBody, WriteBody
from forestage.api.page import Page, wants_page
from forestage.api.problems import problem
from forestage.core.errors import ForbiddenError

__all__ = ["OPEN_ROUTES", "BearerToken", "bound_tenant", "tenant_of"]

OPEN_ROUTES = frozenset({"/healthz", "/readyz", "/metrics"})


def bound_tenant(request: Request) -> str | None:
    """Return the tenant that the caller's token belongs to, None if it may act for any."""
    tenant: str | None = getattr(request.state, "tenant", None)
    return tenant


def tenant_of(request: Request, body: TenantBody | WriteBody) -> str:
    """Return in whose name a request is made. Raises ForbiddenError if the token is another tenant's."""
    bound = bound_tenant(request)
    if bound is None:
        return body.tenant
    if "tenant" in body.model_fields_set and body.tenant != bound:
        raise ForbiddenError("the token belongs to another tenant than the request names")
    return bound


class BearerToken:
    """ASGI middleware; a plain one, so that a handler still learns that its client has left.

    `tokens` maps each token that is taken to its tenant, None for the service-wide one. A browser that comes without
    one for `page` is answered 401 as well, by the page itself, which asks for the token.
    """

    def __init__(self, app: ASGIApp, tokens: Mapping[str, str | None], page: Page | None = None) -> None:
        self._app = app
        self._page = page
        self._expected = [(f"Bearer {token}".encode(), tenant) for token, tenant in tokens.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES:
            headers = Headers(scope=scope)
            if self._page is not None and wants_page(scope["method"], scope["path"], headers):
                await self._page.refusal()(scope, receive, send)
                return
            given = headers.get("authorization", "").encode("latin-1")
            scheme, _, secret = given.partition(b" ")
            normal = scheme.lower().capitalize() + b" " + secret.strip()
            # All are compared, whichever fits: how long it takes says nothing about the tokens.
            matches = [tenant for expected, tenant in self._expected if hmac.compare_digest(normal, expected)]
            if not matches:
                refusal = problem(
                    401, "unauthorized", "a valid bearer token is required", headers={"WWW-Authenticate": "Bearer"}
                )
                await refusal(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = matches[0]
        await self._app(scope, receive, send)
