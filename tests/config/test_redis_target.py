"""What a Redis URL means."""

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.config.redis_target import RedisTarget, RedisTopology, redis_target

ONE, SENTINEL, CLUSTER = RedisTopology.ONE, RedisTopology.SENTINEL, RedisTopology.CLUSTER


@pytest.mark.parametrize(
    ("url", "target", "options"),
    [
        ("redis://cache", RedisTarget(ONE, (("cache", 6379),)), {"db": 0}),
        ("redis://[fe80::1%25eth0]:1", RedisTarget(ONE, (("fe80::1%eth0", 1),)), {"db": 0}),
        ("redis://[fe80::1%eth0]:1/3", RedisTarget(ONE, (("fe80::1%eth0", 1),)), {"db": 3}),
        (
            "rediss://me:p%40ss%2F@cache:7000/2?ssl_check_hostname=no&ssl_cert_reqs=none&ssl_ca_certs=%2Fetc%2Fca.pem",
            RedisTarget(ONE, (("cache", 7000),), tls=True),
            {
                "username": "me",
                "password": "p@ss/",
                "db": 2,
                "ssl_check_hostname": False,
                "ssl_cert_reqs": "none",
                "ssl_ca_certs": "/etc/ca.pem",
            },
        ),
        ("redis://cache/1?db=2", RedisTarget(ONE, (("cache", 6379),)), {"db": 2}),
        (
            "redis://cache?password=a&username=b&client_name=c",
            RedisTarget(ONE, (("cache", 6379),)),
            {"password": "a", "username": "b", "client_name": "c", "db": 0},
        ),
        ("redis://:here@cache?password=there", RedisTarget(ONE, (("cache", 6379),)), {"password": "here", "db": 0}),
        ("unix:///run/a%20b.sock", RedisTarget(ONE, (("/run/a b.sock", 0),)), {}),
        ("unix://:pw@/run/r?db=4", RedisTarget(ONE, (("/run/r", 0),)), {"password": "pw", "db": 4}),
        (
            "redis+cluster://:pw@a:7000,b,[::1]:7001",
            RedisTarget(CLUSTER, (("a", 7000), ("b", 6379), ("::1", 7001))),
            {"password": "pw", "db": 0},
        ),
        ("rediss+cluster://a/0", RedisTarget(CLUSTER, (("a", 6379),), tls=True), {"db": 0}),
        (
            "redis+sentinel://a,b:1/pages/7",
            RedisTarget(SENTINEL, (("a", 26379), ("b", 1)), service="pages"),
            {"db": 7},
        ),
        ("redis+sentinel://a/my-pages.0", RedisTarget(SENTINEL, (("a", 26379),), service="my-pages.0"), {"db": 0}),
    ],
)
def test_meaning(url: str, target: RedisTarget, options: dict[str, Any]) -> None:
    found = redis_target(url)
    assert (found.topology, found.addresses, found.tls, found.service) == (
        target.topology,
        target.addresses,
        target.tls,
        target.service,
    )
    assert found.options == options


def test_sentinels_have_their_own_login_and_the_same_tls() -> None:
    found = redis_target(
        "rediss+sentinel://me:mine@a/pages/1?sentinel_username=s&sentinel_password=theirs&ssl_ca_certs=/ca"
    )
    assert found.options == {"username": "me", "password": "mine", "db": 1, "ssl_ca_certs": "/ca"}
    assert found.sentinel_options == {"username": "s", "password": "theirs", "ssl_ca_certs": "/ca"}
    assert "mine" not in repr(found)
    assert "theirs" not in repr(found)


@given(st.text())
def test_anything_is_read_or_refused(text: str) -> None:
    for url in (text, f"redis://{text}", f"redis+cluster://{text}", f"redis+sentinel://a/{text}", f"rediss://a?{text}"):
        with contextlib.suppress(ValueError):
            redis_target(url)


@given(st.from_regex(r"[/?#@,:&=\[\]%]{0,6}hunter2[/?#@,:&=\[\]%]{0,6}", fullmatch=True))
def test_what_is_refused_is_not_quoted(text: str) -> None:
    said = []
    for url in (text, f"redis://{text}", f"redis+cluster://{text}", f"redis+sentinel://a/{text}", f"rediss://a?{text}"):
        try:
            redis_target(url)
        except ValueError as error:
            said.append(str(error))
    assert not [words for words in said if "hunter2" in words]
