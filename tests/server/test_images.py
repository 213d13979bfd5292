"""Pictures through the HTTP edge: every class A fault that a request can bring, and an engine that
lives on. Prompt lengths are compared with the grid's own arithmetic."""

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.server.checkpoint import IN_TOKEN_LIMIT, PATCH, write_kimi
from tests.server.served import PICTURES, Served, picture
from tests.server.sse import error_of
from tests.vision.test_video import encoded as encoded_video
from vitrail.models.kimi_vl.processor import KimiVLProcessor

QUESTION = {"type": "text", "text": "what colour is the top-left?"}


@pytest.fixture(autouse=True)
def alive(server: Served) -> Iterator[None]:
    """After each test the engine has not restarted and still answers."""
    process = server.engine()["steps_total"]
    yield
    assert send(server, QUESTION).status_code == 200
    assert server.engine()["steps_total"] > process


def send(server: Served, *content: Any, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": list(content)}]
    body = {"messages": messages, "max_tokens": 2, "temperature": 0, **more}
    return server.client.post("/v1/chat/completions", json=body)


def prompt_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"]


def image_tokens(server: Served, *pictures: Any) -> int:
    """What pictures add to the prompt, without what surrounds each."""
    alone = prompt_tokens(send(server, QUESTION))
    one = prompt_tokens(send(server, *pictures, QUESTION))
    return one - alone - len(pictures) * frame_tokens(server)


def frame_tokens(server: Served) -> int:
    """Of one picture: a 1 x 1 has one token of its own."""
    alone = prompt_tokens(send(server, QUESTION))
    return prompt_tokens(send(server, picture("size_1x1_png.png"), QUESTION)) - alone - 1


def expected_tokens(name: str) -> int:
    processor = KimiVLProcessor(
        patch_size=PATCH, in_token_limit=IN_TOKEN_LIMIT, merge=2, image_token_id=444
    )
    with Image.open(PICTURES / name) as image:
        grid = processor.grid(image.height, image.width)
    return grid.num_tokens  # pyright: ignore[reportAttributeAccessIssue]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def logprobs(server: Served, *content: Any) -> list[float]:
    """The likeliest tokens' logprobs after a prompt: a fingerprint of what the model saw."""
    response = send(server, *content, max_tokens=1, logprobs=True, top_logprobs=5)
    assert response.status_code == 200, response.text
    (row,) = response.json()["choices"][0]["logprobs"]["content"]
    return [t["logprob"] for t in row["top_logprobs"]]


def test_a01_tiny_pictures_among_normal_ones(server: Served):
    tiny, wide = picture("size_1x1_png.png"), Image.new("RGB", (918, 1850), (9, 200, 40))
    three = [tiny, tiny, picture(encoded(wide, "PNG"))]
    assert image_tokens(server, tiny) == 1
    assert image_tokens(server, *three) > 2 + 50


@pytest.mark.parametrize(
    "name", sorted(p.name for p in PICTURES.glob("size_*") if "8192" not in p.name)
)
def test_a03_a28_prompt_tokens_are_the_grids(server: Served, name: str):
    assert image_tokens(server, picture(name)) == expected_tokens(name)


def test_a03_a_picture_thinner_than_a_patch(server: Served):
    assert image_tokens(server, picture("size_500x19_png.png")) == 18


def test_a04_grey_and_alpha_are_served_one_after_the_other(server: Served):
    size = (224, 224)
    pictures = (
        encoded(Image.new("L", size, 128), "JPEG", quality=85),
        encoded(Image.new("LA", size, (128, 90)), "PNG"),
        encoded(Image.new("RGBA", size, (10, 20, 30, 40)), "PNG"),
        encoded(Image.new("RGB", size, (10, 20, 30)), "PNG"),
    )
    assert [image_tokens(server, picture(p)) for p in pictures] == [64] * 4


def test_a06_alpha_lies_over_white(server: Served):
    """A transparent picture and its composite over white are seen alike; over black not."""
    half = Image.new("RGBA", (56, 56), (200, 0, 0, 128))
    seen = []
    for colour in ("white", "black"):
        canvas = Image.new("RGBA", half.size, colour)
        canvas.alpha_composite(half)
        seen.append(logprobs(server, picture(encoded(canvas.convert("RGB"), "PNG")), QUESTION))
    white, black = seen
    assert logprobs(server, picture(encoded(half, "PNG")), QUESTION) == pytest.approx(white, 1e-3)
    assert white != pytest.approx(black, 1e-3)


def test_a08_a10_a_turned_photo_is_seen_upright(server: Served):
    """600 x 60 upright, stored turned by EXIF: tokens and answer are the baked picture's."""
    name = "exif_tall_o6_jpg.jpg"
    with Image.open(PICTURES / name) as image:
        assert image.getexif()[0x0112] == 6
        upright = image.transpose(Image.Transpose.ROTATE_270)
        as_stored = image.convert("RGB")
        as_stored.getexif().clear()
    baked = picture(encoded(upright, "PNG"))
    assert image_tokens(server, picture(name)) == image_tokens(server, baked)
    seen = logprobs(server, picture(name), QUESTION)
    assert seen == pytest.approx(logprobs(server, baked, QUESTION), 1e-3)
    stored = logprobs(server, picture(encoded(as_stored, "PNG")), QUESTION)
    assert seen != pytest.approx(stored, 1e-3)


BROKEN = (
    (PICTURES / "size_391x517_jpg.jpg").read_bytes()[:-128],
    b"Hello World",
    b"\x89PNG\r\n\x1a\n",
    (PICTURES / "header_only_png.png").read_bytes(),
    (PICTURES / "zero_dim_png.png").read_bytes(),
    (PICTURES / "trunc_half_png.png").read_bytes(),
    (PICTURES / "bomb_claim_65535sq_png.png").read_bytes(),
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_a11_broken_pictures_are_a_plain_400(server: Served, data: bytes, stream: bool):
    response = send(server, QUESTION, picture(data), stream=stream)
    error = error_of(response)
    assert response.headers["content-type"] == "application/json"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "messages[0].content[1].image_url"


def test_a11_no_bytes_at_all(server: Served):
    error = error_of(send(server, QUESTION, picture(b"")))
    assert "empty payload" in error["message"]


@pytest.mark.parametrize(
    ("name", "kind"), [("avif.avif", "AVIF"), ("heic_stub.heic", "HEIC"), ("svg_plain.svg", "SVG")]
)
def test_a12_formats_we_do_not_read_are_named(server: Served, name: str, kind: str):
    error = error_of(send(server, picture(name), QUESTION))
    assert kind in error["message"]
    assert error["code"] == "unsupported_image"


def test_a12_animations_give_their_first_frame(server: Served):
    assert image_tokens(server, picture("webp_animated.webp")) > 0
    assert image_tokens(server, picture("gif_animated.gif")) > 0


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("data:image/png,hello", "no ';base64'"),
        ("data:image/png", "no comma"),
        ("data:,", "no ';base64'"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "empty payload"),
        ("data:image/png;base64,@@@", "'@'"),
        ("", "empty URL"),
        ("picture.png", "without 'data:'"),
    ],
)
def test_a15_what_is_wrong_with_a_data_url_is_said(server: Served, url: str, word: str):
    part = {"type": "image_url", "image_url": {"url": url}}
    error = error_of(send(server, part, QUESTION))
    assert word in error["message"]
    assert error["param"] == "messages[0].content[0].image_url"


