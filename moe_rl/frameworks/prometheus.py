"""Serve the metrics of a run to Prometheus through `prometheus-client`, which the user installs."""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from moe_rl.core.errors import InvalidInputError


def publish(metrics: Mapping[str, float], port: int) -> None:
    """Set a gauge per metric: `r3/agreement` is `r3_agreement`, with the rank as label.

    Each rank of a node has its own port: `port` + LOCAL_RANK. Raises `InvalidInputError` where prometheus-client is
    missing or the port is taken.
    """
    # Ranks of a node share its address, so that each needs a port of its own.
    client = _served(port + int(os.environ.get("LOCAL_RANK", "0")))
    for name, value in metrics.items():
        _gauge(client, name).labels(os.environ.get("RANK", "0")).set(value)


@cache
def _served(port: int) -> Any:
    try:
        import prometheus_client as client

        client.start_http_server(port)
    except ImportError as error:
        raise InvalidInputError("MOE_RL_PROMETHEUS needs prometheus-client: pip install prometheus-client.") from error
    except OSError as error:
        raise InvalidInputError(f"metrics cannot be served on port {port}: {error.strerror}.") from error
    return client


@cache
def _gauge(client: Any, name: str) -> Any:
    return client.Gauge(name.replace("/", "_"), f"{name} of moe_rl", ["rank"])
