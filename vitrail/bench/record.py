"""What was measured of each request, and what a run's figures are made of. A request that failed is
counted by its reason and is in no figure. Pure. No torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np


@dataclass(slots=True, kw_only=True)
class Record:
    """One request's moments, in seconds of one clock. `due`: when it should have been sent;
    `began`: when it was (a client that is late shows here, not in the server's times). `arrivals`:
    when each piece of the answer came; the first is the first token. `num_output` is the server's
    own count, or the number of pieces where it gives none (`counted` false). `failure`: what kind
    of failure keeps it out of every figure; `detail`: what was said of it."""

    due: float
    began: float = 0.0
    arrivals: list[float] = field(default_factory=list[float])
    ended: float = 0.0
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    wanted: int = 0
    counted: bool = True
    failure: str | None = None
    detail: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.began

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None for an answer of one token or in one piece. Where
        pieces hold several tokens the first piece's are counted as one, which flatters: see
        `Figures.pieces`."""
        if self.num_output < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output - 1)

    @property
    def whole(self) -> float:
        """Seconds to the end."""
        return self.ended - self.began


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in milliseconds: `count` samples, mean, percentiles (linear between the two
    nearest samples). All None where there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `first`: time to first token. `token`: time a token after the first, one sample a
    request. `gap`: between pieces of an answer as they came, one sample a piece. `whole`: end to
    end. Rates are a second of the run, from the first request sent to the last one ended, and count
    what succeeded alone. `pieces`: in which the output tokens came. `cached_tokens`: prompt tokens
    that answers said were cached; `hits` of `queries`: the same by the server's counters, where it
    has them. `late`: from due to sent. `short`: answers with fewer tokens than asked for.
    `examples`: of each kind of failure, what the first one said. `client_cpu`: cores that the
    client itself used."""

    requests: int
    failures: dict[str, int]
    examples: dict[str, str]
    short: int
    seconds: float
    first: Spread
    token: Spread
    gap: Spread
    whole: Spread
    late: Spread
    prompt_tokens: int
    output_tokens: int
    pieces: int
    cached_tokens: int
    output_rate: float
    total_rate: float
    request_rate: float
    counted: bool
    client_cpu: float
    hits: int | None = None
    queries: int | None = None


def spread(seconds: Sequence[float]) -> Spread:
    """The distribution of these."""
    if not seconds:
        return Spread(count=0, mean=None, p50=None, p90=None, p99=None)
    ms = np.asarray(seconds, dtype=np.float64) * 1e3
    p50, p90, p99 = np.percentile(ms, (50, 90, 99)).tolist()
    return Spread(count=len(ms), mean=float(ms.mean()), p50=p50, p90=p90, p99=p99)


def figures(
    records: Sequence[Record], client_cpu: float, cache: tuple[int, int] | None = None
) -> Figures:
    """A run's figures. `cache`: (hits, queries) that the server's counters grew by."""
    good = [r for r in records if r.failure is None]
    bad = [(r.failure, r.detail) for r in records if r.failure is not None]
    kinds = Counter(kind for kind, _ in bad)
    begun = [r.began for r in records if r.began]
    seconds = max((r.ended for r in records), default=0.0) - min(begun, default=0.0)
    output, prompt = sum(r.num_output for r in good), sum(r.num_prompt for r in good)

    def rate(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Figures(
        requests=len(records),
        failures=dict(kinds.most_common()),
        examples=dict(reversed(bad)),
        short=sum(r.num_output < r.wanted for r in good),
        seconds=seconds,
        first=spread([r.first for r in good]),
        token=spread([t for r in good if (t := r.per_token) is not None]),
        gap=spread([b - a for r in good for a, b in zip(r.arrivals, r.arrivals[1:], strict=False)]),
        whole=spread([r.whole for r in good]),
        late=spread([r.began - r.due for r in records if r.began]),
        prompt_tokens=prompt,
        output_tokens=output,
        pieces=sum(len(r.arrivals) for r in good),
        cached_tokens=sum(r.num_cached for r in good),
        output_rate=rate(output),
        total_rate=rate(output + prompt),
        request_rate=rate(len(good)),
        counted=all(r.counted for r in good),
        client_cpu=client_cpu,
        hits=None if cache is None else cache[0],
        queries=None if cache is None else cache[1],
    )
