"""What a video file's bytes say without a decoder: which container, and whether it ends where its
own sizes say. Pure functions of bytes; no PyAV."""

# First bytes -> FFmpeg's reader. None of these refers to other files unless it is told to.
_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    *((4, kind, "mov") for kind in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
    (0, b"\x1a\x45\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
)
# Bytes after the last box are passed over, so a box is believed by its name.
_BOXES = frozenset(
    (*(kind for at, kind, _ in _MAGIC if at == 4), b"moof", b"mfra", b"styp", b"sidx", b"uuid")
    + (b"meta", b"emsg", b"prft", b"pnot", b"pdin", b"udta")
)
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675


def reader_of(data: bytes) -> str | None:
    """FFmpeg's reader for a file, by its first bytes; None for what is not accepted."""
    return next((name for at, magic, name in _MAGIC if data.startswith(magic, at)), None)


def promised_bytes(data: bytes, reader: str) -> int:
    """The least length that the sizes in a file promise: more than it has where it was cut off, but
    for a cut exactly between two elements of a file that does not say how many there are."""
    return {"mov": _mov_end, "matroska": _matroska_end, "avi": _avi_end}[reader](data)


def _mov_end(data: bytes) -> int:
    """Top-level boxes (ISO/IEC 14496-12, 4.2): a size of 32 bits, or 1 and one of 64, or 0 to the
    file's end."""
    at, end = 0, len(data)
    while at + 8 <= end and data[at + 4 : at + 8] in _BOXES:
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big") if at + 16 <= end else 16
        if size == 0 or size < 8:  # to the end, or broken: the reader will say
            return end
        at += size
    return max(at, end)


def _matroska_end(data: bytes) -> int:
    """EBML elements (RFC 8794) down to those of clusters: a segment or a cluster of unknown size is
    entered, anything else is passed by its size."""
    at, end = 0, len(data)
    while at < end:
        kind_len = 9 - data[at].bit_length()
        kind = int.from_bytes(data[at : at + kind_len], "big")
        at += kind_len
        if kind_len > 4 or (at < end and not data[at]):  # no element: bytes after the last one
            return end
        if at >= end:
            return at + 1
        width = 9 - data[at].bit_length()
        mask = (1 << 7 * width) - 1
        size = int.from_bytes(data[at : at + width], "big") & mask
        at += width
        if size == mask and kind not in (_SEGMENT, _CLUSTER):
            return end
        if size != mask and kind != _SEGMENT:
            at += size
        elif size != mask and at + size > end:
            return at + size
    return max(at, end)


def _avi_end(data: bytes) -> int:
    """The first RIFF chunk; those of OpenDML that follow it are seen by the reader."""
    return max(len(data), 8 + int.from_bytes(data[4:8], "little"))
