"""Files: what is accepted, and that every mistake is named at once."""

import os
import tempfile
from pathlib import Path

import pytest

from config.toml_files import MINIMAL, load_text, mistakes_of
from forestage.config import ConfigError, expected_shards, load, read_token
from forestage.core.errors import StartError
from forestage.core.layout import HicacheNaming

# Each: a file, and the beginning of every line it must be refused with, in order.
BAD: dict[str, tuple[str, list[str]]] = {
    "empty": ("", ["models: is missing: write at least one [[models]]"]),
    "no-models": ("models = []", ["models: is empty: write at least one [[models]]"]),
    "models-not-an-array": ("[models]\nname = 'demo'", ["models: must be an array of tables"]),
    "model-not-a-table": ("models = [3]", ["models[0]: must be a table"]),
    "unknown-table": ("[sever]\nport = 1" + MINIMAL, ["sever: unknown key, did you mean server"]),
    "unknown-key": ("[server]\nprot = 1" + MINIMAL, ["server.prot: unknown key, did you mean port"]),
    "underscore": ("[storage.hicache_file]\n" + MINIMAL, ["storage.hicache_file: unknown key, did you mean hicache-f"]),
    "unknown-key-of-a-model": (
        MINIMAL.replace("page_tokens", "page_token = 1\npage_tokens"),
        ["models[0].page_token: "],
    ),
    "unknown-key-of-a-component": (
        MINIMAL + "byte = 1",
        ["models[0].components[0].byte: unknown key, did you mean bytes"],
    ),
    "hash-without-a-scheme": (
        MINIMAL.replace("[[models.", "hash = {}\n[[models."),
        ["models[0].hash.scheme: is missing"],
    ),
    "hash-of-an-unknown-scheme": (
        MINIMAL.replace("[[models.", 'hash = {scheme = "md5"}\n[[models.'),
        ['models[0].hash.scheme: must be "sglang", "sglang-old", "vllm-sha256-cbor" or "vllm-xxhash-cbor", got "md5"'],
    ),
    "hash-with-an-unknown-key": (
        MINIMAL.replace("[[models.", 'hash = {scheme = "sglang", sed = "0"}\n[[models.'),
        ["models[0].hash.sed: unknown key, did you mean seed"],
    ),
    "hash-not-a-table": (
        MINIMAL.replace("[[models.", 'hash = "sglang"\n[[models.'),
        ["models[0].hash: must be a table"],
    ),
    "hash-seed-missing": (
        MINIMAL.replace("[[models.", 'hash = {scheme = "vllm-xxhash-cbor"}\n[[models.'),
        ["models[0].hash.seed: must be the PYTHONHASHSEED that vLLM runs with"],
    ),
    "hash-seed-empty": (
        MINIMAL.replace("[[models.", 'hash = {scheme = "vllm-sha256-cbor", seed = ""}\n[[models.'),
        ["models[0].hash.seed: must be 1 to 1024 characters"],
    ),
    "hash-seed-of-sglang": (
        MINIMAL.replace("[[models.", 'hash = {scheme = "sglang", seed = "0"}\n[[models.'),
        ["models[0].hash.seed: must be absent unless the scheme is one of vLLM's"],
    ),
    "hash-bigram-of-vllm": (
        MINIMAL.replace("[[models.", 'hash = {scheme = "vllm-sha256-cbor", bigram = true}\n[[models.'),
        ["models[0].hash.bigram: must be false unless the scheme is one of SGLang's"],
    ),
    "odd-key": ('[server]\n"a\\nb" = 1' + MINIMAL, ['server."a\\nb": unknown key']),
    "bool-for-int": ("[server]\nport = true" + MINIMAL, ["server.port: must be an integer, got true"]),
    "text-for-int": ('[server]\nport = "8470"' + MINIMAL, ['server.port: must be an integer, got "8470"']),
    "float-for-int": ("[server]\nport = 8470.0" + MINIMAL, ["server.port: must be an integer, got 8470.0"]),
    "int-for-text": ("[server]\nhost = 1" + MINIMAL, ["server.host: must be text, got 1"]),
    "int-for-bool": ("[storage.file]\ndirect = 1" + MINIMAL, ["storage.file.direct: must be true or false, got 1"]),
    "bool-for-number": ("[pool]\nwrite_reserve = true" + MINIMAL, ["pool.write_reserve: must be a number, got true"]),
    "text-for-number": ('[pool]\nwrite_reserve = "0.1"' + MINIMAL, ["pool.write_reserve: must be a number"]),
    "date-for-text": ("[server]\nhost = 2026-01-01" + MINIMAL, ["server.host: must be text, got datetime.date("]),
    "table-for-text": ("[server.host]\nx = 1" + MINIMAL, ["server.host: must be text, got a table"]),
    "array-for-text": ("[server]\nhost = [1]" + MINIMAL, ["server.host: must be text, got an array"]),
    "unknown-and-deep": (f"x{'.x' * 1500} = 1" + MINIMAL, ["x: unknown key"]),
    "table-for-int-and-deep": (
        f"server.port{'.x' * 1500} = 1" + MINIMAL,
        ["server.port: must be an integer, got a t"],
    ),
    "unknown-and-long": (f"{'x' * 20000} = 1" + MINIMAL, ['"xxxxxxxxxx']),
    "text-for-table": ("server = 'x'" + MINIMAL, ["server: must be a table"]),
    "port-low": ("[server]\nport = -1" + MINIMAL, ["server.port: must be at least 0, got -1"]),
    "port-high": ("[server]\nport = 65536" + MINIMAL, ["server.port: must be at most 65535, got 65536"]),
    "port-endless": (
        f"[server]\nport = 0x{'f' * 5000}" + MINIMAL,
        ["server.port: must be at most 65535, got a far la"],
    ),
    "host-empty": ('[server]\nhost = ""' + MINIMAL, ["server.host: must be a host name"]),
    "host-with-scheme": ('[server]\nhost = "http://x"' + MINIMAL, ["server.host: must be a host name"]),
    "uds-twice": (
        '[server]\nuds = "/run/s"\nregions_uds = "/run/s"' + MINIMAL,
        ["server.regions_uds: must be another path than server.uds"],
    ),
    "uds-long": (f'[server]\nuds = "/{"x" * 107}"' + MINIMAL, ["server.uds: must be at most 107 bytes long"]),
    "token-missing": (
        '[server]\ntoken_file = "/nowhere"' + MINIMAL,
        ['server.token_file: "/nowhere" cannot be read: No'],
    ),
    "token-is-a-folder": ('[server]\ntoken_file = "/"' + MINIMAL, ['server.token_file: "/" cannot be read: Is a ']),
    "token-empty": ('[server]\ntoken_file = "/dev/null"' + MINIMAL, ['server.token_file: "/dev/null" holds no token']),
    "token-endless": (
        '[server]\ntoken_file = "/dev/zero"' + MINIMAL,
        ['server.token_file: "/dev/zero" is larger than'],
    ),
    "body-zero": ("[server]\nmax_body_bytes = 0" + MINIMAL, ["server.max_body_bytes: must be from 1 byte"]),
    "pool-path-empty": ('[pool]\npath = ""' + MINIMAL, ["pool.path: must not be empty"]),
    "pool-path-nul": ('[pool]\npath = "a\\u0000"' + MINIMAL, ["pool.path: must be printable text"]),
    "pool-path-long": (f'[pool]\npath = "{"x" * 4001}"' + MINIMAL, ["pool.path: must be at most 4000 bytes"]),
    "pool-zero": ("[pool]\nbytes = 0" + MINIMAL, ["pool.bytes: must be from 1 byte to 1 PiB, got 0"]),
    "pool-one": ("[pool]\nbytes = 1" + MINIMAL, ["pool.bytes: need at least 77824 bytes for one slot of every"]),
    "pool-one-byte-short": ("[pool]\nbytes = 77823" + MINIMAL, ["pool.bytes: need at least 77824 bytes"]),
    "pool-negative": ('[pool]\nbytes = "-1GiB"' + MINIMAL, ["pool.bytes: must be a size"]),
    "pool-not-a-number": ("[pool]\nbytes = nan" + MINIMAL, ["pool.bytes: must be a size such as"]),
    "pool-true": ("[pool]\nbytes = true" + MINIMAL, ["pool.bytes: must be a size"]),
    "pool-absurd": ('[pool]\nbytes = "2PiB"' + MINIMAL, ["pool.bytes: must be from 1 byte to 1 PiB"]),
    "slots-too-many": (MINIMAL + "slots = 100000", ["pool.bytes: the configured slots need "]),
    "pin": ('[pool]\npin = "yes"' + MINIMAL, ['pool.pin: must be "auto", "cuda", "mlock" or "none", got "yes"']),
    "hugepages": ("[pool]\nhugepages = true" + MINIMAL, ['pool.hugepages: must be "auto", "on" or "off", got true']),
    "numa": ("[pool]\nnuma_node = -2" + MINIMAL, ["pool.numa_node: must be at least -1"]),
    "mode-int": ("[pool]\nmode = 0o660" + MINIMAL, ['pool.mode: must be octal text such as "0660", got 432']),
    "mode-unusable": ('[pool]\nmode = "0060"' + MINIMAL, ["pool.mode: must let the owner read and write"]),
    "reserve-whole": ("[pool]\nwrite_reserve = 1" + MINIMAL, ["pool.write_reserve: must be less than 1, got 1"]),
    "reserve-nan": ("[pool]\nwrite_reserve = nan" + MINIMAL, ["pool.write_reserve: must be a finite number"]),
    "kind": (
        '[storage]\nkind = "s3"' + MINIMAL,
        [
            (
                'storage.kind: must be "file", "hicache-file", "vllm-file", "lmcache-file", '
                '"lmcache-redis" or "redis", got "s3"'
            )
        ],
    ),
    "readers": ("[storage]\nreaders = -1" + MINIMAL, ["storage.readers: must be at least 0"]),
    "probe-zero": ("[storage]\nprobe_timeout_ms = 0" + MINIMAL, ["storage.probe_timeout_ms: must be at least 1"]),
    "stall-negative": ("[storage]\nstall_timeout_ms = -5" + MINIMAL, ["storage.stall_timeout_ms: must be at least 1"]),
    "root-empty": ('[storage.file]\nroot = ""' + MINIMAL, ["storage.file.root: must not be empty"]),
    "hicache-root": ('[storage.hicache-file]\nroot = ""' + MINIMAL, ["storage.hicache-file.root: must not be empty"]),
    "vllm-folder": (
        '[storage]\nkind = "vllm-file"' + MINIMAL,
        ['models[0].vllm.folder: is required with storage.kind = "vllm-file"'],
    ),
    "vllm-folders": (
        MINIMAL.replace("= 64", '= 64\nvllm = {folder = "a/b"}'),
        ["models[0].vllm.folder: must be the name of a folder, without slashes"],
    ),
    "vllm-shards": (
        '[storage]\nkind = "vllm-file"' + MINIMAL.replace("= 64", '= 64\nshards = 2\nvllm = {folder = "a_r0"}'),
        ["models[0].components[0].shards: must be 1, got 2"],
    ),
    "lmcache-name": (
        MINIMAL.replace("= 64", '= 64\nlmcache = {served_name = "a@b"}'),
        ["models[0].lmcache.served_name: must not contain an at sign"],
    ),
    "lmcache-model": (
        '[storage]\nkind = "lmcache-file"' + MINIMAL.replace("demo", "de@mo"),
        ["models[0].lmcache.served_name: is required"],
    ),
    "lmcache-salt": (
        MINIMAL.replace("= 64", '= 64\nlmcache = {salt = "a/b"}'),
        ["models[0].lmcache.salt: must be at most 128 characters"],
    ),
    "lmcache-shards": (
        '[storage]\nkind = "lmcache-file"' + MINIMAL.replace("= 64", "= 64\nshards = 256"),
        ["models[0].components[0].shards: must be at most 255"],
    ),
    "prefix": ('[storage.redis]\nprefix = "a{b}"' + MINIMAL, ["storage.redis.prefix: must be 1 to 128 visible"]),
    "connections": ("[storage.redis]\nconnections = 0" + MINIMAL, ["storage.redis.connections: must be at least 1"]),
    "min-over-max": (
        "[prefetch]\nmin_pages = 9\nmax_pages = 8" + MINIMAL,
        ["prefetch.min_pages: must be at most prefetch."],
    ),
    "max-pages": ("[prefetch]\nmax_pages = 0" + MINIMAL, ["prefetch.max_pages: must be at least 1"]),
    "inflight-zero": (
        "[prefetch]\nmax_inflight_fraction = 0" + MINIMAL,
        ["prefetch.max_inflight_fraction: must be more th"],
    ),
    "inflight-high": (
        "[prefetch]\nmax_inflight_fraction = 1.01" + MINIMAL,
        ["prefetch.max_inflight_fraction: must be at most 1, got 1.01"],
    ),
    "queue": ("[prefetch]\nqueue_limit = -1" + MINIMAL, ["prefetch.queue_limit: must be at least 0"]),
    "deadline": ("[prefetch]\ndeadline_ms = -1" + MINIMAL, ["prefetch.deadline_ms: must be at least 0"]),
    "settle": ("[prefetch]\nsettle_ms = 2147483648" + MINIMAL, ["prefetch.settle_ms: must be at most 2147483647"]),
    "lease-over-max": (
        "[lease]\ndefault_ms = 600001" + MINIMAL,
        ["lease.default_ms: must be at most lease.max_ms (60"],
    ),
    "max-under-lease": (
        "[lease]\nmax_ms = 29999" + MINIMAL,
        ["lease.default_ms: must be at most lease.max_ms (29999)"],
    ),
    "pinned": ("[lease]\nmax_pinned_fraction = 0.0" + MINIMAL, ["lease.max_pinned_fraction: must be more than 0"]),
    "name-empty": (MINIMAL.replace('"demo"', '""'), ["models[0].name: must be 1 to 128 bytes"]),
    "name-space": (MINIMAL.replace("demo", "de mo"), ["models[0].name: must be 1 to 128 bytes"]),
    "name-control": (MINIMAL.replace("demo", "de\\u0007mo"), ["models[0].name: must be 1 to 128 bytes"]),
    "name-long": (MINIMAL.replace("demo", "é" * 65), ["models[0].name: must be 1 to 128 bytes"]),
    "name-missing": (MINIMAL.replace('name = "demo"', ""), ["models[0].name: is missing"]),
    "page-tokens": (MINIMAL.replace("= 64", "= 0"), ["models[0].page_tokens: must be at least 1, got 0"]),
    "shards": (MINIMAL.replace("= 64", "= 64\nshards = 0"), ["models[0].shards: must be at least 1, got 0"]),
    "dtype": (MINIMAL.replace("= 64", '= 64\ndtype = "a b"'), ["models[0].dtype: must be 1 to 64 characters"]),
    "no-components": (
        MINIMAL.partition("[[models.c")[0],
        ["models[0].components: is missing: write at least one [[models.components]]"],
    ),
    "components-empty": (
        MINIMAL.partition("[[models.c")[0] + "components = []",
        ["models[0].components: is empty: write at least one [[models.components]]"],
    ),
    "component-dot": (MINIMAL.replace('"kv"', '"k.v"'), ["models[0].components[0].name: must be 1 to 32 characters"]),
    "component-slash": (MINIMAL.replace('"kv"', '"../kv"'), ["models[0].components[0].name: must be 1 to 32 charact"]),
    "component-long": (MINIMAL.replace("kv", "k" * 33), ["models[0].components[0].name: must be 1 to 32 characters"]),
    "component-not-ascii": (MINIMAL.replace("kv", "ké"), ["models[0].components[0].name: must be 1 to 32 characters"]),
    "component-newline": (MINIMAL.replace("kv", "kv\\n"), ["models[0].components[0].name: must be 1 to 32 characters"]),
    "component-bytes": (MINIMAL.replace("65536", '"0GiB"'), ["models[0].components[0].bytes: must be from 1 byte"]),
    "component-no-bytes": (MINIMAL.replace("bytes = 65536", ""), ["models[0].components[0].bytes: is missing"]),
    "component-slots": (MINIMAL + "slots = 0", ["models[0].components[0].slots: must be at least 1"]),
    "component-shards": (MINIMAL + "shards = 65536", ["models[0].components[0].shards: must be at most 65535"]),
    "covers": (MINIMAL + 'covers = "all"', ['models[0].components[0].covers: must be "every_page" or "tail"']),
    "window-of-every-page": (MINIMAL + "window = 1", ["models[0].components[0].window: must be absent unless covers"]),
    "window-zero": (
        MINIMAL + '[[models.components]]\nname = "m"\nbytes = 1\ncovers = "tail"\nwindow = 0',
        ["models[0].components[1].window: must be at least 1"],
    ),
    "only-tails": (MINIMAL + 'covers = "tail"', ['models[0].components: at least one must have covers = "every_page"']),
    "model-twice": (MINIMAL * 3, [f'models[{i}].name: models[0] is already called "demo"' for i in (1, 2)]),
    "component-twice": (
        MINIMAL + '[[models.components]]\nname = "kv"\nbytes = 1',
        ['models[0].components[1].name: models[0].components[0] is already called "kv"'],
    ),
    "naming": (MINIMAL.replace("= 64", '= 64\nhicache = {naming = "newer"}'), ["models[0].hicache.naming: must be "]),
    "served-name": (
        MINIMAL.replace("= 64", '= 64\nhicache = {served_name = "a b"}'),
        ["models[0].hicache.served_name: "],
    ),
    "old-context-ranks": (
        MINIMAL.replace("= 64", '= 64\nhicache = {naming = "old", cp_size = 2}'),
        ['models[0].hicache.cp_size: must be 1 with naming "old"'],
    ),
    "many-at-once": (
        "[sever]\n[server]\nport = true\n[pool]\nbytes = 1\npin = 1\n[lease]\nmax_ms = 1"
        + MINIMAL.replace("= 64", '= "64"\nshards = 0\nhicache = {mla = 1}')
        + '[[models.components]]\nname = "kv"\nbytes = -1\nwindow = 3'
        + MINIMAL,
        [
            "server.port: ",
            "pool.pin: ",
            "lease.default_ms: ",
            "models[0].page_tokens: ",
            "models[0].shards: ",
            "models[0].hicache.mla: ",
            "models[0].components[1].bytes: ",
            "models[0].components[1].window: ",
            "sever: ",
            "models[1].name: ",
            "models[0].components[1].name: ",
        ],
    ),
    "tenant-not-a-table": ("tenants = [3]" + MINIMAL, ["tenants[0]: must be a table"]),
    "tenants-not-an-array": ("[tenants]\nname = 'a'" + MINIMAL, ["tenants: must be an array of tables"]),
    "tenant-unknown-key": (
        '[[tenants]]\nname = "a"\nmin_shar = 0.5' + MINIMAL,
        ["tenants[0].min_shar: unknown key, did you mean min_share"],
    ),
    "tenant-without-name": ("[[tenants]]\nmin_share = 0.5" + MINIMAL, ["tenants[0].name: is missing"]),
    "tenant-name-long": (f'[[tenants]]\nname = "{"x" * 129}"' + MINIMAL, ["tenants[0].name: must be 1 to 128 char"]),
    "tenant-twice": (
        '[[tenants]]\nname = "a"\n[[tenants]]\nname = "a"' + MINIMAL,
        ['tenants[1].name: tenants[0] is already called "a"'],
    ),
    "tenant-share-high": (
        '[[tenants]]\nname = "a"\nmin_share = 1.5\nmax_share = 0.0' + MINIMAL,
        ["tenants[0].min_share: must be at most 1", "tenants[0].max_share: must be more than 0"],
    ),
    "tenant-capped-below-its-promise": (
        '[[tenants]]\nname = "a"\nmin_share = 0.5\nmax_share = 0.4' + MINIMAL,
        ["tenants[0].max_share: must be at least min_share (0.5), got 0.4"],
    ),
    "tenants-promised-too-much": (
        '[[tenants]]\nname = "a"\nmin_share = 0.7\n[[tenants]]\nname = "b"\nmin_share = 0.4' + MINIMAL,
        ["tenants: min_share of all together must be at most 1, is 1.1"],
    ),
    "reserve-beyond-what-is-promised": (
        '[[tenants]]\nname = "a"\nmin_share = 0.5\n[pool]\nwrite_reserve = 0.3\n[lease]\nmax_pinned_fraction = 0.5'
        + MINIMAL,
        ["pool.write_reserve: must be at most 0.25, which lease.max_pinned_fraction and the tenants' min_share"],
    ),
    "reserve-beyond-what-writes-may-use": (
        "[pool]\nwrite_reserve = 0.3\n[writes]\nmax_dirty_fraction = 0.25" + MINIMAL,
        ["pool.write_reserve: must be at most 0.25, which is writes.max_dirty_fraction: writes cannot"],
    ),
    "reserve-beyond-both": (
        "[pool]\nwrite_reserve = 0.5\n[lease]\nmax_pinned_fraction = 0.3\n[writes]\nmax_dirty_fraction = 0.4" + MINIMAL,
        ["pool.write_reserve: must be at most 0.3, which lease.max_pinned_fraction"],
    ),
    "tenants-many": (
        "".join(f'[[tenants]]\nname = "t{number}"\n' for number in range(65)) + MINIMAL,
        ["tenants: at most 64 can be configured, got 65"],
    ),
    "tenant-token-missing": (
        '[[tenants]]\nname = "a"\ntoken_file = "/nowhere"' + MINIMAL,
        ['tenants[0].token_file: "/nowhere" cannot be read: No'],
    ),
    "tenant-token-empty": (
        '[[tenants]]\nname = "a"\ntoken_file = "/dev/null"' + MINIMAL,
        ['tenants[0].token_file: "/dev/null" holds no token'],
    ),
    "pin-for-no-time": ("[lease]\nmax_pin_ms = 0" + MINIMAL, ["lease.max_pin_ms: must be at least 1, got 0"]),
}


