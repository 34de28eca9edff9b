"""The FastAPI application."""

from functools import cache, partial

from fastapi import FastAPI

from forestage.api.auth import BearerToken
from forestage.api.context import Context
from forestage.api.document import describe_app
from forestage.api.events import build_events
from forestage.api.fills import build_fills
from forestage.api.hashing import build_hash
from forestage.api.hints import build_hints
from forestage.api.keyring import Keyring
from forestage.api.page import Page, build_page
from forestage.api.pins import build_pins
from forestage.api.probes import build_probes
from forestage.api.problems import install
from forestage.api.routes import build_router
from forestage.api.status import build_status
from forestage.api.writes import build_writes

__all__ = ["create_app"]


def create_app(context: Context, keyring: Keyring) -> FastAPI:
    """Build the application over a running service.

    Any token in `keyring` makes every route but probes and metrics want one.
    """
    app = FastAPI(
        title="Forestage",
        version=context.version,
        description="Brings KV-cache pages into a shared host pool before an LLM engine needs them.",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # an unknown path is a problem, not a redirect to whatever host the client named
    )
    install(app)
    app.include_router(build_probes(context))
    app.include_router(build_router(context))
    app.include_router(build_fills(context))
    app.include_router(build_writes(context))
    app.include_router(build_pins(context))
    app.include_router(build_hash(context))
    app.include_router(build_hints(context))
    app.include_router(build_events(context))
    app.include_router(build_status(context))
    app.openapi = cache(partial(describe_app, app))  # type: ignore[method-assign]
    page = Page.load() if context.config.server.page else None
    if page is not None:
        app.include_router(build_page(page))
    app.add_middleware(
        BearerToken, keyring=keyring, page=page, max_tenant_requests=context.config.server.max_tenant_requests
    )
    return app
