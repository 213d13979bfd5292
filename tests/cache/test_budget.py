"""From bytes to pages, or to the numbers that would do."""

import pytest

from vitrail.cache.budget import CacheBudget, plan_cache
from vitrail.cache.spec import LatentKv, LayerSpec, PagedKv
from vitrail.config.finding import Finding

LATENT = LatentKv(latent_rank=512, rope_dim=64, dtype="bfloat16")
PAGED = PagedKv(num_kv_heads=3, head_dim=24, head_dim_v=16, dtype="float32")


def test_kimi_vl_figures() -> None:
    """27 layers x 576 channels x 2 bytes x 64 tokens a page, worked out by hand."""
    plan = plan_cache([LATENT] * 27, 64, 1 << 30, 131_072, 256)
    assert isinstance(plan, list), "1 GiB is too little for 131,072 tokens"
    plan = plan_cache([LATENT] * 27, 64, 4 << 30, 131_072, 256)
    assert plan == CacheBudget(num_pages=2157, page_size=64, page_bytes=1_990_656, full_requests=1)
    assert plan.num_tokens == 138_048
    assert 0 <= (4 << 30) - plan.total_bytes < plan.page_bytes


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("max_model_len", [1, 16, 17, 100])
def test_the_refusal_names_the_least_that_works(page_size: int, max_model_len: int) -> None:
    specs: list[LayerSpec] = [LATENT, PAGED, PAGED]
    page_bytes = page_size * (1152 + 2 * 480)
    needed = -(-max_model_len // page_size) * page_bytes
    findings = plan_cache(specs, page_size, needed - 1, max_model_len, 4)
    assert isinstance(findings, list)
    (finding,) = findings
    assert isinstance(finding, Finding)
    assert f"{needed - 1} bytes hold" in finding.saw
    assert f"{max_model_len} tokens" in finding.rule
    assert f"{needed} bytes" in finding.rule
    assert f"--kv-cache-bytes {needed}" in finding.change
    plan = plan_cache(specs, page_size, needed, max_model_len, 4)
    assert isinstance(plan, CacheBudget)
    assert plan.full_requests == 1
    held = (plan.num_pages - 1) * page_size
    if held > 1:
        assert f"--max-model-len {held}" in finding.change
        assert isinstance(plan_cache(specs, page_size, needed - 1, held, 4), CacheBudget)


def test_full_requests_are_bounded_by_both() -> None:
    for running, expected in ((1, 1), (5, 5), (9, 7)):
        plan = plan_cache([PAGED], 10, 480 * 10 * 14, 11, running)
        assert isinstance(plan, CacheBudget)
        assert plan.full_requests == expected
