"""l2_norm: the Euclidean norm of many tensors at once, in fp32 (fp64 when any tensor is fp64).

`l2_norm_squared` is the sum that ranks add before the root. Each element is read once; NaN and inf pass through.
The sum has two stages: each chunk of a tensor (tables.py) lane by lane, then over the lanes; then the chunks of all
tensors in the order of the list. Chunks depend on sizes alone, so that runs agree bit for bit. Launches: one for each
kind of tensor present (dtype, aligned or not, strided), and one for the second stage, which takes the root too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.launch import Launch, Runner, check, check_device, compute_dtype, triton_dtype, use_triton
from plait.kernels.registration import all_plain, observed, register
from plait.kernels.rounding import root
from plait.kernels.tables import (
    Run,
    address,
    collapse,
    device_table,
    elsewhere,
    find_row,
    remembered,
    split_tail,
    strided_offsets,
    strided_runs,
    use_tables,
    wide_pointer,
    with_chunks,
)

# Elements per pass of a program: 16 a thread of 4 warps, two 16-byte reads in flight in 16-bit (derived).
_BLOCK = 2048
# Strided offsets take several 64-bit registers an element; 2048 of them spill (compiled for sm_90).
_BLOCK_STRIDED = 512
# A chunk has more passes where there would be more chunks than this: the second stage is one program (derived).
_MAX_CHUNKS = 8192
_MAX_SINGLE = 3
_BLOCK_PARTIALS = 1024
_NAMES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def _dtype_of(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any([t.dtype is torch.float64 for t in tensors]) else torch.float32


def l2_norm_squared_ref(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The oracle: the sum of squares, 0-dim."""
    dtype = _dtype_of(tensors)
    total = torch.zeros((), dtype=dtype, device=tensors[0].device)
    for tensor in tensors:
        total += tensor.to(compute_dtype(tensor.dtype)).square().sum()
    return total


