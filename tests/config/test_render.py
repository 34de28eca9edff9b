"""What `forestage config` prints."""

import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from config.toml_files import MINIMAL, load_text
from forestage.config import Config, render
from forestage.core.layout import Component, Covers, HicacheNaming, LmcacheNaming, ModelLayout, VllmNaming

NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=32)  # at most 128 bytes
TAGS = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
PATHS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"]) | st.just(" "), min_size=1, max_size=20)
FRACTIONS = st.floats(0, 1, exclude_min=True)
TIMES = st.integers(0, 2**31 - 1)


@st.composite
def components(draw: st.DrawFn, shards: int) -> list[dict[str, object]]:
    names = draw(st.lists(st.from_regex(r"[A-Za-z0-9_-]{1,32}", fullmatch=True), min_size=1, max_size=3, unique=True))
    made = []
    for index, name in enumerate(names):
        component: dict[str, object] = {"name": name, "bytes": draw(st.integers(1, 1 << 20))}
        if index and draw(st.booleans()):
            component |= {"covers": "tail"} | draw(st.sampled_from([{}, {"window": 1}, {"window": 9}]))
        component |= draw(st.sampled_from([{}, {"shards": shards}, {"shards": 3}, {"slots": 5}]))
        made.append(component)
    return made


@st.composite
def models(draw: st.DrawFn, name: str) -> dict[str, object]:
    shards = draw(st.integers(1, 4))
    hicache: dict[str, object] = draw(
        st.fixed_dictionaries(
            {}, optional={"served_name": NAMES | st.just(""), "mla": st.booleans(), "pp_size": st.integers(1, 4)}
        )
    )
    hicache |= draw(st.sampled_from([{}, {"naming": "old"}, {"cp_size": 2, "naming": "new"}]))
    hashed: list[dict[str, object]] = [
        {},
        {"hash": {"scheme": draw(st.sampled_from(["sglang", "sglang-old"])), "bigram": draw(st.booleans())}},
        {"hash": {"scheme": "vllm-sha256-cbor"}},
        {"hash": {"scheme": "vllm-xxhash-cbor", "seed": draw(NAMES)}},
    ]
    return {
        **draw(st.sampled_from(hashed)),
        "name": name,
        "page_tokens": draw(st.integers(1, 1 << 20)),
        "shards": shards,
        "dtype": draw(TAGS),
        "layout": draw(TAGS),
        "hicache": hicache,
        "vllm": draw(st.sampled_from([{}, {"folder": "acme_m_0123456789ab_r0"}])),
        "lmcache": draw(st.sampled_from([{}, {"served_name": "acme/m", "salt": "s"}])),
        "components": draw(components(shards)),
    }


@st.composite
def configs(draw: st.DrawFn) -> Config:
    max_ms = draw(TIMES)
    names = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    pinned = draw(FRACTIONS)
    return Config.model_validate(
        {
            "server": {"port": draw(st.integers(0, 65535)), "max_body_bytes": draw(st.integers(1, 1 << 50))},
            "pool": {
                "path": draw(PATHS),
                "bytes": draw(st.integers(1 << 30, 1 << 50)),
                "mode": draw(st.sampled_from(["0600", "660", "0777"])),
                "write_reserve": draw(st.integers(0, 9)) / 100 * pinned,
            },
            "storage": {
                "kind": draw(st.sampled_from(["file", "redis"])),
                "file": {"root": draw(PATHS), "direct": draw(st.booleans())},
                "hicache-file": {"root": draw(PATHS)},
                "redis": {"prefix": draw(st.from_regex(r"[!-z|~]{1,128}", fullmatch=True))},
            },
            "prefetch": {"max_inflight_fraction": draw(FRACTIONS), "deadline_ms": draw(TIMES)},
            "lease": {
                "max_ms": max_ms,
                "default_ms": draw(st.integers(0, max_ms)),
                "max_pinned_fraction": pinned,
            },
            "tenants": [
                {
                    "name": draw(NAMES) + str(number),
                    "min_share": share / 100,
                    "max_share": draw(st.floats(share / 100, 1)),
                }
                for number, share in enumerate(draw(st.lists(st.integers(1, 30), max_size=3)))
            ],
            "models": [draw(models(name)) for name in names],
        }
    )


@settings(deadline=None)  # shared machines pause
@given(configs())
def test_what_is_rendered_loads_as_an_equal_configuration(config: Config) -> None:
    again = load_text(render(config))
    assert again == config
    assert again.layouts() == config.layouts()
    assert again.shares() == config.shares()
    assert render(again) == render(config)


