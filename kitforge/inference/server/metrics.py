"""Prometheus metrics of the servers (https://prometheus.io/docs/concepts/metric_types/)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from kitforge.data.optional_imports import import_optional

# Upper bounds of histogram buckets: seconds of requests, seconds of tokens, rows of a batch.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
# Statistics of the engine that are counters, not gauges.
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}


class ServerMetrics(ABC):
    """Metrics common to all servers. Thread-safe."""

    def __init__(self) -> None:
        client = self._client = import_optional("prometheus_client", needed_for="kitforge serve", extra="serve")
        self._metrics: list[Any] = []
        self.requests = self._counter("requests", "Requests by path and status.", ("path", "status"))
        self.cancelled = self._counter("cancelled", "Requests cancelled by their clients.")
        self.request_seconds = self._histogram(
            "request_seconds", "From the arrival of a request to the end of its response.", SECONDS
        )
        self.registry = client.CollectorRegistry()
        self.registry.register(self)

    @abstractmethod
    def figures(self) -> Iterator[Any]:
        """Metric families computed at collection time."""

    def rendered(self) -> tuple[bytes, str]:
        """All metrics in the exposition format, and its content type."""
        return self._client.generate_latest(self.registry), self._client.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Any]:
        """The metric families, as prometheus_client asks for them."""
        for metric in self._metrics:
            for family in metric.collect():
                # The creation times double the output and are of no use.
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


class Metrics(ServerMetrics):
    """Metrics of the text-generation server."""

    def __init__(self) -> None:
        super().__init__()
        self._engine: Mapping[str, int] = {}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self.generated_tokens = self._counter("generated_tokens", "Generated tokens.")
        self.first_token = self._histogram("first_token_seconds", "Time to first token.", SECONDS)
        self.queue_time = self._histogram(
            "queue_time_seconds", "From the arrival of a prompt to the step that admits it.", SECONDS
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", _TOKEN
        )

    def text(self, engine: Mapping[str, int]) -> tuple[bytes, str]:
        """All metrics with the current statistics of the engine, and the content type."""
        self._engine = engine
        return self.rendered()

    def figures(self) -> Iterator[Any]:
        core = import_optional("prometheus_client.core", needed_for="kitforge serve", extra="serve")
        gauges: dict[str, float] = {name: value for name, value in self._engine.items() if name not in _COUNTERS}
        if blocks := self._engine.get("blocks"):
            gauges["kv_cache_usage"] = self._engine["blocks_used"] / blocks
        for name, value in gauges.items():
            words = f"Of the engine: {name.replace('_', ' ')}."
            yield core.GaugeMetricFamily(f"kitforge_engine_{name}", words, value)
        for name, words in _COUNTERS.items():
            yield core.CounterMetricFamily(f"kitforge_{name}", words, self._engine.get(name, 0))


class BatchMetrics(ServerMetrics):
    """Metrics of the recommender server, which scores rows in batches with the latest checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0  # training step of the served model
        self.num_live = 0  # active and waiting requests
        self.unknown_shares: Mapping[str, float] = {}  # by feature, of the values so far
        self.rows = self._counter("rows", "Rows scored.")
        self.batch_rows = self._histogram("batch_rows", "Rows of a batch.", _ROWS)
        self.queue_time = self._histogram(
            "queue_time_seconds", "From parsing the rows of a request to their batch.", SECONDS
        )
        self.refreshes = self._counter("refreshes", "Newer checkpoints loaded.")
        self.refresh_failures = self._counter("refresh_failures", "Newer checkpoints that could not be loaded.")

    def figures(self) -> Iterator[Any]:
        """The step of the served model, the number of live requests, and the shares of unknown values."""
        core = import_optional("prometheus_client.core", needed_for="kitforge serve", extra="serve")
        yield core.GaugeMetricFamily("kitforge_model_step", "Training step of the served model.", self.step)
        yield core.GaugeMetricFamily("kitforge_live_requests", "Active and waiting requests.", self.num_live)
        words = "Share of the values of a feature that never occurred in training."
        shares = core.GaugeMetricFamily("kitforge_unknown_share", words, labels=("feature",))
        for name, fraction in self.unknown_shares.items():
            shares.add_metric((name,), fraction)
        yield shares
