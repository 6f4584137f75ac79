"""What the server counts, for Prometheus. No text, no names: figures alone."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from amem.results import EngineStatus, ReplyMetrics

_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Measures:
    """Counters of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, in_flight: Callable[[], int], sessions: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "amem_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self._gone = Counter("amem_requests_gone", "Requests whose client went away.", registry=self._registry)
        self._prompt = Counter(
            "amem_prompt_tokens", "Prompt tokens, reused or computed.", ["source"], registry=self._registry
        )
        self._generated = Counter("amem_generated_tokens", "Tokens that were generated.", registry=self._registry)
        self._matches = Counter(
            "amem_matches", "What requests found of their history.", ["match"], registry=self._registry
        )
        self._ttft = Histogram(
            "amem_ttft_seconds", "Time to the first token.", buckets=_SECONDS, registry=self._registry
        )
        self._queue = Histogram(
            "amem_queue_seconds", "Time until a request was admitted.", buckets=_SECONDS, registry=self._registry
        )
        for name, text, read in (
            ("amem_requests_in_flight", "Requests that run or wait.", in_flight),
            ("amem_sessions", "Sessions without a name.", sessions),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)
        self._hot = Gauge("amem_hot_bytes", "K and V in memory.", registry=self._registry)
        self._budget = Gauge("amem_memory_budget_bytes", "The most that they may take.", registry=self._registry)
        self._disk = Gauge("amem_disk_bytes", "The store's files.", registry=self._registry)

    def request(self, path: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(path, str(status)).inc()

    def gone(self) -> None:
        """Count a request whose client went away."""
        self._gone.inc()

    def reply(self, metrics: ReplyMetrics) -> None:
        """Count a reply."""
        self._prompt.labels("reused").inc(metrics.reused_tokens)
        self._prompt.labels("computed").inc(metrics.computed_tokens)
        self._generated.inc(metrics.generated_tokens)
        self._matches.labels(str(metrics.match)).inc()
        self._ttft.observe(metrics.ttft_ms / 1e3)
        self._queue.observe(metrics.queue_ms / 1e3)

    def text(self, status: EngineStatus) -> bytes:
        """All of it in Prometheus' text format."""
        self._hot.set(status.hot_bytes)
        self._budget.set(status.memory_budget)
        self._disk.set(status.disk_bytes)
        return generate_latest(self._registry)