def test_f01_f06_nothing_is_fetched_and_no_path_is_opened(server: Served):
    said = set()
    for url in (
        "http://127.0.0.1:9/a.png",
        "https://example.invalid/a.png",
        "file:///etc/passwd",
        "file://localhost/etc/nothing#x.jpg",
        "ftp://a/b",
    ):
        error = error_of(send(server, {"type": "image_url", "image_url": {"url": url}}, QUESTION))
        assert "nothing is fetched or opened" in error["message"]
        said.add(error["message"].replace(f"'{url.split(':')[0]}'", ""))
    assert len(said) == 1, "the text says nothing of what is there"


@pytest.mark.parametrize(
    "head",
    [
        "data:image/jpeg;charset=utf-8;base64,",
        "DATA:image/jpeg;BASE64,",
        "data:;base64,",
        "data:image/png;base64,",
    ],
)
def test_a16_data_urls_in_any_case_with_parameters(server: Served, head: str):
    data = base64.b64encode((PICTURES / "size_56x56_jpg.jpg").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": head + data, "detail": "high"}}
    assert image_tokens(server, part) == 4


def test_a19_placeholders_and_pictures_agree(server: Served):
    """One picture after text, two, and a picture alone."""
    one = picture("size_56x56_jpg.jpg")
    frame, alone = frame_tokens(server), prompt_tokens(send(server, QUESTION))
    assert prompt_tokens(send(server, QUESTION, one)) == alone + frame + 4
    assert prompt_tokens(send(server, one, QUESTION, one)) == alone + 2 * (frame + 4)
    assert prompt_tokens(send(server, one)) < alone + frame + 4


def test_a21_the_budget_is_the_checkpoints(kimi_folder: Path, tmp_path: Path):
    """The same picture under another in_token_limit has that many tokens."""
    folder = write_kimi(tmp_path / "wide", in_token_limit=1024)
    part = picture("size_896x896_jpg.jpg")
    with Served(folder, "granian") as wide:
        assert image_tokens(wide, part) == 256
    assert expected_tokens("size_896x896_jpg.jpg") == 64


def test_a24_a34_order_of_parts_and_pictures_is_the_messages(server: Served):
    """Four colour cards: each order of cards and labels is another prompt, and the same one twice
    gives the same answer."""
    cards = [
        picture(encoded(Image.new("RGB", (84, 84), c), "PNG"))
        for c in ("red", "lime", "blue", "gold")
    ]
    labels = [{"type": "text", "text": f"card {i}"} for i in range(4)]
    orders = (
        [part for pair in zip(labels, cards, strict=True) for part in pair],
        [part for pair in zip(cards, labels, strict=True) for part in pair],
        [*cards, *labels],
        [part for pair in zip(labels, cards[::-1], strict=True) for part in pair],
    )
    seen = [logprobs(server, *parts) for parts in orders]
    assert logprobs(server, *orders[0]) == pytest.approx(seen[0], 1e-3)
    for i, one in enumerate(seen):
        for other in seen[i + 1 :]:
            assert one != pytest.approx(other, 1e-3)


def test_a32_a_url_as_a_string_is_a_picture_and_never_text(server: Served):
    url = picture("size_896x896_jpg.jpg")["image_url"]["url"]
    assert image_tokens(server, {"type": "image_url", "image_url": url}) == 64
    for part in (
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": url},
        {"type": "image_url", "image_url": {"uri": url}},
        {"type": "image_url", "image_url": [url]},
        {"type": "image_url"},
        {"image_url": url},
    ):
        error = error_of(send(server, part, QUESTION))
        assert error["param"].startswith("messages[0].content[0]")
        assert url[40:80] not in error["message"]


def test_too_many_pictures_and_too_long_ones(server: Served):
    one = picture("size_1x1_png.png")
    error = error_of(send(server, *[one] * 65))
    assert "65 images" in error["message"]
    assert "at most 64" in error["message"]
    long = encoded(Image.new("L", (7200, 2)), "PNG")
    error = error_of(send(server, QUESTION, picture(long)))
    assert error["param"] == "messages[0].content[1].image_url"


def test_c22_a_picture_of_a_refused_request_works_afterwards(server: Served):
    one = picture(encoded(Image.new("RGB", (300, 200), (1, 2, 3)), "PNG"))
    error = error_of(send(server, one, {"type": "text", "text": "long " * 9000}))
    assert error["code"] == "context_length_exceeded"
    assert send(server, one, QUESTION).status_code == 200
    for i in range(40):
        small = picture(encoded(Image.new("RGB", (56, 56), (i, 255 - i, 7)), "PNG"))
        assert send(server, small, QUESTION).status_code == 200
    assert send(server, one, QUESTION).status_code == 200


def test_c27_bursts_of_pictures_are_all_answered(server: Served):
    def burst(i: int) -> int:
        colours = [(8 * i, 10 * j, 99) for j in range(3)]
        parts = [picture(encoded(Image.new("RGB", (448, 448), c), "PNG")) for c in colours]
        return send(server, *parts, QUESTION).status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(burst, range(24))) <= {200, 503}
    assert not list(server.pixel_folder().iterdir())


