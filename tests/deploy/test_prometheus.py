"""Prometheus's rules and Grafana's dashboards, checked without a cluster."""

import json
import re
import subprocess
import sys
from itertools import combinations

import pytest
import yaml

from piped.metrics import NODE_METRICS, WORKER_METRICS
from tests.support.prometheus import DEPLOY, dashboard_expressions, rule_expressions

DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))


def promtool(*arguments):
    return subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY / "prometheus", capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "--lint=all", "rules.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_promtool_is_content(arguments):
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_section_in_the_runbook():
    runbook = (DEPLOY / "prometheus" / "RUNBOOK.md").read_text()
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", runbook, re.MULTILINE)}
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert alerts
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"deploy/prometheus/RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["alert"].lower() in anchors


def test_every_alert_is_tested():
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    groups = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
    assert {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule} == tested


def test_dashboards_are_what_the_generator_makes():
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "grafana" / "generate.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_unique_ids_units_titles_the_datasource_variable_and_do_not_overlap(path):
    page = json.loads(path.read_text())
    assert {"datasource"} <= {variable["name"] for variable in page["templating"]["list"]}
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
    for a, b in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)


def test_expressions_use_metrics_that_exist():
    known = {metric.name for metric in (*WORKER_METRICS, *NODE_METRICS)} | {"piped_build_info"}
    known |= {f"piped_coordinator_{name}" for name in ("jobs", "nodes", "oldest_pending_seconds")}
    known |= {"piped_node_slots", "piped_coordinator_node_lease_expiry_timestamp_seconds"}
    known |= {"piped_coordinator_rpc_duration_seconds"}
    for name, expression in (dashboard_expressions("j") | rule_expressions()).items():
        for metric in re.findall(r"\bpiped_[a-z0-9_]+", expression):
            base = re.sub(r"_(total|bucket|sum|count)$", "", metric)
            assert {metric, base} & known, f"{name}: {metric}"
