"""The Triton side of adamw_ (optim.py has the formula): one pass over parameter, gradient, moments and master.

One launch for up to three runs of elements each, else one launch per kind of run over a table (tables.py): with
16-byte accesses, narrow, or strided; gradients of several dtypes multiply the kinds. Each input is read once, each
output written once: 28 bytes per element for fp32, 30 for bf16 with fp32 gradients and masters. Numbers that change
from step to step are arguments or, for a captured graph, a tensor that the kernel reads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.launch import Launch, Runner, triton_dtype
from plait.kernels.philox import philox_load_key
from plait.kernels.rounding import divide, random_words, root, stochastic_round
from plait.kernels.tables import (
    Run,
    address,
    collapse,
    device_table,
    find_row,
    split_ends,
    strided_offsets,
    strided_runs,
    wide_pointer,
    with_chunks,
)

# Elements per pass of a program: 8 a thread of 4 warps, so that each access is 16 bytes or two of them (derived).
_BLOCK = 1024
# Strided offsets take several 64-bit registers an element (1024: 220 registers on sm_90).
_BLOCK_STRIDED = 512
# Chunks of a table are up to 8 passes long once there are enough of them for 16 programs on each of 132
# multiprocessors: the search in the table is then paid once per 8 passes (derived).
_MAX_PASSES, _ENOUGH_CHUNKS = 8, 2112
_MAX_SINGLE = 3
_NAMES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class Step(NamedTuple):
    """What all elements of a call share.

    `numbers`: 1 - lr * weight_decay, lr / (1 - beta1^step), 1 - beta2^step, beta1, 1 - beta1, beta2, 1 - beta2, eps.
    `schedule` [3], if given, replaces the first three on the device; `grad_scale`, `loss_scale`, `found_inf`: 0-dim;
    `rng` [2]. Where `found_inf` is not 0, nothing is read or written.
    """

    numbers: tuple[float, float, float, float, float, float, float, float]
    schedule: torch.Tensor | None = None
    grad_scale: torch.Tensor | None = None
    loss_scale: torch.Tensor | None = None
    rng: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether parameters of `dtype` are rounded stochastically."""
        return self.rng is not None and dtype in (torch.bfloat16, torch.float16)


