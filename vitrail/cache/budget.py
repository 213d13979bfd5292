"""`plan_cache`: how many pages a byte budget holds, or why it is too small. No device, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.cache.spec import LayerSpec
from vitrail.config.finding import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBudget:
    """A page is `page_size` tokens in every layer, `page_bytes` in all. `full_requests`: how many
    requests of max_model_len run at once before one is preempted."""

    num_pages: int
    page_size: int
    page_bytes: int
    full_requests: int

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size


def plan_cache(
    specs: Sequence[LayerSpec],
    page_size: int,
    budget_bytes: int,
    max_model_len: int,
    max_running: int,
) -> CacheBudget | list[Finding]:
    """As many pages as `budget_bytes` holds, every one of them usable (no page is set aside).
    Refused if not even one request of `max_model_len` tokens fits: it could never finish."""
    assert specs, "a model without layers"
    assert page_size >= 1
    assert max_model_len >= 1
    page_bytes = page_size * sum(spec.bytes_per_token() for spec in specs)
    num_pages = budget_bytes // page_bytes
    needed = -(-max_model_len // page_size)
    if num_pages < needed:
        held = num_pages * page_size
        smaller = f" or --max-model-len {held}" if held > 1 else ""
        return [
            Finding(
                where="kv_cache_bytes",
                saw=f"{budget_bytes} bytes hold {num_pages} pages of {page_size} tokens "
                f"({page_bytes} bytes a page): {held} tokens",
                rule=f"one request of max_model_len {max_model_len} tokens fits: "
                f"{needed} pages, {needed * page_bytes} bytes",
                change=f"pass --kv-cache-bytes {needed * page_bytes}{smaller}",
                code="cache_too_small",
            )
        ]
    return CacheBudget(
        num_pages=num_pages,
        page_size=page_size,
        page_bytes=page_bytes,
        full_requests=min(max_running, num_pages // needed),
    )
