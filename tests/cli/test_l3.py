"""`forestage l3 ls|put|verify|rm` on every kind of storage."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.stores import FileStore, HicacheStore, LmcacheRedisStore, RedisStore, Store, keys_of
from forestage.cli import main
from forestage.cli.progress import Progress
from support.manifests import DATA
from support.redis_servers import cluster, standalone

KV, STATE = 0, 1
MODEL = ("--model", "m")


@pytest.fixture(params=["file", "hicache-file", "redis", "lmcache-redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if "redis" in request.param:
        with standalone(tmp_path / "redis") as server:
            yield (RedisStore if request.param == "redis" else LmcacheRedisStore)(tmp_path / "l3", server)
    else:
        yield (FileStore if request.param == "file" else HicacheStore)(tmp_path / "l3")


def l3(store: Store, action: str, *more: str) -> int:
    return main(["l3", action, "--config", str(store.config), *more])


# ---- ls


def test_ls_says_what_is_there_and_what_is_not_whole(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(4)
    store.fill(keys, keys[1:2])
    store.set(KV, keys[2], 1, None)
    store.set(KV, keys[3], 0, b"short")
    assert l3(store, "ls") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    size = 2 * (4096 + store.extra_bytes)
    assert lines[0] == ["m", "kv", keys[0].hex(), str(size), "whole"]
    assert lines[2] == ["m", "kv", keys[2].hex(), str(size // 2), "shards", "missing:", "1"]
    assert lines[3] == ["m", "kv", keys[3].hex(), str(size // 2 + 5), "shards", "of", "a", "wrong", "size:", "0"]
    assert lines[4] == ["m", "state", keys[1].hex(), str(2 * (1000 + store.extra_bytes)), "whole"]
    assert " ".join(lines[5]) == f"m kv 4 pages, {3 * size + 5} bytes; 2 not whole"
    assert lines[7][:2] == ["other", "kv"]
    assert len(lines) == 8


def test_ls_as_json(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(3)
    store.fill(keys)
    store.set(KV, keys[2], 1, None)
    assert l3(store, "ls", *MODEL, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["storage"] == store.kind
    assert list(told["models"]) == ["m"]
    model = told["models"]["m"]
    value = 4096 + store.extra_bytes
    assert model["components"]["kv"] == {"pages": 3, "whole": 2, "bytes": 5 * value}
    assert model["components"]["state"] == {"pages": 0, "whole": 0, "bytes": 0}
    assert [page["key"] for page in model["pages"]] == [key.hex() for key in keys]
    assert model["pages"][2] == {
        "component": "kv",
        "key": keys[2].hex(),
        "shard_bytes": [value, None],
        "whole": False,
    }
    assert l3(store, "ls", "--json", "--summary") == 0
    assert "pages" not in json.loads(capsys.readouterr().out)["models"]["m"]


def test_ls_of_nothing(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert l3(store, "ls", *MODEL) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "m kv 0 pages, 0 bytes",
        "m state 0 pages, 0 bytes",
    ]


# ---- verify


def test_verify_finds_all_good(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(300)
    store.fill(keys, keys[:3])
    assert l3(store, "verify") == 0
    assert capsys.readouterr().out.splitlines() == [
        "m  303 ok, 0 corrupt, 0 missing, 0 unreadable",
        "other  0 ok, 0 corrupt, 0 missing, 0 unreadable",
    ]


def test_verify_names_every_bad_page(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(5)
    store.fill(keys, keys[:1])
    value = store.get(KV, keys[1], 0)
    assert value is not None
    store.set(KV, keys[1], 0, value[:-1])
    store.set(KV, keys[3], 0, None)
    store.set(STATE, keys[0], 1, b"")
    assert l3(store, "verify", *MODEL) == 3
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        f"m kv {keys[1].hex()} corrupt",
        f"m kv {keys[3].hex()} missing",
        f"m state {keys[0].hex()} corrupt",
        "m 3 ok, 2 corrupt, 1 missing, 0 unreadable",
    ]
    assert l3(store, "verify", "--json") == 3
    told = json.loads(capsys.readouterr().out)["models"]["m"]
    assert (told["ok"], told["corrupt"], told["missing"]) == (3, 2, 1)
    assert told["bad"][0] == {"component": "kv", "key": keys[1].hex(), "verdict": "corrupt"}


def test_verify_sees_flipped_bytes_where_values_carry_a_checksum(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = keys_of(3)
    store.fill(keys)
    value = bytearray(store.get(KV, keys[1], 1) or b"")
    value[100] ^= 1
    store.set(KV, keys[1], 1, bytes(value))
    assert l3(store, "verify", *MODEL) == (3 if store.extra_bytes else 0)
    assert ("1 corrupt" in capsys.readouterr().out) is bool(store.extra_bytes)


# ---- put


def test_put_copies_what_is_whole(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From one storage to another by its configuration, and back: the values are the same to the byte."""
    keys = keys_of(300)
    store.fill(keys, keys[5:8])
    target = FileStore(tmp_path / "target")
    assert l3(target, "put", *MODEL, "--from", f"config:{store.config}") == 0
    assert "copied 303 pages" in capsys.readouterr().out
    assert l3(target, "verify", *MODEL) == 0
    before = [store.get(KV, key, shard) for key in keys[:9] for shard in range(2)]
    assert l3(store, "rm", *MODEL, "--all", "--yes") == 0
    assert store.get(KV, keys[0], 0) is None
    target.set(KV, keys[8], 0, None)
    assert l3(store, "put", *MODEL, "--from", f"config:{target.config}") == 0
    assert "copied 302 pages, 2455408 bytes; skipped 1 that were not whole" in capsys.readouterr().out
    assert [store.get(KV, key, shard) for key in keys[:8] for shard in range(2)] == before[:16]
    assert store.get(KV, keys[8], 1) is None