@triton.jit
def _load_factor(
    grad_scale_ptr, loss_scale_ptr, HAS_GRAD_SCALE: tl.constexpr, HAS_LOSS_SCALE: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    factor = tl.full((), 1.0, COMPUTE)
    if HAS_GRAD_SCALE:
        factor = tl.load(grad_scale_ptr).to(COMPUTE)
    if HAS_LOSS_SCALE:
        factor = divide(factor, tl.load(loss_scale_ptr).to(COMPUTE))
    return factor


@triton.jit
def _stop_of(stop, found_inf_ptr, HAS_FOUND_INF: tl.constexpr):
    """`stop`, or 0 where an infinite gradient was found."""
    if HAS_FOUND_INF:
        stop = tl.where(tl.load(found_inf_ptr) == 0.0, stop, 0)
    return stop


@triton.jit
def _load_schedule(decay, rate, correction, schedule_ptr, HAS_SCHEDULE: tl.constexpr):
    if HAS_SCHEDULE:
        decay = tl.load(schedule_ptr)
        rate = tl.load(schedule_ptr + 1)
        correction = tl.load(schedule_ptr + 2)
    return decay, rate, correction


@triton.jit
def _update(
    param_ptrs, grad_ptrs, exp_avg_ptrs, exp_avg_sq_ptrs, master_ptrs, mask, first_group, rng_ptr, factor,
    decay, rate, correction, beta1, rest1, beta2, rest2, eps,
    PARAM: tl.constexpr, HAS_MASTER: tl.constexpr, ROUND: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of the elements at blocks of pointers [BLOCK]."""
    g = tl.load(grad_ptrs, mask=mask, other=0.0).to(COMPUTE) * factor
    exp_avg = tl.load(exp_avg_ptrs, mask=mask, other=0.0) * beta1 + g * rest1
    exp_avg_sq = tl.load(exp_avg_sq_ptrs, mask=mask, other=0.0) * beta2 + (g * rest2) * g
    if HAS_MASTER:
        weight = tl.load(master_ptrs, mask=mask, other=0.0)
    else:
        weight = tl.load(param_ptrs, mask=mask, other=0.0).to(COMPUTE)
    denominator = root(divide(exp_avg_sq, correction)) + eps
    weight = weight * decay - divide(exp_avg * rate, denominator)
    tl.store(exp_avg_ptrs, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptrs, exp_avg_sq, mask=mask)
    if HAS_MASTER:
        tl.store(master_ptrs, weight, mask=mask)
    if ROUND:
        key_low, key_high = philox_load_key(rng_ptr)
        rounded = stochastic_round(weight, random_words(key_low, key_high, first_group, BLOCK), PARAM)
    else:
        rounded = weight.to(PARAM)
    tl.store(param_ptrs, rounded, mask=mask)


@triton.jit
def _adamw_run(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, master_ptr, lead, stop, first_group,
    decay, rate, correction, beta1, rest1, beta2, rest2, eps, schedule_ptr, grad_scale_ptr, loss_scale_ptr, rng_ptr,
    found_inf_ptr,
    PARAM: tl.constexpr, COMPUTE: tl.constexpr, HAS_MASTER: tl.constexpr, ROUND: tl.constexpr,
    HAS_SCHEDULE: tl.constexpr, HAS_GRAD_SCALE: tl.constexpr, HAS_LOSS_SCALE: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = _load_factor(grad_scale_ptr, loss_scale_ptr, HAS_GRAD_SCALE, HAS_LOSS_SCALE, COMPUTE)
    decay, rate, correction = _load_schedule(decay, rate, correction, schedule_ptr, HAS_SCHEDULE)
    stop = _stop_of(stop, found_inf_ptr, HAS_FOUND_INF)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    places = start + tl.arange(0, BLOCK)
    offsets = places - lead
    _update(
        param_ptr + offsets, grad_ptr + offsets, exp_avg_ptr + offsets, exp_avg_sq_ptr + offsets,
        master_ptr + offsets, (places >= lead) & (places < stop), first_group + start // 4, rng_ptr, factor,
        decay, rate, correction, beta1, rest1, beta2, rest2, eps,
        PARAM, HAS_MASTER, ROUND, COMPUTE, BLOCK,
    )  # fmt: skip


@triton.jit
def _adamw_table(
    table_ptr, num_rows, chunk_length,
    decay, rate, correction, beta1, rest1, beta2, rest2, eps, schedule_ptr, grad_scale_ptr, loss_scale_ptr, rng_ptr,
    found_inf_ptr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, COMPUTE: tl.constexpr, ALIGNED: tl.constexpr, STRIDED: tl.constexpr,
    HAS_MASTER: tl.constexpr, ROUND: tl.constexpr, HAS_SCHEDULE: tl.constexpr, HAS_GRAD_SCALE: tl.constexpr,
    HAS_LOSS_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    factor = _load_factor(grad_scale_ptr, loss_scale_ptr, HAS_GRAD_SCALE, HAS_LOSS_SCALE, COMPUTE)
    decay, rate, correction = _load_schedule(decay, rate, correction, schedule_ptr, HAS_SCHEDULE)
    chunk = tl.program_id(0).to(tl.int64)
    row_ptr = find_row(table_ptr, num_rows, chunk, WIDTH)
    lead = tl.load(row_ptr + 2)
    stop = _stop_of(tl.load(row_ptr + 1), found_inf_ptr, HAS_FOUND_INF)
    if ALIGNED:  # a promise of the table, told to the compiler
        lead = lead * 0
        stop = stop // 16 * 16
    first_group = tl.load(row_ptr + 3)
    param_ptr = wide_pointer(row_ptr, 4, PARAM, ALIGNED)
    grad_ptr = wide_pointer(row_ptr, 5, GRAD, ALIGNED)
    exp_avg_ptr = wide_pointer(row_ptr, 6, COMPUTE, ALIGNED)
    exp_avg_sq_ptr = wide_pointer(row_ptr, 7, COMPUTE, ALIGNED)
    master_ptr = wide_pointer(row_ptr, 8, COMPUTE, ALIGNED)
    begin = (chunk - tl.load(row_ptr)) * chunk_length
    for done in range(0, tl.minimum(chunk_length, stop - begin), BLOCK):
        start = begin + done
        places = start + tl.arange(0, BLOCK)
        offsets = places - lead
        if STRIDED:
            tail_ptr = row_ptr + 9
            param_ptrs = param_ptr + strided_offsets(tail_ptr, 0, offsets)
            grad_ptrs = grad_ptr + strided_offsets(tail_ptr, 1, offsets)
            exp_avg_ptrs = exp_avg_ptr + strided_offsets(tail_ptr, 2, offsets)
            exp_avg_sq_ptrs = exp_avg_sq_ptr + strided_offsets(tail_ptr, 3, offsets)
            master_ptrs = master_ptr + strided_offsets(tail_ptr, 4, offsets)
        else:
            param_ptrs = param_ptr + offsets
            grad_ptrs = grad_ptr + offsets
            exp_avg_ptrs = exp_avg_ptr + offsets
            exp_avg_sq_ptrs = exp_avg_sq_ptr + offsets
            master_ptrs = master_ptr + offsets
        _update(
            param_ptrs, grad_ptrs, exp_avg_ptrs, exp_avg_sq_ptrs, master_ptrs, (places >= lead) & (places < stop),
            first_group + start // 4, rng_ptr, factor, decay, rate, correction, beta1, rest1, beta2, rest2, eps,
            PARAM, HAS_MASTER, ROUND, COMPUTE, BLOCK,
        )  # fmt: skip


def shared_arguments(step: Step, unread: Any) -> tuple[Any, ...]:
    """What both kernels take last; `unread` stands for an absent tensor."""
    optional = (step.schedule, step.grad_scale, step.loss_scale, step.rng, step.found_inf)
    return (*step.numbers, *[unread if x is None else x for x in optional])


def _shared(step: Step, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(arguments, constants) that both kernels take; an absent tensor is replaced by one that is not read."""
    param, _, exp_avg = tensors[:3]
    arguments = shared_arguments(step, exp_avg)
    constants = {
        "PARAM": _NAMES[param.dtype],
        "COMPUTE": triton_dtype(exp_avg.dtype),
        "HAS_MASTER": len(tensors) == 5,
        "ROUND": step.rounds(param.dtype),
        "HAS_SCHEDULE": step.schedule is not None,
        "HAS_GRAD_SCALE": step.grad_scale is not None,
        "HAS_LOSS_SCALE": step.loss_scale is not None,
        "HAS_FOUND_INF": step.found_inf is not None,
        "BLOCK": _BLOCK,
    }
    return arguments, constants


def run_launch(tensors: Sequence[torch.Tensor], step: Step, index: int | None = None) -> Launch:
    """One run: parameter, gradient, both moments and perhaps master, contiguous; `index` that of element 0."""
    arguments, constants = _shared(step, tensors)
    lead = 0 if index is None else index % 4
    stop, group = lead + tensors[0].numel(), 0 if index is None else index // 4
    pointers = (*tensors, tensors[2])[:5]
    return Launch(_adamw_run, (triton.cdiv(stop, _BLOCK),), (*pointers, lead, stop, group, *arguments), constants)


def table_launch(
    table: torch.Tensor, num_rows: int, num_chunks: int, num_passes: int, like: Sequence[torch.Tensor], step: Step,
    *, aligned: bool, strided: bool = False,
) -> Launch:  # fmt: skip
    """All runs of a table whose tensors have the dtypes of `like`."""
    arguments, constants = _shared(step, like)
    constants |= {"GRAD": _NAMES[like[1].dtype], "ALIGNED": aligned, "STRIDED": strided, "WIDTH": _width(strided)}
    constants["BLOCK"] = _BLOCK_STRIDED if strided else _BLOCK
    return Launch(_adamw_table, (num_chunks,), (table, num_rows, num_passes * _BLOCK, *arguments), constants)


def _width(strided: bool) -> int:
    return 9 + (3 + 4 * 5 if strided else 0)


class _Piece(NamedTuple):
    """One run of parameter number `param`: its first element and its row, yet without its first chunk."""

    param: int
    start: int
    row: list[int]


# (strided, aligned, dtype of the gradient): what one launch over a table is compiled for.
_Kinds = dict[tuple[bool, bool, torch.dtype], list[_Piece]]


def _row(run: Run, index: int | None, addresses: Sequence[int], item_bytes: Sequence[int]) -> list[int]:
    """stop, lead, first group of random words, addresses of the run's first elements."""
    first = 0 if index is None else index + run.start
    moved = [address + run.start * size for address, size in zip(addresses, item_bytes, strict=True)]
    return [first % 4 + run.stop - run.start, first % 4, first // 4, *moved]


def _odd_pieces(param: int, tensors: Sequence[torch.Tensor], index: int | None, kinds: _Kinds) -> None:
    """Adds the runs of one parameter; five tensors. Strided ones go in memory order if no index must be kept."""
    addresses, item_bytes = [t.data_ptr() for t in tensors], [t.element_size() for t in tensors]
    dtype, numel = tensors[1].dtype, tensors[0].numel()
    if not all(t.is_contiguous() for t in tensors):
        sizes, steps = collapse(tensors[0].shape, [t.stride() for t in tensors], any_order=index is None)
        if len(sizes) > 1 or any(step != [1] for step in steps):
            for part in strided_runs(addresses, item_bytes, sizes, steps):
                place = None if index is None else index + part.start
                row = _row(Run(0, part.numel, False), place, part.addresses, item_bytes)
                kinds.setdefault((True, False, dtype), []).append(_Piece(param, 0, row + list(part.tail)))
            return
    for run in split_ends(addresses, item_bytes, numel, index):
        piece = _Piece(param, run.start, _row(run, index, addresses, item_bytes))
        kinds.setdefault((False, run.aligned, dtype), []).append(piece)


def _find_kinds(lists: Sequence[Sequence[torch.Tensor]], indices: Sequence[int] | None) -> _Kinds:
    """The runs of all parameters by kind; the usual ones, whole and aligned, without a detour."""
    kinds: _Kinds = {}
    for i, tensors in enumerate(zip(*lists, strict=True)):
        p, g, m, v, w = tensors
        numel, index = p.numel(), 0 if indices is None else indices[i]
        a, b, c, d, e = p.data_ptr(), g.data_ptr(), m.data_ptr(), v.data_ptr(), w.data_ptr()
        odd = (a | b | c | d | e | numel) % 16 or index % 4
        if not odd and all([t.is_contiguous() for t in tensors]):
            if numel:
                piece = _Piece(i, 0, [numel, 0, index // 4, a, b, c, d, e])
                kinds.setdefault((False, True, g.dtype), []).append(piece)
        elif numel:
            _odd_pieces(i, tensors, None if indices is None else index, kinds)
    return kinds


class Ready(NamedTuple):
    """A launch of one list of tensors: `run` with `first`, the numbers and tensors of a `Step`, then `constants`."""

    run: Runner
    first: tuple[Any, ...]
    constants: tuple[Any, ...]


def ready_launches(
    device: int, lists: Sequence[Sequence[torch.Tensor]], step: Step, first_indices: Sequence[int] | None
) -> list[Ready]:
    """`step_launches`, compiled for the current `device`; tensors have become their addresses, but for tables."""
    found = []
    for launch in step_launches(lists, step, first_indices):
        run, constants = launch.ready(device)
        first = launch.arguments[: -len(shared_arguments(step, lists[2][0]))]
        kept = launch.kernel is _adamw_table  # its table is nobody else's
        first = tuple(
            [address(x) if isinstance(x, torch.Tensor) and not (kept and i == 0) else x for i, x in enumerate(first)]
        )
        found.append(Ready(run, first, constants))
    return found


def _table_launches(lists: Sequence[Sequence[torch.Tensor]], kinds: _Kinds, step: Step) -> list[Launch]:
    """One launch for each kind; one table holds all rows."""
    total = sum(piece.row[0] for pieces in kinds.values() for piece in pieces)
    num_passes = min(_MAX_PASSES, max(1, total // (_BLOCK * _ENOUGH_CHUNKS)))
    values: list[int] = []
    parts = []
    for (strided, aligned, _), pieces in kinds.items():
        flat, num_chunks = with_chunks([piece.row for piece in pieces], num_passes * _BLOCK)
        like = [x[pieces[0].param] for x in lists]
        parts.append((len(values), len(pieces), num_chunks, like, {"aligned": aligned, "strided": strided}))
        values += flat
    table = device_table(values, lists[0][0].device)
    return [
        table_launch(table[start:], num_rows, num_chunks, num_passes, like, step, **kind)
        for start, num_rows, num_chunks, like, kind in parts
    ]


def step_launches(
    lists: Sequence[Sequence[torch.Tensor]], step: Step, first_indices: Sequence[int] | None = None
) -> list[Launch]:
    """All launches of one call. `lists`: parameters, gradients, both moments and perhaps masters.

    `first_indices`: the index of each parameter's first element, for its random words; read where `step` rounds.
    """
    indices = first_indices if step.rounds(lists[0][0].dtype) else None
    # In place of an absent master stands the first moment, which is then not read as such.
    kinds = _find_kinds([*lists, lists[2]][:5], indices)
    pieces = [piece for some in kinds.values() for piece in some]
    if len(pieces) > _MAX_SINGLE or any(strided for strided, _, _ in kinds):
        return _table_launches(lists, kinds, step)
    launches = []
    for param, start, row in pieces:
        size = (row[0] - row[1],)
        views = [x[param].as_strided(size, (1,), x[param].storage_offset() + start) for x in lists]
        launches.append(run_launch(views, step, None if indices is None else indices[param] + start))
    return launches
