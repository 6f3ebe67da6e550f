"""How a coded copy stores a data file: block by block, as byte planes under zstd, sealed if wanted, in small parts.

Not an archive format: a part is a valid safetensors file of U8 tensors, one a block of the plain file. The one idea:
blocks keep their numbers and their CRC32C, so that whoever wants a range fetches only its blocks, and what comes out
of the decoder is proven by the checksums of the plain file. zstd needs `zstandard` (extra `remote`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from plait.ckpt.crypt import SEAL_BYTES, Cipher
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.layout import DTYPES
from plait.ckpt.manifest import DataFile, Fragment

PART_BLOCKS = 8  # 32 MiB of plain bytes: what one put sends and one retry repeats; memory is about three times that
HEAD_BYTES = 4096  # header of a part: 8 entries of about 90 bytes, padded
# Bytes of an item, one plane each -> the integer that holds one. Shifting whole items (2.3 ms for 4 MiB of fp32)
# is five times as fast as copying bytes with a stride (11.8 ms): thread time, 2026-11-29, this machine's one core.
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_FRAME_BYTES = (
    1 + 4 * 8
)  # width and plane sizes: what a coded block that does not shrink is longer than its content
LEVEL = 1  # of zstd: normal fp32 numbers shrink 1.19 x; what does not shrink is found out quickly


class Coder:
    """Encodes and decodes blocks. level: of zstd, None for no compression; cipher: None for no encryption.

    Thread rule: any thread at any time (zstd contexts are made per call; they cost 20 us beside 4 MiB).
    """

    def __init__(self, level: int | None, cipher: Cipher | None) -> None:
        self._level, self._cipher = level, cipher

    @property
    def codec(self) -> str | None:
        """The piece's `codec` in the fragment."""
        names = ["zstd"] * (self._level is not None) + ["aes-256-gcm"] * (self._cipher is not None)
        return "+".join(names) or None

    def encode(self, place: str, raw: memoryview, width: int) -> bytes:
        """Returns what is stored for a block. place: what a sealed block is bound to. width: bytes of its items."""
        coded = bytes(raw) if self._level is None else compress(raw, width, self._level)
        return coded if self._cipher is None else self._cipher.seal(place, coded)

    def decode(self, place: str, coded: bytes, num_bytes: int, where: str) -> bytes | bytearray:
        """Returns the block of `num_bytes`. SnapshotDamaged naming `where`."""
        if self._cipher is not None:
            coded = self._cipher.open(place, coded, where)
        if self._level is not None:
            return decompress(coded, num_bytes, where)
        if len(coded) != num_bytes:
            raise SnapshotDamaged(f"{where}: {len(coded)} bytes where {num_bytes} belong")
        return coded


def compress(raw: memoryview, width: int, level: int = LEVEL) -> bytes:
    """Returns width, the size of each byte plane's frame, the frames, and the bytes after the last whole item.

    A plane that does not shrink is kept as it is. Exact for any bytes and any width.
    """
    zstd = _zstandard().ZstdCompressor(level=level)
    items = len(raw) // width
    planes = bytearray(items * width)
    if items:
        split = torch.frombuffer(planes, dtype=torch.uint8).view(width, items)
        whole = torch.frombuffer(raw, dtype=WIDTHS[width], count=items)
        for plane in range(width):
            split[plane].copy_(whole >> 8 * plane)  # the lowest byte of each
    frames = []
    for plane in range(width):
        kept = memoryview(planes)[plane * items : (plane + 1) * items]
        frame = zstd.compress(kept)
        frames.append(frame if len(frame) < items else kept)
    sizes = b"".join(len(frame).to_bytes(4, "little") for frame in frames)
    return b"".join([bytes([width]), sizes, *frames, raw[items * width :]])


def decompress(coded: bytes, num_bytes: int, where: str) -> bytearray:
    """Returns the `num_bytes` of a block. Every size is checked before memory is taken. SnapshotDamaged."""
    width = coded[0] if coded else 0
    if width not in WIDTHS:
        raise SnapshotDamaged(f"{where}: {width} is no width of an item")
    items, at = num_bytes // width, 1 + 4 * width
    sizes = [int.from_bytes(coded[1 + 4 * p : 5 + 4 * p], "little") for p in range(width)]
    if len(coded) != at + sum(sizes) + num_bytes - items * width or any(size > items for size in sizes):
        raise SnapshotDamaged(f"{where}: a coded block of {len(coded)} bytes does not have the sizes that it says")
    planes, view = bytearray(items * width), memoryview(coded)
    for plane, size in enumerate(sizes):
        frame = view[at : at + size]
        planes[plane * items : (plane + 1) * items] = frame if size == items else _plane(frame, items, where)
        at += size
    result = bytearray(num_bytes)
    if items:
        split = torch.frombuffer(planes, dtype=torch.uint8).view(width, items)
        whole = torch.frombuffer(result, dtype=WIDTHS[width], count=items)
        for plane in range(width):
            whole |= split[plane].to(WIDTHS[width]) << 8 * plane
    result[items * width :] = view[at:]
    return result


