"""From what a client sent (messages, text or ids, with pictures) to `EngineRequest`s. The offline
API, the terminal and the server share it, so that everything a client can get wrong is found here,
before the engine and before any response header. Thread-safe; no torch."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from threading import Event

import msgspec
from PIL import Image

from vitrail.config.engine import EngineConfig
from vitrail.config.finding import Finding, Refused, accept
from vitrail.config.model import PatchRules
from vitrail.engine.conversation import Picture
from vitrail.engine.request import (
    EngineRequest,
    ImageInput,
    SamplingParams,
    sampling_findings,
    typed,
)
from vitrail.models.assets import Assets, image_literal, vocabulary_findings
from vitrail.models.checkpoint import Checkpoint
from vitrail.tokenizer.chat import ChatOptions
from vitrail.tokenizer.messages import Message
from vitrail.tokenizer.tokenizer import Tokenizer
from vitrail.vision.image import (
    DecodedImage,
    ImageLimits,
    decode,
    from_array,
    from_path,
    from_pil,
)
from vitrail.vision.placeholders import ExpandedPrompt, expand, image_identity, locate, spread
from vitrail.vision.preprocess import ImageGrid, PatchedImage, Separators
from vitrail.vision.video import Frame, VideoRoom

# Specials that end a turn in published chat formats, whatever config.json calls the end of text.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")


class ServingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready engine tells its frontends. `kv_tokens`: tokens that the KV cache
    holds. `patch_rules`: how the tower takes pictures, None without one. `video_frames`: taken
    from a video. `encoder_resizes`: it resizes pictures itself, quicker than a frontend would."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    encoder_patches: int
    kv_tokens: int
    patch_rules: PatchRules | None
    video_frames: int
    encoder_resizes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Ids with one image id for each image token, and the images in order."""

    token_ids: list[int]
    images: list[ImageInput]


