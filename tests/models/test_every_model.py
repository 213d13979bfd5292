"""Laws of every model in `cases`: what is written is read, and one prompt gives the same logits on
every way through the cache."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.models.cases import CASES, Case
from tests.models.driver import Driver, Running, image_plans, read_folder, resolve_folder
from tests.weights.write import write_checkpoint
from vitrail.cache.spec import LatentKv, LayerSpec
from vitrail.config.finding import accept
from vitrail.config.model import KvScales, ModelConfig
from vitrail.models.interface import ImageModel, ImageShape, Model
from vitrail.models.registry import ARCHITECTURES, load_entry
from vitrail.weights.load import load, parameters_of

LENGTH = 29
STD = 0.2  # large enough for layers to matter to the logits


@dataclass
class Subject:
    """A case's loaded model and its prompt: ids, and the pictures' embeddings at the image id."""

    config: ModelConfig
    model: Model
    folder: Path
    ids: list[int]
    images: Tensor | None

    def drive(self, page_size: int = 3, batch: int = 4) -> Driver:
        return Driver(self.model, "float32", page_size, LENGTH, batch)

    def add(self, run: Driver) -> Running:
        return run.add(self.ids, self.config.image_token_id or 0, self.images)


@pytest.fixture(scope="module", params=CASES)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    case = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(case.config))
    if case.generation:
        (folder / "generation_config.json").write_text(json.dumps(case.generation))
    config = read_folder(folder)
    entry = load_entry(config.architecture)
    with torch.device("meta"):
        model = entry.build(config, "float32")
    weight_map = entry.weight_map(config)
    write_checkpoint(weight_map, parameters_of(model), folder, seed=3, num_shards=2, std=STD)
    plan = accept(resolve_folder(model, config, folder))
    load(plan, model, folder, torch.device("cpu"))
    images = encode(model, config, case)
    return Subject(config, model, folder, prompt(config, images), images)


def encode(model: Model, config: ModelConfig, case: Case) -> Tensor | None:
    if config.vision is None:
        return None
    samples = 3 * config.vision.patch_size**2
    patches = sum(h * w for h, w in case.grids)
    pixels = torch.rand((patches, samples), generator=torch.Generator().manual_seed(5)) * 2 - 1
    assert isinstance(model, ImageModel)
    plans = image_plans(model, "float32", patches, len(case.grids))
    features = model.encode_patches(pixels, list(case.grids), plans)
    if case.blocks:
        images = [ImageShape(*case.grids[0], block) for block in case.blocks]
    else:
        images = [ImageShape(*grid) for grid in case.grids]
    return model.project_images(features, images)


def prompt(config: ModelConfig, images: Tensor | None) -> list[int]:
    """Random ids; image ids for all pictures in the middle."""
    choose = random.Random(11)
    count = 0 if images is None else len(images)
    ids = [choose.randrange(50) for _ in range(LENGTH - count)]
    return [*ids[:4], *[config.image_token_id or 0] * count, *ids[4:]]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def whole(subject: Subject, page_size: int = 3) -> Tensor:
    run = subject.drive(page_size)
    return run.step([(subject.add(run), LENGTH)])[0]


def test_every_architecture_has_a_case() -> None:
    assert {case.config["architectures"][0] for case in CASES.values()} == set(ARCHITECTURES)


def test_the_map_reads_what_it_writes(subject: Subject) -> None:
    """Every parameter is filled (memory is poisoned), nothing is left over, nothing warned
    about."""
    assert all(p.isfinite().all() for p in subject.model.parameters())
    with torch.device("meta"):
        model = load_entry(subject.config.architecture).build(subject.config, "float32")
    plan = accept(resolve_folder(model, subject.config, subject.folder))
    assert plan.warnings == ()


def test_a_renamed_parameter_without_its_row_is_found_before_loading(subject: Subject) -> None:
    with torch.device("meta"):
        model = load_entry(subject.config.architecture).build(subject.config, "float32")
    model.register_module("renamed", model.get_submodule(first := next(model.named_children())[0]))
    delattr(model, first)
    found = resolve_folder(model, subject.config, subject.folder)
    assert isinstance(found, list)
    said = "\n".join(map(str, found))
    assert "renamed." in said, "what has no row"
    assert len(found) >= 2, "and what has no parameter any more"


def test_logits_are_fp32_and_depend_on_every_token(subject: Subject) -> None:
    logits = whole(subject)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    subject.ids[0] = (subject.ids[0] + 1) % 50
    other = whole(subject)
    subject.ids[0] = (subject.ids[0] - 1) % 50
    assert ((other - logits).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_page_size_does_not_matter(subject: Subject, page_size: int) -> None:
    close(whole(subject, page_size), whole(subject))


def test_chunked_at_every_boundary_is_the_whole(subject: Subject) -> None:
    want, run = whole(subject), subject.drive(batch=LENGTH)
    cuts = range(1, LENGTH)
    sequences = [subject.add(run) for _ in cuts]
    heads = run.step(list(zip(sequences, cuts, strict=True)))
    tails = run.step([(s, LENGTH - cut) for s, cut in zip(sequences, cuts, strict=True)])
    for head, tail in zip(heads, tails, strict=True):
        close(torch.cat((head, tail)), want)


def test_decoded_is_prefilled(subject: Subject) -> None:
    want, run = whole(subject), subject.drive()
    sequence = subject.add(run)
    head = run.step([(sequence, 11)])[0]
    rows = [run.step(decodes=[sequence])[0] for _ in range(LENGTH - 11)]
    close(torch.cat((head, *rows)), want)


def test_batched_with_strangers_is_alone(subject: Subject) -> None:
    want, run = whole(subject), subject.drive()
    sequence, chunk, decode = subject.add(run), run.add([7, 9, 2, 40, 41]), run.add([3, 1, 4])
    run.step([(sequence, 8), (decode, 2), (chunk, 1)])
    got = run.step([(chunk, 4), (sequence, LENGTH - 8)], decodes=[decode])
    close(got[1], want[8:])


def test_every_layer_reads_its_pages_by_their_scales(subject: Subject):
    """Powers of two shift e4m3's exponents and nothing else, as long as nothing saturates; a layer
    that reads without its scales is off by them."""

    def logits(e4m3: Callable[[LayerSpec], KvScales]) -> Tensor:
        run = Driver(subject.model, "float32", 3, LENGTH, 4, e4m3)
        sequence = subject.add(run)
        prefill = run.step([(sequence, LENGTH - 3)])[0]
        return torch.cat([prefill, *(run.step(decodes=[sequence])[0] for _ in range(3))])

    def scaled(spec: LayerSpec) -> KvScales:
        return KvScales(0.5, 0.5 if isinstance(spec, LatentKv) else 0.25)

    torch.testing.assert_close(
        logits(scaled), logits(lambda spec: KvScales()), atol=0.05, rtol=0.05
    )