@pytest.mark.parametrize(("text", "lines"), BAD.values(), ids=BAD.keys())
def test_names_every_mistake_on_a_line_of_its_own(text: str, lines: list[str]) -> None:
    found = mistakes_of(text)
    assert len(found) == len(lines), found
    for mistake, line in zip(found, lines, strict=True):
        assert mistake.startswith(line)
        assert len(mistake) < 300


GOOD = {
    "minimal": MINIMAL,
    "byte-order-mark": "\ufeff" + MINIMAL,
    "smallest-pool": "[pool]\nbytes = 77824" + MINIMAL,
    "whole-number-for-a-fraction": "[prefetch]\nmax_inflight_fraction = 1" + MINIMAL,
    "lease-at-its-limit": "[lease]\ndefault_ms = 5\nmax_ms = 5" + MINIMAL,
    "queue-of-nothing": "[prefetch]\nqueue_limit = 0" + MINIMAL,
    "longest-names": MINIMAL.replace("demo", "é" * 64).replace("kv", "k" * 32),
    "slash-in-a-model": MINIMAL.replace("demo", "acme/mla-1b:lora"),
    "longest-socket": f'[server]\nuds = "/{"x" * 106}"' + MINIMAL,
    "same-component-in-two-models": MINIMAL + MINIMAL.replace("demo", "other"),
    "no-served-name": MINIMAL.replace("= 64", '= 64\nhicache = {served_name = ""}'),
    "redis": '[storage]\nkind = "redis"' + MINIMAL,
    "tenants-promised-everything": "".join(
        f'[[tenants]]\nname = "{name}"\nmin_share = 0.1\n'
        for name in "abcdefghij"  # in binary more than 1
    )
    + MINIMAL,
    "tenant-default": '[[tenants]]\nname = "default"\nmax_share = 1' + MINIMAL,
    "reserve-at-its-limit": "[pool]\nwrite_reserve = 0.1\n[writes]\nmax_dirty_fraction = 0.1" + MINIMAL,
    "no-tenants": "tenants = []" + MINIMAL,
}


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD.keys())
def test_accepts(text: str) -> None:
    assert mistakes_of(text) == []


