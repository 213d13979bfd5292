"""How many prompt tokens a server found in its prefix cache, from the counters of its /metrics; a
server without them says nothing, which is None and not 0."""

import re

from vitrail.bench.http import Address, HttpFailed, fetch

# (found, looked for), both counted in tokens: Vitrail's, vLLM's and SGLang's names
NAMES = (
    ("vitrail_cache_hit_tokens_total", "vitrail_cache_query_tokens_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)", re.M)


async def cache_counters(where: Address, api_key: str | None) -> tuple[int, int] | None:
    """(found, looked for) since the server began; None where it does not count them."""
    try:
        status, body = await fetch(where, "/metrics", api_key)
    except (OSError, HttpFailed):
        return None
    return read_counters(body.decode(errors="replace")) if status == 200 else None


def read_counters(text: str) -> tuple[int, int] | None:
    """From an exposition; the series of a counter (by engine, by source) are added up."""
    sums: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    for hits, queries in NAMES:
        if queries in sums:
            return int(sums.get(hits, 0.0)), int(sums[queries])
    return None
