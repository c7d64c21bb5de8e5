"""What a gateway measures: its own requests, and the load of the workers as it sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cluster.view import ClusterView, NodeView, Role

TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
REQUEST_DURATION = "gen_ai.server.request.duration"

_BUCKETS_S = {
    TIME_TO_FIRST_TOKEN: (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80),
    TIME_PER_OUTPUT_TOKEN: (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5),
    REQUEST_DURATION: (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320),
}


class Telemetry:
    """A meter of its own, and its readings in Prometheus' text format. Nothing of it is global."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, node_id: str) -> None:
        self._registry = CollectorRegistry()
        views = [
            View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(bounds))
            for name, bounds in _BUCKETS_S.items()
        ]
        self._provider = MeterProvider(
            metric_readers=[PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)],
            resource=Resource({"service.name": "headrace-gateway", "service.instance.id": node_id}),
            shutdown_on_exit=False,
            views=views,
        )
        self.meter: Meter = self._provider.get_meter("headrace.gateway")

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def close(self) -> None:
        self._provider.shutdown()


@dataclass(kw_only=True, slots=True)
class Lifetime:
    """The instants of one request, by a monotonic clock, in seconds. The metrics and the log line share them."""

    received_s: float
    admitted_s: float | None = None
    """A worker accepted it, for the first time."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None


class GatewayMetrics:
    """The instruments, made from a meter that is passed in."""

    def __init__(self, meter: Meter, view: ClusterView) -> None:
        self._ttft = meter.create_histogram(TIME_TO_FIRST_TOKEN, "s", "From the request to its first output token")
        self._tpot = meter.create_histogram(TIME_PER_OUTPUT_TOKEN, "s", "Per output token after the first")
        self._duration = meter.create_histogram(REQUEST_DURATION, "s", "From the request to its end")
        self._open = meter.create_up_down_counter("headrace.open_requests", "{request}", "In work in this gateway")
        self._attempts = meter.create_counter("headrace.attempts", "{attempt}", "Placements, by what came of them")
        self._retries = meter.create_counter("headrace.retries", "{attempt}", "Requests placed anew, by cause")
        self._rejections = meter.create_counter("headrace.rejections", "{request}", "Requests refused as overload")
        self._prompt_tokens = meter.create_counter("headrace.prompt_tokens", "{token}", "Prompt tokens, by source")
        self._output_tokens = meter.create_counter("headrace.output_tokens", "{token}", "Output tokens")

        def gauge(name: str, unit: str, description: str, value: Callable[[NodeView], int], *roles: Role) -> None:
            def observe(_: CallbackOptions) -> Iterable[Observation]:
                return [
                    Observation(value(node), {"node": node.peer.node_id, "role": node.role.value})
                    for node in view.nodes.values()
                    if node.role in roles
                ]

            meter.create_observable_gauge(name, [observe], unit, description)

        workers = (Role.PREFILL, Role.DECODE)
        gauge("headrace.running_requests", "{request}", "In a worker's steps", lambda n: n.load.running, *workers)
        gauge("headrace.waiting_requests", "{request}", "Waiting in a worker", lambda n: n.load.waiting, *workers)
        gauge(
            "headrace.pages_used",
            "{page}",
            "Pages of a worker's pool that requests hold",
            lambda n: n.load.pages_total - n.load.pages_free,
            *workers,
        )
        gauge("headrace.pages_free", "{page}", "Free and evictable pages", lambda n: n.load.pages_free, *workers)
        gauge("headrace.node_ready", "1", "1 if the node can do work", lambda n: int(n.load.ready), *Role)

    def opened(self, model: str) -> None:
        """A request is in work until `ended`."""
        self._open.add(1, {"gen_ai.request.model": model})

    def attempt(self, outcome: str) -> None:
        """One worker was asked: accepted, rejected, unreachable, silent or failed."""
        self._attempts.add(1, {"outcome": outcome})

    def retry(self, cause: str) -> None:
        """A request is placed anew."""
        self._retries.add(1, {"cause": cause})

    def rejection(self, model: str) -> None:
        """A client was sent away with 429."""
        self._rejections.add(1, {"gen_ai.request.model": model})

    def ended(
        self,
        operation: str,
        model: str,
        lifetime: Lifetime,
        error_type: str | None,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
    ) -> None:
        """A request has ended. error_type: None if it was answered in full."""
        assert lifetime.ended_s is not None
        self._open.add(-1, {"gen_ai.request.model": model})
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": model,
        }
        ended = attributes if error_type is None else attributes | {"error.type": error_type}
        self._duration.record(lifetime.ended_s - lifetime.received_s, ended)
        if lifetime.admitted_s is not None:
            of_model = {"gen_ai.request.model": model}
            self._prompt_tokens.add(num_cached_tokens, of_model | {"source": "cache"})
            self._prompt_tokens.add(num_prompt_tokens - num_cached_tokens, of_model | {"source": "computed"})
            self._output_tokens.add(num_output_tokens, of_model)
        if lifetime.first_token_s is None or lifetime.last_token_s is None:
            return
        self._ttft.record(lifetime.first_token_s - lifetime.received_s, attributes)
        if num_output_tokens > 1:
            self._tpot.record((lifetime.last_token_s - lifetime.first_token_s) / (num_output_tokens - 1), attributes)
