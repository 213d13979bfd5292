"""What a checkpoint holds beside its weights: tokenizer, chat template, image processor. No
torch."""

from dataclasses import dataclass
from pathlib import Path

from vitrail.config.finding import Finding
from vitrail.config.reader import there
from vitrail.models.checkpoint import Checkpoint
from vitrail.models.registry import find, load_processor
from vitrail.tokenizer.chat import ChatTemplate
from vitrail.tokenizer.gguf import read_tokenizer
from vitrail.tokenizer.tokenizer import Tokenizer
from vitrail.vision.preprocess import ImageProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class Assets:
    """What a checkpoint folder holds beside its weights. `tokenizer` is None for a checkpoint that
    serves token ids only, `processor` for one whose pictures come preprocessed or not at all."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    processor: ImageProcessor | None


def load_assets(checkpoint: Checkpoint) -> Assets:
    """Raises `Refused` for files that are there and wrong; a missing tokenizer or processor is
    None."""
    return Assets(
        tokenizer=load_tokenizer(checkpoint),
        template=load_template(checkpoint),
        processor=load_processor_of(checkpoint),
    )


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """Raises `Refused` for one that is there and wrong."""
    if checkpoint.gguf is not None:
        read = read_tokenizer(checkpoint.gguf.metadata)
        return read[0] if read else None
    folder = _text_folder(checkpoint)
    return None if folder is None else Tokenizer.load(folder)


def load_template(checkpoint: Checkpoint) -> ChatTemplate | None:
    """Comes with a tokenizer, perhaps one that refuses. Raises `Refused` for one that is wrong."""
    if checkpoint.gguf is not None:
        read = read_tokenizer(checkpoint.gguf.metadata)
        return read[1] if read else None
    folder = _text_folder(checkpoint)
    return None if folder is None else ChatTemplate.load(folder)


def load_processor_of(checkpoint: Checkpoint) -> ImageProcessor | None:
    """Raises `Refused` for one that is there and wrong."""
    folder, architecture = checkpoint.folder, checkpoint.architecture
    if checkpoint.gguf is not None or not find(architecture).has_processor(folder):
        return None
    return load_processor(architecture, folder)


def _text_folder(checkpoint: Checkpoint) -> Path | None:
    """Where the tokenizer's files are, if they are."""
    folder = find(checkpoint.architecture).tokenizer_folder(checkpoint.folder)
    found = any(there(folder / name) for name in ("tiktoken.model", "tokenizer.json"))
    return folder if found else None


def vocabulary_findings(tokenizer: Tokenizer, vocab_size: int) -> list[Finding]:
    """Every id that ordinary text can become has a row in the model. Specials beyond it are refused
    where a template writes them: published tokenizers name more than they use."""
    beyond = range(vocab_size, tokenizer.vocab_size)
    missing = [i for i in beyond if not tokenizer.is_special(i) and tokenizer.token_bytes(i)]
    if not missing:
        return []
    return [
        _bad(
            f"{len(missing)} ordinary tokens from id {missing[0]} on, and {vocab_size} rows",
            "every ordinary token has a row in the model's embedding",
        )
    ]


def image_literal(tokenizer: Tokenizer, image_token_id: int) -> str | list[Finding]:
    """What a template writes for a picture."""
    if image_token_id in tokenizer.specials.by_id:
        return tokenizer.specials.by_id[image_token_id]
    return [
        _bad(
            f"no special token of id {image_token_id}",
            "the model's image token is a special of its tokenizer",
        )
    ]


def _bad(saw: str, rule: str) -> Finding:
    return Finding(
        where="tokenizer",
        saw=saw,
        rule=rule,
        change="use the tokenizer that was published with the model",
        code="bad_tokenizer",
    )
