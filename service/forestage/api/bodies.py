"""Shapes of requests; what OpenAPI shows of them. Unknown fields are refused."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from forestage.core.errors import BadRequestError
from forestage.core.hints import HINT_PRIORITY

__all__ = [
    "BODIES",
    "MAX_WAIT_MS",
    "FillBody",
    "HashBody",
    "HashedBody",
    "HintBody",
    "HintsBody",
    "LeaseBody",
    "PageKey",
    "PinBody",
    "PrefetchBody",
    "PrefetchHint",
    "PrefixBody",
    "ReleaseHint",
    "RenewBody",
    "TenantBody",
    "WriteBody",
    "check",
    "request_schema",
]

MAX_MS = 86_400_000  # one day
MAX_WAIT_MS = 600_000
MAX_PARTS = 4096  # of a write
MAX_ACTIONS = 64  # in one envelope of hints
PageKey = Annotated[str, Field(pattern="^([0-9a-fA-F]{2}){16,64}$")]
Millis = Annotated[int, Field(ge=0, le=MAX_MS)]
LeaseMillis = Annotated[int, Field(ge=1, le=MAX_MS)]
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**63 - 1)]
HashedText = Annotated[str, Field(max_length=4096)]
ModelName = Annotated[str, Field(min_length=1, max_length=256, description="The name of a configured model.")]
Pages = Annotated[int, Field(ge=0, le=2**31 - 1)]
HintName = Annotated[str, Field(min_length=1, max_length=128)]
HintVersion = Annotated[str, Field(pattern=r"^[01](\.[0-9]{1,9})?$")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]
TenantName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=128,
        description="On whose account. With a token of a tenant, that one, and no other may be named.",
    ),
]
Priority = Annotated[
    int, Field(ge=-(2**31), le=2**31 - 1, description="Of jobs that wait for admission, the higher goes first.")
]
MinPages = Annotated[
    Pages | None,
    Field(
        description="Read nothing unless that gains at least so many pages over what is usable without a read. "
        "0 and 1 mean the same. Left out: `prefetch.min_pages`."
    ),
]
DeadlineMs = Annotated[
    Millis | None,
    Field(
        description="Milliseconds from arrival, after which the job ends with what is ready; 0: none. "
        "Left out: `prefetch.deadline_ms`."
    ),
]
LeaseMs = Annotated[
    LeaseMillis | None,
    Field(description="Milliseconds that the lease lives, cut to `lease.max_ms`. Left out: `lease.default_ms`."),
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LoraBody(_Body):
    """An adapter as vLLM hashes it."""

    name: HashedText = Field(description="Its name, as vLLM's requests have it.")
    path: HashedText = Field(description="Its path, as vLLM's requests have it.")


class MmItemBody(_Body):
    """A multimodal item of a prompt."""

    identifier: HashedText = Field(description="The hash that vLLM has given its content.")
    offset: Tokens = Field(description="The first token of its placeholders, counted from the beginning of the prompt.")
    length: Annotated[int, Field(ge=1, le=2**31 - 1)] = Field(description="Tokens that its placeholders are.")


class HashedBody(_Body):
    """What enters the page keys of a prompt beside its token ids."""

    extra_key: HashedText | None = Field(default=None, description="SGLang's extra key. Only with `token_ids`.")
    cache_salt: HashedText | None = Field(
        default=None, description="The request's cache salt; an empty one counts as none. Only with `token_ids`."
    )
    lora: HashedText | LoraBody | None = Field(
        default=None, description="The adapter: an id for SGLang, name and path for vLLM. Only with `token_ids`."
    )
    mm: list[MmItemBody] = Field(
        default=[], max_length=4096, description="vLLM's multimodal items, in order. Only with `token_ids`."
    )


class HashBody(HashedBody):
    """Whose keys to show."""

    model: ModelName
    token_ids: list[TokenId] = Field(description="The prompt, from its first token on.")


class PrefixBody(HashedBody):
    """Which prefix: either `keys`, or the `token_ids` that they are derived from."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["keys"]}, {"required": ["token_ids"]}]})

    model: ModelName
    keys: list[PageKey] | SkipJsonSchema[None] = Field(
        default=None,
        description="Page keys in page order, in hex; at most `prefetch.max_pages`, none twice.",
        json_schema_extra={"uniqueItems": True},
    )
    token_ids: list[TokenId] | SkipJsonSchema[None] = Field(
        default=None, description="The prompt, in place of `keys`, for a model whose configuration names its `hash`."
    )
    include_keys: bool = Field(default=False, description="Whether the answer names the page keys.")
    device_pages: Pages = Field(
        default=0,
        description="Leading pages that are on the GPU already: not required, not read, given no slot. "
        "At most as many as there are keys.",
    )


class TenantBody(PrefixBody):
    """Which prefix, and in whose name."""

    tenant: TenantName = "default"


class PrefetchBody(TenantBody):
    """What to bring, and on which terms."""

    request_id: RequestId | None = Field(
        default=None,
        description="A name for the job, to ask for it later. The same id with the same body (but for `wait_ms`) finds "
        "the job that is there. Left out: one is made.",
    )
    min_pages: MinPages = None
    priority: Priority = 0
    deadline_ms: DeadlineMs = None
    wait_ms: int = Field(
        default=0,
        ge=0,
        le=MAX_WAIT_MS,
        description="Milliseconds to wait for the job to be done. A client that leaves meanwhile cancels it.",
    )
    lease_ms: LeaseMs = None


