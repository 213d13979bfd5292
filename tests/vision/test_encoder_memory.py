"""The tower's peak memory is linear in patches: counted, not argued. 1792 x 1792 pixels are
128 x 128 patches, the largest picture at a limit of 16,384; half the side, a quarter of them."""

import pytest
import torch
from moonvit_reference import CONFIG
from torch import Tensor, nn

from vitrail.attention.plan import PlanLimits, make_table
from vitrail.check.live_bytes import LiveBytes
from vitrail.config.hardware import CPU, find
from vitrail.vision.attention import VisionAttentionMetadata
from vitrail.vision.moonvit import MoonVit

FULL, HALF = (128, 128), (64, 64)
GPU = find("H200")


class DenseAttention(nn.Module):
    """What the law must catch: one mask over all patches of all pictures, one matrix of scores."""

    def __init__(self, attention):
        super().__init__()
        self.qkv, self.out, self.site = attention.qkv, attention.out, attention.site

    def forward(self, x_NM: Tensor, meta: VisionAttentionMetadata) -> Tensor:
        heads = (3, self.site.num_q_heads, self.site.head_dim)
        q, k, v = self.qkv(x_NM).unflatten(1, heads).permute(1, 2, 0, 3)
        picture = torch.cat(
            [torch.full((n,), i, device=x_NM.device) for i, n in enumerate(meta.varlen.kv_lens)]
        )
        scores = q @ k.transpose(1, 2) * self.site.scale
        scores.masked_fill_(picture[:, None] != picture[None], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


def peak(grids, device="cpu", hardware=CPU, dense=False) -> float:
    """Bytes a patch at the peak of one forward pass, beside weights, input and the block of scores
    that the plan allows."""
    with torch.device(device):
        tower = MoonVit(CONFIG, torch.float32)
        patches = torch.zeros((sum(h * w for h, w in grids), 588), dtype=torch.uint8)
    if dense:
        for block in tower.encoder.blocks:
            block.attn = DenseAttention(block.attn)
    limits = PlanLimits(dtype="float32", page_size=None, max_batch=4, max_q_len=1, max_kv_len=16384)
    table = make_table(tower.sites(), limits, hardware, "reference")
    ((site, phase),) = tower.sites()
    fixed = table.select(site, phase, len(grids), max(h * w for h, w in grids)).score_bytes
    with torch.inference_mode(), LiveBytes() as live:
        tower(patches, grids, table)
    return (live.peak - fixed) / len(patches)


def linear(peaks: list[float]) -> bool:
    """No batch costs more a patch than the smallest one does."""
    return max(peaks) <= 1.02 * peaks[0]


def test_peak_memory_is_linear_in_patches():
    peaks = [peak([HALF] * n) for n in (1, 2, 4)]
    assert linear(peaks), peaks
    assert peak([HALF], "meta") == peaks[0]


@pytest.mark.nightly
@pytest.mark.suite("soak", minutes=4, owner="vision")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_peak_memory_is_linear_up_to_the_largest_pictures(count):
    """16,384^2 scores a picture and head: half a minute for each picture on one busy core."""
    peaks = [peak([HALF], "meta"), peak([FULL] * count)]
    assert linear(peaks), peaks


def test_peak_memory_under_a_gpu_plan_is_linear_in_patches():
    """Sizes alone, on the meta device: the same operations in the same order, nothing computed."""
    batches = [[side] * n for side in (HALF, FULL) for n in (1, 2, 4)]
    peaks = [peak(grids, "meta", GPU) for grids in batches]
    assert linear(peaks), peaks


def test_the_law_catches_a_dense_mask():
    peaks = [peak([HALF] * n, "meta", dense=True) for n in (1, 2, 4)]
    assert not linear(peaks), peaks
    assert peaks[1] > 1.5 * peaks[0]
    sides = [peak([side], "meta", dense=True) for side in (HALF, FULL)]
    assert not linear(sides), sides


def test_mixed_sizes_cost_what_their_patches_cost():
    assert linear([peak([(32, 32)]), peak([(32, 32), (8, 40), (2, 2)]), peak([(40, 40), (32, 2)])])
