"""Settings from the environment."""

import pytest

from config.toml_files import MINIMAL, load_text, mistakes_of
from forestage.config.environment import overlay, variables

# One line a setting: the text as an environment has it, and the value the service sees.
SETTINGS: list[tuple[str, str, str, object]] = [
    ("FORESTAGE_SERVER__HOST", "0.0.0.0", "server.host", "0.0.0.0"),
    ("FORESTAGE_SERVER__PORT", "0", "server.port", 0),
    ("FORESTAGE_SERVER__UDS", "/run/forestage.sock", "server.uds", "/run/forestage.sock"),
    ("FORESTAGE_SERVER__REGIONS_UDS", "/run/regions.sock", "server.regions_uds", "/run/regions.sock"),
    ("FORESTAGE_SERVER__TOKEN_FILE", "", "server.token_file", ""),
    ("FORESTAGE_SERVER__MAX_BODY_BYTES", "1Mi", "server.max_body_bytes", 1 << 20),
    ("FORESTAGE_SERVER__PAGE", "false", "server.page", False),
    ("FORESTAGE_SERVER__REQUEST_TIMEOUT_MS", "500", "server.request_timeout_ms", 500),
    ("FORESTAGE_SERVER__MAX_TENANT_REQUESTS", "8", "server.max_tenant_requests", 8),
    ("FORESTAGE_SERVER__MAX_CONNECTIONS", "64", "server.max_connections", 64),
    ("FORESTAGE_POOL__PATH", "/mnt/pool/é", "pool.path", "/mnt/pool/é"),
    ("FORESTAGE_POOL__BYTES", "2147483648", "pool.bytes", 2 << 30),
    ("FORESTAGE_POOL__PIN", "mlock", "pool.pin", "mlock"),
    ("FORESTAGE_POOL__HUGEPAGES", "off", "pool.hugepages", "off"),
    ("FORESTAGE_POOL__NUMA_NODE", "-1", "pool.numa_node", -1),
    ("FORESTAGE_POOL__MODE", "0600", "pool.mode", 0o600),
    ("FORESTAGE_POOL__WRITE_RESERVE", "0.25", "pool.write_reserve", 0.25),
    ("FORESTAGE_STORAGE__KIND", "redis", "storage.kind", "redis"),
    ("FORESTAGE_STORAGE__READERS", "+8", "storage.readers", 8),
    ("FORESTAGE_STORAGE__PROBE_TIMEOUT_MS", "50", "storage.probe_timeout_ms", 50),
    ("FORESTAGE_STORAGE__STALL_TIMEOUT_MS", "70", "storage.stall_timeout_ms", 70),
    ("FORESTAGE_STORAGE__FILE__ROOT", "/l3", "storage.file.root", "/l3"),
    ("FORESTAGE_STORAGE__FILE__DIRECT", "True", "storage.file.direct", True),
    ("FORESTAGE_STORAGE__HICACHE_FILE__ROOT", "/hicache", "storage.hicache_file.root", "/hicache"),
    ("FORESTAGE_STORAGE__VLLM_FILE__ROOT", "/kv", "storage.vllm_file.root", "/kv"),
    ("FORESTAGE_STORAGE__LMCACHE_FILE__ROOT", "/lm", "storage.lmcache_file.root", "/lm"),
    ("FORESTAGE_STORAGE__LMCACHE_REDIS__URL", "redis://lm", "storage.lmcache_redis.url", "redis://lm"),
    ("FORESTAGE_STORAGE__LMCACHE_REDIS__CONNECTIONS", "2", "storage.lmcache_redis.connections", 2),
    ("FORESTAGE_STORAGE__LMCACHE_REDIS__TTL_S", "60", "storage.lmcache_redis.ttl_s", 60),
    ("FORESTAGE_STORAGE__REDIS__URL", "redis://cache", "storage.redis.url", "redis://cache"),
    ("FORESTAGE_STORAGE__REDIS__PREFIX", "a:b", "storage.redis.prefix", "a:b"),
    ("FORESTAGE_STORAGE__REDIS__CONNECTIONS", "16", "storage.redis.connections", 16),
    ("FORESTAGE_STORAGE__REDIS__TTL_S", "3600", "storage.redis.ttl_s", 3600),
    ("FORESTAGE_PREFETCH__MIN_PAGES", "4", "prefetch.min_pages", 4),
    ("FORESTAGE_PREFETCH__MAX_PAGES", "100", "prefetch.max_pages", 100),
    ("FORESTAGE_PREFETCH__MAX_INFLIGHT_FRACTION", "1", "prefetch.max_inflight_fraction", 1.0),
    ("FORESTAGE_PREFETCH__QUEUE_LIMIT", "0", "prefetch.queue_limit", 0),
    ("FORESTAGE_PREFETCH__MAX_JOBS", "9", "prefetch.max_jobs", 9),
    ("FORESTAGE_PREFETCH__DEADLINE_MS", "500", "prefetch.deadline_ms", 500),
    ("FORESTAGE_PREFETCH__SETTLE_MS", "0", "prefetch.settle_ms", 0),
    ("FORESTAGE_PREFETCH__KEEP_DONE_MS", "1", "prefetch.keep_done_ms", 1),
    ("FORESTAGE_LEASE__DEFAULT_MS", "1000", "lease.default_ms", 1000),
    ("FORESTAGE_LEASE__MAX_MS", "30000", "lease.max_ms", 30000),
    ("FORESTAGE_LEASE__MAX_PIN_MS", "7200000", "lease.max_pin_ms", 7_200_000),
    ("FORESTAGE_LEASE__MAX_PINS", "9", "lease.max_pins", 9),
    ("FORESTAGE_LEASE__MAX_LEASES", "9", "lease.max_leases", 9),
    ("FORESTAGE_LEASE__MAX_PINNED_FRACTION", "5e-1", "lease.max_pinned_fraction", 0.5),
    ("FORESTAGE_WRITES__EXPIRE_MS", "5000", "writes.expire_ms", 5000),
    ("FORESTAGE_WRITES__MAX_DIRTY_FRACTION", "0.25", "writes.max_dirty_fraction", 0.25),
    ("FORESTAGE_WRITES__MAX_ATTEMPTS", "9", "writes.max_attempts", 9),
    ("FORESTAGE_WRITES__MAX_WRITES", "9", "writes.max_writes", 9),
    ("FORESTAGE_WRITES__KEEP_DONE_MS", "0", "writes.keep_done_ms", 0),
    ("FORESTAGE_EVENTS__BUFFER", "100", "events.buffer", 100),
    ("FORESTAGE_EVENTS__MAX_LISTENERS", "0", "events.max_listeners", 0),
    ("FORESTAGE_EVENTS__PUBLISH", "true", "events.publish", True),
    ("FORESTAGE_EVENTS__ENDPOINT", "tcp://*:6557", "events.endpoint", "tcp://*:6557"),
    ("FORESTAGE_EVENTS__REPLAY_ENDPOINT", "", "events.replay_endpoint", ""),
    ("FORESTAGE_EVENTS__FORM", "map", "events.form", "map"),
    ("FORESTAGE_EVENTS__HASHES", "vllm", "events.hashes", "vllm"),
    ("FORESTAGE_EVENTS__TOPIC", "kv@{model}", "events.topic", "kv@{model}"),
    ("FORESTAGE_EVENTS__BUFFER_STEPS", "10", "events.buffer_steps", 10),
    ("FORESTAGE_EVENTS__DATA_PARALLEL_RANK", "3", "events.data_parallel_rank", 3),
    ("FORESTAGE_EVENTS__CLEAR", "false", "events.clear", False),
]

