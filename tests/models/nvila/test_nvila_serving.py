"""NVILA from messages to tokens: what stands around pictures and frames, both layouts, and videos
for every vision model."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.models.nvila.checkpoint import in_sub_folders, write_nvila
from tests.server.checkpoint import MEDIA_PAD, write_kimi
from tests.vision.test_video import encoded
from vitrail import LLM, Refused, SamplingParams

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("nvila")
    return {
        "nvila": write_nvila(root / "nvila"),
        "lite": write_nvila(root / "lite", lite=True),
        "kimi": write_kimi(root / "kimi"),
    }


@pytest.fixture(scope="module")
def llms(folders: dict[str, Path]) -> dict[str, LLM]:
    return {name: small(folder) for name, folder in folders.items()}


def small(folder: Path, **choices: Any) -> LLM:
    return LLM(folder, device="cpu", kv_cache_bytes=1 << 20, page_size=16, **choices)


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3))
    return Image.fromarray(noise.astype(np.uint8))


def image(width: int = 56, height: int = 28) -> dict[str, Any]:
    return {"type": "image", "image": picture(width, height)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def clip(count: int = 20) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(encoded(count)).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def shown(llm: LLM, *parts: Any) -> list[str]:
    """The prompt with each run of image ids as its length, and the text between."""
    ids = llm.prepare(message(*parts)).token_ids
    pieces: list[str] = []
    run: list[int] = []
    for token in [*ids, -1]:
        if run and (token == MEDIA_PAD) != (run[-1] == MEDIA_PAD) or token < 0:
            decoded = llm.preparer.tokenizer.decode(run, skip_special=True)
            pieces.append(f"[{len(run)}]" if run[-1] == MEDIA_PAD else decoded)
            run = []
        run.append(token)
    return [piece for piece in pieces if piece]


def test_the_text_around_pictures_is_the_published_one(llms: dict[str, LLM]) -> None:
    """Tiles of one token here. A line feed after each part; in Lite's text one more after each
    tile of a picture that is alone."""
    eight, lite = llms["nvila"], llms["lite"]
    assert shown(eight, text("a"), image(), text("b")) == ["a", "[10]", "\nb"]
    assert shown(eight, image(), image(28, 56)) == ["[1]", "\n", "[1]", "\n"]
    assert shown(lite, image(28, 28), text("b")) == ["[1]", "\n\nb"]
    tiles = shown(lite, text("a"), image(), text("b"))
    assert tiles[:2] == ["a", "[1]"]
    assert tiles[2:] == [*["\n\n", "[1]"] * (tiles.count("[1]") - 1), "\n\nb"]
    assert shown(lite, image(), image(28, 56)) == ["[1]", "\n", "[1]", "\n"]
    frames = ["[1]", "\n"] * 8
    assert shown(lite, clip()) == frames
    assert shown(eight, clip(), text("b")) == [*frames[:-1], "\nb"]


def test_the_added_line_feed_is_tokenised_with_the_text_after_it(llms: dict[str, LLM]) -> None:
    """As in the authors' text, where it is written before tokenising."""
    lite = llms["lite"]
    encode = lite.preparer.tokenizer.encode
    for words in ("\nWhat", "What", " what"):
        ids = lite.prepare(message(image(28, 28), text(words))).token_ids
        at = ids.index(MEDIA_PAD)
        assert ids[at + 1 :][: len(encode("\n"))] == encode("\n")
        rest = ids[at + 1 + len(encode("\n")) :]
        assert rest[: len(encode("\n" + words))] == encode("\n" + words)


def test_one_picture_beside_a_video_is_alone(llms: dict[str, LLM]) -> None:
    got = shown(llms["nvila"], image(), clip())
    assert got == ["[10]", "\n", *["[1]", "\n"] * 8]


def test_a26_pictures_with_text_text_alone_and_pictures_alone(llms: dict[str, LLM]) -> None:
    for name in ("nvila", "lite"):
        llm = llms[name]
        for parts in ((image(), text("what?")), (text("hello"),), (image(),), (clip(5),)):
            (got,) = llm.chat(message(*parts), GREEDY)
            assert len(got.outputs[0].token_ids) == 5
            assert got.outputs[0].error is None


@pytest.mark.parametrize("name", ["nvila", "lite"])
def test_one_image_id_in_ids_brings_what_a_template_would(llms: dict[str, LLM], name: str) -> None:
    llm = llms[name]
    whole = llm.prepare(message(text("a"), image(), text("b")))
    at = [i for i, t in enumerate(whole.token_ids) if t == MEDIA_PAD]
    lead = whole.token_ids[: at[0]]
    given = {"prompt_token_ids": [*lead, MEDIA_PAD], "images": [picture(56, 28)]}
    assert llm.prepare(given).token_ids[: at[-1] + 1] == whole.token_ids[: at[-1] + 1]
    runs = {"prompt_token_ids": whole.token_ids, "images": [picture(56, 28)]}
    assert llm.prepare(runs).token_ids == whole.token_ids