def test_put_of_a_directory_that_sglang_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((DATA / "hicache-hybrid" / "manifest.json").read_text())
    sizes = {component["name"]: component["bytes"] for component in manifest["model"]["components"]}
    config = tmp_path / "forestage.toml"
    config.write_text(
        f'[storage]\nkind = "file"\n[storage.file]\nroot = "{tmp_path}/l3"\n[pool]\nbytes = "64MiB"\n'
        '[[models]]\nname = "acme"\npage_tokens = 16\nshards = 2\nhicache = { served_name = "acme-hybrid-1b" }\n'
        f'[[models.components]]\nname = "kv"\nbytes = {sizes["kv"]}\n'
        f'[[models.components]]\nname = "mamba"\nbytes = {sizes["mamba"]}\ncovers = "tail"\nwindow = 1\n'
    )
    source = f"hicache-file:{DATA / 'hicache-hybrid' / 'l3'}"
    assert main(["l3", "put", "--config", str(config), "--model", "acme", "--from", source]) == 0
    told = capsys.readouterr().out
    pages = {(file["component"], file["name"][:64]) for file in manifest["files"]}
    assert told.startswith(f"copied {len(pages)} pages")
    assert main(["l3", "verify", "--config", str(config)]) == 0
    assert f"{len(pages)} ok, 0 corrupt" in capsys.readouterr().out


# ---- rm


def test_rm_of_pages_and_of_all(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    keys = keys_of(4)
    store.fill(keys, keys[:1])
    assert l3(store, "rm", *MODEL, keys[0].hex(), keys[1].hex().upper()) == 0
    assert capsys.readouterr().out == "removed 3 pages\n"
    assert l3(store, "rm", *MODEL, keys[0].hex()) == 1
    assert f"{keys[0].hex()}: not there" in capsys.readouterr().err
    assert store.get(KV, keys[2], 0) is not None

    assert l3(store, "rm", *MODEL, "--all") == 2
    assert "2 pages" in capsys.readouterr().err
    assert store.get(KV, keys[2], 0) is not None

    store.set(KV, keys[2], 1, None)
    assert l3(store, "rm", *MODEL, "--all", "--yes") == 0
    assert capsys.readouterr().out == "removed 2 pages\n"
    assert l3(store, "ls", *MODEL, "--summary") == 0
    assert "kv          0 pages" in capsys.readouterr().out


# ---- what cannot be


@pytest.mark.parametrize(
    ("action", "more", "said"),
    [
        ("ls", ("--model", "nobody"), "no model 'nobody'"),
        ("put", (*MODEL, "--from", "/somewhere"), "is none of hicache-file:DIR"),
        ("put", (*MODEL, "--from", "tape:/somewhere"), "is none of hicache-file:DIR"),
        ("put", (*MODEL, "--from", "file:/does/not/exist"), "is no directory"),
        ("put", (*MODEL, "--from", "config:/does/not/exist"), "cannot be read"),
        ("rm", MODEL, "name page keys, or give --all"),
        ("rm", (*MODEL, "--all", "00" * 16), "name page keys, or give --all"),
        ("rm", (*MODEL, "abc"), "is no page key"),
        ("rm", (*MODEL, "00" * 15), "is no page key"),
    ],
)
def test_wrong_commands_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, more: tuple[str, ...], said: str
) -> None:
    assert l3(FileStore(tmp_path), action, *more) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1