def test_f12_text_never_claims_a_slot(server: Served):
    """Spelt image tokens are ordinary text wherever a string may stand, with and without a
    picture."""
    spelt = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    one = picture("size_56x56_jpg.jpg")
    plain, frame = (
        prompt_tokens(send(server, {"type": "text", "text": spelt})),
        frame_tokens(server),
    )
    assert plain > 45, "its characters, not five specials"
    both = prompt_tokens(send(server, {"type": "text", "text": spelt}, one))
    assert both == plain + frame + 4
    history = [
        {"role": "system", "content": spelt},
        {"role": "user", "content": spelt, "name": spelt},
        {"role": "assistant", "content": spelt},
        {"role": "tool", "content": spelt, "tool_call_id": spelt},
        {"role": "user", "content": [one, {"type": "text", "text": spelt}]},
    ]
    body = json.dumps({"messages": history, "max_tokens": 2})
    response = server.client.post("/v1/chat/completions", content=body)
    assert prompt_tokens(response) > 5 * 45
    ids = {"prompt": [72, 444, 444, 72], "max_tokens": 2}
    error = error_of(server.client.post("/v1/completions", json=ids))
    assert "image token" in error["message"] or "pictures" in error["message"]


def test_image_tokens_are_never_sampled(server: Served):
    biased = send(server, QUESTION, max_tokens=20, logit_bias={"444": 100}, logprobs=True)
    rows = biased.json()["choices"][0]["logprobs"]["content"]
    assert all(row["token"] != "<|media_pad|>" for row in rows)


def clip(data: bytes) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def test_a_video_is_eight_pictures(server: Served):
    """64 x 48 pixels are 6 x 4 patches, 6 tokens a frame."""
    alone = prompt_tokens(send(server, QUESTION))
    got = prompt_tokens(send(server, clip(encoded_video(20)), QUESTION))
    assert got - alone == 8 * (6 + frame_tokens(server))


@pytest.mark.parametrize("stream", [True, False])
def test_a11_a_truncated_or_empty_video_is_a_400_with_numbers(server: Served, stream: bool):
    whole = encoded_video(20)
    for data in (whole[: len(whole) // 2], whole[:40], b"not a video at all"):
        response = send(server, QUESTION, clip(data), stream=stream)
        assert response.status_code == 400
        error = error_of(response)
        assert error["param"] == "messages[0].content[1].video_url"
        assert str(len(data)) in error["message"]
    response = send(server, clip(b""))
    assert response.status_code == 400


def test_f01_a_video_is_not_fetched(server: Served):
    part = {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a.mp4"}}
    response = send(server, part)
    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_image_url"
