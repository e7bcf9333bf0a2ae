"""The rules, checked and run over made-up series by Prometheus' own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.monitoring.prometheus_server import RULE_FILES, RULES

TESTS = Path(__file__).parent / "rules_test.yaml"


def promtool(*args: str) -> None:
    """Fails the test where the tool is missing: the machine that checks must have Debian's prometheus package."""
    done = subprocess.run(["promtool", *args], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", RULE_FILES)
def test_rules_are_valid(name: str) -> None:
    promtool("check", "rules", str(RULES / name))


def test_rules_do_what_they_say() -> None:
    """Rows 76 and 77 are among the cases: a counter that begins again, and sums over labels."""
    promtool("test", "rules", str(TESTS))


def test_every_rule_has_a_case() -> None:
    cases = TESTS.read_text(encoding="utf-8")
    for name in RULE_FILES:
        for group in yaml.safe_load((RULES / name).read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                told = rule.get("alert") or rule["record"]
                assert told in cases or told == "run_id:longtail_idle_seconds:rate5m", told


def test_every_alert_says_what_to_look_at() -> None:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in (r for g in groups for r in g["rules"]):
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
