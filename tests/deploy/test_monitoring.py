"""The page of metrics, the alert rules and the Grafana dashboard name metrics and labels that exist."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_pages import METRICS, metrics_page
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from redpoll.control.observe.metrics import catalog

DEPLOY = Path(__file__).parents[2] / "deploy"
SAMPLE = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
MONITORING = (DEPLOY / "docs" / "monitoring.md").read_text()
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DEPLOY / "grafana" / "redpoll.json").read_text())
PANELS = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
# Every series, with the labels it can have. Prometheus adds `job` and `instance`.
SERIES = {sample.name: set(sample.labels) for metric in catalog() for sample in metric.samples}
SELECTOR = re.compile(r"\b(redpoll_\w+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|without|on)\s*\(([^)]*)\)")


def faults_of(expression: str) -> list[str]:
    faults, known = [], {"instance", "job"}
    for name, matchers in SELECTOR.findall(expression):
        if name not in SERIES:
            faults.append(f"{name} doesn't exist")
            continue
        known |= SERIES[name]
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        faults += [f"{name} has no label {label}" for label in used - SERIES[name] - {"instance", "job"}]
    for labels in GROUPING.findall(expression):
        faults += [f"no label {label}" for label in {name.strip() for name in labels.split(",")} - known]
    return faults


def test_page_of_metrics_is_up_to_date():
    assert METRICS.read_text() == metrics_page(), "run: .venv/bin/python deploy/docs_pages.py"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_uses_metrics_that_exist_and_is_described(rule):
    assert not faults_of(rule["expr"])
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
    assert f"`{rule['alert']}` ({rule['labels']['severity']})" in MONITORING


@pytest.mark.parametrize(("title", "expression"), PANELS)
def test_panel_uses_metrics_that_exist(title, expression):
    assert not faults_of(expression)


def dropped(written: Any, known: Any, path: str = "") -> Iterator[str]:
    """The paths of what is in `written` and not in `known`, which may have more."""
    if isinstance(written, dict) and isinstance(known, dict):
        for name, value in written.items():
            yield from dropped(value, known.get(name), f"{path}/{name}")
    elif isinstance(written, list) and isinstance(known, list) and len(written) == len(known):
        for index, value in enumerate(written):
            yield from dropped(value, known[index], f"{path}/{index}")
    elif written != known:
        yield path


def test_grafana_knows_every_field_of_the_dashboard():
    """Grafana's own models, which are generated from its schema, drop what they don't know."""
    register_default_plugins()
    known = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    # A text for Grafana's list of variables, which its schema lacks.
    assert [path for path in dropped(DASHBOARD, known) if not path.endswith("/definition")] == []
    misspelled = {**DASHBOARD, "timezzone": "utc"}
    assert "/timezzone" in dropped(misspelled, json.loads(JSONEncoder().encode(Dashboard.from_json(misspelled))))


def test_faults_are_found():
    assert faults_of("rate(redpoll_connectionz[5m])") == ["redpoll_connectionz doesn't exist"]
    assert faults_of('redpoll_connections{status="200"}') == ["redpoll_connections has no label status"]
    assert faults_of("sum by (app) (redpoll_connections)") == ["no label app"]


def test_sample_evaluates_rules_as_often_as_their_tests_and_scrapes_in_the_steps_that_rules_count():
    sample = yaml.safe_load(SAMPLE)["global"]
    tests = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())
    assert sample["evaluation_interval"] == tests["evaluation_interval"]
    steps = {step for rule in RULES for step in re.findall(r"\[\w+:(\w+)\]", rule["expr"])}
    assert steps == {sample["scrape_interval"]}


def test_lines_for_an_existing_prometheus_have_the_job_and_the_intervals_of_the_sample():
    (block,) = re.findall(r"((?:^    .*\n)+)\nThen copy the rules", MONITORING, re.MULTILINE)
    lines, sample = yaml.safe_load(block), yaml.safe_load(SAMPLE)
    assert (lines["global"], lines["scrape_configs"]) == (sample["global"], sample["scrape_configs"])
    (rule_file,) = lines["rule_files"]
    assert f"cp deploy/prometheus/alerts.yml /etc/prometheus/{rule_file}\n" in MONITORING
    assert "prometheus.yml deploy/prometheus/alerts.yml /etc" not in MONITORING


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool isn't installed")
def test_promtool_accepts_the_sample_with_its_commented_lines(tmp_path):
    whole = re.sub(r"^#(?=alerting:|  )", "", SAMPLE, flags=re.MULTILINE)
    (tmp_path / "prometheus.yml").write_text(whole)
    assert yaml.safe_load(whole)["alerting"]["alertmanagers"]
    command = ["promtool", "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    check = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert check.returncode == 0, check.stdout + check.stderr


def test_every_alert_is_raised_by_a_recorded_series():
    cases = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())["tests"]
    raised = {test["alertname"] for case in cases for test in case.get("alert_rule_test", ()) if test.get("exp_alerts")}
    for case in cases:
        for test in case.get("promql_expr_test", ()):
            raised |= set(re.findall(r'alertname="(\w+)"', str(test["exp_samples"])))
    assert raised == {rule["alert"] for rule in RULES}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool isn't installed")
def test_promtool_accepts_the_rules_and_recorded_series_raise_them():
    check = subprocess.run([DEPLOY / "prometheus" / "check"], capture_output=True, text=True, timeout=120, check=False)
    assert check.returncode == 0, check.stdout + check.stderr