def _plane(frame: memoryview, items: int, where: str) -> bytes:
    zstandard = _zstandard()
    try:
        said = zstandard.frame_content_size(frame)
        if said != items:  # also "unknown" (-1): nothing is expanded on trust
            raise SnapshotDamaged(f"{where}: a frame says {said} bytes where {items} belong")
        data: bytes = zstandard.ZstdDecompressor().decompress(frame, max_output_size=items, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SnapshotDamaged(f"{where}: cannot be decompressed ({error})") from error
    if len(data) != items:
        raise SnapshotDamaged(f"{where}: {len(data)} bytes came out where {items} belong")
    return data


def widths(fragment: Fragment, source_step: int | None, file: DataFile) -> list[int]:
    """Returns for each block of a data file the item size of what fills most of it: planes of that width shrink best.

    Pieces are aligned to their items and blocks to all of them (docs/format.md), so planes are in phase.
    """
    filled: list[dict[int, int]] = [{} for _ in file.crc32c]
    for piece in fragment.pieces:
        if piece.source_step != source_step or not piece.num_bytes:
            continue
        dtype = DTYPES.get(piece.dtype)
        width = 1 if dtype is None or piece.logical_dtype is not None else dtype.itemsize
        width = width // 2 if dtype is not None and dtype.is_complex else width
        end = piece.file_offset + piece.num_bytes
        for block in range(piece.file_offset // file.block_bytes, -(-end // file.block_bytes)):
            start = max(piece.file_offset, block * file.block_bytes)
            stop = min(end, (block + 1) * file.block_bytes)
            filled[block][width] = filled[block].get(width, 0) + stop - start
    return [max(block, key=block.__getitem__) if block else 1 for block in filled]


def pack(first: int, blocks: Sequence[bytes]) -> bytes:
    """Returns a part: a safetensors file whose tensors are the coded blocks `first`, `first` + 1, ..."""
    return b"".join([_head(first, [len(block) for block in blocks]), *blocks])


def _head(first: int, sizes: Sequence[int]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "plait-part-1"}}
    at = 0
    for number, size in enumerate(sizes, first):
        entries[_key(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    assert len(text) <= HEAD_BYTES - 8, "more blocks than a header holds"
    return (HEAD_BYTES - 8).to_bytes(8, "little") + text.ljust(HEAD_BYTES - 8)


def unpack(head: bytes, part_bytes: int, first: int, plain: Sequence[int], where: str) -> list[tuple[int, int]]:
    """Returns (start, stop) in the part of each block, from its first HEAD_BYTES. SnapshotDamaged.

    plain: bytes of the blocks `first`, ... when decoded, which bound what may be read for them.
    """
    try:
        entries = json.loads(head[8:HEAD_BYTES])
        places = [tuple(entries[_key(n)]["data_offsets"]) for n in range(first, first + len(plain))]
        good = len(entries) == 1 + len(plain)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotDamaged(f"{where}: is no part of a coded copy ({error})") from error
    at = 0
    for place, size in zip(places, plain, strict=True):
        good = good and len(place) == 2 and place[0] == at and type(place[1]) is int
        good = good and at <= place[1] <= at + size + MAX_FRAME_BYTES + SEAL_BYTES
        at = place[1] if good else at
    if not good or HEAD_BYTES + at != part_bytes or head != _head(first, [stop - start for start, stop in places]):
        raise SnapshotDamaged(f"{where}: its header does not fit its {part_bytes} bytes and {len(plain)} blocks")
    return [(HEAD_BYTES + start, HEAD_BYTES + stop) for start, stop in places]


def coder_of(codec: str | None, cipher: Cipher | None) -> Coder:
    """Returns the decoder of a fragment's codec."""
    return Coder(LEVEL if codec and "zstd" in codec else None, cipher if codec and "aes" in codec else None)


def _key(number: int) -> str:
    return f"block.{number:08d}"


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError("compression needs `zstandard`: pip install 'plait[remote]'") from error
    return zstandard
