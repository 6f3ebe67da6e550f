"""The head's product and its loss in chunks of tokens, on one vocabulary shard: direct functions without checks.

Here: the statistics; the gradients given the log-sum-exp (the logits are made again: four products with the
statistics'), added into a given weight gradient or as new tensors; and both in one walk (three products) for a caller
who knows beforehand how each token's loss counts. The losses of a whole vocabulary are loss_whole.py's; what is
differentiable and checked is loss.py. The one idea: one chunk of logits exists at a time, and the gradients of chunks
are added up in fp32, so that no number of chunks costs digits. A chunk is some tokens with the whole vocabulary, and
the weight gradient is what is added up; but for a new one of 16 bits on a GPU it is a slice of the vocabulary with
all tokens, and dx is: an fp32 sum of T D numbers in place of V D. docs/kernels.md has the peak of each form.
"""

from collections.abc import Callable, Iterator

import torch

from plait.kernels.entropy import capped, merge_stats, plain_grad, plain_stats
from plait.kernels.launch import compute_dtype, use_triton
from plait.kernels.loss_triton import grad_launch, stats_launch
from plait.kernels.matmul import wgrad_into
from plait.kernels.plans import Built, Site, planned

# Statistics [4, n] of a shard -> (lse, target logit, logit sum), each [n], of the whole vocabulary.
Merge = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# (vocab_start, num_classes, label_smoothing, z_loss, softcap)
Terms = tuple[int, int, float, float, float]
# A chunk of the walk: (its rows, x of them, their logits, room for their gradient, which may be the logits').
_Chunk = tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]

# Logits that exist at one time: 2^24 is 64 MiB in fp32, small beside the weight of a 128k vocabulary (derived).
_CHUNK_ELEMENTS = 1 << 24
# Logits of the plain path that are copied at a time for their statistics: 2^18 are 1 MiB in fp32, which a core's
# cache keeps (derived; in one thread of a CPU no faster than whole chunks, but without a second one).
_CACHED_ELEMENTS = 1 << 18
# On a GPU each chunk of tokens reads and writes the whole weight gradient, 8 bytes per element, beside 2 FLOP per
# element and token: 744 tokens balance them at 800 TFLOP/s and 4.3 TB/s (derived), so a chunk has at least 768. With
# 1536 that traffic is a sixth of the three products' time even where nothing overlaps it; more tokens gain little.
# Between them, what fits into a tenth of plain torch's 12 bytes per logit: 6 per logit of a chunk, and dx. At least
# 2^23 logits, 256 tiles of 128 x 256, fill the card. Whole tiles of 128 tokens.
_GPU_CHUNK_ROWS, _GPU_MOST_ROWS, _GPU_TILE, _GPU_LEAST_ELEMENTS = 768, 1536, 128, 1 << 23
# A slice of the vocabulary reads and writes an fp32 dx, 8 bytes per element, beside 8 FLOP per element and class: at
# those rates 186 classes balance them, and 4096 make it a twentieth. Fewer where there are few tokens: an eighth of
# them, which at 8192 tokens fits all into a tenth of plain torch (derived), but no less than 2^23 logits.
_GPU_SLICE_COLS, _GPU_SLICE_SHARE = 4096, 8
# Rows of a chunk start at multiples of this many logits, so that accesses are wide for every vocabulary.
_ALIGNED = 16


