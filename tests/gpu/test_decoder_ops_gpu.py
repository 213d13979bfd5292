"""The decoder's kernels, compiled, at the published shape: as close to float32 as plain torch in
bf16 is; e4m3 to the code; nothing asks the device."""

import pytest
import torch

from vitrail.cache.kv_pool import quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.suite("kernels", minutes=3, owner="ops", gpus=1),
]
OPS = (
    "rms_norm",
    "add_rms_norm",
    "silu_mul",
    "rope_table",
    "linear",
    "scores",
    "add_norm_linear",
    "expanded_queries",
    "absorbed_queries",
    "values",
    "expanded_keys",
)


@pytest.mark.parametrize("name", OPS)
def test_ours_is_as_close_as_plain_torch(name: str) -> None:
    from tests.gpu.decoder_checks import WORST, checks

    torch.manual_seed(0)
    found = {c.tokens: c.ratios() for c in checks() if c.name == name}
    assert found
    assert all(r <= WORST for ratios in found.values() for r in ratios), found


def test_every_way_of_a_product_is_as_close() -> None:
    from tests.gpu.decoder_checks import HIDDEN, WORST, way_checks
    from vitrail.ops.linear.table import Way

    torch.manual_seed(1)
    ways = [Way(1, HIDDEN, 2), Way(4, HIDDEN, 4), Way(16, HIDDEN, 8)]
    found = {c.name: c.ratios() for c in way_checks(ways)}
    assert all(r <= WORST for ratios in found.values() for r in ratios), found


@pytest.mark.parametrize("scale", [1.0, 0.037])
def test_e4m3_rows_are_the_pool_s_codes(scale: float) -> None:
    """Every bf16 number as a rotary channel that turns by nothing."""
    from tests.gpu.decoder_checks import DEVICE, DTYPE, SIZES, Slots
    from vitrail.ops.mla import fused
    from vitrail.ops.mla.naive import LatentNorm
    from vitrail.ops.rope.naive import Turns

    numbers = torch.arange(1 << 16, device=DEVICE).to(torch.uint16).view(DTYPE)
    tokens = len(numbers) // SIZES.rope
    row = torch.ones(tokens, SIZES.projected, dtype=DTYPE, device=DEVICE)
    # pairs (number, 0): the turned second member is number * 0 + 0
    row[:, -SIZES.rope :] = numbers.view(tokens, SIZES.rope)
    tables = torch.ones(2, tokens, SIZES.rope // 2, device=DEVICE)
    tables[1] = 0
    into = Slots(tokens)
    into.cache_NPC = torch.zeros(into.cache_NPC.shape, device=DEVICE).to(torch.float8_e4m3fn)
    into.scale = scale
    norm = LatentNorm(torch.ones(SIZES.rank, dtype=DTYPE, device=DEVICE), 0.0)
    fused.expanded_queries(row, norm, Turns(tables[0], tables[1], False), SIZES, into)
    stored = into.cache_NPC.view(torch.uint8).view(-1, SIZES.row)[into.slots_T]
    got = stored[:, SIZES.rank :].flatten().view(torch.float8_e4m3fn).float()
    want = quantized(numbers, scale).float()
    # a number that is not finite spoils its partner: x * 1 - y * 0
    first, second = numbers.view(tokens, 2, -1).isfinite().unbind(1)
    spoilt = ~(first & second)
    spoilt = torch.stack((spoilt, spoilt), 1).flatten()
    assert torch.equal(got[~spoilt], want[~spoilt])
    assert got[~numbers.isfinite()].isnan().all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_nothing_is_asked_of_the_device(tokens: int) -> None:
    from tests.gpu.decoder_checks import HIDDEN, SIZES, Slots, angles, normal
    from vitrail.ops.dispatch import select_linear, select_mla, select_norm, select_rope_table
    from vitrail.ops.mla.naive import LatentNorm
    from vitrail.ops.rope.naive import Turns

    device = torch.device("cuda")
    x, norm, matrix = normal(tokens, HIDDEN), normal(HIDDEN), normal(SIZES.projected, HIDDEN)
    kv_b = normal(SIZES.heads, SIZES.nope + SIZES.value, SIZES.rank)
    latent_norm, turns = LatentNorm(normal(SIZES.rank), 1e-6), Turns(*angles(tokens), True)
    into, positions = Slots(tokens), torch.arange(tokens, device=device)

    def run() -> None:
        select_rope_table(device)(positions, SIZES.rope, 8e5, None)
        row, _ = select_linear(device).add_norm_linear(x, x, norm, 1e-5, matrix)
        ops = select_mla(device)
        q = ops.absorbed_queries(row, kv_b[:, : SIZES.nope], latent_norm, turns, SIZES, into)
        ops.values(q[..., : SIZES.rank], kv_b[:, SIZES.nope :])
        ops.expanded_queries(row, latent_norm, turns, SIZES, into)
        ops.expanded_keys(q[:, 0], kv_b.flatten(0, 1), SIZES, True)
        select_norm(device).add_rms_norm(x, x, norm, 1e-5)
        select_linear(device).scores(x, matrix)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
