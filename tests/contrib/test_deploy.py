"""The page of metrics lists what is shown; dashboard, alerts and scalers ask for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry

from machinery_py import Config, Server, Signature
from machinery_py.contrib import exporter
from machinery_py.contrib.prometheus import install
from machinery_py.events import (
    MessageDead,
    TaskReceived,
    TaskRejected,
    TaskSent,
    TaskSucceeded,
)
from tests.docs import pages

DEPLOY = pages.ROOT / "examples" / "deploy"
TASK: Signature[Any] = Signature(name="a", routing_key="q")
ADDED = {"counter": ["total"], "histogram": ["bucket", "sum", "count"], "gauge": []}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return metric → type and labels, as in the tables."""
    found = re.findall(
        r"^\| `(machinery_\w+)` \| (\w+) \|([^|]*)\|",
        pages.read("docs/reference/metrics.md"),
        re.MULTILINE,
    )
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in found}


def samples() -> dict[str, set[str]]:
    """Return sample → labels, as PromQL names them; each also has those that Prometheus adds."""
    added = {"job", "instance", "namespace"}
    return {
        "_".join((name, *suffix)): labels | added | ({"le"} if suffix == ("bucket",) else set())
        for name, (kind, labels) in documented().items()
        for suffix in [(one,) for one in ADDED[kind]] or [()]
    }


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


def panels() -> list[dict[str, Any]]:
    return list(json.loads((DEPLOY / "grafana.json").read_text())["panels"])


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title and the query of all that asks."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    [scaled] = yaml.safe_load_all((DEPLOY / "keda.yml").read_text())
    for trigger in scaled["spec"]["triggers"]:
        yield "keda", trigger["metadata"]["query"]
    adapter, scaler = yaml.safe_load_all((DEPLOY / "hpa.yml").read_text())
    for rule in yaml.safe_load(adapter["data"]["config.yaml"])["externalRules"]:
        yield "hpa", rule["seriesQuery"]
        yield "hpa", rule["metricsQuery"].replace("<<.LabelMatchers>>", "")
        for metric in scaler["spec"]["metrics"]:
            assert metric["external"]["metric"]["name"] == rule["name"]["as"]


def test_the_page_has_what_is_shown_with_its_types_and_labels() -> None:
    registry = CollectorRegistry()
    server = Server(Config(broker="memory://", result_backend="memory://"))
    install(server, registry)
    server.events.emit(TaskSent(signature=TASK))
    server.events.emit(TaskReceived(signature=TASK, wait=1.0))
    server.events.emit(TaskSucceeded(signature=TASK, runtime=1.0))
    server.events.emit(TaskRejected(signature=TASK, reason="poison"))
    server.events.emit(MessageDead(uuid="u", name="a", queue="q", reason="poison", error=""))
    registry.register(exporter.StoreCollector(server))

    with server.new_worker("w", 1):
        server.task(len).send([])
        found = {
            metric.name: (
                metric.type,
                {key for one in metric.samples for key in one.labels} - {"le"},
            )
            for metric in registry.collect()
        }

    assert found == documented()


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_query_is_valid_and_asks_for_what_there_is(title: str, query: str) -> None:
    known = samples()
    query = query.replace("$__rate_interval", "5m")
    selectors: list[promql_parser.VectorSelector] = []

    def note(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        return True

    promql_parser.walk(promql_parser.parse(query), note)

    assert selectors
    for one in selectors:
        assert one.name in known
        assert {matcher.name for matcher in one.matchers.matchers} <= known[one.name]


def test_alerts_have_what_a_person_needs() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}


def test_panels_lie_side_by_side_and_name_their_variables() -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    variables = {one["name"] for one in board["templating"]["list"]} | {"__rate_interval"}
    cells = [
        (x, y)
        for panel in panels()
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]

    assert len({panel["id"] for panel in panels()}) == len(panels())
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert set(re.findall(r"\$\{?(\w+)", "".join(query for _, query in queries()))) <= variables
