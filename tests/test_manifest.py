"""The JSON files: round trip of anything legal, refusal of anything else, and the exact layout of data files."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.layout import ALIGNMENT, LARGE_BYTES, lay_out, shares_of
from plait.ckpt.manifest import (
    FORMATS,
    DataFile,
    FileEntry,
    Fragment,
    Manifest,
    Objects,
    Piece,
    from_bytes,
    to_bytes,
)
from plait.ckpt.state import Sharded, flatten
from plait.ckpt.tables import build_table, check_covered, merge_objects
from plait.ckpt.values import is_float_text

SIZE = st.integers(0, 2**63 - 1)
NAME = st.text(max_size=12)
SHAPE = st.lists(SIZE, max_size=4).map(tuple)
PIECE = st.builds(
    Piece,
    name=NAME,
    dtype=NAME,
    logical_dtype=st.none() | NAME,
    full_shape=SHAPE,
    offset=SHAPE,
    shape=SHAPE,
    flat=st.none() | st.tuples(SIZE, SIZE),
    replica=st.tuples(SIZE, SIZE),
    key=NAME,
    file_offset=SIZE,
    num_bytes=SIZE,
    xxh3_128=NAME,
)
FRAGMENT = st.builds(
    Fragment,
    format=st.just(FORMATS[Fragment]),
    step=SIZE,
    attempt=NAME,
    rank=SIZE,
    world_size=SIZE,
    file=st.none()
    | st.builds(
        DataFile, name=NAME, bytes=SIZE, block_bytes=SIZE, crc32c=st.lists(st.integers(0, 2**32 - 1)).map(tuple)
    ),
    pieces=st.lists(PIECE, max_size=3).map(tuple),
    aliases=st.dictionaries(NAME, NAME, max_size=3),
    objects=st.dictionaries(NAME, st.integers() | NAME, max_size=3),
    per_rank=st.dictionaries(NAME, st.booleans(), max_size=3),
)
MANIFEST = Manifest(
    format=FORMATS[Manifest],
    step=12,
    attempt="12-0000000000000001-1",
    run="abc",
    epoch=3,
    world_size=1,
    grid={"dp": 1},
    commit="rename",
    files=(FileEntry("objects.json", 5, "00"), FileEntry("r00000.json", 7, "11")),
    aliases={},
    num_tensors=0,
    num_bytes=0,
)


@given(FRAGMENT)
def test_fragment_round_trip(fragment):
    assert from_bytes(Fragment, to_bytes(fragment), "here") == fragment


def test_manifest_round_trip_and_digest_line():
    data = to_bytes(MANIFEST)
    fields = {name: value for name, value in vars(MANIFEST).items() if value != {} or name != "metrics"}
    assert data.split(b"\n")[0] == json.dumps(fields, separators=(",", ":"), default=vars).encode()
    assert from_bytes(Manifest, data, "here") == MANIFEST
    line, tail, empty = data.split(b"\n")
    assert json.loads(line)["step"] == 12 and empty == b""
    assert tail == b"sha256:" + hashlib.sha256(line).hexdigest().encode()


def resealed(change) -> bytes:
    """Returns the manifest with its JSON changed and a digest that matches again: only strictness can refuse it."""
    raw = json.loads(to_bytes(MANIFEST).split(b"\n")[0])
    change(raw)
    line = json.dumps(raw).encode()
    return line + b"\nsha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.update(extra=1), r"unknown or missing fields \['extra'\]"),
        (lambda r: r.pop("epoch"), r"unknown or missing fields \['epoch'\]"),
        (lambda r: r.update(step=-1), "Manifest.step has a wrong type or range"),
        (lambda r: r.update(step=True), "Manifest.step has a wrong type or range"),
        (lambda r: r.update(step=1.0), "Manifest.step has a wrong type or range"),
        (lambda r: r.update(step=2**63), "Manifest.step has a wrong type or range"),
        (lambda r: r.update(grid={"dp": "2"}), "Manifest.grid has a wrong type"),
        (lambda r: r.update(files={}), "Manifest.files is not a list"),
        (lambda r: r["files"][0].update(more=0), r"FileEntry has unknown or missing fields \['more'\]"),
        (lambda r: r.update(format="plait-snapshot-2"), "this plait reads 'plait-snapshot-1'"),
        (lambda r: r.update(num_bytes=float("nan")), "NaN is not allowed"),
    ],
)
def test_strict_fields(change, text):
    with pytest.raises(SnapshotDamaged, match=text):
        from_bytes(Manifest, resealed(change), "here")


def test_doubled_key_and_deep_nesting_are_refused():
    for line in (b'{"step":1,"step":2}', b"[" * 100_000 + b"]" * 100_000):
        data = line + b"\nsha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n"
        with pytest.raises(SnapshotDamaged, match="is not JSON as written"):
            from_bytes(Manifest, data, "here")


def test_every_changed_or_missing_byte_is_seen():
    data = to_bytes(MANIFEST)
    for at in range(len(data)):
        with pytest.raises(SnapshotDamaged):
            from_bytes(Manifest, data[:at], "truncated")
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        with pytest.raises(SnapshotDamaged):
            from_bytes(Manifest, bytes(changed), "flipped")
    with pytest.raises(SnapshotDamaged):
        from_bytes(Manifest, data + b"x", "extended")


# ---- who writes what, and where it lies


def leaves_of(state):
    return list(flatten(state).tensors.values())


def test_replicas_share_the_bytes_evenly_and_write_each_once():
    state = {f"w{i}": torch.zeros(size) for i, size in enumerate([3_000_000, 500_000, 400_000, 350_000, 100, 7])}
    shares = [shares_of(leaves_of(state), rank, 4) for rank in range(4)]
    written = [sum(s.num_bytes for s in mine) for mine in shares]
    total = sum(t.numel() * 4 for t in state.values())
    assert sum(written) == total
    assert max(written) - min(written) <= 2 * LARGE_BYTES
    small = [s.leaf.name for mine in shares for s in mine if s.num_bytes <= 400]
    assert sorted(small) == ["w4", "w5"] and {s.leaf.name for s in shares[0]} >= {"w4", "w5"}


def test_replicas_of_a_shard_share_it_without_knowing_the_others():
    def shard(index):
        return {"w": Sharded(torch.zeros(1_500_000), (3_000_000,), (1_500_000,), replica=(index, 3))}

    ranges = sorted((s.start, s.stop) for i in range(3) for s in shares_of(leaves_of(shard(i)), 5, 16))
    assert ranges[0][0] == 0 and ranges[-1][1] == 1_500_000
    assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False)) and len(ranges) == 3


def test_large_pieces_are_aligned_and_there_are_no_holes():
    state = {"a": torch.zeros(300_001), "b": torch.zeros(300_001), "c": torch.zeros(3, dtype=torch.float64)}
    state |= {"d": torch.zeros(5, dtype=torch.uint8), "e": torch.zeros(0, 5), "f": torch.tensor(1.0)}
    layout = lay_out(shares_of(leaves_of(state), 0, 1))
    assert len(layout.header) % ALIGNMENT == 0
    for piece in layout.pieces:
        item = piece.share.leaf.tensor.element_size()
        assert piece.data_offset % (ALIGNMENT if piece.share.num_bytes >= LARGE_BYTES else item) == 0
    header = json.loads(layout.header[8:])
    spans = sorted(tuple(e["data_offsets"]) for name, e in header.items() if name != "__metadata__")
    assert spans[0][0] == 0 and spans[-1][1] == layout.data_bytes
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))


# ---- fragments together


def piece(name="w", offset=(0,), shape=(4,), full_shape=(8,), **more):
    values = dict(dtype="F32", logical_dtype=None, flat=None, replica=(0, 1), key=name, file_offset=0, xxh3_128="")
    values |= dict(num_bytes=4 * shape[0]) | more
    return Piece(name=name, offset=offset, shape=shape, full_shape=full_shape, **values)


def fragment(rank, *pieces, **more):
    file = DataFile(f"r{rank:05d}.safetensors", 1 << 20, 4 << 20, (0,))
    values = dict(aliases={}, objects={}, per_rank={}) | more
    return Fragment(FORMATS[Fragment], 1, "a", rank, 2, file, tuple(pieces), **values)


def test_gap_and_overlap_name_the_tensor():
    with pytest.raises(SnapshotDamaged, match="'w' is not covered exactly once: 4 of 8 elements are in no piece"):
        check_covered(build_table([fragment(0, piece())], "here"), "here")
    with pytest.raises(SnapshotDamaged, match=r"overlap \(pieces of ranks \[0, 1\]"):
        check_covered(build_table([fragment(0, piece()), fragment(1, piece(offset=(2,)))], "here"), "here")
    check_covered(build_table([fragment(0, piece()), fragment(1, piece(offset=(4,)))], "here"), "here")


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (piece(num_bytes=17), "17 bytes for 4 elements"),
        (piece(offset=(6,)), "is not inside"),
        (piece(offset=(0, 0)), "is not inside"),
        (piece(flat=(3, 9), num_bytes=24), "flat range"),
        (piece(file_offset=1 << 20), "ends behind"),
        (piece(full_shape=(0, 1 << 62, 2), offset=(0, 0, 0), shape=(0, 0, 0), num_bytes=0), "no tensor can have"),
        (piece(dtype="F33"), "unknown to this torch"),
        (piece(codec="zstd"), "codec 'zstd'"),
    ],
)
def test_a_piece_that_contradicts_itself_is_refused(bad, text):
    with pytest.raises(SnapshotDamaged, match=text):
        build_table([fragment(0, bad)], "here")


def test_ranks_that_contradict_each_other_are_named():
    other = dataclasses.replace(piece(offset=(4,)), dtype="I32")
    with pytest.raises(SnapshotDamaged, match="rank 1, tensor 'w': torch.int32"):
        build_table([fragment(0, piece()), fragment(1, other)], "here")
    with pytest.raises(SnapshotDamaged, match="tied to 'v' on rank 1 but not on rank 0"):
        build_table([fragment(0, piece()), fragment(1, aliases={"w": "v"})], "here")
    with pytest.raises(ValueError, match="value 'lr' is 1 on rank 0 but 2 on rank 1"):
        merge_objects([fragment(0, objects={"lr": 1}), fragment(1, objects={"lr": 2})])


def test_objects_keep_names_sorted_and_values_exact():
    merged = merge_objects([fragment(0, objects={"b": 1}), fragment(1, objects={"a": [1], "b": 1})])
    assert list(merged) == ["a", "b"]
    record = Objects(FORMATS[Objects], merged)
    assert from_bytes(Objects, to_bytes(record), "here") == record


@pytest.mark.parametrize("text", ["0x1.8p+1", "nan", "-inf", "0x0.0p+0"])
def test_metrics_are_hex_floats_and_nothing_else(text):
    assert is_float_text(float.fromhex(text).hex())
    for wrong in (text + " ", "1.5", 1.5, None, "0x" + "0" * 50, "0x1p+99999"):
        assert not is_float_text(wrong)
