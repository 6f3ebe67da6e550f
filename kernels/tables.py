"""Many tensors in one launch: a table in device memory says where each run of elements lies and how long it is.

Not a kernel: this makes the rows, brings them to the device and finds a program's row; the kernels are in
adamw_triton.py and norms.py. One row of int64 per run: first chunk, lead, stop, one number of the kernel's own, the
address of element 0 in each tensor, and for strided runs three sizes and four strides per tensor. A chunk is the part
of a run that one program walks. Runs that are aligned to 16 bytes and a multiple of 16 elements go into a launch of
their own, compiled with 16-byte accesses; what is left over at either end is narrow.

The table reaches the device by one copy from pinned memory, never waited for. A captured CUDA graph would read that
memory again at each replay, so there the numbers travel as kernel arguments instead, which the graph keeps.

A step after the other has the same tensors: what was made for some addresses is found again by them (`remembered`),
the table on the device included, so that such a call makes no row and copies nothing.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.launch import INTERPRETED, Launch, use_triton

# Elements; a run of this many is a whole number of 16-byte accesses in every dtype (derived).
_WIDE = 16
_MAX_DIMS = 4
# Numbers per launch when a table is written from arguments: the parameters of _write_numbers.
_NUM_WRITTEN = 32


class Run(NamedTuple):
    """Elements [start, stop) of a tensor's flat index; `aligned`: 16-byte accesses fit and no end is left over."""

    start: int
    stop: int
    aligned: bool