def l2_norm_ref(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The oracle of l2_norm."""
    return l2_norm_squared_ref(tensors).sqrt()


@triton.jit
def _square_run(
    x_ptr, partial_ptr, stop, chunk_length, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    begin = chunk * chunk_length
    sums = tl.zeros([BLOCK], COMPUTE)
    for done in range(0, tl.minimum(chunk_length, stop - begin), BLOCK):
        offsets = begin + done + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < stop, other=0.0).to(COMPUTE)  # [BLOCK]
        sums += x * x
    tl.store(partial_ptr + chunk, tl.sum(sums, axis=0).to(partial_ptr.dtype.element_ty))


@triton.jit
def _square_table(
    table_ptr, partial_ptr, num_rows, chunk_length,
    INPUT: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    row_ptr = find_row(table_ptr, num_rows, chunk, WIDTH)
    stop = tl.load(row_ptr + 1)
    if ALIGNED:  # a promise of the table, told to the compiler
        stop = stop // 16 * 16
    chunk -= tl.load(row_ptr)
    x_ptr = wide_pointer(row_ptr, 3, INPUT, ALIGNED)
    begin = chunk * chunk_length
    sums = tl.zeros([BLOCK], COMPUTE)
    for done in range(0, tl.minimum(chunk_length, stop - begin), BLOCK):
        places = begin + done + tl.arange(0, BLOCK)
        offsets = places
        if STRIDED:
            offsets = strided_offsets(row_ptr + 4, 0, places)
        x = tl.load(x_ptr + offsets, mask=places < stop, other=0.0).to(COMPUTE)  # [BLOCK]
        sums += x * x
    slot = tl.load(row_ptr + 2) + chunk
    tl.store(partial_ptr + slot, tl.sum(sums, axis=0).to(partial_ptr.dtype.element_ty))


@triton.jit
def _add_partials(partial_ptr, out_ptr, num_partials, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], partial_ptr.dtype.element_ty)
    for start in range(0, num_partials, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        sums += tl.load(partial_ptr + offsets, mask=offsets < num_partials, other=0.0)
    total = tl.sum(sums, axis=0)
    if ROOT:
        total = root(total)
    tl.store(out_ptr, total)


def run_launch(x: torch.Tensor, partial: torch.Tensor, num_passes: int) -> Launch:
    """Sums of the chunks of one contiguous run into `partial`."""
    length = num_passes * _BLOCK
    constants = {"COMPUTE": triton_dtype(x.dtype), "BLOCK": _BLOCK}
    return Launch(_square_run, (triton.cdiv(x.numel(), length),), (x, partial, x.numel(), length), constants)


def table_launch(
    table: torch.Tensor, partial: torch.Tensor, num_rows: int, num_chunks: int, num_passes: int, dtype: torch.dtype,
    *, aligned: bool, strided: bool = False,
) -> Launch:  # fmt: skip
    """Sums of the chunks of all runs of a table, each at its place in `partial`; all tensors have `dtype`."""
    constants = {
        "INPUT": _NAMES[dtype],
        "COMPUTE": triton_dtype(dtype),
        "ALIGNED": aligned,
        "STRIDED": strided,
        "WIDTH": 11 if strided else 4,
        "BLOCK": _BLOCK_STRIDED if strided else _BLOCK,
    }
    return Launch(_square_table, (num_chunks,), (table, partial, num_rows, num_passes * _BLOCK), constants)


def partials_launch(partial: torch.Tensor, out: torch.Tensor, take_root: bool = False) -> Launch:
    """The sum of `partial` in order, or its root, into 0-dim `out`."""
    constants = {"ROOT": take_root, "BLOCK": _BLOCK_PARTIALS}
    return Launch(_add_partials, (1,), (partial, out, partial.numel()), constants, num_warps=8)


def _runs_of(x: torch.Tensor) -> list[tuple[bool, Run, list[int]]]:
    """(strided, run, row without first chunk and slot: stop, address, sizes and strides) of one tensor."""
    address, size, numel = x.data_ptr(), x.element_size(), x.numel()
    whole = x.is_contiguous()
    if whole and not (address | numel) % 16:  # the usual one, without a detour
        return [(False, Run(0, numel, True), [numel, address])]
    if not whole:
        sizes, (steps,) = collapse(x.shape, [x.stride()], any_order=True)
        if len(sizes) > 1 or steps != [1]:
            runs = strided_runs([address], [size], sizes, [steps])
            return [(True, Run(0, r.numel, False), [r.numel, *r.addresses, *r.tail]) for r in runs]
    return [(False, r, [r.stop - r.start, address + r.start * size]) for r in split_tail(address, numel)]


def first_launches(tensors: Sequence[torch.Tensor]) -> tuple[list[Launch], torch.Tensor]:
    """The launches of the first stage and the sums that they write, one per chunk, in the order of the list."""
    length = _BLOCK * max(1, sum([x.numel() for x in tensors]) // (_BLOCK * _MAX_CHUNKS))
    pieces = [(x, *run) for x in tensors if x.numel() for run in _runs_of(x)]
    kinds: dict[tuple[bool, bool, torch.dtype], list[list[int]]] = {}
    num_slots, slots = 0, []
    for x, strided, run, (stop, *place) in pieces:
        kinds.setdefault((strided, run.aligned, x.dtype), []).append([stop, num_slots, *place])
        slots.append(num_slots)
        num_slots += -(-stop // length)
    partial = torch.empty(num_slots, dtype=_dtype_of(tensors), device=tensors[0].device)
    if len(pieces) <= _MAX_SINGLE and not any([strided for strided, _, _ in kinds]):
        launches = []
        for (x, _, run, _), slot in zip(pieces, slots, strict=True):
            view = x.as_strided((run.stop - run.start,), (1,), x.storage_offset() + run.start)
            launches.append(run_launch(view, partial[slot:], length // _BLOCK))
        return launches, partial
    values: list[int] = []
    parts = []
    for (strided, aligned, dtype), rows in kinds.items():
        flat, num_chunks = with_chunks(rows, length)
        parts.append((len(values), len(rows), num_chunks, dtype, {"aligned": aligned, "strided": strided}))
        values += flat
    table = device_table(values, partial.device)
    return [
        table_launch(table[start:], partial, num_rows, num_chunks, length // _BLOCK, dtype, **kind)
        for start, num_rows, num_chunks, dtype, kind in parts
    ], partial


class _Ready(NamedTuple):
    """The launches of one list of tensors: each `run` with an input, its place among the partial sums, the rest."""

    first: list[tuple[Runner, Any, int, tuple[Any, ...]]]
    second: tuple[Runner, tuple[Any, ...]]
    like: torch.Tensor  # 0-dim, never read: what results look like
    num_partials: int


def _ready(device: int, lists: Sequence[Sequence[torch.Tensor]], take_root: bool) -> _Ready | None:
    """Compiled for the current `device`; inputs have become their addresses, but for tables. None: not for Triton."""
    (tensors,) = lists
    _check(tensors)
    if not use_tables(tensors):
        return None
    launches, partial = first_launches(tensors)
    first = []
    for launch in launches:
        (x, home, *rest), (run, constants) = launch.arguments, launch.ready(device)
        kept = x if launch.kernel is _square_table else address(x)  # its table is nobody else's
        first.append((run, kept, home.storage_offset(), (*rest, *constants)))
    like = torch.empty((), dtype=partial.dtype, device=partial.device)
    second = partials_launch(partial, like, take_root)
    run, constants = second.ready(device)
    return _Ready(first, (run, (*second.arguments[2:], *constants)), like, partial.numel())


def _launch(tensors: list[torch.Tensor], take_root: bool) -> torch.Tensor | None:
    """The sum of squares or its root by Triton; None where it does not serve."""
    if not use_triton(tensors[0]):
        return None
    if elsewhere(tensors[0]):
        with torch.cuda.device(tensors[0].device):
            return _launch(tensors, take_root)
    ready: _Ready | None = remembered(_ready, (tensors,), (take_root,), take_root)
    if ready is None:
        return None
    out = torch.empty_like(ready.like)
    partial = torch.empty_strided((ready.num_partials,), (1,), dtype=out.dtype, device=out.device)
    for run, x, place, rest in ready.first:
        run(x, partial[place:] if place else partial, *rest)
    run, rest = ready.second
    run(partial, out, *rest)
    return out


def _kernel(tensors: list[torch.Tensor], take_root: bool = False) -> torch.Tensor:
    found = _launch(tensors, take_root)
    if found is not None:
        return found
    norms = torch._foreach_norm([t.detach() for t in tensors], 2, dtype=_dtype_of(tensors))
    total = torch.stack(norms).square_().sum()
    return total.sqrt_() if take_root else total


_l2_norm_squared = register(
    "l2_norm_squared(Tensor[] tensors, bool root=False) -> Tensor",
    _kernel,
    lambda tensors, root=False: tensors[0].new_empty((), dtype=_dtype_of(tensors)),
)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    check(len(tensors) > 0, lambda: "l2_norm_squared: no tensors; expected at least one")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"l2_norm_squared: tensors[{i}] is {tensor!r}; expected a tensor")
        if tensor.dtype not in _NAMES:
            raise TypeError(f"l2_norm_squared: a tensor is {tensor.dtype}; expected a floating dtype")
        if tensor.device != tensors[0].device:
            check_device("l2_norm_squared", tensors[0], tensor=tensor)


def _norm(tensors: list[torch.Tensor], take_root: bool) -> torch.Tensor:
    if not observed() and tensors and all_plain(tensors):
        found = _launch(tensors, take_root)  # checks what it has not met
        if found is not None:
            return found
    _check(tensors)
    with torch.no_grad():
        norm: torch.Tensor = _l2_norm_squared(tensors, take_root)
    return norm


def l2_norm_squared(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of all elements, 0-dim, without a gradient. ValueError on an empty list or mixed devices."""
    return _norm(list(tensors), False)


def l2_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm over all elements of all tensors, 0-dim. Errors as `l2_norm_squared`."""
    return _norm(list(tensors), True)
