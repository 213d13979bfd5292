"""Texts whose special literals count, as their authors' own tokenizers read them."""

from vitrail.tokenizer.tokenizer import Tokenizer


def encode_with_specials(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of `text` with special literals recognised."""
    pieces = tokenizer.specials.split(text)
    ids = tokenizer.encode(pieces[0])
    for literal, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        ids.append(tokenizer.specials.ids[literal])
        ids.extend(tokenizer.encode(piece))
    return ids
