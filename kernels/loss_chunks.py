"""The head's product and its loss in chunks of tokens, on one vocabulary shard: direct functions without checks.

Three of them: the statistics, the gradients given the log-sum-exp (the logits are made again: four products with the
statistics'), and both in one walk (three products) for a caller who knows beforehand how each token's loss counts.
What is differentiable and checked is loss.py. The one idea: a chunk of logits exists at a time, and the gradients of
chunks are added up in fp32, so that no number of chunks costs digits. On a GPU a chunk has `_GPU_CHUNK_ELEMENTS`
logits, or `_GPU_CHUNK_ROWS` tokens where that is more.
"""

from collections.abc import Callable

import torch

from plait.kernels.entropy import capped, merge_stats, plain_grad, plain_stats
from plait.kernels.launch import compute_dtype, use_triton
from plait.kernels.loss_triton import grad_launch, stats_launch
from plait.kernels.matmul import wgrad_into

# Statistics [4, n] of a shard -> (lse, target logit, logit sum), each [n], of the whole vocabulary.
Merge = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

# Logits that exist at one time: 2^24 is 64 MiB in fp32, small beside the weight of a 128k vocabulary (derived).
_CHUNK_ELEMENTS = 1 << 24
# Logits of the plain path that are copied at a time for their statistics: 2^18 are 1 MiB in fp32, which a core's
# cache keeps (derived; in one thread of a CPU no faster than whole chunks, but without a second one).
_CACHED_ELEMENTS = 1 << 18
# On a GPU each chunk reads and writes the whole weight gradient, 8 bytes per element, beside 2 FLOP per element and
# token: 744 tokens balance them at 800 TFLOP/s and 4.3 TB/s (derived), so a chunk has at least 768. With a vocabulary
# of 128k that is 0.6 GB in all, a tenth of what plain torch needs for 4096 tokens. Whole tiles of 128 tokens.
_GPU_CHUNK_ELEMENTS, _GPU_CHUNK_ROWS, _GPU_TILE = 3 << 25, 768, 128
# Rows of a chunk start at multiples of this many logits, so that accesses are wide for every vocabulary.
_ALIGNED = 16