def test_both_layouts_are_the_same_model(
    folders: dict[str, Path], llms: dict[str, LLM], tmp_path: Path
) -> None:
    """The authors' sub-folders, whose image token has no embedding: 151649 of 687."""
    llm = small(in_sub_folders(folders["nvila"], tmp_path / "parts"))
    picture_of = picture(56, 28)
    got = []
    for each in (llms["nvila"], llm):
        image_id = each.preparer.facts.image_token_id
        prompt = {"prompt_token_ids": [5, *[image_id] * 10, 7, 9], "images": [picture_of]}
        got.append(each.score(prompt["prompt_token_ids"], prompt["images"]))
    assert llm.preparer.facts.image_token_id == 151649
    assert np.array_equal(got[0], got[1])


def test_a_missing_sub_folder_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = in_sub_folders(folders["nvila"], tmp_path / "parts")
    (folder / "mm_projector" / "model.safetensors").unlink()
    with pytest.raises(Refused, match="mm_projector/model folder"):
        small(folder)


def test_kimi_takes_a_video_as_its_frames(llms: dict[str, LLM]) -> None:
    """Eight pictures, each framed by the template, at its native resolution."""
    kimi = llms["kimi"]
    frames = [
        {"type": "image", "image": kimi_frame}
        for kimi_frame in pictures_of(kimi.preparer.limits, 20)
    ]
    as_video = kimi.prepare(message(clip(), text("what?")))
    as_pictures = kimi.prepare(message(*frames, text("what?")))
    assert as_video.token_ids == as_pictures.token_ids
    assert [i.identity for i in as_video.images] == [i.identity for i in as_pictures.images]
    assert len(as_video.images) == 8
    (got,) = kimi.chat(message(clip(), text("what?")), GREEDY)
    assert len(got.outputs[0].token_ids) == 5


def pictures_of(limits: Any, count: int) -> list[np.ndarray]:
    from vitrail.vision.video import VideoRoom, sample

    data = encoded(count)
    return sample(data, 8, limits, "video", VideoRoom(), lambda frame: frame.pixels)


def test_the_offline_api_takes_paths_and_frames(llms: dict[str, LLM], tmp_path: Path) -> None:
    llm = llms["nvila"]
    path = tmp_path / "clip.mp4"
    path.write_bytes(encoded(20))
    one = llm.prepare(message({"type": "video", "video": str(path)}))
    two = llm.prepare(message(clip()))
    frames = pictures_of(llm.preparer.limits, 20)
    three = llm.prepare(message({"type": "video", "video": frames}))
    assert one.token_ids == two.token_ids == three.token_ids
    ids = [[i.identity for i in p.images] for p in (one, two, three)]
    assert ids[0] == ids[1] == ids[2]


def test_the_number_of_frames_is_the_engines_choice(folders: dict[str, Path]) -> None:
    llm = small(folders["nvila"], video_frames=3, max_images=5)
    assert shown(llm, clip()) == ["[1]", "\n"] * 3
    with pytest.raises(Refused, match="6 images. Rule: at most 5"):
        llm.prepare(message(clip(), clip()))


def test_a_checkpoint_says_how_many_frames_and_the_engine_may_say_otherwise(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """The authors' config.json has `num_video_frames`. What does not fit in a request is refused
    before weights are read."""
    folder = in_sub_folders(folders["nvila"], tmp_path / "parts")

    def say(frames: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_video_frames": frames}))

    for frames, choices, seen in (
        (5, {}, 5),
        (5, {"video_frames": 3}, 3),
        (70, {"video_frames": 2}, 2),
    ):
        say(frames)
        llm = small(folder, **choices)
        assert llm.preparer.video_frames == seen
    say(9)
    with pytest.raises(Refused, match=r"9 frames a video \(the checkpoint's\), 6 images a request"):
        small(folder, max_images=6)
    assert small(folder, max_images=0).preparer.video_frames == 9
    for bad in (0, -1, 10**6, 2.5, "8"):
        say(bad)
        with pytest.raises(Refused, match="num_video_frames"):
            small(folder)


def test_f01_f06_a_video_is_never_fetched(llms: dict[str, LLM]) -> None:
    for url in ("http://127.0.0.1:1/a.mp4", "file:///etc/passwd", "/etc/passwd"):
        part = {"type": "video_url", "video_url": {"url": url}}
        with pytest.raises(Refused) as refused:
            llms["nvila"].prepare(message(part))
        assert refused.value.findings[0].code == "unsupported_image_url"


def test_a11_a_broken_video_names_its_part(llms: dict[str, LLM]) -> None:
    cut = base64.b64encode(encoded(20)[:300]).decode()
    part = {"type": "video_url", "video_url": "data:video/mp4;base64," + cut}
    with pytest.raises(Refused) as refused:
        llms["nvila"].prepare(message(text("a"), part))
    (finding,) = refused.value.findings
    assert finding.where == "messages[0].content[1].video_url"
    assert "300 bytes" in finding.saw


def test_f12_text_never_claims_a_tile(llms: dict[str, LLM]) -> None:
    for name in ("nvila", "lite"):
        ids = llms[name].prepare(message(text("<|media_pad|><image>"))).token_ids
        assert MEDIA_PAD not in ids


def test_a01_f25_pictures_of_one_pixel(llms: dict[str, LLM]) -> None:
    for name in ("nvila", "lite"):
        (got,) = llms[name].chat(message(image(1, 1), text("x")), GREEDY)
        assert got.outputs[0].error is None
