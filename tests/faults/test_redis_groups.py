"""Clusters and sentinels below a running service: one node's trouble is a matter of its pages; order is kept."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.crc import key_slot

from faults.fault_table import FaultTable
from faults.redis_stock import PAGES, Stock, assert_up
from forestage.core.layout import ModelLayout
from support.live import make_keys
from support.live_redis import Answer, LiveRedis, live_redis, name_of, put_in_cluster, value_of
from support.redis_servers import ClusterGroup, cluster, sentinel, standalone
from support.redis_stub import StubCluster
from support.resp import error

SLACK_MS = 800  # a busy machine's, on top of what was asked for
PROBE_MS = 500  # a node that takes more than a part of it has failed


@pytest.fixture(scope="module")
def cluster_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterGroup]:
    """One cluster for all tests here; each leaves it whole."""
    with cluster(tmp_path_factory.mktemp("cluster")) as group:
        yield group


def _avoiding(group: ClusterGroup, model: ModelLayout, lost: int, chain: str) -> tuple[list[bytes], int]:
    """Return 30 keys, the first few of which are not on node `lost`, and how many these are."""
    keys = make_keys(300, chain)
    kept = [key for key in keys if group.owner(name_of(model, key)) != lost]
    gone = [key for key in keys if group.owner(name_of(model, key)) == lost]
    mixed = [*kept[:9], gone[0], *kept[9:20], *gone[1:10]]
    return mixed, 9


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_node_that_is_away_shortens_where_its_pages_are(
    tmp_path: Path, cluster_group: ClusterGroup, fault_table: FaultTable, fault: str
) -> None:
    group, lost = cluster_group, 1
    async with live_redis(tmp_path, group.url, slots=256, storage={"probe_timeout_ms": PROBE_MS}) as live:
        model = live.model
        chains = [_avoiding(group, model, lost, f"{fault} {n}") for n in range(6)]
        everywhere = [make_keys(PAGES * 3, f"{fault} everywhere {n}") for n in range(10)]
        for keys in (*(keys for keys, _ in chains), *everywhere):
            put_in_cluster(group, model, keys)
        assert (await live.ask(everywhere.pop())).ready == PAGES * 3
        if fault == "killed":
            group.kill(lost)
        else:
            group.stop(lost)
        answers: list[Answer] = []
        for keys, reachable in chains:
            answer = await live.ask(keys, deadline_ms=2000)
            assert answer.ready == reachable
            assert answer.shortfall == {"storage_unavailable": len(keys) - reachable}
            answers.append(answer)
        assert max(one.ms for one in answers) < 2 * PROBE_MS + SLACK_MS
        assert sorted(one.ms for one in answers)[2] < SLACK_MS  # once it is known, nobody waits for it
        elsewhere = [key for key in make_keys(60, f"{fault} rest") if group.owner(name_of(model, key)) != lost][:PAGES]
        put_in_cluster(group, model, elsewhere)
        assert (await live.ask(elsewhere)).ready == PAGES
        if fault == "killed":
            group.restart(lost)
            for keys in everywhere:
                put_in_cluster(group, model, keys)
        else:
            group.cont(lost)
            group.settle()
        heal_ms = await live.heals(everywhere.pop)
        await assert_up(live)
        await live.quiet()
        fault_table.add(f"cluster: one node of three {fault}", answers[0], live, heal_ms)


async def test_killed_in_mid_run(tmp_path: Path, cluster_group: ClusterGroup, fault_table: FaultTable) -> None:
    """Jobs follow one another while a node dies and comes back: each is true about what it got."""
    group, lost = cluster_group, 2
    async with live_redis(tmp_path, group.url, slots=256) as live:
        chains = [make_keys(PAGES, f"run {n}") for n in range(60)]
        put_in_cluster(group, live.model, [key for chain in chains for key in chain])
        answers: list[Answer] = []
        for number, chain in enumerate(chains[:40]):
            if number == 15:
                group.kill(lost)
            answers.append(await live.ask(chain))
        assert all(one.ready == PAGES for one in answers[:15])
        for chain, answer in zip(chains[16:], answers[16:], strict=False):
            owners = [group.owner(name_of(live.model, key)) for key in chain]
            assert answer.ready == (owners.index(lost) if lost in owners else PAGES)
        group.restart(lost)
        put_in_cluster(group, live.model, [key for chain in chains[40:] for key in chain])
        fresh = iter(chains[40:])
        heal_ms = await live.heals(lambda: next(fresh))
        await live.quiet()
        worst = max(answers, key=lambda answer: answer.ms)
        fault_table.add("cluster: a node killed under 40 jobs (slowest)", worst, live, heal_ms)


async def test_a_slot_on_the_move(tmp_path: Path, cluster_group: ClusterGroup, fault_table: FaultTable) -> None:
    """ASK while it moves, MOVED when it has: nothing is missing at any time."""
    group = cluster_group
    async with live_redis(tmp_path, group.url, slots=256) as live:
        chains = [make_keys(PAGES, f"moving {n}") for n in range(3)]
        for chain in chains:
            put_in_cluster(group, live.model, chain)
        moving = name_of(live.model, chains[0][4])
        slot, source = key_slot(moving), group.owner(moving)
        target = (source + 1) % 3
        assert (await live.ask(chains[1])).ready == PAGES
        group.open_slot(slot, target)
        assert group.migrate_keys(slot, target) == 1
        answer = await live.ask(chains[0])
        assert (answer.ready, answer.job.loaded) == (PAGES, PAGES)
        fault_table.add("cluster: a page's slot is being moved (ASK)", answer, live)
        group.move_slot(slot, target)
        assert (await live.ask(chains[2])).ready == PAGES
        async with live_redis(tmp_path / "second", group.url_of([source])) as other:
            again = await other.ask(chains[0])
            assert again.ready == PAGES
        group.nodes[target].command("DEL", moving)
        group.give_back_slot(slot)
        assert await live.metric("storage_errors_total") == 0
        await live.quiet()


@asynccontextmanager
async def _over_stubs(path: Path, **storage: object) -> AsyncIterator[tuple[LiveRedis, StubCluster, list[bytes]]]:
    """Run a service over three scripted nodes with 30 pages."""
    with StubCluster() as nodes:
        async with live_redis(path, nodes.url, slots=256, storage=storage) as live:
            keys = make_keys(30, "spread")
            for key in keys:
                nodes.put(name_of(live.model, key), value_of(live.model, key))
            assert {nodes.number_of(name_of(live.model, key)) for key in keys} == {0, 1, 2}
            yield live, nodes, keys
            await live.quiet()


@pytest.mark.parametrize("word", ["MOVED", "ASK", "TRYAGAIN"])
async def test_a_redirection_once(tmp_path: Path, fault_table: FaultTable, word: str) -> None:
    async with _over_stubs(tmp_path) as (live, nodes, keys):
        name = name_of(live.model, keys[7])
        slot, source = key_slot(name), nodes.number_of(name)
        target = nodes.nodes[(source + 1) % 3]
        if word == "MOVED":
            nodes.give(slot, (source + 1) % 3)
            target.values[name] = nodes.nodes[source].values.pop(name)
        elif word == "ASK":
            target.values[name] = nodes.nodes[source].values.pop(name)
            nodes.nodes[source].on("EXISTS", error(f"ASK {slot} 127.0.0.1:{target.port}"), key=name)
            nodes.nodes[source].on("GET", error(f"ASK {slot} 127.0.0.1:{target.port}"), key=name)
        else:
            for command in ("EXISTS", "GET"):
                nodes.nodes[source].on(command, error("TRYAGAIN Multiple keys during rehashing"), key=name, times=1)
        answer = await live.ask(keys)
        assert (answer.ready, answer.job.loaded) == (30, 30)
        assert answer.ms < SLACK_MS
        assert target.count("ASKING") == (2 if word == "ASK" else 0)
        await assert_up(live)
        fault_table.add(f"cluster: {word} once", answer, live)


async def test_the_distribution_changes_between_two_jobs(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_stubs(tmp_path) as (live, nodes, keys):
        assert (await live.ask(keys[:10])).ready == 10
        for slot in range(16384):
            nodes.give(slot, (nodes.owners[slot] + 1) % 3)
        values = [node.values for node in nodes.nodes]
        for node, of_other in zip(nodes.nodes, [values[2], values[0], values[1]], strict=True):
            node.values = of_other
        answer = await live.ask(keys)
        assert answer.ready == 30
        asked = nodes.nodes[0].count("CLUSTER") + nodes.nodes[1].count("CLUSTER") + nodes.nodes[2].count("CLUSTER")
        assert asked <= 4
        fault_table.add("cluster: every slot moved between two jobs", answer, live)


@pytest.mark.parametrize("fault", ["refuses", "swallows everything"])
async def test_a_scripted_node_goes_and_comes(tmp_path: Path, fault_table: FaultTable, fault: str) -> None:
    async with _over_stubs(tmp_path, probe_timeout_ms=PROBE_MS) as (live, nodes, keys):
        lost = nodes.number_of(name_of(live.model, keys[7]))
        reachable = next(i for i, key in enumerate(keys) if nodes.number_of(name_of(live.model, key)) == lost)
        if fault == "refuses":
            nodes.nodes[lost].refuse()
        else:
            nodes.nodes[lost].on("*", hold=True)
        accepted = nodes.nodes[lost].accepted
        answers = [await live.ask(keys, deadline_ms=1500) for _ in range(12)]
        # One may meet a pause of the machine that is longer than the probe timeout.
        assert sum(one.ready == reachable for one in answers) >= len(answers) - 1
        assert max(one.ready for one in answers) == reachable
        assert max(one.ms for one in answers) < 1500 + SLACK_MS
        assert sorted(one.ms for one in answers)[6] < SLACK_MS
        assert nodes.nodes[lost].accepted - accepted <= 10
        nodes.nodes[lost].heal()
        heal_ms = await live.heals(lambda: keys)
        await assert_up(live)
        fault_table.add(f"cluster: a node {fault}", answers[0], live, heal_ms)


async def test_an_announced_address_that_nobody_reaches(tmp_path: Path, fault_table: FaultTable) -> None:
    with StubCluster() as nodes:
        nodes.announced[2] = ("192.0.2.1", 6379)  # a network for documentation: no route, or no answer
        async with live_redis(tmp_path, nodes.url, storage={"probe_timeout_ms": PROBE_MS}) as live:
            keys = make_keys(30, "spread")
            for key in keys:
                nodes.put(name_of(live.model, key), value_of(live.model, key))
            reachable = next(i for i, key in enumerate(keys) if nodes.number_of(name_of(live.model, key)) == 2)
            answer = await live.ask(keys, deadline_ms=2000)
            assert answer.ready == reachable
            assert answer.ms < 2000 + SLACK_MS
            again = await live.ask(keys, deadline_ms=2000)
            assert again.ready == reachable
            nodes.announced.clear()
            heal_ms = await live.heals(lambda: keys)
            await live.quiet()
            fault_table.add("cluster: an address that nobody reaches", answer, live, heal_ms)


async def test_fifty_clients_over_one_connection_a_node(tmp_path: Path, fault_table: FaultTable) -> None:
    async with _over_stubs(tmp_path, redis={"connections": 1}) as (live, nodes, _):
        chains = [make_keys(4, f"client {n}") for n in range(50)]
        for chain in chains:
            for key in chain:
                nodes.put(name_of(live.model, key), value_of(live.model, key))
        answers = await asyncio.gather(*(live.ask(chain) for chain in chains))
        assert [answer.ready for answer in answers] == [4] * 50
        for node in nodes.nodes:
            assert node.open <= 1 + 2 + 2 + 1  # readers, probes, writes, the look at the distribution
        slowest = max(answers, key=lambda answer: answer.ms)
        fault_table.add("cluster: 50 clients over 1 connection a node (slowest)", slowest, live)


async def test_a_failover_is_followed(tmp_path: Path, fault_table: FaultTable) -> None:
    with sentinel(tmp_path / "redis") as group:
        async with live_redis(tmp_path, group.url) as live:
            stock = Stock(group.primary, live.model)
            assert (await live.ask(stock())).ready == PAGES
            group.wait_for_copy()
            loop = asyncio.get_running_loop()
            died = loop.time()
            failing = asyncio.create_task(asyncio.to_thread(group.failover))
            answers: list[Answer] = []
            while not failing.done():
                answers.append(await live.ask(make_keys(PAGES, f"absent {len(answers)}")))
                await asyncio.sleep(0.01)
            await failing
            heal_ms = await live.heals(stock.spare)
            assert heal_ms < 3000
            await assert_up(live)
            assert all(set(one.shortfall) <= {"not_stored", "storage_unavailable"} for one in answers)
            worst = max(answers, key=lambda answer: answer.ms)
            took = (loop.time() - died) * 1e3
            fault_table.add(f"Sentinel: primary killed, {took:.0f} ms to the replica (slowest)", worst, live, heal_ms)


async def test_a_stale_primary_is_dropped(tmp_path: Path, fault_table: FaultTable) -> None:
    """The old primary lives on as a replica: what is written goes to the new one."""
    with sentinel(tmp_path / "redis") as group:
        async with live_redis(tmp_path, group.url) as live:
            stock = Stock(group.primary, live.model)
            assert (await live.ask(stock())).ready == PAGES
            payload = bytes(live.model.components[0].bytes)
            await live.parts.storage.write(live.model, 0, make_keys(1, "before")[0], [payload])
            group.wait_for_copy()
            old = group.primary
            new = await asyncio.to_thread(lambda: group.failover(kill=False))
            assert new is not old
            # The sentinel would do this in ten seconds; until then the old one takes writes, and they are lost with it.
            old.command("REPLICAOF", "127.0.0.1", new.port)
            key = make_keys(1, "after")[0]
            await live.parts.storage.write(live.model, 0, key, [payload])
            assert new.command("EXISTS", name_of(live.model, key)) == 1
            answer = await live.ask(stock())
            assert answer.ready == PAGES
            await assert_up(live)
            fault_table.add("Sentinel: planned failover, old primary lives on", answer, live)


async def test_a_unix_socket_serves_a_live_service(tmp_path: Path) -> None:
    with standalone(tmp_path / "redis", unix=True) as server:
        async with live_redis(tmp_path, server.url) as live:
            stock = Stock(server, live.model)
            assert (await live.ask(stock())).ready == PAGES
            server.kill()
            assert (await live.ask(stock())).shortfall == {"storage_unavailable": PAGES}
            server.start()
            stock.store()
            await live.heals(stock.spare)
            await live.quiet()
