"""Redis URLs: what is accepted, and that no secret is ever shown."""

from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.toml_files import MINIMAL, load_text, mistakes_of
from forestage.config import render
from forestage.config.redis_url import mask_redis_url

VARIABLE = "FORESTAGE_STORAGE__REDIS__URL"

GOOD = {
    "redis://127.0.0.1:6379/0": "redis://127.0.0.1:6379/0",
    "redis://cache": "redis://cache",
    "redis://cache/": "redis://cache/",
    "redis://[::1]:6379/3": "redis://[::1]:6379/3",
    "rediss://reader:hunter2@cache:6380/1": "rediss://reader:****@cache:6380/1",
    "redis://:hunter2@cache": "redis://:****@cache",
    "redis://reader@cache": "redis://reader@cache",
    "redis://:p%2Fhunter2@cache": "redis://:****@cache",
    "unix:///run/redis.sock": "unix:///run/redis.sock",
    "unix://reader:hunter2@/run/redis.sock?db=1": "unix://reader:****@/run/redis.sock?db=1",
    "redis://cache?password=hunter2&db=1": "redis://cache?password=****&db=1",
    "redis://cache?p%61ssword=hunter2": "redis://cache?p%61ssword=****",
    "rediss://cache?ssl_password=hunter2": "rediss://cache?ssl_password=****",
    "redis+cluster://a,b": "redis+cluster://a,b",
    "redis+cluster://a:7000,[::1]:7001/": "redis+cluster://a:7000,[::1]:7001/",
    "rediss+cluster://reader:hunter2@a:7000,b/0?ssl_ca_certs=/ca": "rediss+cluster://reader:****@a:7000,b/0?ssl_ca_certs=/ca",
    "redis+sentinel://a,b:26380/pages": "redis+sentinel://a,b:26380/pages",
    "rediss+sentinel://:hunter2@a/pages/3?sentinel_password=hunter2": (
        "rediss+sentinel://:****@a/pages/3?sentinel_password=****"
    ),
}

BAD = [
    "",
    "hunter2",
    "http://hunter2@cache",
    "REDIS://:hunter2@cache",
    "redis:hunter2",
    "redis://",
    "redis://:hunter2",
    "redis://default:hunter2",
    "redis://:hunter2@",
    "redis://cache:0/hunter2",
    "redis://cache:65536/0?hunter2",
    "redis://cache:99x/0?hunter2",
    "redis://cache/hunter2",
    "redis://cache/0/hunter2",
    "redis://:p/hunter2@cache",
    "redis://user:12/hunter2@cache",
    "redis://user:12?hunter2@cache",
    "redis://user:12#hunter2@cache",
    "redis://:p@hunter2@cache",
    "redis://[:hunter2@cache",
    "redis://ca\u2100che:hunter2",
    "redis://:****@cache",
    "unix://",
    "unix:///",
    "unix:/run/hunter2.sock",
    "unix://run/hunter2.sock",
    "unix://a,b/hunter2.sock",
    "redis://a,hunter2",
    "redis://a:1,b:2/hunter2",
    "redis+tcp://hunter2",
    "unix+cluster:///hunter2",
    "+cluster://hunter2",
    "redis+cluster://a,:hunter2",
    "redis+cluster://a,,hunter2",
    "redis+cluster://a/1?hunter2",
    "redis+cluster://a?db=1",
    "redis+cluster://[::1,hunter2",
    "redis+sentinel://hunter2",
    "redis+sentinel://a/?hunter2",
    "redis+sentinel://a/pages/hunter2",
    "redis+sentinel://a/pa%20ges/0?hunter2",
    "redis+sentinel://:****@a/pages",
    "redis://[hunter2@cache",
    "redis://hunter2]@cache",
    "redis://cache?ssl_ca_certs=hunter2",
    "redis://cache?sentinel_password=hunter2",
    "redis://cache?hunter2=1",
    "redis://cache?db=hunter2",
    "redis://cache?db=",
    "rediss://cache?ssl_cert_reqs=hunter2",
    "rediss://cache?ssl_check_hostname=hunter2",
    "rediss://cache?ssl_ca_certs=",
    "redis://cache?socket_timeout=1",
]


@pytest.mark.parametrize(("url", "masked"), GOOD.items())
def test_accepts_and_masks(url: str, masked: str) -> None:
    config = load_text(MINIMAL, {VARIABLE: url})
    assert config.storage.redis.url == url
    assert mask_redis_url(url) == masked
    assert f'url = "{masked}"\n' in render(config)
    for text in (render(config), repr(config), str(config)):
        assert "hunter2" not in text


@pytest.mark.parametrize("url", BAD)
def test_refuses_without_showing_it(url: str) -> None:
    (line,) = mistakes_of(MINIMAL, {VARIABLE: url})
    assert line.startswith("storage.redis.url: ")
    assert line.endswith(f" (from {VARIABLE})")
    assert "hunter2" not in line


@pytest.mark.parametrize(
    "tables",
    [
        '[storage.redis]\nurl = ["redis://:hunter2@cache"]',
        '[storage]\nredis = "redis://:hunter2@cache"',
        'storage = "redis://:hunter2@cache"',
        '[storage.redis]\nurls = "redis://:hunter2@cache"',
    ],
)
def test_a_url_in_the_wrong_place_is_not_shown_either(tables: str) -> None:
    (line,) = mistakes_of(tables + MINIMAL)
    assert line.startswith("storage")
    assert "hunter2" not in line


@settings(deadline=None)  # shared machines pause
@given(st.text(min_size=1), st.text(min_size=1))
def test_no_percent_encoded_password_survives_the_mask(user: str, secret: str) -> None:
    url = f"redis://{quote(user, safe='')}:{quote(secret, safe='')}@cache:6379/0"
    masked = mask_redis_url(url)
    assert urlsplit(masked).password == "****"
    assert masked == f"redis://{quote(user, safe='')}:****@cache:6379/0"
