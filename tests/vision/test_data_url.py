"""Image URLs of a client: data URLs in every spelling; anything else is refused unseen."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.config.finding import Refused
from vitrail.vision.image import ImageLimits, decode, parse_data_url

FOLDER = Path(__file__).parents[1] / "cases" / "images"
URLS = {url["id"]: url for url in json.loads((FOLDER / "manifest.json").read_text())["urls"]}
LIMITS = ImageLimits(max_bytes=32 << 20, max_pixels=64_000_000)
EXAMPLES = settings(max_examples=100, derandomize=True, deadline=None)


@pytest.mark.parametrize("name", URLS)
def test_a15_a16_urls(name: str) -> None:
    url = URLS[name]
    if url["expect"] == "accept":
        image = decode(parse_data_url(url["url"], LIMITS, "url"), LIMITS, "url")
        assert image.pixels.shape == (28, 28, 3)
        return
    with pytest.raises(Refused) as caught:
        parse_data_url(url["url"], LIMITS, "messages[0].content[0].image_url.url")
    assert caught.value.findings[0].where == "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("url", "saw"),
    [
        ("data:image/png,hello", "no ';base64' before the comma"),
        ("data:image/png", "no comma in a data URL of 14 characters"),
        ("data:,", "no ';base64'"),
        ("data:image/png;base64", "no comma"),
        ("data:image/png;base64,", "an empty payload"),
        ("data:image/png;base64, \n", "an empty payload"),
        ("data:;base64,AAAA*BBB", "'\\*' at character 4"),
        ("data:;base64,AAAAé", "'é' at character 4"),
        ("data:;base64,AAAAA", "5 characters"),
        ("data:;base64,AA=A", "4 characters"),
        ("data:base64,AAAA", "no ';base64'"),
        ("", "an empty URL"),
        ("https://example.com/a.png", "scheme 'https'"),
        ("FILE:///x", "scheme 'file'"),
        ("iVBORw0KGgo", "11 characters without 'data:'"),
    ],
)
def test_a15_data_url_says_what_was_wrong(url: str, saw: str) -> None:
    with pytest.raises(Refused, match=saw):
        parse_data_url(url, LIMITS, "url")


@EXAMPLES
@given(
    st.binary(min_size=1, max_size=200),
    st.sampled_from(["data", "DATA", "Data"]),
    st.sampled_from(["", "image/jpeg", "image/jpeg;charset=utf-8", "image/svg+xml;a=b;c=d"]),
    st.sampled_from([";base64", ";BASE64", ";Base64"]),
    st.booleans(),
)
def test_a16_any_data_url_round_trips(
    data: bytes, scheme: str, kind: str, marker: str, wrapped: bool
) -> None:
    payload = (base64.encodebytes if wrapped else base64.b64encode)(data).decode()
    assert parse_data_url(f"{scheme}:{kind}{marker},{payload}", LIMITS, "url") == data


def test_data_url_is_bounded_before_it_is_decoded() -> None:
    limits = ImageLimits(max_bytes=300, max_pixels=1)
    fits = base64.b64encode(bytes(300)).decode()
    assert parse_data_url("data:;base64," + fits, limits, "url") == bytes(300)
    with pytest.raises(Refused, match="at most 300 bytes"):
        parse_data_url("data:;base64," + "*" * 500, limits, "url")


def test_f01_f06_urls_are_refused_without_looking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words whether the file exists, and neither a file nor a socket opened."""
    path = tmp_path / "a.png"
    path.write_bytes((FOLDER / "size_3x3_png.png").read_bytes())
    urls = [str(path), path.as_uri(), f"file://localhost{path}#x.png"]
    urls += [u["url"] for n, u in URLS.items() if n.startswith(("ssrf", "file"))]

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("looked")

    def said() -> list[str]:
        words = []
        for url in urls:
            with pytest.raises(Refused) as caught:
                parse_data_url(url, LIMITS, "url")
            words.append(str(caught.value))
        return words

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", forbidden)
        patch.setattr("socket.socket", forbidden)
        with_file = said()
    path.unlink()
    assert said() == with_file