def chunks_of(num_rows: int, num_local: int, num_cols: int = 0, on_gpu: bool = False) -> list[slice]:
    """The tokens of each chunk of logits; `num_cols` is D."""
    most = _CHUNK_ELEMENTS // max(1, num_local)
    if on_gpu:
        fitting = num_rows // 5 - num_rows * num_cols // (3 * max(1, num_local))
        most = max(_GPU_CHUNK_ROWS, min(_GPU_MOST_ROWS, fitting), _GPU_LEAST_ELEMENTS // max(1, num_local))
        most = most // _GPU_TILE * _GPU_TILE
        num_chunks = max(1, -(-num_rows // most))
        most = -(-num_rows // (num_chunks * _GPU_TILE)) * _GPU_TILE  # of one length, but for the last
    step = max(1, most)
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


def _slices(num_rows: int, num_local: int, on_gpu: bool) -> list[slice]:
    """The classes of each slice of the vocabulary: on a CPU one of all."""
    step = max(_GPU_LEAST_ELEMENTS // max(1, num_rows), min(_GPU_SLICE_COLS, num_rows // _GPU_SLICE_SHARE))
    step = max(1, step // _GPU_TILE) * _GPU_TILE if on_gpu else max(1, num_local)
    return [slice(i, min(i + step, num_local)) for i in range(0, num_local, step)]


def _cached(s: torch.Tensor) -> list[slice]:
    """The rows of s[n, V_local] in small parts (on a GPU in one); never one row of several, whose sums would have
    another order.
    """
    num_rows = s.shape[0]
    num_parts = 1 if s.is_cuda else max(1, min(num_rows // 2, s.numel() // _CACHED_ELEMENTS))
    return [slice(num_rows * i // num_parts, num_rows * (i + 1) // num_parts) for i in range(num_parts)]


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T in the compute dtype, not rounded to 16 bits in between."""
    dtype = compute_dtype(x.dtype)
    if x.dtype == dtype:
        return torch.mm(x, weight.t())
    return torch.mm(x.to(dtype), weight.to(dtype).t())


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """a @ b into `out`; on a GPU the product of 16-bit inputs may be written in fp32."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _build_stats(
    site: Site, s: torch.Tensor, target: torch.Tensor, stats: torch.Tensor, vocab_start: int, softcap: float
) -> Built:
    return Built((), [stats_launch(s, target, vocab_start, softcap, stats)])


def _build_grad(
    site: Site, s: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor | None,
    grad: torch.Tensor, divisor: torch.Tensor | None, vocab_start: int, num_classes: int, label_smoothing: float,
    z_loss: float, softcap: float, ignore_index: int,
) -> Built:  # fmt: skip
    options = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    return Built((), [grad_launch(s, target, lse, dloss, *options, grad, divisor, ignore_index)])


def some_rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """x[rows]; `x` itself, without a call into torch, where that is all of it."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def first_cols(x: torch.Tensor, count: int) -> torch.Tensor:
    """x[:, :count]; `x` itself where that is all of it."""
    return x if count == x.shape[1] else x[:, :count]


def _cols(x: torch.Tensor, cols: slice) -> torch.Tensor:
    """x[:, cols], as `some_rows`."""
    return x if cols.stop - cols.start == x.shape[1] else x[:, cols]


def _chunk_like(
    x: torch.Tensor, chunks: list[slice], num_local: int, dtype: torch.dtype, aligned: int = _ALIGNED
) -> torch.Tensor:
    """Room for the logits of the longest chunk, [n, V_local]."""
    longest = chunks[0].stop if chunks else 0
    return _cols(x.new_empty((longest, -(-num_local // aligned) * aligned), dtype=dtype), slice(0, num_local))


def room_for(site: Site, num_rows: int, num_local: int, dtype: torch.dtype) -> torch.Tensor:
    """Room in a plan for logits [num_rows, num_local], which are its first columns."""
    return site.empty((num_rows, -(-num_local // _ALIGNED) * _ALIGNED), dtype)


def logits_into(x: torch.Tensor, weight: torch.Tensor, room: torch.Tensor) -> None:
    """x @ weight^T into the first columns of `room`."""
    multiply(x, weight.t(), first_cols(room, weight.shape[0]))


def dx_into(room: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor) -> None:
    """The first columns of `room`, the gradient of the logits, @ weight into dx."""
    multiply(first_cols(room, weight.shape[0]), weight, dx)


def dweight_into(x: torch.Tensor, room: torch.Tensor, accumulate: bool, dweight: torch.Tensor) -> None:
    """The gradient in the first columns of `room`, turned, @ x into dweight, or added there."""
    wgrad_into(x, first_cols(room, dweight.shape[0]), dweight, accumulate)


def walk(
    x: torch.Tensor, weight: torch.Tensor, chunks: list[slice], both: bool = True, aligned: int = _ALIGNED
) -> Iterator[_Chunk]:
    """The logits of each chunk by the product of a card, in one room; with `both` 16-bit inputs' gradient in another.

    On the plain path, where `aligned` is 1, the gradient's room is the logits'.
    """
    wide, num_local = compute_dtype(x.dtype), weight.shape[0]
    room = _chunk_like(x, chunks, num_local, wide, aligned)
    narrow = room if not both or x.dtype is wide or aligned == 1 else _chunk_like(x, chunks, num_local, x.dtype)
    turned = (weight.to(wide) if aligned == 1 else weight).t()
    for rows in chunks:
        part = slice(0, rows.stop - rows.start)
        s, inputs = some_rows(room, part), some_rows(x, rows)
        multiply(inputs, turned, s)
        yield rows, inputs, s, s if narrow is room else some_rows(narrow, part)


def head_stats(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start: int, softcap: float
) -> torch.Tensor:
    """`linear_cross_entropy_stats` without checks: for code that has a backward of its own."""
    stats = torch.empty(4, x.shape[0], dtype=compute_dtype(x.dtype), device=x.device)
    if not weight.shape[0]:
        stats.zero_()
        stats[0] = float("-inf")
    elif use_triton(x):
        chunks = chunks_of(x.shape[0], weight.shape[0], x.shape[1], x.is_cuda)
        for rows, _, s, _ in walk(x, weight, chunks, both=False):
            planned(_build_stats, (s, some_rows(target, rows), _cols(stats, rows)), vocab_start, softcap)
    else:
        for rows in chunks_of(x.shape[0], weight.shape[0]):
            s = capped(_logits(x[rows], weight), softcap)
            plain_stats(s, target[rows], vocab_start, stats[:, rows])
    return stats


def head_grad(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor,
    dweight: torch.Tensor | None, vocab_start: int, num_classes: int, label_smoothing: float, z_loss: float,
    softcap: float, need_dx: bool, divisor: torch.Tensor | None = None, ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """dx (empty without need_dx), without checks or graph; adds into dweight in its own dtype.

    dloss [N] counts each token's loss, 0 where it is ignored. With the divisor of `head_loss` it is the 0-dim
    gradient of the reduced loss.
    """
    dx = x.new_empty(x.shape if need_dx else (0,))
    if not weight.shape[0]:
        return dx.zero_()
    options = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    if not use_triton(x):
        if divisor is not None:
            dloss = torch.where(target != ignore_index, dloss / divisor, 0.0)
        for rows in chunks_of(x.shape[0], weight.shape[0]):
            s = capped(_logits(x[rows], weight), softcap)
            grad = plain_grad(s, target[rows], lse[rows], dloss[rows], *options)
            add_gradients(x[rows], weight, grad, dx[rows] if need_dx else None, dweight)
        return dx
    for rows, inputs, s, grad in walk(x, weight, chunks_of(x.shape[0], weight.shape[0], x.shape[1], x.is_cuda)):
        upstream = some_rows(dloss, rows) if divisor is None else dloss
        tensors = (s, some_rows(target, rows), some_rows(lse, rows), upstream, grad, divisor)
        planned(_build_grad, tensors, *options, ignore_index)
        add_gradients(inputs, weight, grad, some_rows(dx, rows) if need_dx else None, dweight)
    return dx


def head_grad_new(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor,
    vocab_start: int, num_classes: int, label_smoothing: float, z_loss: float, softcap: float, need_dx: bool,
    divisor: torch.Tensor | None = None, ignore_index: int = -100,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dx, empty without need_dx, dweight), both new and in x's dtype, without checks or graph. dloss as `head_grad`.

    16-bit ones on a GPU by slices of the vocabulary: dweight is written once, as it is, by a product over all tokens,
    and dx is summed in fp32. Beyond the results that takes 4 bytes per element of x, and 6 per logit of a slice.
    """
    options = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    slices = _slices(x.shape[0], weight.shape[0], x.is_cuda)
    if x.dtype == lse.dtype or len(slices) < 2 or not x.shape[0]:
        wide = weight.new_zeros(weight.shape, dtype=lse.dtype)
        dx = head_grad(x, weight, target, lse, dloss, wide, *options, need_dx, divisor, ignore_index)
        return dx, wide.to(weight.dtype)
    if divisor is not None and not use_triton(x):
        dloss, divisor = torch.where(target != ignore_index, dloss / divisor, 0.0), None
    dweight = weight.new_empty(weight.shape)
    total = torch.empty(x.shape if need_dx else (0,), dtype=lse.dtype, device=x.device)
    rooms = [x.new_empty((x.shape[0], slices[0].stop), dtype=dtype) for dtype in (lse.dtype, x.dtype)]
    for part in slices:
        s, grad = (room[:, : part.stop - part.start] for room in rooms)
        shard = weight[part]
        multiply(x, shard.t(), s)
        here = (vocab_start + part.start, *options[1:])
        if use_triton(x):
            planned(_build_grad, (s, target, lse, dloss, grad, divisor), *here, ignore_index)
        else:
            grad.copy_(plain_grad(capped(s, softcap), target, lse, dloss, *here))
        wgrad_into(x, grad, dweight[part], False)
        if need_dx:  # grad @ shard
            wgrad_into(shard, grad.t(), total, part.start > 0)
    del rooms, s, grad
    return total.to(x.dtype), dweight


def gradients_like(
    x: torch.Tensor, weight: torch.Tensor, need_dx: bool, need_dweight: bool, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for (dx, dweight in fp32 (fp64)): unneeded ones are empty, so is dweight where `out` takes it."""
    made = weight.new_empty if use_triton(x) and x.shape[0] else weight.new_zeros  # the first chunk overwrites it
    shape = weight.shape if need_dweight and out is None else (0,)
    return x.new_empty(x.shape if need_dx else (0,)), made(shape, dtype=compute_dtype(x.dtype))


def head_once(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, vocab_start: int,
    num_classes: int, label_smoothing: float, z_loss: float, softcap: float, need_dx: bool, need_dweight: bool,
    merge: Merge | None = None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(merged statistics [3, N] as `merge_stats`, dx, dweight fp32 (fp64)) with three products; unneeded ones empty.

    With `out` [V_local, D] the weight gradient is added into it, in its own dtype, and dweight is empty. `dloss` [N]
    is how much each token's loss counts. The bits are those of `head_stats` and `head_grad`. Shards exchange in
    `merge`, once per chunk: a pass for the statistics alone would cost the product that this saves. Their chunks are
    those of the whole vocabulary, since all ranks must walk alike.
    """
    num_rows, num_local = x.shape[0], weight.shape[0]
    merged = torch.empty(3, num_rows, dtype=compute_dtype(x.dtype), device=x.device)
    dx, dweight = gradients_like(x, weight, need_dx, need_dweight, out)
    options = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    chunks = chunks_of(num_rows, num_local if merge is None else num_classes, weight.shape[1], x.is_cuda)
    if not num_local:  # a shard without rows takes part in the exchanges
        for rows in chunks:
            stats = head_stats(some_rows(x, rows), weight, some_rows(target, rows), vocab_start, softcap)
            merged[:, rows] = torch.stack((merge or merge_stats)(stats))
        return merged, dx.zero_(), dweight
    home = (dweight if out is None else out) if need_dweight else None
    make_grad, aligned = (_once_triton, _ALIGNED) if use_triton(x) else (_once_plain, 1)
    for rows, inputs, s, grad in walk(x, weight, chunks, aligned=aligned):
        make_grad(s, some_rows(target, rows), some_rows(dloss, rows), _cols(merged, rows), options, merge, grad)
        added = out is not None or rows.start > 0
        add_gradients(inputs, weight, grad, some_rows(dx, rows) if need_dx else None, home, added)
    return merged, dx, dweight


def _once_triton(
    s: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, merged: torch.Tensor,
    options: Terms, merge: Merge | None, grad: torch.Tensor,
) -> None:  # fmt: skip
    """Logits s[n, V_local] -> merged [3, n] and grad, which may be `s`."""
    stats = torch.empty((4, s.shape[0]), dtype=s.dtype, device=s.device)
    planned(_build_stats, (s, target, stats), options[0], options[-1])
    torch.stack((merge or merge_stats)(stats), out=merged)
    planned(_build_grad, (s, target, merged[0], dloss, grad, None), *options, -100)


def _once_plain(
    s: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, merged: torch.Tensor,
    options: Terms, merge: Merge | None, grad: torch.Tensor,
) -> None:  # fmt: skip
    """As `_once_triton` with `grad` the logits themselves: a few rows at a time, out of the cache."""
    for rows in _cached(s) if merge is None else [slice(0, s.shape[0])]:
        block = capped(s[rows], options[-1])
        stats = plain_stats(block.clone(), target[rows], options[0], s.new_empty(4, block.shape[0]))
        merged[:, rows] = torch.stack((merge or merge_stats)(stats))
        plain_grad(block, target[rows], merged[0, rows], dloss[rows], *options)


def add_gradients(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, dx: torch.Tensor | None, dweight: torch.Tensor | None,
    accumulate: bool = True,
) -> None:  # fmt: skip
    """Writes dx and adds into dweight those of a chunk's logits, `grad` [n, V_local]. Without `accumulate` the
    kernels overwrite dweight, which plain torch finds zero.
    """
    narrow = grad if grad.dtype is x.dtype else grad.to(x.dtype)
    if dx is not None:
        multiply(narrow, weight, dx)
    if dweight is not None and use_triton(x):
        wgrad_into(x, narrow, dweight, accumulate)
    elif dweight is not None and dweight.dtype == x.dtype:
        dweight.addmm_(narrow.t(), x)
    elif dweight is not None:
        dweight.addmm_(grad.t(), x.to(dweight.dtype))