WRONG = [
    ("FORESTAGE_SERVER__PORT", "", "server.port: must be an integer"),
    ("FORESTAGE_SERVER__PORT", "84 70", "server.port: must be an integer"),
    ("FORESTAGE_SERVER__PORT", "8470.0", "server.port: must be an integer"),
    ("FORESTAGE_SERVER__PORT", "true", "server.port: must be an integer"),
    ("FORESTAGE_SERVER__PORT", "70000", "server.port: must be at most 65535"),
    ("FORESTAGE_SERVER__PORT", "9" * 5000, "server.port: must be an integer"),
    ("FORESTAGE_SERVER__TOKEN_FILE", "/nowhere/token", "server.token_file: "),
    ("FORESTAGE_POOL__BYTES", "lots", "pool.bytes: must be a size"),
    ("FORESTAGE_POOL__PATH", "/a\udcff", "pool.path: must be printable text"),
    ("FORESTAGE_POOL__PATH", "a\nb", "pool.path: must be printable text"),
    ("FORESTAGE_POOL__MODE", "rw-rw----", "pool.mode: must be octal text"),
    ("FORESTAGE_POOL__WRITE_RESERVE", "nan", "pool.write_reserve: must be a number"),
    ("FORESTAGE_POOL__WRITE_RESERVE", "1e999", "pool.write_reserve: must be a finite number"),
    ("FORESTAGE_STORAGE__FILE__DIRECT", "yes", "storage.file.direct: must be true or false"),
    ("FORESTAGE_STORAGE__KIND", "hicache_file", "storage.kind: must be "),
    (
        "FORESTAGE_EVENTS__REPLAY_ENDPOINT",
        "tcp://x",
        "events.replay_endpoint: must be empty, or like tcp://127.0.0.1:5558",
    ),
    ("FORESTAGE_EVENTS__ENDPOINT", "", "events.endpoint: must be like tcp://127.0.0.1:5557"),
    ("FORESTAGE_LEASE__DEFAULT_MS", "600001", "lease.default_ms: must be at most lease.max_ms (600000)"),
]