def use_tables(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a table of these is for Triton to read: the interpreter follows addresses of host memory only."""
    if INTERPRETED:
        return all([x.device.type == "cpu" for x in tensors])
    return all([use_triton(x) for x in tensors])


def shares_memory(x: torch.Tensor) -> bool:
    """Whether elements of `x` lie on one another, as after `expand`: nothing to write to."""
    return not x.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def split_tail(address: int, numel: int) -> list[Run]:
    """The whole accesses, then what is left: the same cut at every address, so that a sum keeps its order."""
    stop = numel // _WIDE * _WIDE
    runs = (Run(0, stop, address % 16 == 0), Run(stop, numel, False))
    return [run for run in runs if run.start < run.stop]


def split_ends(addresses: Sequence[int], item_bytes: Sequence[int], numel: int, index: int | None) -> list[Run]:
    """A head up to where all tensors are aligned, the body, and a tail; one narrow run if they are aligned nowhere.

    `index`, if given, is that of element 0; the body then begins at a multiple of 4.
    """
    for start in range(_WIDE):
        places = (address + start * size for address, size in zip(addresses, item_bytes, strict=True))
        if (index is None or (index + start) % 4 == 0) and all(place % 16 == 0 for place in places):
            break
    else:
        return [Run(0, numel, False)] if numel else []
    start = min(start, numel)
    stop = start + (numel - start) // _WIDE * _WIDE
    runs = (Run(0, start, False), Run(start, stop, True), Run(stop, numel, False))
    return [run for run in runs if run.start < run.stop]


def collapse(
    shape: Sequence[int], strides: Sequence[Sequence[int]], any_order: bool
) -> tuple[list[int], list[list[int]]]:
    """The fewest dims that walk all tensors of one shape; `any_order`: in the order of the first one's memory.

    Without it the flat index stays that of the shape. Dims of size 1 go, neighbours that lie like one are merged.
    """
    dims = [dim for dim, size in enumerate(shape) if size != 1]
    if any_order:
        dims.sort(key=lambda dim: -strides[0][dim])
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim in dims:
        if sizes and all(mine[-1] == theirs[dim] * shape[dim] for mine, theirs in zip(steps, strides, strict=True)):
            sizes[-1] *= shape[dim]
            for mine, theirs in zip(steps, strides, strict=True):
                mine[-1] = theirs[dim]
        else:
            sizes.append(shape[dim])
            for mine, theirs in zip(steps, strides, strict=True):
                mine.append(theirs[dim])
    return sizes, steps


class Strided(NamedTuple):
    """`numel` elements from flat index `start` on: addresses of the first one; `tail`: three inner sizes, then four
    strides per tensor.
    """

    start: int
    numel: int
    addresses: tuple[int, ...]
    tail: tuple[int, ...]


def strided_runs(
    addresses: Sequence[int], item_bytes: Sequence[int], sizes: Sequence[int], steps: Sequence[Sequence[int]]
) -> Iterator[Strided]:
    """The collapsed dims as runs of at most four dims: one run for nearly all tensors, more beyond four dims."""
    outer, inner = sizes[:-_MAX_DIMS], sizes[-_MAX_DIMS:]
    pad = _MAX_DIMS - len(inner)
    numel = functools.reduce(int.__mul__, inner, 1)
    tail = [1] * max(0, pad - 1) + list(inner[1:] if pad == 0 else inner)
    tail = [1] * (_MAX_DIMS - 1 - len(tail)) + tail
    for step in steps:
        tail += [0] * pad + list(step[-_MAX_DIMS:])
    for number, place in enumerate(itertools.product(*map(range, outer))):
        moved = tuple(
            address + size * sum(i * s for i, s in zip(place, step, strict=False))
            for address, size, step in zip(addresses, item_bytes, steps, strict=True)
        )
        yield Strided(number * numel, numel, moved, tuple(tail))


def with_chunks(rows: Sequence[Sequence[int]], chunk: int) -> tuple[list[int], int]:
    """(the rows flat, each led by the number of its first chunk, number of chunks); row[0] is the run's stop."""
    flat: list[int] = []
    num_chunks = 0
    for row in rows:
        flat.append(num_chunks)
        flat.extend(row)
        num_chunks += -(-row[0] // chunk)
    return flat, num_chunks


# One compiled form for all numbers and counts: what `_compile_writer` loads is what a capture finds.
@triton.jit(do_not_specialize=["count", *(f"n{i}" for i in range(_NUM_WRITTEN))])
def _write_numbers(
    table_ptr, count,
    n0: tl.int64, n1: tl.int64, n2: tl.int64, n3: tl.int64, n4: tl.int64, n5: tl.int64, n6: tl.int64, n7: tl.int64,
    n8: tl.int64, n9: tl.int64, n10: tl.int64, n11: tl.int64, n12: tl.int64, n13: tl.int64, n14: tl.int64,
    n15: tl.int64, n16: tl.int64, n17: tl.int64, n18: tl.int64, n19: tl.int64, n20: tl.int64, n21: tl.int64,
    n22: tl.int64, n23: tl.int64, n24: tl.int64, n25: tl.int64, n26: tl.int64, n27: tl.int64, n28: tl.int64,
    n29: tl.int64, n30: tl.int64, n31: tl.int64,
):  # fmt: skip
    numbers = (
        n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15, n16, n17, n18, n19, n20, n21, n22, n23,
        n24, n25, n26, n27, n28, n29, n30, n31,
    )  # fmt: skip
    for i in tl.static_range(32):
        tl.store(table_ptr + i, numbers[i], mask=i < count)


@triton.jit
def find_row(table_ptr, num_rows, chunk, WIDTH: tl.constexpr):
    """Address of the last row whose first chunk is <= chunk."""
    low = chunk * 0
    high = low + num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(table_ptr + middle * WIDTH) <= chunk:
            low = middle
        else:
            high = middle
    return table_ptr + low * WIDTH


@triton.jit
def wide_pointer(row_ptr, column, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to DTYPE in a column of a row; ALIGNED promises 16 bytes."""
    pointer = tl.load(row_ptr + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def strided_offsets(tail_ptr, tensor, flat):
    """Offsets in elements of flat indices within a strided run, in one of its tensors."""
    strides_ptr = tail_ptr + 3 + 4 * tensor
    offsets = flat * 0
    for dim in tl.static_range(3):
        size = tl.load(tail_ptr + 2 - dim)
        offsets += (flat % size) * tl.load(strides_ptr + 3 - dim)
        flat = flat // size
    return offsets + flat * tl.load(strides_ptr)


def write_launches(values: Sequence[int], table: torch.Tensor) -> list[Launch]:
    """Launches that write `values` into `table` (int64, as long) from their arguments."""
    launches = []
    for start in range(0, len(values), _NUM_WRITTEN):
        part = list(values[start : start + _NUM_WRITTEN])
        filled = part + [0] * (_NUM_WRITTEN - len(part))
        launches.append(Launch(_write_numbers, (1,), (table[start:], len(part), *filled), {}, 1))
    return launches


@functools.cache
def _compile_writer(device: torch.device) -> None:
    """Loads the writer outside of any capture, within which a module may not be loaded."""
    for launch in write_launches([0], torch.empty(1, dtype=torch.int64, device=device)):
        launch.run()


def device_table(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """`values` as int64 on `device`, without a wait; right also in a CUDA graph that is replayed."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64)
    if torch.cuda.is_current_stream_capturing():
        table = torch.empty(len(values), dtype=torch.int64, device=device)
        for launch in write_launches(values, table):
            launch.run()
        return table
    _compile_writer(device)
    return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


class _Aside:
    """What a look-up hands on beside its key; emptied behind it, so that nothing keeps a caller's tensors."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside)

    def __hash__(self) -> int:
        return 0


# An entry has the launches and the table of one list of tensors, about 0.6 KB a tensor; few lists take turns.
@functools.lru_cache(16)
def _remembered(build: Callable[..., Any], device: int, stream: int, key: tuple[Any, ...], aside: _Aside) -> Any:
    return build(device, *aside.values)


def remembered(
    build: Callable[..., Any], lists: Sequence[Sequence[torch.Tensor]], key: tuple[Any, ...], *more: Any
) -> Any:
    """build(current device, lists, *more), found again for tensors of the same addresses and layouts and equal `key`.

    `build` may depend on the tensors' dtypes, shapes, strides, devices and addresses, and on `more` as far as `key`
    tells it. Its tables are for the stream that they were copied on. A captured graph gets its own: one of those
    kept here may be gone before its replay.
    """
    first = lists[0][0]
    card = first.get_device()
    device: int = -1 if INTERPRETED else triton.runtime.driver.active.get_current_device()
    if INTERPRETED or (card >= 0 and torch.cuda.is_current_stream_capturing()):
        return build(device, lists, *more)
    places = tuple(
        [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.get_device()) for tensors in lists for x in tensors]
    )
    stream = triton.runtime.driver.active.get_current_stream(device)
    aside = _Aside(lists, *more)
    try:
        return _remembered(build, device, stream, (places, *map(len, lists), *key), aside)
    finally:
        aside.values = ()


def elsewhere(x: torch.Tensor) -> bool:
    """Whether `x` is on a card that is not the current one."""
    return x.is_cuda and x.get_device() != triton.runtime.driver.active.get_current_device()


def address(x: torch.Tensor) -> Any:
    """What a kernel is given for `x`: its address, which a launch takes too; the interpreter wants the tensor."""
    return x if INTERPRETED else x.data_ptr()
