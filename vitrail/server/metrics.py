"""What /metrics shows. What is counted for every chunk is kept as plain numbers and turned into
prometheus_client's families when asked; the engine's gauges are those of its last step."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from vitrail.engine.ipc import Stats

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_ENGINE = {
    "running": "requests being computed",
    "waiting": "requests queued",
    "free_pages": "KV pages free or only cached",
    "num_pages": "KV pages",
    "steps_total": "engine steps",
    "preemptions_total": "requests preempted",
    "images_encoded_total": "images encoded",
    "cache_hit_tokens_total": "prompt tokens found in the cache",
    "cache_query_tokens_total": "prompt tokens looked for in the cache",
}


class Latency:
    """A histogram of seconds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """`count` times the same."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def family(self) -> Metric:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class Metrics(Collector):
    """One registry a server, so that two servers in a process do not share counts. `stats` reads
    the engine's."""

    def __init__(self, stats: Callable[[], Stats | None]):
        self._stats = stats
        self._registry = CollectorRegistry()
        r = self._registry
        self.requests = Counter(
            "vitrail_requests", "HTTP requests by status", ["status"], registry=r
        )
        self.finished = Counter(
            "vitrail_choices", "choices by finish reason", ["reason"], registry=r
        )
        self.prompt_tokens = 0
        self.generated = 0
        self.first_token = Latency(
            "vitrail_time_to_first_token_seconds", "to the first token", _FIRST
        )
        self.between = Latency("vitrail_inter_token_latency_seconds", "between tokens", _BETWEEN)
        self.whole = Latency("vitrail_e2e_request_latency_seconds", "to the end", _FIRST)
        r.register(self)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("vitrail_prompt_tokens", "prompt tokens", self.prompt_tokens)
        yield CounterMetricFamily("vitrail_generation_tokens", "generated tokens", self.generated)
        for latency in (self.first_token, self.between, self.whole):
            yield latency.family()
        stats = self._stats()
        if stats is None:
            return
        for name, value in msgspec.structs.asdict(stats).items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"vitrail_{name}", _ENGINE[name], value)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


class Timer:
    """Latencies of one HTTP request."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._began = self._last = time.perf_counter()
        self._is_first = True

    def tokens(self, count: int) -> None:
        """`count` tokens arrived now; the time since the last is shared among them."""
        if count == 0:
            return
        now = time.perf_counter()
        if self._is_first:
            self._is_first = False
            self._metrics.first_token.observe(now - self._began)
        else:
            self._metrics.between.observe((now - self._last) / count, count)
        self._last = now
        self._metrics.generated += count

    def end(self) -> None:
        """The request is over."""
        self._metrics.whole.observe(time.perf_counter() - self._began)