def test_put_from_a_model_with_other_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, source = FileStore(tmp_path / "a"), FileStore(tmp_path / "b")
    source.config.write_text(source.config.read_text().replace("bytes = 1000", "bytes = 1001"))
    assert l3(target, "put", *MODEL, "--from", f"config:{source.config}") == 2
    assert "has other pages" in capsys.readouterr().err
    source.config.write_text(source.config.read_text().replace('name = "m"', 'name = "n"'))
    assert l3(target, "put", *MODEL, "--from", f"config:{source.config}") == 2
    assert "no model 'm'" in capsys.readouterr().err


def test_a_storage_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = HicacheStore(tmp_path)
    (tmp_path / "l3").rmdir()
    for action in ("ls", "verify"):
        assert l3(store, action) == 1
        assert "No such file or directory" in capsys.readouterr().err


def test_a_redis_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with standalone(tmp_path / "redis") as server:
        store = RedisStore(tmp_path, server)
        store.fill(keys_of(3))
        server.kill()
        for action, more in (("ls", ()), ("verify", ()), ("rm", (*MODEL, "--all", "--yes"))):
            assert l3(store, action, *more) == 1
            told = capsys.readouterr().err
            assert told.startswith("forestage: ")
            assert len(told.splitlines()) == 1


def test_a_full_redis_ends_a_copy_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FileStore(tmp_path / "source")
    source.fill(keys_of(300))
    with standalone(tmp_path / "redis", "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        target = RedisStore(tmp_path / "target", server)
        assert l3(target, "put", *MODEL, "--from", f"config:{source.config}") == 1
        told = capsys.readouterr().err
        assert "memory" in told
        assert len(told.splitlines()) == 1
        assert l3(target, "verify", *MODEL) in {0, 3}
        assert " 0 corrupt" in capsys.readouterr().out


def test_other_programs_values_are_seen_as_odd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with standalone(tmp_path / "redis") as server:
        store = RedisStore(tmp_path, server)
        keys = keys_of(2)
        store.fill(keys)
        server.command("DEL", store.name(KV, keys[0], 0))
        server.command("RPUSH", store.name(KV, keys[0], 0), "a")
        server.command("SET", "forestage:somebody-else", "x")
        assert l3(store, "ls", *MODEL) == 0
        assert "shards of a wrong size: 0" in capsys.readouterr().out
        assert l3(store, "verify", *MODEL) == 3
        assert "1 ok, 1 corrupt" in capsys.readouterr().out
        assert l3(store, "rm", *MODEL, "--all", "--yes") == 0
        assert server.command("KEYS", "*") == [b"forestage:somebody-else"]


def test_a_cluster_is_listed_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FileStore(tmp_path / "source")
    source.fill(keys_of(60))
    with cluster(tmp_path / "redis") as group:
        target = RedisStore(tmp_path / "target", group.nodes[0])
        target.config.write_text(target.config.read_text().replace(group.nodes[0].url, group.url))
        assert l3(target, "put", *MODEL, "--from", f"config:{source.config}") == 0
        assert l3(target, "verify", *MODEL) == 0
        assert "60 ok, 0 corrupt" in capsys.readouterr().out
        assert all(node.command("DBSIZE") for node in group.nodes)
        assert l3(target, "rm", *MODEL, "--all", "--yes") == 0
        assert not any(node.command("DBSIZE") for node in group.nodes)


# ---- the bar


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_waits_a_second_and_wipes_itself() -> None:
    now = 100.0
    terminal = _Terminal()
    with Progress("copying", 400, terminal, lambda: now) as progress:
        now = 100.9
        progress.add(90, 90_000_000)
        assert terminal.getvalue() == ""
        now = 102.0
        progress.add(10, 10_000_000)
        shown = terminal.getvalue()
        assert shown == "\rcopying [######                  ]  25%  100 of 400 pages  50 MB/s  6 s left"
        now = 102.05
        progress.add(10, 10_000_000)
        assert terminal.getvalue() == shown
    assert terminal.getvalue().endswith("\r" + " " * (len(shown) - 1) + "\r")


def test_no_bar_without_a_terminal() -> None:
    now = 0.0
    stream = io.StringIO()
    with Progress("copying", 2, stream, lambda: now) as progress:
        now = 5.0
        progress.add(1, 1)
    assert stream.getvalue() == ""
