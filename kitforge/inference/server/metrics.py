"""What a server has done since it was started, for Prometheus (https://prometheus.io/docs/concepts/metric_types/)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from kitforge.data.extras import load_extra

# Upper ends of buckets, in seconds: of whole requests, and of single tokens.
_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
# Counts of an engine that only grow and are no gauges, with what they count.
_COUNTERS = {
    "prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts that were found in the prefix cache.",
}


@final
class Metrics:
    """Counters and histograms of one server. Any thread may add to them."""

    def __init__(self) -> None:
        client = self._client = load_extra("prometheus_client", needed_for="kitforge serve", extra="serve")
        self._metrics: list[Any] = []
        self._engine: Mapping[str, int] = {}
        self.requests = self._counter("requests", "Requests by path and status.", ("path", "status"))
        self.cancelled = self._counter("cancelled", "Answers that nobody waited for any more.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens made.")
        self.evicted_connections = self._counter("evicted_connections", "Silent connections closed to make room.")
        self.request_seconds = self._histogram("request_seconds", "From a request to the end of its answer.", _REQUEST)
        self.first_token = self._histogram("first_token_seconds", "From a request to its first token.", _REQUEST)
        self.queue_time = self._histogram(
            "queue_time_seconds", "From a prompt's arrival to the step that begins to read it.", _REQUEST
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "From one token of an answer to the next.", _TOKEN
        )
        self.registry = client.CollectorRegistry()
        self.registry.register(self)

    def text(self, engine: Mapping[str, int]) -> tuple[bytes, str]:
        """Everything, with the engine's counts of the moment, and its content type."""
        self._engine = engine
        return self._client.generate_latest(self.registry), self._client.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """For prometheus_client: a family for each of them."""
        for metric in self._metrics:
            for family in metric.collect():
                # When each was first counted is of no use, and as long as the rest.
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
        core = load_extra("prometheus_client.core", needed_for="kitforge serve", extra="serve")
        gauges: dict[str, float] = {name: value for name, value in self._engine.items() if name not in _COUNTERS}
        if blocks := self._engine.get("blocks"):
            gauges["kv_cache_usage"] = self._engine["blocks_used"] / blocks
        for name, value in gauges.items():
            words = f"Of the engine: {name.replace('_', ' ')}."
            yield core.GaugeMetricFamily(f"kitforge_engine_{name}", words, value)
        for name, words in _COUNTERS.items():
            yield core.CounterMetricFamily(f"kitforge_{name}", words, self._engine.get(name, 0))

    def _counter(self, name: str, words: str, labels: tuple[str, ...] = ()) -> Any:
        metric = self._client.Counter(f"kitforge_{name}", words, labels, registry=None)
        self._metrics.append(metric)
        return metric

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Any:
        metric = self._client.Histogram(f"kitforge_{name}", words, buckets=buckets, registry=None)
        self._metrics.append(metric)
        return metric