def _chunks(num_rows: int, num_local: int, on_gpu: bool = False) -> list[slice]:
    if on_gpu:
        step = max(_GPU_CHUNK_ROWS, _GPU_CHUNK_ELEMENTS // max(1, num_local) // _GPU_TILE * _GPU_TILE)
    else:
        step = max(1, _CHUNK_ELEMENTS // max(1, num_local))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


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


def _logits_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`_logits` into `out`, which is returned; on a GPU the product of 16-bit inputs is written in fp32."""
    if x.is_cuda and x.dtype != out.dtype:
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    return torch.mm(x.to(out.dtype), weight.to(out.dtype).t(), out=out)


def _chunk_like(
    x: torch.Tensor, chunks: list[slice], num_local: int, dtype: torch.dtype, aligned: int = _ALIGNED
) -> torch.Tensor:
    """Room for the logits of the longest chunk, [n, V_local]."""
    longest = chunks[0].stop if chunks else 0
    return x.new_empty((longest, -(-num_local // aligned) * aligned), dtype=dtype)[:, :num_local]


def head_stats(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start: int, softcap: float
) -> torch.Tensor:
    """`linear_cross_entropy_stats` without checks: for code that has a backward of its own."""
    stats = torch.empty(4, x.shape[0], dtype=compute_dtype(x.dtype), device=x.device)
    if not weight.shape[0]:
        stats.zero_()
        stats[0] = float("-inf")
    elif use_triton(x):
        chunks = _chunks(x.shape[0], weight.shape[0], x.is_cuda)
        room = _chunk_like(x, chunks, weight.shape[0], stats.dtype)
        for rows in chunks:
            s = _logits_into(x[rows], weight, room[: rows.stop - rows.start])
            stats_launch(s, target[rows], vocab_start, softcap, stats[:, rows]).run()
    else:
        for rows in _chunks(x.shape[0], weight.shape[0]):
            s = capped(_logits(x[rows], weight), softcap)
            plain_stats(s, target[rows], vocab_start, stats[:, rows])
    return stats


def head_grad(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor,
    dweight: torch.Tensor | None, vocab_start: int, num_classes: int, label_smoothing: float, z_loss: float,
    softcap: float, need_dx: bool,
) -> torch.Tensor:  # fmt: skip
    """dx (empty without need_dx), without checks or graph; adds into dweight in its own dtype."""
    dx = x.new_empty(x.shape if need_dx else (0,))
    if not weight.shape[0]:
        return dx.zero_()
    options = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    if use_triton(x):
        _grad_chunks(x, weight, target, lse, dloss, dweight, options, dx if need_dx else None)
        return dx
    for rows in _chunks(x.shape[0], weight.shape[0]):
        s = capped(_logits(x[rows], weight), softcap)
        grad = plain_grad(s, target[rows], lse[rows], dloss[rows], *options)
        _add_gradients(x[rows], weight, grad, dx[rows] if need_dx else None, dweight)
    return dx


def _grad_chunks(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor,
    dweight: torch.Tensor | None, options: tuple[int, int, float, float, float], dx: torch.Tensor | None,
) -> None:  # fmt: skip
    """`head_grad` by Triton: the gradient goes over the logits, 16-bit inputs' into a second, narrow chunk."""
    chunks = _chunks(x.shape[0], weight.shape[0], x.is_cuda)
    room = _chunk_like(x, chunks, weight.shape[0], lse.dtype)
    narrow = room if x.dtype == lse.dtype else _chunk_like(x, chunks, weight.shape[0], x.dtype)
    for rows in chunks:
        s, grad = room[: rows.stop - rows.start], narrow[: rows.stop - rows.start]
        _logits_into(x[rows], weight, s)
        grad_launch(s, target[rows], lse[rows], dloss[rows], *options, grad).run()
        _add_gradients(x[rows], weight, grad, None if dx is None else dx[rows], dweight)


def head_once(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, vocab_start: int,
    num_classes: int, label_smoothing: float, z_loss: float, softcap: float, need_dx: bool, need_dweight: bool,
    merge: Merge | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(merged statistics [3, N] as `merge_stats`, dx, dweight fp32 (fp64)) with three products; unneeded ones empty.

    `dloss` [N] is how much each token's loss counts. The bits are those of `head_stats` and `head_grad`. Shards
    exchange in `merge`, once per chunk: a pass for the statistics alone would cost the product that this saves. Their
    chunks are those of the whole vocabulary, since all ranks must walk alike.
    """
    wide = compute_dtype(x.dtype)
    num_rows, num_local = x.shape[0], weight.shape[0]
    merged = torch.empty(3, num_rows, dtype=wide, device=x.device)
    dx = x.new_empty(x.shape if need_dx else (0,))
    if not num_local:
        dx.zero_()
    dweight = weight.new_zeros(weight.shape if need_dweight else (0,), dtype=wide)
    options = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    chunks = _chunks(num_rows, num_local if merge is None else num_classes, x.is_cuda)
    triton = use_triton(x)
    room = _chunk_like(x, chunks, num_local, wide, _ALIGNED if triton else 1)
    narrow = room if x.dtype == wide or not triton else _chunk_like(x, chunks, num_local, x.dtype)
    product_weight = weight if triton else weight.to(wide)
    for rows in chunks:
        part = slice(0, rows.stop - rows.start)
        if not num_local:  # a shard without rows takes part in the exchanges
            stats = head_stats(x[rows], weight, target[rows], vocab_start, softcap)
            merged[:, rows] = torch.stack((merge or merge_stats)(stats))
            continue
        s, grad = room[part], narrow[part]
        _logits_into(x[rows], product_weight, s)
        make_grad = _once_triton if triton else _once_plain
        make_grad(s, target[rows], dloss[rows], merged[:, rows], options, merge, grad)
        _add_gradients(x[rows], weight, grad, dx[rows] if need_dx else None, dweight if need_dweight else None)
    return merged, dx, dweight


def _once_triton(
    s: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, merged: torch.Tensor,
    options: tuple[int, int, float, float, float], merge: Merge | None, grad: torch.Tensor,
) -> None:  # fmt: skip
    """Logits s[n, V_local] -> merged [3, n] and grad, which may be `s`."""
    stats = s.new_empty(4, s.shape[0])
    stats_launch(s, target, options[0], options[-1], stats).run()
    torch.stack((merge or merge_stats)(stats), out=merged)
    grad_launch(s, target, merged[0], dloss, *options, grad).run()


def _once_plain(
    s: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor, merged: torch.Tensor,
    options: tuple[int, int, float, float, float], merge: Merge | None, grad: torch.Tensor,
) -> None:  # fmt: skip
    """As `_once_triton` with `grad` the logits themselves: a few rows at a time, out of the cache."""
    for rows in _cached(s) if merge is None else [slice(0, s.shape[0])]:
        block = capped(s[rows], options[-1])
        stats = plain_stats(block.clone(), target[rows], options[0], s.new_empty(4, block.shape[0]))
        merged[:, rows] = torch.stack((merge or merge_stats)(stats))
        plain_grad(block, target[rows], merged[0, rows], dloss[rows], *options)


def _add_gradients(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, dx: torch.Tensor | None, dweight: torch.Tensor | None
) -> None:
    """Writes dx and adds into dweight those of a chunk's logits, `grad` [n, V_local]."""
    narrow = grad.to(x.dtype)
    if dx is not None:
        torch.mm(narrow, weight, out=dx)
    if dweight is not None and use_triton(x):
        wgrad_into(x, narrow, dweight, True)
    elif dweight is not None and dweight.dtype == x.dtype:
        dweight.addmm_(narrow.t(), x)
    elif dweight is not None:
        dweight.addmm_(grad.t(), x.to(dweight.dtype))
