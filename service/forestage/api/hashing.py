"""The route that shows page keys: what a prompt is called in L3 and in the pool."""

from fastapi import APIRouter, Request, Response

from forestage.api.answers import HashAnswer
from forestage.api.auth import REFUSALS, RoleRoute, needs
from forestage.api.bodies import HashBody, check, request_schema
from forestage.api.codec import answer, read_body
from forestage.api.context import Context
from forestage.api.problem_types import problem_answers
from forestage.api.prompts import scheme_of, shown_keys, take_keys
from forestage.api.reading import BODY_PROBLEMS
from forestage.core.errors import BadRequestError
from forestage.core.roles import Role

__all__ = ["build_hash"]


def build_hash(context: Context) -> APIRouter:
    """Build `/v1/hash` over a running service."""
    router = APIRouter(prefix="/v1", responses=REFUSALS, route_class=RoleRoute)

    @router.post(
        "/hash",
        summary="Say the page keys of a prompt",
        response_model=HashAnswer,
        responses=problem_answers(*BODY_PROBLEMS, "unknown-model", "no-hash-scheme", "stopping"),
        openapi_extra=needs(Role.READ) | request_schema(HashBody),
    )
    async def show_keys(request: Request) -> Response:
        body = await read_body(request, context.config.server.max_body_bytes)
        if "token_ids" not in body:
            raise BadRequestError("token_ids: Field required")
        keys = await take_keys(body, context)
        model = check(HashBody, {**body, "token_ids": []}).model
        scheme = scheme_of(model, context)
        facts = {"model": model, "scheme": scheme.name, "page_tokens": scheme.page_tokens, "pages": len(keys)}
        return answer(request, {**facts, **shown_keys(keys, request.headers.get("accept", ""))})

    return router
