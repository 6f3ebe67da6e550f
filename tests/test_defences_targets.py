"""Defences that were deleted one by one and that no other test missed: what lies in tensors, on both ways.

What a guarded optimizer owns and what a capture takes for one tensor; which copy a restore opens and holds; which
bytes go into which view of a target, and through how much memory. As in test_defences.py, most tests call the
function itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait import _C
from plait.ckpt import SnapshotError, Snapshots, StateError, TornSnapshot, candidates, keep, read_plan, restore
from plait.ckpt.aside import bare_digest, check_bare
from plait.ckpt.box import Box
from plait.ckpt.candidates import Candidate
from plait.ckpt.capture import find_aliases
from plait.ckpt.device import range_of
from plait.ckpt.guard import Flight, Guards
from plait.ckpt.leaf import Leaf
from plait.ckpt.manifest import Piece
from plait.ckpt.read_plan import MAX_SPAN_BYTES, Move, Target, moves_of, windows
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.tables import Source, TensorEntry
from plait.ckpt.windows import HostLane, Windows
from tests.faults import empty_state, is_small_state, restored_seed, small_state

# ---- what an optimizer owns, and one tensor by two names ----------------------------------------------------------


def test_an_optimizer_owns_what_lies_in_its_tensors_to_the_last_byte():
    flat = torch.zeros(100)
    strided = torch.as_strided(torch.zeros(100), (3, 2), (30, 5))

    class Optimizer:
        def register_write_pre_hook(self, hook: object) -> SimpleNamespace:
            return SimpleNamespace(remove=lambda: None)

        def pieces(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(a=flat[:60], b=strided)]

    optimizer, guards = Optimizer(), Guards()
    guards.add(optimizer)
    mine = [flat[:60], flat[20:60], strided, strided[2, 1]]
    others = [flat, flat[20:61], flat[60:], flat[:0], torch.as_strided(strided, (67,), (1,))]
    assert [owner is not None for owner in guards.owners([*mine, *others])] == [True] * 4 + [False] * 5
    assert range_of(strided) == (strided.data_ptr(), 66 * 4)
    guards.close()


def flight(**device: Any) -> Flight:
    stage = SimpleNamespace(copied=True, close=lambda: None)
    begun = Flight(3, stage, [], ["w"])  # type: ignore[arg-type]
    begun.device = SimpleNamespace(torn=None, close=lambda: None, **device)
    return begun


def test_copies_from_a_device_hold_writes_up_tell_of_torn_ones_and_are_ended():
    held, ended = [], []
    begun = flight(hold_writes=lambda *what: held.append(what))
    owner: Any = object()
    begun.fence(owner)
    begun.fence(owner, [torch.zeros(3)])  # of the host
    assert held == [(owner, None), (owner, [])]
    begun.device.torn = "w"
    with pytest.raises(TornSnapshot, match="step 3: 'w' was changed"):
        begun.settle()
    begun.device.close = lambda: ended.append(1)
    begun.end()
    assert ended and begun.device is None
    begun.fence()  # there is nothing left to wait for


def test_a_lazy_conjugate_or_negative_of_the_same_memory_is_another_tensor():
    w = torch.randn(4, dtype=torch.complex64)
    views = {"a": w, "b": w.conj(), "c": w.conj().imag, "d": w.imag, "e": w.view(4)}
    leaves = [Leaf(name, name, view, (4,), Box((0,), (4,)), None, (0, 1)) for name, view in views.items()]
    assert views["c"].is_neg() and find_aliases(leaves) == {"e": "a"}


def test_ranks_that_hold_other_bare_tensors_are_named():
    names = ["model/a", "model/b", "opt/a"]
    check_bare([(0, bare_digest(names)), (1, bare_digest(reversed(names)))])
    for others in (["model/a", "model/c", "opt/a"], names[:2], [*names, "more/x"], []):
        with pytest.raises(StateError, match=r"not the same on all ranks: \d on rank 0, \d on rank 1"):
            check_bare([(0, bare_digest(names)), (1, bare_digest(others))])


# ---- which copy a restore opens -----------------------------------------------------------------------------------


def saved(root: Path, *steps: int) -> Path:
    with Snapshots(root, threads=1, keep_last=None) as snapshots:
        for step in steps:
            snapshots.save(step, small_state(step)).wait()
    return root / f"step-{steps[-1]:09d}"


def test_a_snapshot_that_is_read_is_held_against_retention(tmp_path, monkeypatch):
    folder = saved(tmp_path, 1)
    real, free = SnapshotReader.read, []

    def read(self: SnapshotReader, targets: Any) -> None:
        with keep._alone(folder) as alone:
            free.append(alone)
        real(self, targets)

    monkeypatch.setattr(SnapshotReader, "read", read)
    assert restored_seed(tmp_path) == 1 and free == [False]


@pytest.mark.parametrize("at", ["open", "read"])
def test_a_copy_whose_store_fails_gives_way_to_the_next(tmp_path, monkeypatch, at):
    saved(tmp_path, 1, 2)
    real_open, real_read = candidates.open_folder, SnapshotReader.read

    def fail(folder: Path) -> None:
        if folder.name.endswith("2"):
            raise OSError(errno.EIO, "the store is away")

    def open_folder(folder: Path, *more: Any) -> SnapshotReader:
        fail(folder)
        return real_open(folder, *more)

    def read(self: SnapshotReader, targets: Any) -> None:
        fail(self.folder)
        real_read(self, targets)

    if at == "open":
        monkeypatch.setattr(candidates, "open_folder", open_folder)
    else:
        monkeypatch.setattr(SnapshotReader, "read", read)
    found = Snapshots(tmp_path, read_only=True).restore(empty_state())
    assert found.step == 1 and "the store is away" in found.report.skipped[0][1]


def test_ranks_that_try_different_snapshots_are_told():
    candidate = Candidate(3, "step-000000003", lambda: None)  # type: ignore[arg-type, return-value]
    words = [["step-000000003", "ok", "3-a-1", []], ["step-000000002", "ok", "2-a-1", []]]
    with pytest.raises(SnapshotError, match="rank 1 sees 'step-000000002' where this rank sees 'step-000000003'"):
        restore._common_verdict(candidate, words)
    words[1][0] = "step-000000003"  # by its name alone
    assert restore._common_verdict(candidate, words) == "the ranks see different snapshots of that name"
    words[1][2] = "3-a-1"
    assert restore._common_verdict(candidate, words) is None


@pytest.mark.parametrize("resident", [True, False])
def test_faults_of_reading_in_a_restore_cost_one_snapshot_at_most(tmp_path, resident):
    """At each system call, with the blocks in the page cache (buffered, copied past the caches) and without (direct):
    EINTR and short reads cost nothing, an error the newest. EINVAL at the data tells the two ways apart."""
    saved(tmp_path, 1, 2)
    paths = list(tmp_path.glob("step-*/r00000.safetensors"))

    def step(*script: tuple[int, str, int]) -> int:
        for path in paths:
            if resident:
                path.read_bytes()
            else:
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        io = _C.FaultIo(list(script))
        found = Snapshots(tmp_path, read_only=True, threads=1, io=io).restore(empty_state())
        assert is_small_state(found.values, found.step), script
        ops[:] = ops or io.ops
        return found.step

    ops: list[tuple[str, str]] = []
    assert step() == 2
    data = max(index for index, (name, _) in enumerate(ops) if name == "pread")
    facts = _C.io_facts(tmp_path)
    if resident or (facts["direct_io"] and facts["filesystem"] != "tmpfs"):
        assert step((data, "errno", errno.EINVAL)) == (1 if resident else 2)
    for index, (name, _) in enumerate(ops):
        assert step((index, "errno", errno.EIO)) == 1, ops[index]
        assert step((index, "errno", errno.EINTR)) == 2, ops[index]
        for moved in (1, 4095) if name == "pread" else ():
            assert step((index, "short", moved)) == 2, ops[index]


# ---- which bytes go into which view -------------------------------------------------------------------------------


def piece(
    shape: tuple[int, ...], flat: tuple[int, int] | None = None, offset: tuple[int, ...] | None = None
) -> Piece:
    count = torch.Size(shape).numel() if flat is None else flat[1] - flat[0]
    at = offset or (0,) * len(shape)
    return Piece("w", "F32", None, shape, at, shape, flat, (0, 1), "w", 4096, 4 * count, "")


def entry_of(full_shape: tuple[int, ...], *pieces: Piece) -> TensorEntry:
    return TensorEntry("w", torch.float32, full_shape, [Source(0, one) for one in pieces])


def filled(target: Target, content: torch.Tensor) -> torch.Tensor:
    """Reads a target out of a file whose bytes from 4096 on are `content`; returns its tensor."""
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(requests: list[tuple[int, int, int]]) -> None:
        for at, size, address in requests:
            assert 4096 <= at and at + size <= 4096 + content.numel() * 4
            ctypes.memmove(address, content.data_ptr() + at - 4096, size)

    with Windows() as through:
        for window in windows([move for _, move in moves_of(target, late)]):
            through.fill(window, read)
    for destination, source in late:
        destination.copy_(source.reshape(destination.shape))
    return target.tensor


@pytest.mark.parametrize(("a", "b"), [(2, 14), (0, 16), (4, 8), (3, 5), (1, 15)])
def test_flat_elements_come_from_where_they_lie_in_their_piece(a, b):
    """Wanted and held cut into the same parts: each begins where the one before it ended."""
    entry, content = entry_of((4, 4), piece((4, 4), (a, b))), torch.arange(a, b, dtype=torch.float32)
    box = Box((0, 0), (4, 4))
    assert torch.equal(filled(Target(entry, torch.zeros(b - a), box, (a, b)), content), content)
    turned = torch.zeros(2, (b - a) // 2).t()  # its flat view is a copy
    assert torch.equal(filled(Target(entry, turned, box, (a, b)), content).reshape(-1), content)


def test_a_target_that_the_pieces_do_not_fill_is_an_error():
    entry = entry_of((4, 4), piece((2, 4)))
    with pytest.raises(SnapshotError, match="'w': 8 of 16 elements found"):
        list(moves_of(Target(entry, torch.zeros(4, 4), Box((0, 0), (4, 4)), None), []))


@pytest.mark.parametrize("view", ["conj", "neg"])
def test_a_lazy_view_gets_the_values_and_not_their_bits(tmp_path, view):
    w = torch.randn(3, 5, dtype=torch.complex64)
    value = w if view == "conj" else w.imag.clone()
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"w": value})
    base = torch.zeros(3, 5, dtype=torch.complex64).conj()
    target = base if view == "conj" else base.imag
    assert target.is_conj() or target.is_neg()
    Snapshots(tmp_path, read_only=True).restore({"w": target})
    assert torch.equal(target, value)


def moves(*num_bytes: int, dense: bool = True) -> list[Move]:
    """Moves through a window, one after the other in the file."""
    found, at = [], 0
    for size in num_bytes:
        target = torch.empty(2 * (size if dense else size // 2), dtype=torch.uint8)[::2]
        found.append(Move(at, size, target, torch.uint8, (1 if dense else 2,), False))
        at += size
    return found


def test_what_is_staged_at_once_is_bounded_and_all_of_it_comes(monkeypatch):
    monkeypatch.setattr(read_plan, "WINDOW_BYTES", 1000)
    sizes = [400, 300, 300, 1, 2500, 10, 999, 1000]
    found = list(windows(moves(*sizes)))
    assert max(sum(move.num_bytes for move in window) for window in found) <= 1000
    ranges = [(move.file_offset, move.num_bytes) for window in found for move in window]
    assert all(at + size == following for (at, size), (following, _) in zip(ranges, ranges[1:], strict=False))
    assert sum(size for _, size in ranges) == sum(sizes) == sum(m.target.numel() for w in found for m in w)
    gaps = moves(2500, dense=False)  # its rows do not lie where an even cut would look for them
    assert list(windows(gaps)) == [gaps]
    straight = [move._replace(direct=True) for move in moves(5000, 5000)]  # needs no memory
    assert list(windows(straight)) == [straight]


def test_far_rows_are_read_one_by_one_and_near_ones_up_to_a_limit():
    far = entry_of((8, 1 << 20), piece((8, 1 << 20)))
    column = Target(far, torch.zeros(8, 2), Box((0, 7), (8, 2)), None)
    assert [move.num_bytes for _, move in moves_of(column, [])] == [8] * 8
    near = entry_of((3000, 4096), piece((3000, 4096)))
    column = Target(near, torch.zeros(3000, 2), Box((0, 7), (3000, 2)), None)
    sizes = [move.num_bytes for _, move in moves_of(column, [])]
    assert len(sizes) > 1 and max(sizes) <= MAX_SPAN_BYTES and sum(sizes) > 2 * MAX_SPAN_BYTES


def test_an_odd_number_of_bytes_before_wider_elements_in_a_window():
    values = [torch.arange(3, dtype=torch.uint8), torch.arange(5), torch.randn(3)]
    content = b"".join(value.numpy().tobytes() for value in values)
    targets = [torch.zeros(2 * len(value), dtype=value.dtype)[::2] for value in values]
    staged, at = [], 0
    for target in targets:
        staged.append(Move(at, target.numel() * target.element_size(), target, target.dtype, (1,), False))
        at += staged[-1].num_bytes

    def read(requests: list[tuple[int, int, int]]) -> None:
        for start, size, address in requests:
            ctypes.memmove(address, content[start : start + size], size)

    with Windows() as through:
        through.fill(staged, read)
    assert all(map(torch.equal, targets, values))


def test_a_window_is_of_the_lanes_own_memory_and_large_enough():
    class Card(HostLane):
        pass

    through = Windows()
    card, host = Card(), through._lane(torch.device("cpu"))
    first = through._take(100, [card])
    assert through._take(60, [card, host]) is first  # the next, smaller one
    larger = through._take(1000, [card])
    assert larger.numel() >= 1000
    assert through._take(10, [host]) is not larger, "memory of the host's is not page-locked"


def test_every_copy_of_a_step_is_held_where_ranks_have_disks_of_their_own():
    held: list[str] = []

    def copy(name: str) -> Candidate:
        @contextmanager
        def hold() -> Iterator[None]:
            held.append(name)
            yield

        return Candidate(1, name, lambda: None, hold)  # type: ignore[arg-type, return-value]

    with ExitStack() as stack:
        stack.enter_context(candidates._nearest(1, [copy("a"), copy("b")]).hold())
        assert held == ["a", "b"]
