"""The user's choices: validated once, each refusal with its number; environment variables too."""

import pytest

from vitrail.config.engine import EngineConfig, plan_frames, validate
from vitrail.config.env import NAMES, read_env
from vitrail.config.finding import Refused


def test_the_defaults_are_valid():
    assert validate(EngineConfig(model="x")) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_running", 0),
        ("max_waiting", 0),
        ("max_step_tokens", 0),
        ("page_size", 0),
        ("page_size", 257),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.01),
        ("memory_fraction", float("nan")),
        ("encoder_cache_bytes", -1),
        ("max_images", -1),
        ("image_workers", 0),
        ("seed", -1),
        ("max_model_len", 1),
        ("kv_cache_bytes", 0),
        ("encoder_patches", 0),
        ("max_image_pixels", 0),
        ("max_image_bytes", 0),
    ],
)
def test_a_choice_out_of_range_is_named_with_its_value(field: str, value: object):
    (found,) = validate(EngineConfig(model="x", **{field: value}))  # pyright: ignore
    assert found.where == field
    assert found.saw == str(value)
    assert f"--{field.replace('_', '-')}" in found.change


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "gpu"),
        ("device", "CPU"),
        ("dtype", "fp32"),
        ("weights", "randm"),
        ("kv_cache_dtype", "float8_e4m3fn"),
        ("max_running", 2.5),
        ("max_running", "8"),
        ("page_size", True),
        ("prefix_cache", 1),
        ("max_model_len", "many"),
        ("memory_fraction", True),
        ("seed", None),
    ],
)
def test_a_choice_of_another_type_is_refused(field: str, value: object):
    (found,) = validate(EngineConfig(model="x", **{field: value}))  # pyright: ignore
    assert found.where == field
    assert found.saw == repr(value)


def test_the_frames_of_a_video_fit_in_a_request():
    (found,) = validate(EngineConfig(model="x", video_frames=9, max_images=8))
    assert found.where == "video_frames"
    assert found.saw == "9 frames a video, 8 images a request"
    assert validate(EngineConfig(model="x", video_frames=8, max_images=8)) == []
    assert validate(EngineConfig(model="x", max_images=0, video_frames=9)) == [], "text alone"


def test_the_frames_of_a_video_are_chosen_published_or_eight():
    chosen, silent = EngineConfig(model="x", video_frames=3), EngineConfig(model="x", max_images=16)
    assert [plan_frames(chosen, n) for n in (None, 5, 99)] == [3, 3, 3]
    assert [plan_frames(silent, n) for n in (None, 5, 16)] == [8, 5, 16]
    assert validate(silent) == []
    made = plan_frames(silent, 17)
    assert isinstance(made, list)
    assert made[0].saw == "17 frames a video (the checkpoint's), 16 images a request"
    assert "--video-frames 16 or less, or a larger --max-images" in made[0].change
    assert isinstance(plan_frames(EngineConfig(model="x", max_images=7), None), list)


def test_every_bad_choice_is_reported_at_once():
    found = validate(EngineConfig(model="x", max_running=0, page_size=0, memory_fraction=2))
    assert {f.where for f in found} == {"max_running", "page_size", "memory_fraction"}


def test_environment(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert read_env().log == "info"
    assert read_env().api_key is None
    monkeypatch.setenv("VITRAIL_LOG", "loud")
    with pytest.raises(Refused, match="VITRAIL_LOG: 'loud'"):
        read_env()
    monkeypatch.setenv("VITRAIL_LOG", "DEBUG")
    assert read_env().log == "debug"
    monkeypatch.setenv("VITRAIL_API_KEY", "")
    with pytest.raises(Refused, match="VITRAIL_API_KEY"):
        read_env()
