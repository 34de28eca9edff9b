"""The alerts: right by promtool, one source, each with its reasons, its case in the unit tests, and its runbook."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from deploy.places import DOCS, MONITORING, ROOT, RULES, tool

RULES_TEST = MONITORING / "rules_test.yaml"


def _rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _promtool(*arguments: str) -> str:
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, check=False, cwd=MONITORING, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_takes_them() -> None:
    assert f"SUCCESS: {len(_rules())} rules found" in _promtool("check", "rules", RULES.name)


def test_unit_tests() -> None:
    assert "SUCCESS" in _promtool("test", "rules", RULES_TEST.name)


def test_each_alert_has_a_case_that_fires() -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == {rule["alert"] for rule in _rules()}


def test_the_rule_object_is_made_of_them(tmp_path: Path) -> None:
    made = tmp_path / "made.yaml"
    subprocess.run([str(ROOT / "scripts" / "make-prometheusrule"), str(made)], check=True, timeout=60)
    assert yaml.safe_load(made.read_text())["spec"] == yaml.safe_load(RULES.read_text())
    assert (MONITORING / "prometheusrule.yaml").read_text() == made.read_text(), "run make rules"


def test_each_alert_says_why_from_when_on_and_what_to_do() -> None:
    text = RULES.read_text()
    headings = re.findall(r"^#+ (.+)$", (DOCS / "operate.md").read_text(), re.MULTILINE)
    for rule in _rules():
        comment = text.partition(f"- alert: {rule['alert']}\n")[0].rpartition("\n\n")[2]
        assert "# Why: " in comment, rule["alert"]
        assert "Floor: " in comment, rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"]["runbook_url"] == f"docs/operate.md#{rule['alert'].lower()}"
        assert rule["alert"] in headings
    runbooks = {heading for heading in headings if heading.startswith("Forestage")}
    assert runbooks == {rule["alert"] for rule in _rules()}
