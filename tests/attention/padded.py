"""Records of a fixed number, as graphs have them: those of a batch, and empty ones behind them."""

import numpy as np
import torch

from vitrail.attention.metadata import PagedMetadata, Work, lengths_of
from vitrail.attention.plan import AttentionPlan
from vitrail.attention.records import COMBINE_FIELDS, ITEM_FIELDS, Records, records_of


def padded(records: Records, num_items: int, num_combines: int) -> Records:
    """The same work in records of a fixed number, the rest of them empty."""
    assert len(records.items) <= num_items, f"{len(records.items)} items, room for {num_items}"
    assert len(records.combines) <= num_combines, f"{len(records.combines)} of {num_combines}"
    items = np.zeros((num_items, ITEM_FIELDS), np.int32)
    items[: len(records.items)] = records.items
    combines = np.zeros((num_combines, COMBINE_FIELDS), np.int32)
    combines[: len(records.combines)] = records.combines
    return Records(items, combines, records.slots)


def padded_work(
    plan: AttentionPlan, meta: PagedMetadata, device: torch.device, room: tuple[int, int]
) -> Work:
    """`room`: items and combines."""
    records = padded(records_of(plan, lengths_of(meta)), *room)
    items, combines = (torch.from_numpy(r).to(device) for r in records[:2])
    return Work(items=items, combines=combines, slots=room[0])
