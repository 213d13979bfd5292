"""Image slots in a prompt -> the span of tokens that each picture fills, and each picture's
identity.

Owns the count: ids marked as image equal the pictures' tokens, or the prompt is refused. Knows
token ids as ints only; no text, no pixels."""

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from vitrail.config.finding import Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """Tokens [offset, offset + length) of a prompt belong to picture `image_index`."""

    offset: int
    length: int
    image_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedPrompt:
    """`token_ids` with one image id for each image token; `spans` in order, disjoint, one a
    picture, covering exactly the positions that hold the image id."""

    token_ids: list[int]
    spans: tuple[ImageSpan, ...]


def expand(
    token_ids: Sequence[int],
    slots: Sequence[int],
    num_tokens: Sequence[int],
    image_token_id: int,
    where: str = "messages",
) -> ExpandedPrompt:
    """Each slot (rising positions in `token_ids`, each holding the image id) repeated to its
    picture's count. `num_tokens`: tokens of each picture, in order. Raises `Refused` where there
    are not as many slots as pictures, or where text claims an image id outside a slot."""
    if len(slots) != len(num_tokens):
        raise _count(len(slots), "slot", num_tokens, where)
    claimed = [i for i, token in enumerate(token_ids) if token == image_token_id]
    if claimed != list(slots):
        raise Refused.because(
            where=where,
            saw=f"{len(claimed)} image tokens ({image_token_id}) for {len(slots)} slots",
            rule="only a picture's slot holds the image token",
            change="remove the image token from the text",
            code="image_token_in_text",
        )
    return _fill(token_ids, [(slot, slot + 1) for slot in slots], num_tokens)


def spread(
    token_ids: Sequence[int],
    slots: Sequence[int],
    parts: Sequence[int],
    between: Sequence[Sequence[int]],
    end: Sequence[int],
) -> tuple[list[int], list[int]]:
    """The ids with a slot for each part of each picture, and these slots. Slot i becomes `parts[i]`
    slots, `between[i]` after each but the last, `end` after that."""
    made: list[int] = []
    found: list[int] = []
    copied = 0
    for slot, count, ids in zip(slots, parts, between, strict=True):
        made += token_ids[copied:slot]
        for part in range(count):
            found.append(len(made))
            made.append(token_ids[slot])
            made += ids if part < count - 1 else end
        copied = slot + 1
    return [*made, *token_ids[copied:]], found


def locate(
    token_ids: Sequence[int],
    num_tokens: Sequence[int],
    image_token_id: int,
    where: str = "prompt_token_ids",
) -> ExpandedPrompt:
    """The pictures' spans in ids that a caller made: for each picture, in order, either one image
    id (expanded here) or a run of exactly its tokens (kept); neighbours may touch. Raises
    `Refused`, with the numbers, for anything else."""
    pads = [i for i, token in enumerate(token_ids) if token == image_token_id]
    if len(pads) == len(num_tokens):
        return _fill(token_ids, [(at, at + 1) for at in pads], num_tokens)
    taken: list[tuple[int, int]] = []
    at = 0  # of `pads`
    for index, length in enumerate(num_tokens):
        if at == len(pads):
            raise _count(index, "run", num_tokens, where)
        run = _run(pads, at)
        if run != 1 and run < length:
            raise Refused.because(
                where=where,
                saw=f"{run} image tokens in a row at position {pads[at]} for picture {index}, "
                f"which has {length}",
                rule="a picture takes one image token, or a run of exactly its own",
                change="pass one image token a picture",
                code="image_token_count",
            )
        length = min(run, length)
        taken.append((pads[at], pads[at] + length))
        at += length
    if at < len(pads):
        raise _count(len(pads), "image token", num_tokens, where)
    return _fill(token_ids, taken, num_tokens)


def image_identity(digest: bytes, processor_identity: bytes, model_revision: str) -> bytes:
    """32 bytes that stand for a picture's embeddings: its content's digest, its processor's
    parameters and the model's revision. Equal identities may share cache entries; nothing else
    may."""
    assert len(digest) == len(processor_identity) == 32, "both are 32-byte digests"
    return blake3(b"vitrail image" + digest + processor_identity + model_revision.encode()).digest()


def _run(pads: Sequence[int], at: int) -> int:
    """How many of `pads` follow each other without a gap, from index `at`."""
    end = at + 1
    while end < len(pads) and pads[end] == pads[end - 1] + 1:
        end += 1
    return end - at


def _fill(
    token_ids: Sequence[int], taken: Sequence[tuple[int, int]], num_tokens: Sequence[int]
) -> ExpandedPrompt:
    """Replace each taken range by as many copies of its first id as its picture has tokens."""
    expanded: list[int] = []
    spans: list[ImageSpan] = []
    copied = 0
    for index, ((start, end), length) in enumerate(zip(taken, num_tokens, strict=True)):
        assert length > 0, f"picture {index} has {length} tokens"
        expanded += token_ids[copied:start]
        spans.append(ImageSpan(offset=len(expanded), length=length, image_index=index))
        expanded += [token_ids[start]] * length
        copied = end
    expanded += token_ids[copied:]
    return ExpandedPrompt(token_ids=expanded, spans=tuple(spans))


def _count(seen: int, what: str, num_tokens: Sequence[int], where: str) -> Refused:
    plural = "" if seen == 1 else "s"
    return Refused.because(
        where=where,
        saw=f"{seen} {what}{plural} for {len(num_tokens)} pictures of {sum(num_tokens)} tokens",
        rule="each picture has one place in the prompt, and each place a picture",
        change="send as many pictures as the prompt has places for",
        code="image_count",
    )
