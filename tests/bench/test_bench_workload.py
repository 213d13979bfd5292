"""Requests are functions of (seed, run, index); arrivals are Poisson's; files are read strictly."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail.bench.workload import Noise, Poisson, Synthetic, parse_size, read_lines, words
from vitrail.config.finding import Refused

WORK = Synthetic(
    prompt_len=9,
    output_len=5,
    num_pictures=2,
    picture_size=(30, 40),
    shared_len=6,
    num_shared_pictures=1,
    ids=(100, 20_000),
)


def test_runs_repeat_exactly_and_share_only_what_is_shared():
    first, again, other = WORK.items(7, 0, 3), WORK.items(7, 0, 3), WORK.items(7, 1, 3)
    assert first == again
    every = [*first, *other]
    assert len({item.shared_ids for item in every}) == 1
    assert len({item.ids for item in every}) == 6
    assert len({item.pictures[0] for item in every}) == 1
    assert len({p for item in every for p in item.pictures[1:]}) == 12
    assert WORK.items(8, 0, 1)[0].shared_ids != first[0].shared_ids
    assert WORK.items(7, 0, 5)[:3] == first, "a longer run begins like a shorter one"
    for item in every:
        assert (len(item.ids), len(item.shared_ids), len(item.pictures)) == (9, 6, 3)
        assert item.max_tokens == 5
        assert all(100 <= i < 20_000 for i in item.ids + item.shared_ids)


def test_pictures_are_uniform_noise_and_their_files_are_they():
    noise, other = (Noise(height=60, width=50, seed=(1, n)) for n in range(2))
    pixels = noise.pixels()
    assert pixels.shape == (60, 50, 3)
    counts = np.bincount(pixels.ravel() // 16, minlength=16)
    assert counts.min() > 0.8 * pixels.size / 16
    assert not np.array_equal(pixels, other.pixels())
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(noise.png()))), pixels)


def test_arrivals_are_poissons():
    times = Poisson(rate=4.0).times(3, 0, 20_000)
    assert times == Poisson(rate=4.0).times(3, 0, 20_000)
    assert times != Poisson(rate=4.0).times(3, 1, 20_000)
    assert times[:10] == Poisson(rate=4.0).times(3, 0, 10)
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05), "exponential: deviation is the mean"
    assert np.mean(gaps > 0.25) == pytest.approx(np.exp(-1), abs=0.02)
    counted = np.bincount(np.asarray(times).astype(int))[:-1]
    assert counted.var() == pytest.approx(counted.mean(), rel=0.1), "Poisson: variance is the mean"


def test_text_of_ids_is_one_word_each():
    assert words([0, 1, 2]) == "the of and"
    assert len(words(range(1000)).split()) == 1000


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return path


def test_a_file_is_requests_in_order_and_from_the_first_again(tmp_path: Path):
    chat = [{"role": "user", "content": "what?"}]
    read = read_lines(
        write(
            tmp_path / "w.jsonl",
            {"prompt": "hello", "max_tokens": 3},
            {"prompt": [1, 2], "max_tokens": 4},
            "",
            {"messages": chat, "max_tokens": 5, "pictures": ["20x10"]},
        )
    )
    items = read.items(1, 0, 5)
    assert [item.max_tokens for item in items] == [3, 4, 5, 3, 4]
    assert [item.prompt for item in items] == ["hello", [1, 2], None, "hello", [1, 2]]
    assert items[2].messages == tuple(chat)
    (picture,) = items[2].pictures
    assert (picture.height, picture.width) == (10, 20)
    assert read.items(1, 1, 3)[2].pictures != items[2].pictures


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nonsense", "w.jsonl:2"),
        ({"prompt": "x"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, "at least 1"),
        ({"prompt": "x", "max_tokens": 1, "n": 2}, "n"),
        ({"max_tokens": 1}, "neither"),
        ({"prompt": "x", "messages": [], "max_tokens": 1}, "both"),
        ({"prompt": "x", "max_tokens": 1, "pictures": ["2x2"]}, "messages"),
        ({"messages": [{}], "max_tokens": 1, "pictures": ["0x2"]}, "WIDTHxHEIGHT"),
        ({"messages": [], "max_tokens": 1}, "message"),
        ({"prompt": 3, "max_tokens": 1}, "w.jsonl:2"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: object, word: str):
    path = write(tmp_path / "w.jsonl", {"prompt": "hello", "max_tokens": 3}, line)
    with pytest.raises(Refused, match=word) as refused:
        read_lines(path)
    assert refused.value.findings[0].where == "w.jsonl:2"


def test_no_file_no_lines_no_size(tmp_path: Path):
    with pytest.raises(Refused, match=r"none\.jsonl"):
        read_lines(tmp_path / "none.jsonl")
    with pytest.raises(Refused, match="1 to"):
        read_lines(write(tmp_path / "empty.jsonl", ""))
    assert parse_size("640x480", "x") == (480, 640)
    for text in ("640", "640x", "-1x5", "640x480x3", "0x1", ""):
        with pytest.raises(Refused, match="WIDTHxHEIGHT"):
            parse_size(text, "x")
