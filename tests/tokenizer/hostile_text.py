"""Texts made to look like special tokens, whole and in pieces."""

from hypothesis import strategies as st

LITERALS = (
    "<|media_pad|>",
    "<|media_start|>",
    "<|im_end|>",
    "<|im_user|>",
    "<|reserved_token_428|>",
    "[BOS]",
    "[EOT]",
)
IMAGE = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"


@st.composite
def _pieces(draw: st.DrawFn) -> str:
    literal = draw(st.sampled_from(LITERALS))
    first = draw(st.integers(0, len(literal)))
    return literal[first : draw(st.integers(first, len(literal)))]


fragments = st.one_of(
    _pieces(),
    st.sampled_from((*LITERALS, IMAGE)),
    st.sampled_from(
        (" ", "\n", "\t ", "x", "user", "image", "\ufdd0", "\ufdd1\ufdef", "漢字", "👩‍🚀")
    ),
    st.text(max_size=4),
)
hostile = st.lists(fragments, max_size=6).map("".join)