def test_every_default_is_written_out() -> None:
    written = tomllib.loads(render(load_text(MINIMAL)))
    assert written == {
        "server": {
            "host": "127.0.0.1",
            "port": 8470,
            "uds": "",
            "regions_uds": "",
            "token_file": "",
            "max_body_bytes": "8MiB",
            "page": True,
            "max_connections": 1024,
            "max_tenant_requests": 512,
            "request_timeout_ms": 30000,
        },
        "pool": {
            "path": "/dev/shm/forestage/pool",
            "bytes": "1GiB",
            "pin": "auto",
            "hugepages": "auto",
            "numa_node": -1,
            "mode": "0660",
            "write_reserve": 0.0,
        },
        "storage": {
            "kind": "file",
            "readers": 0,
            "probe_timeout_ms": 1000,
            "stall_timeout_ms": 2000,
            "file": {"root": "./l3", "direct": False},
            "hicache-file": {"root": "./hicache"},
            "vllm-file": {"root": "./vllm-kv"},
            "lmcache-file": {"root": "./lmcache"},
            "lmcache-redis": {"url": "redis://127.0.0.1:6379/0", "connections": 4, "ttl_s": 0},
            "redis": {"url": "redis://127.0.0.1:6379/0", "prefix": "forestage", "connections": 4, "ttl_s": 0},
        },
        "prefetch": {
            "min_pages": 1,
            "max_pages": 65536,
            "max_inflight_fraction": 0.8,
            "queue_limit": 1024,
            "max_jobs": 65536,
            "deadline_ms": 0,
            "settle_ms": 20,
            "keep_done_ms": 60000,
        },
        "writes": {
            "max_writes": 65536,
            "expire_ms": 30000,
            "max_dirty_fraction": 0.5,
            "max_attempts": 5,
            "keep_done_ms": 60000,
        },
        "events": {
            "buffer": 65536,
            "max_listeners": 16,
            "publish": False,
            "endpoint": "tcp://127.0.0.1:5557",
            "replay_endpoint": "tcp://127.0.0.1:5558",
            "form": "array",
            "hashes": "auto",
            "topic": "",
            "buffer_steps": 10_000,
            "data_parallel_rank": 0,
            "clear": True,
        },
        "lease": {
            "max_leases": 262144,
            "max_pins": 65536,
            "default_ms": 30000,
            "max_ms": 600000,
            "max_pin_ms": 3600000,
            "max_pinned_fraction": 1.0,
        },
        "models": [
            {
                "name": "demo",
                "page_tokens": 64,
                "shards": 1,
                "dtype": "bfloat16",
                "layout": "page_first",
                "hicache": {
                    "served_name": "demo",
                    "naming": "new",
                    "mla": False,
                    "tp_size": 1,
                    "pp_size": 1,
                    "cp_size": 1,
                },
                "vllm": {"folder": ""},
                "lmcache": {"salt": ""},
                "components": [{"name": "kv", "bytes": "64KiB", "covers": "every_page", "shards": 1}],
            }
        ],
    }


def test_layouts_are_what_the_core_works_with() -> None:
    config = load_text("""
        [[models]]
        name = "acme/hybrid-1b"
        page_tokens = 16
        shards = 4
        dtype = "float8_e4m3fn"
        layout = "layer_first"
        hicache = {served_name = "hybrid", mla = true}
        vllm = {folder = "f_r0"}
        lmcache = {salt = "s"}
        [[models.components]]
        name = "kv"
        bytes = "8KiB"
        shards = 1
        [[models.components]]
        name = "mamba"
        bytes = 32768
        covers = "tail"
        slots = 64
        [[models.components]]
        name = "swa"
        bytes = 100
        covers = "tail"
        window = 8
    """)
    kv = Component("kv", 8192, 1)
    mamba = Component("mamba", 32768, 4, Covers.TAIL, 1, 64)
    swa = Component("swa", 100, 4, Covers.TAIL, 8)
    naming = HicacheNaming("hybrid", tp_size=4, mla=True)
    assert config.layouts() == (
        ModelLayout(
            "acme/hybrid-1b",
            16,
            (kv, mamba, swa),
            4,
            "float8_e4m3fn",
            "layer_first",
            naming,
            VllmNaming("f_r0"),
            LmcacheNaming("acme/hybrid-1b", "s"),
        ),
    )
