"""Shapes of requests and answers; what OpenAPI shows. Unknown fields in a request are refused."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from forestage.core.errors import BadRequestError
from forestage.core.hints import HINT_PRIORITY, HintOutcome

__all__ = [
    "EvictedAnswer",
    "HashAnswer",
    "HashBody",
    "HashedBody",
    "Health",
    "HintAnswer",
    "HintsAnswer",
    "HintsBody",
    "InfoAnswer",
    "LeaseBody",
    "LeasedAnswer",
    "LookupAnswer",
    "ModelsAnswer",
    "PinBody",
    "PinnedAnswer",
    "PoolAnswer",
    "PrefetchAnswer",
    "PrefetchBody",
    "PrefetchHint",
    "PrefixBody",
    "Problem",
    "ReleaseHint",
    "RenewAnswer",
    "RenewBody",
    "TenantBody",
    "WriteAnswer",
    "WriteBody",
    "WriteCounts",
    "check",
    "problem_answers",
    "request_schema",
]

MAX_MS = 86_400_000  # one day
MAX_WAIT_MS = 600_000
MAX_ACTIONS = 64  # in one envelope of hints
PageKey = Annotated[str, Field(pattern="^([0-9a-fA-F]{2}){16,64}$")]
Millis = Annotated[int, Field(ge=0, le=MAX_MS)]
LeaseMillis = Annotated[int, Field(ge=1, le=MAX_MS)]
Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**63 - 1)]
HashedText = Annotated[str, Field(max_length=4096)]
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
Pages = Annotated[int, Field(ge=0, le=2**31 - 1)]
HintName = Annotated[str, Field(min_length=1, max_length=128)]
HintVersion = Annotated[str, Field(pattern=r"^[01](\.[0-9]{1,9})?$")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:\-]{1,128}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LoraBody(_Body):
    """An adapter as vLLM hashes it."""

    name: HashedText
    path: HashedText


class MmItemBody(_Body):
    """A multimodal item of a prompt: its placeholders are `length` tokens from token `offset` on."""

    identifier: HashedText
    offset: Tokens
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]


class HashedBody(_Body):
    """What enters the page keys of a prompt beside its token ids."""

    extra_key: HashedText | None = None
    cache_salt: HashedText | None = None
    lora: HashedText | LoraBody | None = None
    mm: list[MmItemBody] = Field(default=[], max_length=4096)


class HashBody(HashedBody):
    """Whose keys to show."""

    model: ModelName
    token_ids: list[TokenId]


class PrefixBody(HashedBody):
    """Which prefix: `keys` in page order, or the `token_ids` they are derived from; the first `device_pages` are on the
    GPU already. With `include_keys` the answer says the keys."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": ["keys"]}, {"required": ["token_ids"]}]})

    model: ModelName
    keys: list[PageKey] | SkipJsonSchema[None] = Field(default=None, json_schema_extra={"uniqueItems": True})
    token_ids: list[TokenId] | SkipJsonSchema[None] = None
    include_keys: bool = False
    device_pages: Pages = 0


class TenantBody(PrefixBody):
    """Which prefix, and in whose name."""

    tenant: str = Field(default="default", min_length=1, max_length=128)


class PrefetchBody(TenantBody):
    """What to bring, and on which terms. Times are milliseconds; 0 means none."""

    request_id: RequestId | None = None
    min_pages: Pages | None = None
    priority: int = Field(default=0, ge=-(2**31), le=2**31 - 1)
    deadline_ms: Millis | None = None
    wait_ms: int = Field(default=0, ge=0, le=MAX_WAIT_MS)
    lease_ms: LeaseMillis | None = None


class LeaseBody(TenantBody):
    """Which resident prefix to lease, and for how long."""

    lease_ms: LeaseMillis | None = None


class PinBody(TenantBody):
    """Which resident prefix to keep, and for how long."""

    ttl_ms: LeaseMillis


class PrefetchHint(TenantBody):
    """What a hint asks to bring. Times are milliseconds; 0 means none."""

    min_pages: Pages | None = None
    priority: int = Field(default=HINT_PRIORITY, ge=-(2**31), le=2**31 - 1)
    deadline_ms: Millis | None = None
    lease_ms: LeaseMillis | None = None


class ReleaseHint(_Body):
    """Which pin, and which prefetch, are not needed any more."""

    pin_id: HintName | None = None
    request_id: RequestId | None = None


class HintBody(_Body):
    """One action; what its payload must be goes by its type."""

    action_id: HintName
    action_type: HintName
    action_version: HintName
    payload: dict[str, Any]


class HintsBody(_Body):
    """A KvHintsEnvelope. With a `message_id`, sending it again does nothing more."""

    protocol_version: HintVersion
    message_id: Annotated[str, Field(max_length=128)] = ""
    actions: list[HintBody] = Field(max_length=MAX_ACTIONS)


