"""Bearer tokens, checked before anything else; probes and metrics stay open.

Law: a request that comes through has its `caller` in its state, and a route runs for callers of its role only.
"""

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from forestage.api.bodies import TenantBody, WriteBody
from forestage.api.keyring import Keyring
from forestage.api.page import Page, wants_page
from forestage.api.problem_types import problem_answers
from forestage.api.problems import problem
from forestage.core.errors import ForbiddenError
from forestage.core.roles import Caller, Role

__all__ = [
    "OPEN_ROUTES",
    "REFUSALS",
    "BearerToken",
    "RoleRoute",
    "bound_tenant",
    "is_still_taken",
    "needs",
    "require",
    "tenant_of",
]

OPEN_ROUTES = frozenset({"/healthz", "/readyz", "/metrics"})

#: The OpenAPI part that says how callers are refused, for every route that wants a token.
REFUSALS = problem_answers("unauthorized")
_ROLE = "x-role"
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def caller_of(request: Request) -> Caller:
    """Return who makes a request; everybody may do everything where no token is configured."""
    caller: Caller = getattr(request.state, "caller", None) or Caller()
    return caller


def bound_tenant(request: Request) -> str | None:
    """Return the tenant that the caller's token belongs to, None if it may act for any."""
    return caller_of(request).tenant


def tenant_of(request: Request, body: TenantBody | WriteBody) -> str:
    """Return in whose name a request is made. Raises ForbiddenError if the token is another tenant's."""
    bound = bound_tenant(request)
    if bound is None:
        return body.tenant
    if "tenant" in body.model_fields_set and body.tenant != bound:
        raise ForbiddenError("the token belongs to another tenant than the request names")
    return bound


def require(request: Request, role: Role) -> None:
    """Raise ForbiddenError unless the caller has this role or a higher one."""
    if caller_of(request).role < role:
        raise ForbiddenError(f"this takes a token of the role {role.word}", slug="role-needed")


def is_still_taken(request: Request) -> bool:
    """Say whether a request's token would let it in now, too: answers without an end ask again and again."""
    taken: Callable[[], bool] | None = getattr(request.state, "taken", None)
    return taken is None or taken()


def needs(role: Role | None) -> dict[str, Any]:
    """Return the OpenAPI part that says which role a route needs at least (None: not even a token); see RoleRoute."""
    return {_ROLE: "none" if role is None else role.word}


class RoleRoute(APIRoute):
    """A route that runs for callers of the role that its `openapi_extra` names; without one it cannot be made."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        word = (more.get("openapi_extra") or {}).get(_ROLE)
        if word is None:
            raise TypeError(f"{path}: say which role it needs, with openapi_extra=needs(...)")
        self._role = None if word == "none" else Role[word.upper()]
        if self._role not in {None, Role.READ}:  # which every token has
            more["responses"] = _with_role_needed(more.get("responses") or {})
        super().__init__(path, endpoint, **more)

    def get_route_handler(self) -> _Handler:
        handle, role = super().get_route_handler(), self._role
        if role is None:
            return handle

        async def handle_if_allowed(request: Request) -> Response:
            require(request, role)
            return await handle(request)

        return handle_if_allowed


def _with_role_needed(responses: dict[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    refusal = problem_answers("role-needed")[403]
    others = responses.get(403)
    if others is not None:
        refusal = {**refusal, "description": f"{refusal['description']}; {others['description']}"}
    return {**responses, 403: refusal}


class BearerToken:
    """ASGI middleware; a plain one, so that a handler still learns that its client has left.

    A browser that comes without a token for `page` is answered 401 as well, by the page itself, which asks for one. Of
    one tenant's tokens at most `max_tenant_requests` are answered at once.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, page: Page | None, max_tenant_requests: int) -> None:
        self._app = app
        self._open: Counter[str] = Counter()
        self._max_tenant_requests = max_tenant_requests
        self._page = page
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_ROUTES and not self._keyring.is_open:
            headers = Headers(scope=scope)
            if self._page is not None and wants_page(scope["method"], scope["path"], headers):
                await self._page.refusal()(scope, receive, send)
                return
            authorization = headers.get("authorization", "")
            caller = self._keyring.caller(authorization)
            if caller is None:
                refusal = problem(
                    401, "unauthorized", "a valid bearer token is required", headers={"WWW-Authenticate": "Bearer"}
                )
                await refusal(scope, receive, send)
                return
            state = scope.setdefault("state", {})
            state["caller"] = caller
            state["taken"] = lambda: self._keyring.caller(authorization) == caller
            if caller.tenant is not None:
                await self._answer_tenant(caller.tenant, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer_tenant(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        if self._open[tenant] >= self._max_tenant_requests:
            detail = f"{self._max_tenant_requests} requests of this tenant have no answer yet"
            await problem(429, "limit-reached", detail, headers={"Retry-After": "1"})(scope, receive, send)
            return
        self._open[tenant] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[tenant] -= 1
