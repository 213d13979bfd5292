"""The rows about what clients send: pictures, conversations, text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from vitrail.check.report import Fact, Row
from vitrail.check.sizes import Sizes, masked_ids
from vitrail.check.subject import Subject
from vitrail.config.engine import plan_frames
from vitrail.config.finding import Finding, Refused
from vitrail.config.model import ModelConfig
from vitrail.models.assets import image_literal, vocabulary_findings
from vitrail.tokenizer.chat import ChatOptions, ChatTemplate, Rendered
from vitrail.tokenizer.messages import ImagePart, Message, TextPart
from vitrail.tokenizer.tokenizer import Tokenizer
from vitrail.vision.placeholders import expand
from vitrail.vision.preprocess import ImageGrid, ImageProcessor

# Where the user names none: width, height.
SPREAD = ((64, 64), (512, 512), (1024, 1024), (1920, 1080), (3024, 4032))
ROUND_TRIP = "A sign says: 42 €, naïve café, 東京, \n\ttabs <|and|> 🙂 it's 3.14!"
TOOL: Mapping[str, Fact] = {
    "type": "function",
    "function": {
        "name": "look_up_price",
        "description": "The price of an article.",
        "parameters": {
            "type": "object",
            "properties": {"article": {"type": "string"}},
            "required": ["article"],
        },
    },
}


class Read(NamedTuple):
    """An asset, or why it cannot be read; None: the checkpoint has none."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    processor: ImageProcessor | None


def images_row(subject: Subject, sizes: Sizes | None) -> Row:
    """Grid, patches and tokens of pictures, against the encoder's budget and the context."""
    if subject.config.vision is None:
        return Row(name="images", details=("a text model",))
    processor = subject.processor
    if processor is None:
        return Row(name="images", findings=(_no_processor(),))
    wanted = subject.question.images
    details: list[str] = []
    findings = _frame_findings(subject)
    facts: list[Fact] = []
    for width, height in wanted or SPREAD:
        where, severity = f"picture of {width} x {height}", "error" if wanted else "warning"
        grids = processor.grids(height, width, alone=True)
        if isinstance(grids, Finding):
            findings.append(_named(grids, where, severity))
            continue
        limit = None if sizes is None else sizes.max_model_len
        found = _grid_findings(subject, grids, (width, height), limit)
        findings += [_named(f, where, severity) for f in found]
        tokens, patches = sum(g.num_tokens for g in grids), sum(g.num_patches for g in grids)
        parts, first = f"{len(grids)} parts, " if grids[1:] else "", next(iter(grids))
        details.append(
            f"{width} x {height}: {parts}{first.height} x {first.width} patches"
            f"{_scales(first)}, {patches:,} in all, {tokens:,} tokens"
        )
        facts.append({"width": width, "height": height, "patches": patches, "tokens": tokens})
    budget = f"budget {subject.patches:,} patches a step, largest picture {processor.max_patches:,}"
    return Row(
        name="images",
        details=(budget, *details),
        findings=tuple(findings),
        facts={"budget": subject.patches, "largest": processor.max_patches, "pictures": facts},
    )


def _frame_findings(subject: Subject) -> list[Finding]:
    """A video's frames are pictures of one request."""
    planned = plan_frames(subject.choices, subject.config.video_frames)
    return planned if isinstance(planned, list) else []


def _scales(grid: ImageGrid) -> str:
    return f" in {grid.sequences} sequences" if grid.sequences > 1 else ""


def _named(finding: Finding, where: str, severity: str) -> Finding:
    return replace(finding, where=where, severity="error" if severity == "error" else "warning")


def _grid_findings(
    subject: Subject, grids: Sequence[ImageGrid], size: tuple[int, int], limit: int | None
) -> list[Finding]:
    found: list[Finding] = []
    choices, tokens = subject.choices, sum(g.num_tokens for g in grids)
    longest = max(g.sequence_patches for g in grids)
    checks = (
        (
            longest <= subject.patches,
            f"a sequence of {longest} patches",
            f"at most {subject.patches}, the encoder's budget",
            f"pass --encoder-patches {longest} or more",
        ),
        (
            limit is None or tokens < limit,
            f"{tokens} tokens",
            f"a picture and its answer fit in {limit} tokens",
            f"send a smaller picture, or serve {tokens + 1} tokens or more",
        ),
        (
            size[0] * size[1] <= choices.max_image_pixels,
            f"{size[0] * size[1]} pixels",
            f"at most {choices.max_image_pixels}, by the header",
            "raise --max-image-pixels",
        ),
    )
    for holds, saw, rule, change in checks:
        if not holds:
            found.append(
                Finding(where="", saw=saw, rule=rule, change=change, code="image_too_large")
            )
    return found


def _no_processor() -> Finding:
    return Finding(
        where="preprocessor_config.json",
        saw="missing",
        rule="pictures are processed as the checkpoint says",
        change="complete the checkpoint, or send preprocessed patches with their grid",
        code="no_processor",
        severity="warning",
    )


def template_row(config: ModelConfig, read: Read) -> Row:
    """The conversations that clients send come out, each picture once."""
    if read.tokenizer is None or read.template is None:
        return Row(name="template", findings=(_no_tokenizer(),))
    literal = None
    findings: list[Finding] = []
    if config.image_token_id is not None:
        literal = image_literal(read.tokenizer, config.image_token_id)
        if isinstance(literal, list):
            return Row(name="template", findings=tuple(literal))
    details: list[str] = []
    made: dict[str, Rendered] = {}
    for name, (messages, options) in conversations(literal is not None).items():
        try:
            made[name] = read.template.render(
                read.tokenizer, messages, image_token=literal, options=options
            )
        except Refused as refused:
            if refused.findings[0].code == "no_chat_template":
                return Row(name="template", findings=refused.findings)
            needed = name in ("text", "two images")
            findings += [
                _named(f, f"{f.where}: {name}", "error" if needed else "warning")
                for f in refused.findings
            ]
            continue
        details.append(f"{name}: {len(made[name].token_ids)} tokens")
    if "text" in made and "tools" in made and made["text"].text == made["tools"].text:
        findings.append(_tools_unwritten())
    if "two images" in made and config.image_token_id is not None:
        findings += _count_findings(made["two images"], read.processor, config.image_token_id)
    return Row(name="template", details=tuple(details), findings=tuple(findings))


