"""What a server has done since it was started, for Prometheus (https://prometheus.io/docs/concepts/metric_types/)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, final

from kitforge.data.optional_imports import import_optional

# Upper ends of buckets: in seconds, of whole requests and of single tokens; and of the rows of a batch.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
# Counts of an engine that only grow and are no gauges, with what they count.
_COUNTERS = {
    "prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts that were found in the prefix cache.",
}


class ServerMetrics(ABC):
    """Counters and histograms of any server. Any thread may add to them."""

    def __init__(self) -> None:
        client = self._client = import_optional("prometheus_client", needed_for="kitforge serve", extra="serve")
        self._metrics: list[Any] = []
        self.requests = self._counter("requests", "Requests by path and status.", ("path", "status"))
        self.cancelled = self._counter("cancelled", "Answers that nobody waited for any more.")
        self.evicted_connections = self._counter("evicted_connections", "Silent connections closed to make room.")
        self.request_seconds = self._histogram("request_seconds", "From a request to the end of its answer.", SECONDS)
        self.registry = client.CollectorRegistry()
        self.registry.register(self)

    @abstractmethod
    def figures(self) -> Iterator[Any]:
        """Families that are found out when they are asked for."""

    def rendered(self) -> tuple[bytes, str]:
        """Everything, and its content type."""
        return self._client.generate_latest(self.registry), self._client.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """For prometheus_client: a family for each of them."""
        for metric in self._metrics:
            for family in metric.collect():
                # When each was first counted is of no use, and as long as the rest.
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
        yield from self.figures()

    def _counter(self, name: str, words: str, labels: tuple[str, ...] = ()) -> Any:
        metric = self._client.Counter(f"kitforge_{name}", words, labels, registry=None)
        self._metrics.append(metric)
        return metric

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Any:
        metric = self._client.Histogram(f"kitforge_{name}", words, buckets=buckets, registry=None)
        self._metrics.append(metric)
        return metric


@final
class Metrics(ServerMetrics):
    """Those of a server that continues text."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Mapping[str, int] = {}
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens made.")
        self.first_token = self._histogram("first_token_seconds", "From a request to its first token.", SECONDS)
        self.queue_time = self._histogram(
            "queue_time_seconds", "From a prompt's arrival to the step that begins to read it.", SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "From one token of an answer to the next.", _TOKEN
        )

    def text(self, engine: Mapping[str, int]) -> tuple[bytes, str]:
        """Everything, with the engine's counts of the moment, and its content type."""
        self._engine = engine
        return self.rendered()

    def figures(self) -> Iterator[Any]:
        """The engine's counts."""
        core = import_optional("prometheus_client.core", needed_for="kitforge serve", extra="serve")
        gauges: dict[str, float] = {name: value for name, value in self._engine.items() if name not in _COUNTERS}
        if blocks := self._engine.get("blocks"):
            gauges["kv_cache_usage"] = self._engine["blocks_used"] / blocks
        for name, value in gauges.items():
            words = f"Of the engine: {name.replace('_', ' ')}."
            yield core.GaugeMetricFamily(f"kitforge_engine_{name}", words, value)
        for name, words in _COUNTERS.items():
            yield core.CounterMetricFamily(f"kitforge_{name}", words, self._engine.get(name, 0))


@final
class BatchMetrics(ServerMetrics):
    """Those of a server that answers rows in batches, over versions of one model."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # of the version that answers
        self.num_live = 0  # requests being answered or waiting
        self.rows = self._counter("rows", "Rows answered.")
        self.batch_rows = self._histogram("batch_rows", "Rows of a batch.", _ROWS)
        self.queue_time = self._histogram(
            "queue_time_seconds", "From a request's rows being read to the batch that they are in.", SECONDS
        )
        self.refreshes = self._counter("refreshes", "Newer checkpoints that were taken over.")
        self.refresh_failures = self._counter("refresh_failures", "Newer checkpoints that could not be taken over.")

    def figures(self) -> Iterator[Any]:
        """The version, and how many wait."""
        core = import_optional("prometheus_client.core", needed_for="kitforge serve", extra="serve")
        yield core.GaugeMetricFamily("kitforge_model_step", "The training step of the model that answers.", self.step)
        yield core.GaugeMetricFamily("kitforge_live_requests", "Requests answered or waiting.", self.num_live)