class Preparer:
    """Turns prompts into requests for one engine. `limits`: of a picture, as the engine's choices
    set them."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, assets: Assets, facts: ServingFacts
    ):
        self.facts = facts
        self.assets = assets
        self._config = config
        self._revision = checkpoint.revision.hex()
        self.limits = ImageLimits(
            max_bytes=config.max_image_bytes, max_pixels=config.max_image_pixels
        )
        self._openers = ThreadPoolExecutor(config.image_workers, thread_name_prefix="picture")
        self.video_frames = facts.video_frames
        stops = set(facts.eos_token_ids)
        if assets.tokenizer is not None:
            ids = assets.tokenizer.special_ids
            stops |= {ids[name] for name in TURN_ENDS if name in ids}
            if found := vocabulary_findings(assets.tokenizer, facts.vocab_size):
                raise Refused(found)
        self._stop_ids = frozenset(i for i in stops if i < facts.vocab_size)

    def chat(
        self,
        messages: Sequence[Message],
        pictures: Sequence[Picture],
        options: ChatOptions,
        gone: Event | None = None,
    ) -> Prompt:
        """A conversation through the checkpoint's template; the n-th image part is `pictures[n]`.
        `gone` is set when nobody waits for it any more, which ends the decoding of videos."""
        tokenizer, template = self.tokenizer, self.assets.template
        assert template is not None, "a tokenizer comes with a template, perhaps one that refuses"
        image_id = self.facts.image_token_id
        literal = None if image_id is None else accept(image_literal(tokenizer, image_id))
        self._count(pictures, "messages")
        around = self._separators(pictures)
        rendered = template.render(
            tokenizer,
            messages,
            image_token=literal,
            options=options,
            after_images=[each.text for each in around],
        )
        if not pictures or image_id is None:
            return self._prompt(list(rendered.token_ids), [])
        patched = self._patch(pictures, gone)
        ids, slots = self._spread(rendered.token_ids, rendered.image_slots, patched, around)
        parts = [part for parts in patched for part in parts]
        expanded = expand(ids, slots, [p.grid.num_tokens for p in parts], image_id)
        return self._prompt(expanded, parts)

    def text(self, text: str) -> Prompt:
        """Plain text, special tokens in it being text too, after the begin token of a model that
        was trained with one."""
        return self._prompt([*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)], [])

    def ids(self, token_ids: Sequence[int], pictures: Sequence[Picture] = ()) -> Prompt:
        """Ids that the caller made: one image id a picture, which brings its separators, or as many
        as each of its parts has tokens, the separators being the caller's."""
        self._check_vocabulary(token_ids, "prompt_token_ids")
        self._count(pictures, "images")
        patched = self._patch(pictures)
        image_id = self.facts.image_token_id
        if image_id is None:
            return self._prompt(list(token_ids), [])
        parts = [part for parts in patched for part in parts]
        ids, around = token_ids, self._separators(pictures)
        slots = [i for i, token in enumerate(token_ids) if token == image_id]
        if len(slots) == len(pictures) and any(each.end for each in around):
            ids, _ = self._spread(token_ids, slots, patched, around, last_text=True)
        return self._prompt(locate(ids, [p.grid.num_tokens for p in parts], image_id), parts)

    def requests(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, want_logits: bool = False
    ) -> list[EngineRequest]:
        """One request a choice; only the first returns the prompt's logprobs.
        Raises `Refused` with
        every finding of the parameters and lengths."""
        params = typed(params)
        found = sampling_findings(params, self.facts.vocab_size)
        found += self._length_findings(prompt, params)
        if params.stop and self.assets.tokenizer is None:
            found.append(_no_tokenizer("stop"))
        if found:
            raise Refused(found)
        room = self.facts.max_model_len - len(prompt.token_ids)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._stop_ids
        seed = params.seed if params.seed is not None else _mix(self._config.seed, request_id)
        ids = [request_id] if params.n == 1 else [f"{request_id}-{i}" for i in range(params.n)]
        return [
            EngineRequest(
                id=each,
                prompt_token_ids=prompt.token_ids,
                images=prompt.images,
                params=params if i == 0 else msgspec.structs.replace(params, prompt_logprobs=None),
                max_tokens=room if params.max_tokens is None else params.max_tokens,
                stop_token_ids=stops,
                seed=seed if i == 0 else _mix(seed, str(i)),
                group=request_id if params.n > 1 else "",
                want_logits=want_logits,
            )
            for i, each in enumerate(ids)
        ]

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises `Refused` where there is none."""
        if self.assets.tokenizer is None:
            raise Refused(_no_tokenizer("prompt"))
        return self.assets.tokenizer

    def _length_findings(self, prompt: Prompt, params: SamplingParams) -> list[Finding]:
        limit, length = self.facts.max_model_len, len(prompt.token_ids)
        wanted = params.max_tokens or 1
        if length == 0:
            return [
                Finding(
                    where="prompt",
                    saw="0 tokens",
                    rule="a prompt has at least one token",
                    change="send some text",
                )
            ]
        if length + wanted <= limit:
            return []
        return [
            Finding(
                where="prompt" if length >= limit else "max_tokens",
                saw=f"{length} prompt tokens and {wanted} to generate, {length + wanted} together",
                rule=f"prompt and output fit in {limit} tokens",
                change=f"send at most {limit - 1} prompt tokens"
                if length >= limit
                else f"shorten the prompt or generate at most {limit - length} tokens",
                code="context_length_exceeded",
            )
        ]

    def _check_vocabulary(self, token_ids: Sequence[int], where: str) -> None:
        """An id without a row in the embedding would fail the whole step that holds it."""
        vocab = self.facts.vocab_size
        image_id = self.facts.image_token_id  # its row is never read, so it need not have one
        bad = [i for i in token_ids if not 0 <= i < vocab and i != image_id]
        if bad:
            raise Refused.because(
                where,
                f"{len(bad)} ids outside the vocabulary, the first {bad[0]}",
                f"ids are 0 to {vocab - 1}",
                "use the checkpoint's own tokenizer",
            )

    def _count(self, images: Sequence[Picture], where: str) -> None:
        """Before anything is decoded."""
        if images and self.facts.image_token_id is None:
            raise Refused.because(
                where,
                f"{len(images)} images",
                "this model takes text alone",
                "remove the images or serve a vision model",
            )
        if len(images) > self._config.max_images:
            raise Refused.because(
                where,
                f"{len(images)} images",
                f"at most {self._config.max_images} in one request",
                "send fewer, or start the engine with a larger --max-images",
            )

    def _separators(self, pictures: Sequence[Picture]) -> list[Separators]:
        """The text around each picture."""
        processor = self.assets.processor
        if processor is None:
            return [Separators()] * len(pictures)
        alone = _is_alone(pictures)
        return [processor.separators(alone and not p.is_frame) for p in pictures]

    def _spread(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        patched: Sequence[Sequence[PatchedImage]],
        around: Sequence[Separators],
        last_text: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Each picture's slot as slots of its parts, with what stands around them. `last_text`: the
        text after the last part is not in the ids yet."""
        counts = [len(parts) for parts in patched]
        if not any(each.end for each in around):
            return spread(token_ids, slots, counts, [()] * len(slots), ())
        encode = self.tokenizer.encode
        end = encode(around[0].end)
        between = [[*end, *encode(each.text)] for each in around]
        if last_text and any(each.text for each in around):
            end = between[0]  # a picture that is alone
        return spread(token_ids, slots, counts, between, end)

    def _patch(
        self, pictures: Sequence[Picture], gone: Event | None = None
    ) -> list[tuple[PatchedImage, ...]]:
        """Each picture's parts, pictures of one request side by side. A video is decoded once for
        all its frames, and a frame is parts before the next one is decoded. What is refused is the
        first in the request's order."""
        alone, videos = _is_alone(pictures), dict[int, list[tuple[PatchedImage, ...]]]()
        room = VideoRoom(gone=gone or Event())

        def opened(picture: Picture) -> tuple[PatchedImage, ...]:
            return self._open(picture, alone and not picture.is_frame, videos, room)

        stills = [p for p in pictures if not p.is_frame]
        if len(stills) < 2:
            return [opened(p) for p in pictures]
        with closing(self._side_by_side(opened, stills)) as made:
            return [opened(p) if p.is_frame else next(made) for p in pictures]

    def _side_by_side(
        self, opened: Callable[[Picture], tuple[PatchedImage, ...]], pictures: Sequence[Picture]
    ) -> Generator[tuple[PatchedImage, ...]]:
        """What `opened` gives of each, in order. No more than keep the threads busy are queued:
        other requests' pictures take turns with these. Whoever stops asking ends the rest."""
        todo, waiting = iter(pictures), deque[Future[tuple[PatchedImage, ...]]]()

        def queue(count: int) -> None:
            waiting.extend(self._openers.submit(opened, p) for p in islice(todo, count))

        try:
            queue(2 * self._config.image_workers)
            while waiting:
                made = waiting.popleft().result()
                queue(1)
                yield made
        finally:
            for each in waiting:
                each.cancel()

    def _open(
        self,
        picture: Picture,
        alone: bool,
        videos: dict[int, list[tuple[PatchedImage, ...]]],
        room: VideoRoom,
    ) -> tuple[PatchedImage, ...]:
        source, where = picture.source, picture.where
        if isinstance(source, PatchedImage):
            self._check_grid(source.grid, where)
            return (source,)
        if self.assets.processor is None:
            raise Refused.because(
                where,
                "a picture, and the checkpoint has no preprocessor_config.json",
                "pictures are processed as the checkpoint says",
                "pass preprocessed patches with their grid, or complete the checkpoint",
            )
        if isinstance(source, bytes):
            image = decode(source, self.limits, where)
        elif isinstance(source, Path):
            image = from_path(source, self.limits, where)
        elif isinstance(source, Image.Image):
            image = from_pil(source, self.limits, where)
        elif isinstance(source, Frame):
            key = id(source.video)
            if key not in videos:
                videos[key] = source.all(
                    self.limits, where, room, lambda frame: self._parts(frame, False, where)
                )
            return videos[key][source.index]
        else:
            image = from_array(source, self.limits, where)
        return self._parts(image, alone, where)

    def _parts(self, image: DecodedImage, alone: bool, where: str) -> tuple[PatchedImage, ...]:
        processor = self.assets.processor
        assert processor is not None
        grids = processor.grids(image.height, image.width, alone)
        if isinstance(grids, Finding):
            raise Refused(replace(grids, where=where))
        for grid in grids:
            self._check_grid(grid, where)
        whole = processor.unresized(image, alone) if self.facts.encoder_resizes else None
        return processor.parts(image, alone) if whole is None else (whole,)

    def _check_grid(self, grid: ImageGrid, where: str) -> None:
        if grid.sequence_patches > self.facts.encoder_patches:
            raise Refused.because(
                where,
                f"{grid.height} x {grid.width} = {grid.sequence_patches} patches",
                f"at most {self.facts.encoder_patches}, the encoder's budget",
                "send a smaller picture, or start with a larger --encoder-patches",
                "image_too_large",
            )

    def _prompt(
        self, prompt: list[int] | ExpandedPrompt, patched: Sequence[PatchedImage]
    ) -> Prompt:
        if isinstance(prompt, list):
            self._check_vocabulary(prompt, "prompt")
            return Prompt(token_ids=prompt, images=[])
        self._check_vocabulary(prompt.token_ids, "prompt")
        processor = self.assets.processor
        rules = processor.identity if processor is not None else bytes(32)
        images = [
            ImageInput(
                identity=image_identity(patched[s.image_index].digest, rules, self._revision),
                offset=s.offset,
                num_tokens=s.length,
                height=patched[s.image_index].grid.height,
                width=patched[s.image_index].grid.width,
                patches=patched[s.image_index].patches,
                sequences=patched[s.image_index].grid.sequences,
                block=patched[s.image_index].grid.block,
                resized=patched[s.image_index].resized,
            )
            for s in prompt.spans
        ]
        return Prompt(token_ids=prompt.token_ids, images=images)


def _is_alone(pictures: Sequence[Picture]) -> bool:
    """Whether there is exactly one picture, frames of videos not counted."""
    return sum(not p.is_frame for p in pictures) == 1


def _mix(seed: int, text: str) -> int:
    """A 63-bit seed from another and a name."""
    digest = blake2b(f"{seed}:{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _no_tokenizer(where: str) -> Finding:
    return Finding(
        where=where,
        saw="text, and the checkpoint has no tokenizer",
        rule="text needs tiktoken.model or tokenizer.json",
        change="send token ids, or complete the checkpoint",
        code="no_tokenizer",
    )