FILES = {
    "not-utf8": (MINIMAL.encode() + b"# \xff", "is not UTF-8 (byte "),
    "utf16": (MINIMAL.encode("utf-16"), "is not UTF-8 (byte 0)"),
    "not-toml": (b"server: {port: 8470}", "is not valid TOML: "),
    "key-twice": (b"[server]\nport = 1\nport = 2", "is not valid TOML: "),
    "nul": (b"\0", "is not valid TOML: "),
    "too-deep": (b"x = " + b"[" * 5000, "is not valid TOML: nested too deeply"),
    "endless-number": (b"x = " + b"9" * 5000, "is not valid TOML: "),
    "too-large": (b"#" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
}


@pytest.mark.parametrize(("content", "line"), FILES.values(), ids=FILES.keys())
def test_names_a_file_that_is_no_configuration(content: bytes, line: str) -> None:
    (mistake,) = mistakes_of(content)
    assert f"forestage.toml: {line}" in mistake


def test_names_a_file_that_cannot_be_read_and_what_else_is_wrong(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    with pytest.raises(ConfigError) as raised:
        load(str(missing), {"FORESTAGE_SERVER__PORT": "x", "FORESTAGE_X": "1"})
    first, second, third = raised.value.mistakes
    assert first == f"{missing}: cannot be read: No such file or directory"
    assert second.startswith("FORESTAGE_X: unknown variable")
    assert third.startswith("server.port: must be an integer")

    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(str(tmp_path), {})
    with pytest.raises(ConfigError, match="embedded null byte"):
        load("a\0b", {})


def test_without_a_file_the_models_are_missing() -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, {})
    assert raised.value.mistakes == ["models: is missing: write at least one [[models]]"]
    assert isinstance(raised.value, StartError)


def test_is_frozen() -> None:
    config = load_text(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.server.port = 1


def test_reads_the_token_without_the_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("\n s3cret-_.~+/= \n")
    assert read_token(str(file)) == "s3cret-_.~+/="
    assert load_text(f'[server]\ntoken_file = "{file}"' + MINIMAL).server.token_file == str(file)
    for content in (b" \n", b"two words", b"caf\xc3\xa9", b"a\nb", b"\xff", b"x" * 4097):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"hold|is not UTF-8|is larger") as refusal:
            read_token(str(file))
        assert "words" not in str(refusal.value)


SHARDS = [  # naming, component, tensor x pipeline x context ranks, mla, files a page
    ("new", "kv", (2, 1, 1), False, 2),
    ("new", "kv", (2, 3, 5), False, 30),
    ("new", "mamba", (2, 3, 1), False, 6),
    ("new", "kv", (8, 1, 1), True, 1),
    ("new", "indexer", (8, 2, 3), True, 6),
    ("new", "mamba", (8, 2, 3), True, 48),
    ("old", "kv", (8, 2, 1), True, 2),
    ("old", "mamba", (8, 2, 1), True, 2),
    ("old", "mamba", (8, 2, 1), False, 16),
]


@pytest.mark.parametrize(("naming", "component", "ranks", "mla", "files"), SHARDS)
def test_counts_the_files_of_a_page(
    naming: str, component: str, ranks: tuple[int, int, int], mla: bool, files: int
) -> None:
    tp, pp, cp = ranks
    assert expected_shards(HicacheNaming("m", tp, pp, cp, mla, naming), component) == files
    text = f"""
        [storage]
        kind = "KIND"
        [[models]]
        name = "m"
        page_tokens = 16
        shards = {files}
        hicache = {{tp_size = {tp}, pp_size = {pp}, cp_size = {cp}, mla = {str(mla).lower()}, naming = "{naming}"}}
        [[models.components]]
        name = "{component}"
        bytes = 64
    """
    assert mistakes_of(text.replace("KIND", "hicache-file")) == []
    more = text + f"shards = {files + 1}"
    (line,) = mistakes_of(more.replace("KIND", "hicache-file"))
    assert line.startswith(
        f"models[0].components[0].shards: is {files + 1}, but models[0].hicache makes it {files} "
        f"(tp_size {tp}, pp_size {pp}, cp_size {cp}, "
    )
    assert mistakes_of(more.replace("KIND", "file")) == []  # only that storage reads by those names


def test_one_wrong_model_does_not_hide_the_ranks_of_another() -> None:
    wrong = MINIMAL.replace("= 64", "= 0")
    mla = MINIMAL.replace("demo", "mla").replace("= 64", "= 64\nshards = 4\nhicache = {mla = true}")
    found = mistakes_of('[storage]\nkind = "hicache-file"' + wrong + mla)
    assert [line.partition(": ")[0] for line in found] == ["models[0].page_tokens", "models[1].components[0].shards"]


def test_a_file_of_another_user_is_named(tmp_path: Path) -> None:
    file = tmp_path / "forestage.toml"
    file.write_text(MINIMAL)
    file.chmod(0)
    if os.geteuid() == 0:  # root reads everything: ask as somebody else
        _as_nobody(file)
    else:
        with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            load(str(file), {})


def _as_nobody(file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        moved = Path(folder, "forestage.toml")
        file.rename(moved)
        os.seteuid(65534)
        try:
            with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
                load(str(moved), {})
        finally:
            os.seteuid(0)


def test_two_tenants_with_one_token_could_not_be_told_apart(tmp_path: Path) -> None:
    for name, token in [("x", "same"), ("y", "same\n"), ("z", "other")]:
        (tmp_path / name).write_text(token)
    tenants = "".join(f'[[tenants]]\nname = "{n}"\ntoken_file = "{tmp_path / n}"\n' for n in "zy")
    (line,) = mistakes_of(f'[server]\ntoken_file = "{tmp_path}/x"\n' + tenants + MINIMAL)
    assert line.startswith("tenants[1].token_file: ")
    assert line.endswith("holds the same token as server.token_file, so it would not tell who calls")
