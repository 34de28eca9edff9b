"""Dashboard and alerts against a real service: Prometheus scrapes it under load, and each query has an answer."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.places import DASHBOARD, DEPLOY, RULES
from deploy.scraped_service import Prometheus, scraped_service

#: What Grafana puts in; the windows hold many scrapes of this test.
_VARIABLES = {"$__rate_interval": "10s", "$__range": "60s", "$instance": ".*", "$model": "(short|narrow)"}


def _dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = _dashboard()["panels"]
    return panels


def _targets() -> list[Any]:
    return [
        pytest.param(target, id=f"{panel['title']} {target['legendFormat']}")
        for panel in _panels()
        for target in panel.get("targets", ())
    ]


def _expression(target: dict[str, Any]) -> str:
    expr = str(target["expr"])
    for variable, value in _VARIABLES.items():
        expr = expr.replace(variable, value)
    assert "$" not in expr, expr
    return expr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with scraped_service(tmp_path_factory.mktemp("scraped")) as prometheus:
        yield prometheus


@pytest.mark.parametrize("target", _targets())
def test_each_query_returns_data(prometheus: Prometheus, target: dict[str, Any]) -> None:
    found = prometheus.until(_expression(target))
    for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
        assert all(series.get(label) for series, _ in found), f"no label {label}"
    if "{{" not in target["legendFormat"]:
        assert len(found) == 1


def test_what_is_shown_is_true(prometheus: Prometheus) -> None:
    """The shares that the dashboard begins with, against what this load must give."""
    stats = {panel["title"]: panel["targets"][0] for panel in _panels() if panel["type"] == "stat"}
    ((_, ready),) = prometheus.until(_expression(stats["Ready of requested"]))
    assert 0.3 < ready < 0.95  # a part of each round is not stored, or finds no room
    ((_, up),) = prometheus.until(_expression(stats["Sidecars"]))
    ((_, storage),) = prometheus.until(_expression(stats["L3"]))
    assert (up, storage) == (1, 1)


def test_queries_and_alerts_name_only_what_is_exposed(prometheus: Prometheus) -> None:
    exposed = set(prometheus.get("/api/v1/label/__name__/values"))
    expressions = [target.values[0]["expr"] for target in _targets()]
    expressions += [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    expressions += [v["query"]["query"] for v in _dashboard()["templating"]["list"] if v["type"] == "query"]
    asked = {name for expr in expressions for name in re.findall(r"\bforestage_\w+", expr)}
    assert len(asked) > 15
    assert asked <= exposed


def test_alerts_evaluate_and_fire_for_what_this_load_does(prometheus: Prometheus) -> None:
    expected = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    fires = prometheus.until('ALERTS{alertname="ForestagePoolTooSmall", alertstate="pending"}')
    assert {series["model"] for series, _ in fires} == {"short", "narrow"}
    rules = {rule["name"]: rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]}
    assert set(rules) == expected
    assert {name: rule["health"] for name, rule in rules.items()} == dict.fromkeys(expected, "ok")
    silent = {name for name, rule in rules.items() if rule["state"] == "inactive"}
    assert silent >= {"ForestageDown", "ForestageNotScraped", "ForestageStorageDown", "ForestageCorruptPages"}


def test_the_dashboard_answers_in_order() -> None:
    dashboard = _dashboard()
    rows = [panel["title"] for panel in _panels() if panel["type"] == "row"]
    assert rows == [
        "Do prefetches help?",
        "Why not more?",
        "Is the pool the limit?",
        "Is L3 the limit?",
        "Do writes reach L3?",
    ]
    identities = [panel["id"] for panel in _panels()]
    assert len(set(identities)) == len(identities)
    names = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert names == {"datasource": "datasource", "instance": "query", "model": "query"}
    places: set[tuple[int, int]] = set()
    for panel in _panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_compose_shows_the_same_files() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for name in ("prometheus", "grafana") for volume in services[name]["volumes"])
    assert mounts[f"./{RULES.relative_to(DEPLOY)}"] == "/etc/prometheus/rules.yaml"
    inside = mounts[f"./{DASHBOARD.relative_to(DEPLOY)}"]
    provider = yaml.safe_load((DEPLOY / "compose" / "grafana" / "dashboards" / "forestage.yaml").read_text())
    assert inside.rpartition("/")[0] == provider["providers"][0]["options"]["path"]
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == inside
    scraping = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    assert scraping["rule_files"] == ["rules.yaml"]
    ((job,),) = ([job["job_name"] for job in scraping["scrape_configs"]],)
    assert job == "forestage"