UNKNOWN = [
    ("FORESTAGE_SERVER__PROT", "unknown variable, did you mean FORESTAGE_SERVER__PORT"),
    ("FORESTAGE_SERVER_PORT", "unknown variable, did you mean FORESTAGE_SERVER__PORT"),
    ("FORESTAGE_server__port", "unknown variable"),
    ("FORESTAGE_STORAGE__HICACHE-FILE__ROOT", "unknown variable, did you mean FORESTAGE_STORAGE__HICACHE_FILE__ROOT"),
    ("FORESTAGE_STORAGE__FILE", "unknown variable"),
    ("FORESTAGE_", "unknown variable"),
    ("FORESTAGE_MODELS", "models come only from the file"),
    ("FORESTAGE_MODELS__0__NAME", "models come only from the file"),
    ("FORESTAGE_TENANTS__0__NAME", "tenants come only from the file"),
    ("FORESTAGE_PORT_8470_TCP_ADDR", "unknown variable; if Kubernetes made it for a Service"),
]


def test_every_setting_outside_models_has_a_variable() -> None:
    assert {name: ".".join(key).replace("-", "_") for name, key in variables().items()} == {
        name: key for name, _, key, _ in SETTINGS
    }


@pytest.mark.parametrize(("name", "text", "key", "value"), SETTINGS, ids=str)
def test_sets_each_setting(name: str, text: str, key: str, value: object) -> None:
    seen: object = load_text(MINIMAL, {name: text, "HOME": "/", "forestage_lower": "1"})
    for part in key.split("."):
        seen = getattr(seen, part)
    assert seen == value
    assert type(seen) is type(value)


def test_wins_over_the_file_even_where_the_file_is_wrong() -> None:
    text = '[server]\nport = "soon"\nhost = "::1"\n[storage.file]\nroot = "/a"\n' + MINIMAL
    config = load_text(text, {"FORESTAGE_SERVER__PORT": "1", "FORESTAGE_STORAGE__FILE__ROOT": "/b"})
    assert (config.server.port, config.server.host, config.storage.file.root) == (1, "::1", "/b")


@pytest.mark.parametrize(
    ("name", "text", "line"), WRONG, ids=lambda value: str(value)[:40].encode("unicode_escape").decode()
)
def test_names_key_and_variable_of_a_wrong_value(name: str, text: str, line: str) -> None:
    (mistake,) = mistakes_of(MINIMAL, {name: text})
    assert mistake.startswith(line)
    assert mistake.endswith(f" (from {name})")


@pytest.mark.parametrize(("name", "line"), UNKNOWN)
def test_refuses_an_unknown_variable(name: str, line: str) -> None:
    (mistake,) = mistakes_of(MINIMAL, {name: "1"})
    assert mistake.startswith(f"{name}: {line}")


def test_an_unprintable_name_stays_on_its_line() -> None:
    (mistake,) = mistakes_of(MINIMAL, {"FORESTAGE_\n\udcff": "1"})
    assert mistake.startswith('"FORESTAGE_\\n\\udcff": unknown variable')


def test_a_variable_under_something_that_is_no_table_adds_no_mistake() -> None:
    assert mistakes_of("server = 5\n" + MINIMAL, {"FORESTAGE_SERVER__PORT": "1"}) == ["server: must be a table"]
    (line,) = mistakes_of('storage = {file = "x"}\n' + MINIMAL, {"FORESTAGE_STORAGE__FILE__ROOT": "1"})
    assert line == "storage.file: must be a table"


def test_leaves_what_the_file_says_as_it_was() -> None:
    raw = {"storage": {"file": {"root": "/a"}, "kind": "file"}}
    merged, sources, mistakes = overlay(raw, {"FORESTAGE_STORAGE__FILE__ROOT": "/b", "FORESTAGE_POOL__PIN": "none"})
    assert raw == {"storage": {"file": {"root": "/a"}, "kind": "file"}}
    assert merged == {"storage": {"file": {"root": "/b"}, "kind": "file"}, "pool": {"pin": "none"}}
    assert set(sources) == {("storage", "file", "root"), ("pool", "pin")}
    assert mistakes == []