def conversations(images: bool) -> dict[str, tuple[list[Message], ChatOptions]]:
    """By name, what every client may send; two pictures to a model that sees them."""
    user = Message(role="user", content=(TextPart(text="What does it cost?"),))
    system = Message(role="system", content=(TextPart(text="Answer with a number."),))
    plain, tools = ChatOptions(), ChatOptions(tools=(dict(TOOL),))
    made = {
        "text": ([user], plain),
        "system": ([system, user], plain),
        "tools": ([user], tools),
    }
    if images:
        parts = (ImagePart(), TextPart(text="Which is larger?"), ImagePart())
        made["two images"] = ([Message(role="user", content=parts)], plain)
    return made


def _tools_unwritten() -> Finding:
    return Finding(
        where="chat template: tools",
        saw="a request with tools renders as one without",
        rule="the template writes the tools that a request brings",
        change="do not send tools to this model, or use a template that knows them",
        code="tools_ignored",
        severity="warning",
    )


def _count_findings(
    rendered: Rendered, processor: ImageProcessor | None, image_id: int
) -> list[Finding]:
    """Two pictures of unequal sizes fill their places exactly."""
    if processor is None:
        return []
    grids = [processor.grids(h, w, alone=False) for h, w in ((480, 640), (900, 300))]
    parts = [part for each in grids if not isinstance(each, Finding) for part in each]
    counts = [part.num_tokens for part in parts]
    if len(counts) != len(rendered.image_slots):
        return []  # a picture of several parts brings its own separators
    try:
        made = expand(list(rendered.token_ids), list(rendered.image_slots), counts, image_id)
    except Refused as refused:
        return list(refused.findings)
    seen = sum(token == image_id for token in made.token_ids)
    if seen == sum(counts):
        return []
    return [
        Finding(
            where="chat template: two images",
            saw=f"{seen} image tokens for pictures of {counts}",
            rule="as many as the pictures have",
            change="use the published template and processor",
            code="image_count",
        )
    ]


def _no_tokenizer() -> Finding:
    return Finding(
        where="tokenizer",
        saw="neither tiktoken.model nor tokenizer.json",
        rule="text needs a tokenizer, a conversation its template",
        change="complete the checkpoint, or send token ids alone",
        code="no_tokenizer",
        severity="warning",
    )


def tokenizer_row(config: ModelConfig, read: Read) -> Row:
    """Ids inside the vocabulary, the image token out of reach, text that comes back."""
    tokenizer, vocab = read.tokenizer, config.text.vocab_size
    findings = _eos_findings(config)
    if tokenizer is None:
        return Row(name="tokenizer", findings=(*findings, _no_tokenizer()))
    findings += vocabulary_findings(tokenizer, vocab)
    details = [
        f"{tokenizer.vocab_size:,} ids, {len(tokenizer.specials.ids)} special; {vocab:,} rows"
    ]
    if config.image_token_id is not None:
        literal = image_literal(tokenizer, config.image_token_id)
        if isinstance(literal, list):
            findings += literal
        else:
            findings += _claim_findings(tokenizer, literal, config.image_token_id)
            masked = "never sampled" if masked_ids(config) else "beyond the vocabulary"
            details.append(f"image token {literal!r} = {config.image_token_id}, {masked}")
    findings += _round_trip(tokenizer)
    return Row(name="tokenizer", details=tuple(details), findings=tuple(findings))


def _eos_findings(config: ModelConfig) -> list[Finding]:
    vocab = config.text.vocab_size
    outside = [i for i in config.eos_token_ids if not 0 <= i < vocab]
    if config.eos_token_ids and not outside:
        return []
    none = not config.eos_token_ids
    return [
        Finding(
            where="config.json: eos_token_id",
            saw="none" if none else f"{outside} of {list(config.eos_token_ids)}",
            rule=f"an end token is an id of the vocabulary, 0 to {vocab - 1}",
            change="restore the published config.json and generation_config.json",
            code="bad_eos",
            severity="warning" if none or len(outside) < len(config.eos_token_ids) else "error",
        )
    ]


def _claim_findings(tokenizer: Tokenizer, literal: str, image_id: int) -> list[Finding]:
    """Text that spells the image token stays text."""
    if image_id not in tokenizer.encode(f"a {literal} b"):
        return []
    return [
        Finding(
            where="tokenizer",
            saw=f"text with {literal!r} becomes id {image_id}",
            rule="text never claims a picture's place",
            change="mark the token as special in the tokenizer's files",
            code="bad_tokenizer",
        )
    ]


def _round_trip(tokenizer: Tokenizer) -> list[Finding]:
    try:
        text = tokenizer.decode(tokenizer.encode(ROUND_TRIP))
    except Refused as refused:
        return [_named(f, f.where, "warning") for f in refused.findings]
    if text == ROUND_TRIP:
        return []
    return [
        Finding(
            where="tokenizer",
            saw=f"{ROUND_TRIP!r} comes back as {text!r}",
            rule="text comes back from its ids",
            change="use the tokenizer that was published with the model",
            code="bad_tokenizer",
        )
    ]
