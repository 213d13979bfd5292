"""`Tokenizer`: text to token ids and back, from a checkpoint's own files.

Two kinds of files are read. `tiktoken.model` (with `tokenizer_config.json`) decides where both are
there, because that is what Kimi's authors ship; else `tokenizer.json`. A *special* token is one
that the checkpoint flags `"special": true`: `encode` never makes one out of text, `decode` skips
it. Added tokens flagged false (`<think>`, runs of blanks) are vocabulary like any other, as the
authors meant. Knows nothing of templates and turns: which special ends a turn is the model's
business.
"""

import binascii
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import cast

import tiktoken
import tokenizers

from vitrail.config.finding import Refused
from vitrail.config.reader import Json, load_json, read_asset, read_file, there
from vitrail.tokenizer.specials import Specials

BYTES = frozenset(bytes([b]) for b in range(256))
# Control characters, what UTF-8 never holds, and the first bytes of planes without letters.
RARE_BYTES = frozenset(
    bytes([b])
    for b in (*(set(range(0x20)) - {0x09, 0x0A, 0x0D}), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100))
)


class Tokenizer(ABC):
    """One checkpoint's tokenizer. Immutable after loading; every method may be called from any
    thread.

    `specials`: its special tokens; `vocab_size`: every id is less than this, ids in between may be
    unassigned (they decode to nothing); `prefix_ids`: what the authors put before a plain text, a
    begin token for those models that were trained with one (templates write it themselves).
    """

    def __init__(
        self, tokens: Mapping[int, bytes], specials: Specials, prefix_ids: tuple[int, ...] = ()
    ):
        self.specials, self.prefix_ids = specials, prefix_ids
        self.special_ids: Mapping[str, int] = MappingProxyType(specials.ids)
        self.vocab_size = 1 + max((*tokens, *specials.by_id))
        shown = [b""] * self.vocab_size
        for token_id, token in tokens.items():
            shown[token_id] = token
        everything = shown.copy()
        for token_id, literal in specials.by_id.items():
            shown[token_id], everything[token_id] = b"", literal.encode()
        self._shown, self._everything = tuple(shown), tuple(everything)
        absent = b"".join(sorted(BYTES - set(tokens.values())))
        self._unspelt = re.compile(b"[" + re.escape(absent) + b"]" if absent else b"(?!)")

    @staticmethod
    def load(folder: Path) -> "Tokenizer":
        """The tokenizer of the checkpoint in `folder`. Raises `Refused`: code `no_tokenizer` where
        there is none, `bad_tokenizer` or `bad_checkpoint` where it is garbled or of a kind we would
        not compute exactly."""
        if there(folder / "tiktoken.model"):
            return KimiTokenizer(folder)
        if there(folder / "tokenizer.json"):
            config = folder / "tokenizer_config.json"
            return JsonTokenizer(
                load_json(folder / "tokenizer.json"),
                read_file(folder / "tokenizer.json").decode(),
                load_json(config) if there(config) else {},
            )
        raise _bad(
            "tokenizer",
            f"neither tiktoken.model nor tokenizer.json in {folder}",
            "one of these files defines the tokenizer",
            "complete the model folder",
            "no_tokenizer",
        )

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Special tokens' literals in it are ordinary text. Raises `Refused`
        for a lone surrogate, which no UTF-8 text holds, and for a rare character that some
        vocabularies cannot spell."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise Refused.because(
                where="text",
                saw=f"the lone surrogate {text[error.start]!r} at character {error.start}",
                rule="text is valid Unicode",
                change="send the character as a whole surrogate pair or as UTF-8",
                code="invalid_unicode",
            ) from error
        lost = self._unspelt.search(data)
        if lost is not None:
            at = len(data[: lost.start()].decode(errors="ignore"))
            raise Refused.because(
                where="text",
                saw=f"{text[at]!a} at character {at}, with the byte {lost[0][0]:#04x}",
                rule="every byte of the text has a token in the model's vocabulary",
                change="remove the character",
                code="unspelt_character",
            )
        return self._encode(text)

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """`encode` of valid Unicode."""

    def id_of(self, special: str) -> int:
        """The id of a special token's literal. Raises `Refused` where there is no such token."""
        token_id = self.specials.ids.get(special)
        if token_id is None:
            raise _bad(
                "tokenizer",
                f"no special token {special!r} among {len(self.specials.ids)}",
                "the model's own tokens are special tokens of its tokenizer",
                "use the tokenizer files published with the model",
            )
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, which decoding skips."""
        return token_id in self.specials.by_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for, perhaps part of a character; a special's literal in
        UTF-8; nothing for an id that the vocabulary does not assign."""
        return self._everything[token_id] if 0 <= token_id < self.vocab_size else b""

    def bytes_table(self, skip_special: bool) -> tuple[bytes, ...]:
        """`token_bytes` of every id below `vocab_size`; with `skip_special`, specials have none."""
        return self._shown if skip_special else self._everything

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`: the tokens' bytes joined, invalid UTF-8 replaced by U+FFFD as
        `bytes.decode` does."""
        table = self.bytes_table(skip_special)
        data = b"".join(table[i] for i in ids if 0 <= i < len(table))
        return data.decode("utf-8", errors="replace")


# Kimi's own split, eight alternatives: runs of Han; words that end in lower case; words in upper
# case (both without Han, with an English contraction); up to three digits; punctuation; newlines;
# blanks.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_KIMI_RESERVED = 256
_PIECE_CHARS, _RUN_CHARS = 400_000, 25_000
_RUN = re.compile(r"\s+|\S+")


class KimiTokenizer(Tokenizer):
    """`tiktoken.model`, Kimi's split pattern, and the names in `tokenizer_config.json`.

    256 ids above the ranks are reserved for specials; those without a name are
    `<|reserved_token_ID|>`. Text is cut as the published class cuts it: every 400,000 characters,
    and after every 25,000 of one kind (blank or not).
    """

    def __init__(self, folder: Path):
        ranks = _read_ranks(folder / "tiktoken.model")
        config = load_json(folder / "tokenizer_config.json")
        named = _kimi_added(config, len(ranks))
        reserved = range(len(ranks), len(ranks) + _KIMI_RESERVED)
        added = {i: (f"<|reserved_token_{i}|>", True) for i in reserved} | named
        specials, plain = _by_flag(added, "tokenizer_config.json")
        tokens = {rank: token for token, rank in ranks.items()}
        super().__init__(tokens | {i: s.encode() for s, i in plain.items()}, specials)
        self._plain = set(plain)
        self._core = tiktoken.Encoding(
            name="kimi", pat_str=KIMI_SPLIT, mergeable_ranks=ranks, special_tokens=plain
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in kimi_pieces(text):
            ids += self._core.encode(piece, allowed_special=self._plain, disallowed_special=())
        return ids


def kimi_pieces(text: str) -> Iterator[str]:
    """`text` in the pieces that the published class tokenises one by one."""
    for start in range(0, len(text), _PIECE_CHARS):
        chunk = text[start : start + _PIECE_CHARS]
        cut = 0
        if len(chunk) > _RUN_CHARS:
            for run in _RUN.finditer(chunk):
                for end in range(run.start() + _RUN_CHARS, run.end(), _RUN_CHARS):
                    yield chunk[cut:end]
                    cut = end
        yield chunk[cut:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The lines "base64 rank" of a tiktoken file: ranks 0 .. n-1, all 256 single bytes among
    them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_asset(path).splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[binascii.a2b_base64(token, strict_mode=True)] = int(rank)
        except ValueError as error:
            raise _bad(
                f"{path.name}: line {number}",
                f"{line[:40]!r} ({error})",
                "a line is a base64 token, a blank and its rank",
                "fetch the file again",
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _bad(
            path.name,
            f"{len(ranks)} tokens whose ranks are not 0 to {len(ranks) - 1}",
            "ranks are dense and unique",
            "fetch the file again",
        )
    _need_bytes(BYTES, ranks, path.name)
    return ranks


def _kimi_added(config: Json, num_ranks: int) -> dict[int, tuple[str, bool]]:
    where = "tokenizer_config.json"
    kind = config.get("tokenizer_class")
    if kind != "TikTokenTokenizer":
        raise _bad(
            f"{where}: tokenizer_class",
            repr(kind),
            "tiktoken.model is read as Kimi's TikTokenTokenizer, whose split pattern we know",
            "add a tokenizer.json, which states its own pattern",
        )
    added = _added_from_config(config)
    low = [i for i in added if i < num_ranks]
    if not added or low:
        raise _bad(
            f"{where}: added_tokens_decoder",
            f"ids {low[:5]} below the {num_ranks} ranks" if low else "no tokens",
            "special tokens are named there, at ids above the ranks",
            "restore the published tokenizer_config.json",
        )
    return added


class JsonTokenizer(Tokenizer):
    """`tokenizer.json` of the byte-level BPE kind (GPT-2, Llama 3, Qwen, and Kimi's converted).

    Refused: other models (Unigram, WordPiece), SentencePiece-style decoders and prefix spaces,
    whose text depends on what stands before it, added tokens that eat blanks or respect words, and
    post-processors that append tokens.
    """

    def __init__(self, data: Json, text: str, config: Json):
        """`data` is the JSON of `text`; `config`: tokenizer_config.json, {} where there is none."""
        name = "tokenizer.json"
        vocab = _byte_level_vocab(data)
        added = _added_from_json(data)
        _agree(added, config)
        specials, plain = _by_flag(added, name)
        alphabet = _byte_alphabet()
        tokens: dict[int, bytes] = {i: s.encode() for s, i in plain.items()}
        for token, token_id in vocab.items():
            if token_id in added:
                continue
            if not alphabet.keys() >= set(token):
                raise _bad(
                    f"{name}: model.vocab",
                    f"token {token_id}, {token!r:.60}",
                    "every character of a byte-level token stands for one byte",
                    "use a checkpoint with a byte-level tokenizer",
                )
            tokens[token_id] = bytes(alphabet[c] for c in token)
        # SmolLM2's own vocabulary lacks some of the rare ones: a text with one of them is refused
        _need_bytes(BYTES - RARE_BYTES, tokens.values(), name)
        _specials_are_unreachable(data, specials)
        super().__init__(tokens, specials, _prefix(data, specials))
        self._core = _build(text)

    def _encode(self, text: str) -> list[int]:
        return self._core.encode(text, add_special_tokens=False).ids


def _build(text: str) -> tokenizers.Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise _bad(
            "tokenizer.json", f"{error}", "the file is one that tokenizers reads", "fetch it again"
        ) from error
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = True  # that is: as ordinary text
    return core


def _byte_level_vocab(data: Json) -> dict[str, int]:
    """The vocabulary of a byte-level BPE, or `Refused` where the file is anything else."""
    model = _object(data.get("model"))
    before, after = _steps(data.get("pre_tokenizer")), _steps(data.get("decoder"))
    levels = [step for step in before if step.get("type") == "ByteLevel"]
    wrong: list[str] = []
    if model.get("type", "BPE") != "BPE":
        wrong.append(f"model.type {model.get('type')!r}")
    if model.get("byte_fallback"):
        wrong.append("model.byte_fallback true")
    wrong += [
        f"model.{key} {model[key]!r}"
        for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        if model.get(key)
    ]
    if not levels or any(step.get("add_prefix_space", True) for step in levels):
        wrong.append(f"pre_tokenizer {before!r:.120}")
    if [step.get("type") for step in after] != ["ByteLevel"]:
        wrong.append(f"decoder {after!r:.120}")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not all(type(i) is int and i >= 0 for i in vocab.values()):
        wrong.append("model.vocab that is not an object of ids")
    if wrong:
        raise _bad(
            "tokenizer.json",
            "; ".join(wrong),
            "a byte-level BPE without prefix space: its decoded text does not depend on neighbours",
            "use a checkpoint with a byte-level tokenizer",
        )
    return cast(dict[str, int], vocab)


def _prefix(data: Json, specials: Specials) -> tuple[int, ...]:
    """The special tokens that the post-processor puts before a text."""
    prefix: list[str] = []
    wrong: list[object] = []
    for step in _steps(data.get("post_processor")):
        if step.get("type") == "TemplateProcessing":
            pieces = cast(Sequence[Json], step.get("single") or ())
            names = [_object(piece.get("SpecialToken")).get("id") for piece in pieces]
            begun = [n for n in names if isinstance(n, str)]
            if names != [*begun, None] or not set(begun) <= specials.ids.keys():
                wrong.append(pieces)
            prefix += begun
        elif step.get("type") != "ByteLevel":
            wrong.append(step)
    if wrong:
        raise _bad(
            "tokenizer.json: post_processor",
            f"{wrong!r:.120}",
            "at most special tokens before the text",
            "use a checkpoint whose tokenizer appends nothing",
        )
    return tuple(specials.ids[name] for name in prefix)


def _specials_are_unreachable(data: Json, specials: Specials) -> None:
    """No merge, and no whole-word look-up, may make a special token out of ordinary text."""
    model = _object(data.get("model"))
    in_vocab = specials.ids.keys() & _object(model.get("vocab")).keys()
    if not in_vocab:
        return
    merges = cast(Sequence[str | Sequence[str]], model.get("merges") or ())
    made = {m.replace(" ", "", 1) if isinstance(m, str) else "".join(m) for m in merges}
    reachable = in_vocab if model.get("ignore_merges") else in_vocab & made
    if reachable:
        raise _bad(
            "tokenizer.json: model",
            f"{len(reachable)} special tokens made by merges, {min(reachable)!r} among them",
            "text can never claim a special token",
            "keep special tokens in added_tokens alone",
        )


def _added_from_json(data: Json) -> dict[int, tuple[str, bool]]:
    """`added_tokens`: id -> (literal, special)."""
    where = "tokenizer.json: added_tokens"
    entries = data.get("added_tokens") or []
    if not isinstance(entries, list):
        raise _bad_added(where, entries)
    return dict(_added_entry(where, _object(e), _object(e).get("id")) for e in entries)


def _added_from_config(config: Json) -> dict[int, tuple[str, bool]]:
    """`added_tokens_decoder`: id -> (literal, special)."""
    where = "tokenizer_config.json: added_tokens_decoder"
    entries = _object(config.get("added_tokens_decoder"))
    return dict(
        _added_entry(where, _object(entry), int(key) if key.isdecimal() else key)
        for key, entry in entries.items()
    )


def _added_entry(where: str, entry: Json, token_id: object) -> tuple[int, tuple[str, bool]]:
    literal, special = entry.get("content"), entry.get("special", False)
    eats = [flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]
    if not isinstance(literal, str) or not literal or type(special) is not bool or eats:
        raise _bad_added(where, entry)
    if type(token_id) is not int or token_id < 0:
        raise _bad_added(where, {"id": token_id})
    return token_id, (literal, special)


def _bad_added(where: str, saw: object) -> Refused:
    return _bad(
        where,
        f"{saw!r:.120}",
        "an added token has an id, a literal, and neither lstrip, rstrip nor single_word",
        "restore the published file",
    )


def _by_flag(added: Mapping[int, tuple[str, bool]], where: str) -> tuple[Specials, dict[str, int]]:
    """The special tokens and the ordinary added ones, literal -> id."""
    literals = [literal for literal, _ in added.values()]
    twice = sorted({s for s in literals if literals.count(s) > 1}) if _repeats(literals) else []
    if twice:
        raise _bad(
            where,
            f"{twice[0]!r} with two ids",
            "a literal has one id",
            "restore the published file",
        )
    specials = {literal: i for i, (literal, special) in added.items() if special}
    plain = {literal: i for i, (literal, special) in added.items() if not special}
    return Specials(specials), plain


def _repeats(literals: Sequence[str]) -> bool:
    return len(set(literals)) < len(literals)


def _agree(added: Mapping[int, tuple[str, bool]], config: Json) -> None:
    """`tokenizer_config.json`, where it lists added tokens, must not contradict tokenizer.json."""
    for token_id, (literal, _) in _added_from_config(config).items():
        if added.get(token_id, ("",))[0] != literal:
            raise _bad(
                f"tokenizer_config.json: added_tokens_decoder {token_id}",
                f"{literal!r}, where tokenizer.json has {added.get(token_id)!r}",
                "both files name the same added tokens",
                "take both files from the same revision of the model",
            )


def _need_bytes(needed: frozenset[bytes], tokens: Iterable[bytes], where: str) -> None:
    missing = needed - set(tokens)
    if missing:
        raise _bad(
            where,
            f"no token for {len(missing)} of {len(needed)} bytes, {min(missing)!r} among them",
            "a byte-level vocabulary spells every byte, or text would be lost",
            "fetch the file again",
        )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100
    in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _steps(step: object) -> list[Json]:
    """A pre-tokenizer, decoder or post-processor as a flat list, sequences opened."""
    data = _object(step)
    inner = data.get("pretokenizers") or data.get("decoders") or data.get("processors")
    if isinstance(inner, list):
        return [flat for s in inner for flat in _steps(s)]
    return [data] if data else []


def _object(value: object) -> Json:
    return cast(Json, value) if isinstance(value, dict) else {}


def _bad(where: str, saw: str, rule: str, change: str, code: str = "bad_tokenizer") -> Refused:
    return Refused.because(where=where, saw=saw, rule=rule, change=change, code=code)