class RenewBody(_Body):
    """How long a lease shall live from now."""

    lease_ms: LeaseMillis | None = None


class WriteBody(_Body):
    """Which pages to write; `tails` names, by tail component, the page indexes that carry a state."""

    model: str = Field(min_length=1, max_length=256)
    keys: list[PageKey] = Field(json_schema_extra={"uniqueItems": True})
    tails: dict[str, Annotated[list[Pages], Field(json_schema_extra={"uniqueItems": True})]] = {}
    tenant: str = Field(default="default", min_length=1, max_length=128)


class LengthsAnswer(BaseModel):
    requested: int
    host: int
    stored: int
    restorable: int
    granted: int
    ready: int


class LookupLengths(BaseModel):
    requested: int
    host: int
    stored: int
    restorable: int
    grantable: int


class LeaseAnswer(BaseModel):
    id: str
    expires_in_ms: int


class PrefetchAnswer(BaseModel):
    request_id: str
    model: str
    state: Literal["queued", "probing", "loading", "done"]
    outcome: Literal["complete", "partial", "miss", "declined", "cancelled"] | None
    page_tokens: int
    pages: LengthsAnswer
    tokens: LengthsAnswer
    loaded: int
    joined: int
    shortfall: dict[str, int]
    lease: LeaseAnswer | None = None
    slots: dict[str, list[int]] | None = None
    timing_ms: dict[str, float]
    keys: list[PageKey] | None = None


class LookupAnswer(BaseModel):
    model: str
    page_tokens: int
    pages: LookupLengths
    tokens: LookupLengths
    keys: list[PageKey] | None = None
    boundaries: list[int] | None = None


class LeasedAnswer(BaseModel):
    model: str
    page_tokens: int
    pages: LengthsAnswer
    tokens: LengthsAnswer
    keys: list[PageKey] | None = None
    lease: LeaseAnswer | None = None
    slots: dict[str, list[int]] | None = None


class PinnedAnswer(BaseModel):
    id: str | None = None
    model: str
    page_tokens: int
    pages: LengthsAnswer
    tokens: LengthsAnswer
    expires_in_ms: int
    keys: list[PageKey] | None = None


class EvictedAnswer(BaseModel):
    model: str
    evicted: int
    kept: int
    keys: list[PageKey] | None = None


class HintAnswer(BaseModel):
    action_id: str
    action_type: str
    outcome: HintOutcome
    reason: str | None
    detail: str | None = None
    request_id: str | None = None
    state: Literal["queued", "probing", "loading", "done"] | None = None
    pin_id: str | None = None
    expires_in_ms: int | None = None
    pages: LengthsAnswer | None = None
    shortfall: dict[str, int] | None = None
    demoted: int | None = None
    kept: int | None = None


class HintsAnswer(BaseModel):
    protocol_version: str
    message_id: str
    actions: list[HintAnswer]


class HashAnswer(BaseModel):
    model: str
    scheme: str
    page_tokens: int
    pages: int
    keys: list[PageKey]


class RenewAnswer(BaseModel):
    lease: LeaseAnswer


class WriteAnswer(BaseModel):
    id: str
    model: str
    stored: list[int]
    granted: int
    reason: Literal["host_capacity", "back_pressure"] | None
    slots: dict[str, list[int | None]]
    instance: str
    generation: int
    expires_in_ms: int


class WriteCounts(BaseModel):
    committed: int
    durable: int
    failed: int
    duplicate: int


class RegionAnswer(BaseModel):
    offset: int
    slot_bytes: int
    slots: int
    shards: int
    shard_bytes: int
    bytes: int
    table_offset: int


class PoolAnswer(BaseModel):
    path: str
    bytes: int
    instance: str
    generation: int
    regions: dict[str, dict[str, RegionAnswer]]


class ComponentAnswer(BaseModel):
    name: str
    bytes: int
    shards: int
    covers: Literal["every_page", "tail"]
    window: int
    slots: int


class ModelAnswer(BaseModel):
    name: str
    fingerprint: str
    page_tokens: int
    shards: int
    dtype: str
    layout: str
    hash: str | None
    components: list[ComponentAnswer]


class ModelsAnswer(BaseModel):
    models: list[ModelAnswer]


class InfoAnswer(BaseModel):
    version: str
    storage: str
    storage_state: Literal["up", "degraded"]
    pinned: str
    hugepages: str
    uptime_s: float
    instance: str
    generation: int
    models: list[str]


class Health(BaseModel):
    status: str
    storage: Literal["up", "degraded"] | None = None


class Problem(BaseModel):
    type: str
    title: str
    status: int
    detail: str


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


def problem_answers(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI part that says which problems a route answers with."""
    schema = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": "see `type`", "content": schema} for status in statuses}


def request_schema(shape: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI part that says what a body looks like."""
    schema = shape.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with what it refers to in place: the document has no other place for parts of requests."""
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(part, definitions) for name, part in schema.items()}
