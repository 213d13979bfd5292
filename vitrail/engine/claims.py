"""Which images a step encodes for whom, and how far a sequence's chunk may read: planning on ints.
Entries and their users are the encoder cache's; knows neither pages nor tokens."""

from vitrail.cache.encoder import EncoderCache, EncoderEntry, EntryState
from vitrail.engine.policy import EncodeBudget, SchedulerLimits
from vitrail.engine.request import ImageInput, Sequence
from vitrail.engine.step import StepDraft


class Claims:
    """Owns the budget of encoding, the image that is encoded in part (no more than one at a time),
    and of the step at hand: entries that are encoded in it by id (`encoded`), and whether an image
    did not fit, so that nobody behind it takes the room it needs."""

    def __init__(self, encoder: EncoderCache, limits: SchedulerLimits):
        self._encoder = encoder
        self._budget = EncodeBudget(limits.encoder_patches, limits.patches_beside)
        self._begun: EncoderEntry | None = None
        self._wait = False
        self.encoded: dict[int, EncoderEntry] = {}

    def begin(self, index: int, decodes: int, waiting: int) -> None:
        """Of the step that is planned next."""
        self._budget.begin(index, decodes, waiting)
        self._wait, self.encoded = False, {}

    def finished(self, index: int) -> None:
        """What this step and those before it encode is done."""
        self._budget.done = index

    def claim(self, draft: StepDraft, seq: Sequence, end: int) -> int:
        """Hold the entries of all images before `end`; where the chunk must end if one is not to be
        had, not encoded to its end or still being encoded beside: then those behind it are begun
        all the same. `seq.held` are those of images[image_at:] so far."""
        images, held, ready = seq.request.images, len(seq.held), end
        for i, image in enumerate(images[seq.image_at :]):
            if image.offset >= end:
                break
            before = min(ready, max(image.offset, seq.launched))
            if i >= held:
                entry = self._entry(image)
                if entry is None:
                    self._wait = True
                    return before
                self._encoder.acquire(entry, seq.id)
                seq.held.append(entry)
            if not self._encode(draft, seq.held[i], image):
                return before
            if not self._budget.may_read(seq.held[i].step):
                ready = before
        return ready

    def _entry(self, image: ImageInput) -> EncoderEntry | None:
        """The entry of `image`, a new one if need be. None: no room, or no budget to begin it (to
        end it, while another is begun). One in use anyway takes nothing from who waits."""
        entry = self._encoder.lookup(image.identity)
        if entry is not None and (entry.users or not self._wait):
            return entry
        begun = self._begun is not None and self._begun.state is EntryState.NEW
        least = image.sequence_patches * (image.sequences if begun else 1)
        if self._wait or least > self._budget.left(image.sequence_patches):
            return None
        return self._encoder.admit(image.identity, image.num_tokens)

    def _encode(self, draft: StepDraft, entry: EncoderEntry, image: ImageInput) -> bool:
        """As many more sequences of `image` as the step's budget holds; whether it is encoded to
        its end. Whoever holds an entry goes on with it: nobody else might."""
        left = image.sequences - entry.encoded
        if left:
            size = image.sequence_patches
            count = min(left, self._budget.left(size) // size)
            if count:
                entry.step = self._budget.take(count * size)
                self.encoded[entry.id] = entry
                draft.encode(entry.id, image, entry.encoded, count)
                entry.encoded += count
            if count < left:  # the budget is the oldest picture's
                self._wait, self._begun = True, entry
            elif self._begun is entry:
                self._begun = None
        return entry.encoded == image.sequences
