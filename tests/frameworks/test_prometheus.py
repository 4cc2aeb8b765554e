"""Metrics that Prometheus reads from a run, through prometheus-client itself."""

import socket
import sys
import urllib.request
from types import ModuleType

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks import prometheus


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def test_gauges_are_served_under_their_names(monkeypatch):
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (it is optional)")
    port = free_port()
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    prometheus.publish({"r3/agreement": 0.5, "moe_rl/dead_experts": 0.0}, port)
    prometheus.publish({"r3/agreement": 0.75}, port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert 'r3_agreement{rank="3"} 0.75' in lines
    assert 'moe_rl_dead_experts{rank="3"} 0.0' in lines
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(InvalidInputError, match="cannot be served on port"):
            prometheus.publish({}, taken.getsockname()[1])


def test_a_rank_serves_one_gauge_per_metric_at_a_port_of_its_own(monkeypatch):
    """With a stand-in of prometheus-client, which may be missing: what it is asked for."""
    asked: list[object] = []

    class Gauge:
        def __init__(self, name: str, documentation: str, labels: list[str]) -> None:
            asked.append((name, labels))

        def labels(self, rank: str) -> "Gauge":
            self.rank = rank
            return self

        def set(self, value: float) -> None:
            asked.append((self.rank, value))

    stand_in = ModuleType("prometheus_client")
    vars(stand_in).update(start_http_server=asked.append, Gauge=Gauge)
    monkeypatch.setitem(sys.modules, "prometheus_client", stand_in)
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    for made in (prometheus._served, prometheus._gauge):
        made.cache_clear()
    prometheus.publish({"r3/agreement": 0.5}, 9000)
    prometheus.publish({"r3/agreement": 0.75}, 9000)
    assert asked == [9003, ("r3_agreement", ["rank"]), ("11", 0.5), ("11", 0.75)]
    for made in (prometheus._served, prometheus._gauge):
        made.cache_clear()


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InvalidInputError, match="pip install prometheus-client"):
        prometheus.publish({}, free_port())


def test_the_dashboard_shows_metrics_that_exist():
    """Every metric of the page, by the names that the library gives."""
    import json
    import re
    from pathlib import Path

    import numpy as np

    from moe_rl.balancing import pass_metrics
    from moe_rl.routes.online import load_metrics, replay_metrics

    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana-dashboard.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:r3|moe_rl)_\w+", target["expr"])
    }
    counts, routes = np.ones((2, 4), int), np.zeros((0, 2, 2), int)
    known = {*load_metrics(counts, counts), *replay_metrics(routes, routes, None, num_experts=4)[0]}
    known |= {"moe_rl/nodes_per_token", *re.findall(r'"(moe_rl/\w+)"', Path(pass_metrics.__file__).read_text())}
    assert shown <= {name.replace("/", "_") for name in known}
    assert {name.replace("/", "_") for name in load_metrics(counts, counts)} <= shown
