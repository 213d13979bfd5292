"""What a checkpoint holds beside its weights: tokenizer, chat template, image processor. No
torch."""

from dataclasses import dataclass

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
    folder = checkpoint.folder
    if checkpoint.gguf is not None:
        read = read_tokenizer(checkpoint.gguf.metadata)
        return Assets(
            tokenizer=read[0] if read else None, template=read[1] if read else None, processor=None
        )
    row = find(checkpoint.architecture)
    text = row.tokenizer_folder(folder)
    has_tokenizer = any((text / n).is_file() for n in ("tiktoken.model", "tokenizer.json"))
    has_processor = row.has_processor(folder)
    return Assets(
        tokenizer=Tokenizer.load(text) if has_tokenizer else None,
        template=ChatTemplate.load(text) if has_tokenizer else None,
        processor=load_processor(checkpoint.architecture, folder) if has_processor else None,
    )
