"""Pictures that come as they are: the encoder makes the processor's patches of them, alone and
beside others; through the whole engine they give the same logits and are the same to its caches."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import golden_llm
from vitrail.engine.conversation import Picture
from vitrail.engine.encode import patches_of, send
from vitrail.engine.step import EncodeJob
from vitrail.models.kimi_vl.processor import KimiVLProcessor
from vitrail.vision.image import ImageLimits, from_array

CPU = torch.device("cpu")
LIMITS = ImageLimits(max_bytes=1 << 30, max_pixels=1 << 30)
SIDES = st.integers(20, 130)


def processor(limit: int) -> KimiVLProcessor:
    return KimiVLProcessor(patch_size=14, in_token_limit=limit, merge=2, image_token_id=5)


def picture(height: int, width: int, seed: int = 0):
    generator = np.random.default_rng(seed)
    return from_array(generator.integers(0, 256, (height, width, 3), np.uint8), LIMITS, "image")


def jobs_of(parts) -> list[EncodeJob]:
    return [
        EncodeJob(
            entry=i,
            height=part.grid.height,
            width=part.grid.width,
            num_tokens=part.grid.num_tokens,
            resized=part.resized,
        )
        for i, part in enumerate(parts)
    ]


@given(sides=st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4), limit=st.integers(9, 60))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_encoder_makes_the_processors_patches(sides, limit):
    """Whichever of a batch come as they are."""
    kimi = processor(limit)
    images = [picture(*side, seed) for seed, side in enumerate(sides)]
    whole = [kimi.unresized(image, True) for image in images]
    patched = [kimi.process(image) for image in images]
    pairs = enumerate(zip(whole, patched, strict=True))
    parts = [w if w is not None and i % 3 else p for i, (w, p) in pairs]
    got = patches_of(jobs_of(parts), [part.patches for part in parts], CPU, 14)
    assert np.array_equal(got.numpy(), np.concatenate([part.patches for part in patched]))


def test_what_is_left_to_the_encoder():
    """Neither a picture of many more bytes than its patches, nor one whose passes come in another
    order in newer releases of Pillow; its identity and its grid are those of its patches."""
    kimi = processor(100)
    kept = kimi.unresized(picture(200, 180), True)
    assert kept is not None
    assert kept.resized == (kept.grid.resized_height, kept.grid.resized_width)
    made = kimi.process(picture(200, 180))
    assert (kept.digest, kept.grid) == (made.digest, made.grid)
    assert made.resized is None
    assert kimi.unresized(picture(500, 400), True) is None
    assert kimi.unresized(picture(400, 80), True) is None
    assert kimi.unresized(picture(80, 400), True) is not None


def test_logits_and_caches_do_not_tell_them_apart():
    llm = golden_llm()
    kimi = processor(60)
    llm.preparer.assets = dataclasses.replace(llm.preparer.assets, processor=kimi)
    pixels = [picture(130, 150, seed).pixels for seed in range(2)]
    image_id = llm.preparer.facts.image_token_id
    assert image_id is not None
    prompt = [1, image_id, 2, 3, image_id, 4]

    def prepared():
        return llm.preparer.ids(prompt, [Picture(p, "image") for p in pixels])

    patched = prepared()
    facts = llm.preparer.facts
    llm.preparer.facts = msgspec.structs.replace(facts, encoder_resizes=True)
    whole = prepared()
    assert [image.resized for image in patched.images] == [None, None]
    assert [image.patches.ndim for image in whole.images] == [3, 3]
    assert [i.identity for i in whole.images] == [i.identity for i in patched.images]
    assert whole.token_ids == patched.token_ids
    ids, images = whole.token_ids, pixels
    got = llm.score(ids, images)
    llm.preparer.facts = facts
    llm.engine.rest()
    want = golden_llm()
    want.preparer.assets = dataclasses.replace(want.preparer.assets, processor=kimi)
    assert np.array_equal(got, want.score(ids, images))


def test_a_picture_to_resize_is_one_sequence_of_pixels():
    job = EncodeJob(entry=0, height=2, width=2, num_tokens=1, resized=(28, 28))
    with pytest.raises(ValueError, match="2 axes"):
        patches_of([job], [np.zeros((4, 588), np.uint8)], CPU, 14)


def test_arrays_arrive_as_they_are():
    arrays = [np.arange(5, dtype=np.uint8), np.arange(6, dtype=np.int32).reshape(2, 3)]
    for array, tensor in zip(arrays, send(arrays, CPU), strict=True):
        assert np.array_equal(tensor.numpy(), array)