class TargetBody(_Body):
    """Where pages of one component go in a region."""

    shard: int = Field(default=0, ge=0, lt=MAX_PARTS, description="Which shard of each page.")
    first: Pages = Field(default=0, description="The page that the first offsets are for.")
    run_bytes: list[Annotated[int, Field(ge=1, le=2**31 - 1)]] = Field(
        min_length=1,
        max_length=MAX_PARTS,
        description="Bytes of each run that a page is cut into, in order; together what the component has for a page.",
    )
    offsets: list[Annotated[int, Field(ge=0, le=2**62)]] = Field(
        description="Where each run goes, in bytes from the start of the region: those of the first page, then those "
        "of the next. No two runs overlap."
    )


class FillBody(TenantBody):
    """What to bring, on which terms, and where to."""

    region: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="The region's id, from its registration."
    )
    targets: dict[str, TargetBody] = Field(
        min_length=1, max_length=64, description="By component, where its pages go; of others nothing is copied."
    )
    min_pages: MinPages = None
    priority: Priority = 0
    deadline_ms: DeadlineMs = None


class LeaseBody(TenantBody):
    """Which resident prefix to lease, and for how long."""

    lease_ms: LeaseMs = None


class PinBody(TenantBody):
    """Which resident prefix to keep, and for how long."""

    ttl_ms: LeaseMillis = Field(description="Milliseconds that the pin lives, cut to `lease.max_pin_ms`.")


class PrefetchHint(TenantBody):
    """The payload of an action `prefetch`."""

    min_pages: MinPages = None
    priority: Priority = HINT_PRIORITY
    deadline_ms: DeadlineMs = None
    lease_ms: LeaseMs = None


class ReleaseHint(_Body):
    """The payload of an action `release`: a pin, an expectation, a prefetch, one or more, not needed any more."""

    pin_id: HintName | None = Field(default=None, description="The pin to end.")
    expect_id: HintName | None = Field(default=None, description="The expectation to end.")
    request_id: RequestId | None = Field(default=None, description="The prefetch to cancel and forget.")


class HintBody(_Body):
    """One action; what its payload must be goes by its type."""

    action_id: HintName = Field(description="A name for the action, once in an envelope.")
    action_type: HintName = Field(description="`prefetch`, `pin`, `retain`, `expect`, `release` or `demote`.")
    action_version: HintName = Field(description="`1`, or `1.` and a number.")
    payload: dict[str, Any] = Field(
        description="Of `prefetch` a PrefetchHint, of `pin` and `retain` a PinBody, of `release` a ReleaseHint, "
        "of `demote` a TenantBody."
    )


class HintsBody(_Body):
    """A KvHintsEnvelope."""

    protocol_version: HintVersion = Field(description="`0` or `1`, with or without a further number.")
    message_id: Annotated[str, Field(max_length=128)] = Field(
        default="", description="A name for the envelope: one that comes again under it is not carried out again."
    )
    actions: list[HintBody] = Field(max_length=MAX_ACTIONS, description="What to do, in this order.")


class RenewBody(_Body):
    """How long a lease shall live from now."""

    lease_ms: LeaseMs = None


class WriteBody(_Body):
    """Which pages to write."""

    model: ModelName
    keys: list[PageKey] = Field(
        description="Page keys of a prefix, in page order; at most `prefetch.max_pages`, none twice.",
        json_schema_extra={"uniqueItems": True},
    )
    tails: dict[str, Annotated[list[Pages], Field(json_schema_extra={"uniqueItems": True})]] = Field(
        default={}, description="By tail component, the indexes of the pages that carry a state."
    )
    request_id: RequestId | None = Field(
        default=None, description="What the callers share who fill this write together; only with `parts` above 1."
    )
    parts: int = Field(default=1, ge=1, le=MAX_PARTS, description="How many callers fill it together.")
    part: int = Field(default=0, ge=0, lt=MAX_PARTS, description="Which of them this one is.")
    tenant: TenantName = "default"


#: Every shape that some body or payload has.
BODIES: tuple[type[BaseModel], ...] = (
    FillBody,
    HashBody,
    HintsBody,
    LeaseBody,
    PinBody,
    PrefetchBody,
    PrefetchHint,
    ReleaseHint,
    RenewBody,
    TenantBody,
    WriteBody,
)

B = TypeVar("B", bound=_Body)


def check(shape: type[B], body: dict[str, Any], num_keys: int = 0) -> B:
    """Check a parsed body without keys and token ids (parsed apart, thousands at a time); raises BadRequestError."""
    try:
        checked = shape.model_validate({**body, "keys": []} if "keys" in shape.model_fields else body)
    except ValidationError as error:
        # Names of unknown fields are the caller's, and may be as long as a body.
        mistakes = [f"{'.'.join(map(str, e['loc']))[:64] or 'body'}: {e['msg']}" for e in error.errors()[:10]]
        raise BadRequestError("; ".join(mistakes)) from None
    if isinstance(checked, PrefixBody) and checked.device_pages > num_keys:
        raise BadRequestError(f"device_pages: {checked.device_pages}, but only {num_keys} keys")
    return checked


def request_schema(shape: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI part that says which of `BODIES` a route takes."""
    schema = {"$ref": f"#/components/schemas/{shape.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
