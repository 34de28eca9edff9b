"""Errors as RFC 9457 problem details. No stack trace, key, token or path ever leaves."""

import json
import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from forestage.api.problem_types import PROBLEM_MEDIA
from forestage.core.errors import ForestageError

__all__ = ["install", "problem"]

log = logging.getLogger("forestage.api")

_SLUGS = {404: "not-found", 405: "method-not-allowed", 401: "unauthorized"}


def problem(
    status: int, slug: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
) -> Response:
    """Build a problem answer; `more` are extension members."""
    body = {"type": slug, "title": HTTPStatus(status).phrase, "status": status, "detail": detail, **more}
    return Response(json.dumps(body), status, headers, PROBLEM_MEDIA)


async def _of_forestage(_: Request, error: Exception) -> Response:
    assert isinstance(error, ForestageError)
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return problem(error.status, error.slug, error.detail, headers=headers)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    slug = _SLUGS.get(error.status_code, "http-error")
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = _allowed(request)
    return problem(error.status_code, slug, str(error.detail), headers=headers)


def _allowed(request: Request) -> str:
    """List the methods that some route takes at this path; the framework names those of the first one only."""
    taken = (
        method
        for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    )
    return ", ".join(taken)


async def _of_validation(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    where = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:10])
    return problem(422, "invalid-request", where)


async def _of_anything(_: Request, error: Exception) -> Response:
    log.error("a request failed inside the service: %s", type(error).__name__, exc_info=error)
    return problem(500, "internal", "the service failed; its log says why")


def install(app: FastAPI) -> None:
    """Answer every error of an app as a problem. The handlers are coroutines: others would wait for a thread."""
    app.add_exception_handler(ForestageError, _of_forestage)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(Exception, _of_anything)
