"""linear_cross_entropy: head matmul and loss in chunks of tokens, for vocabulary shards too.

The loss is entropy.py's. The target's logit and the log-sum-exp come from the same product, so the loss without
smoothing is never negative. The weight gradient is fp32 (fp64 for fp64). No logit is stored for backward, which makes
the chunks again.

Memory beyond inputs and outputs: 5 bytes per token from forward to backward (lse and whether it counts), and one
chunk of logits at a time. On a GPU that is 4 bytes per logit, and in the backward of 16-bit inputs 2 more; a chunk
has `_GPU_CHUNK_ELEMENTS` logits, or `_GPU_CHUNK_ROWS` tokens where that is more.
"""

import torch

from plait.kernels.entropy import (
    AllReduce,
    capped,
    check_options,
    check_targets,
    cross_entropy_ref,
    merge_stats,
    plain_grad,
    plain_stats,
    reduce_losses,
    stats_like,
    token_loss,
)
from plait.kernels.launch import check, check_device, check_floating, compute_dtype, register, use_triton
from plait.kernels.loss_triton import grad_launch, stats_launch
from plait.kernels.matmul import wgrad_into

# Logits that exist at one time: 2^24 is 64 MiB in fp32, small beside the weight of a 128k vocabulary (derived).
_CHUNK_ELEMENTS = 1 << 24
# On a GPU each chunk reads and writes the whole weight gradient, 8 bytes per element, beside 2 FLOP per element and
# token: 744 tokens balance them at 800 TFLOP/s and 4.3 TB/s (derived), so a chunk has at least 768. With a vocabulary
# of 128k that is 0.6 GB in all, a tenth of what plain torch needs for 4096 tokens. Whole tiles of 128 tokens.
_GPU_CHUNK_ELEMENTS, _GPU_CHUNK_ROWS, _GPU_TILE = 3 << 25, 768, 128
# Rows of a chunk start at multiples of this many logits, so that accesses are wide for every vocabulary.
_ALIGNED = 16


def linear_cross_entropy_ref(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: float
) -> torch.Tensor:
    """The oracle of linear_cross_entropy on one whole vocabulary; options as `cross_entropy_ref`."""
    dtype = compute_dtype(x.dtype)
    return cross_entropy_ref(x.to(dtype) @ weight.to(dtype).t(), target, **options)  # type: ignore[arg-type]


def _chunks(num_rows: int, num_local: int, on_gpu: bool = False) -> list[slice]:
    if on_gpu:
        step = max(_GPU_CHUNK_ROWS, _GPU_CHUNK_ELEMENTS // max(1, num_local) // _GPU_TILE * _GPU_TILE)
    else:
        step = max(1, _CHUNK_ELEMENTS // max(1, num_local))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


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


def _chunk_like(x: torch.Tensor, chunks: list[slice], num_local: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for the logits of the longest chunk, [n, V_local]."""
    longest = chunks[0].stop if chunks else 0
    return x.new_empty((longest, -(-num_local // _ALIGNED) * _ALIGNED), dtype=dtype)[:, :num_local]


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
        narrow = grad.to(x.dtype)
        if need_dx:
            torch.mm(narrow, weight, out=dx[rows])
        if dweight is not None and dweight.dtype == x.dtype:
            dweight.addmm_(narrow.t(), x[rows])
        elif dweight is not None:
            dweight.addmm_(grad.t(), x[rows].to(dweight.dtype))
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
        if dx is not None:
            torch.mm(grad, weight, out=dx[rows])
        if dweight is not None:
            wgrad_into(x[rows], grad, dweight, True)


_stats = register(
    "linear_cross_entropy_stats(Tensor x, Tensor weight, Tensor target, int vocab_start, float softcap) -> Tensor",
    head_stats,
    lambda x, weight, target, vocab_start, softcap: stats_like(x),
)
_grad = register(
    "linear_cross_entropy_grad(Tensor x, Tensor weight, Tensor target, Tensor lse, Tensor dloss,"
    " Tensor(a!)? dweight, int vocab_start, int num_classes, float label_smoothing, float z_loss, float softcap,"
    " bool need_dx) -> Tensor",
    head_grad,
    lambda x, *args: x.new_empty(x.shape if args[-1] else (0,)),
)


def linear_cross_entropy_stats(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, vocab_start: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """A shard's statistics [4, N] in fp32 (fp64): max, sum of exp relative to it, target's logit or 0, logit sum.

    x[N, D], weight[V_local, D] (padding rows cut off), target int64 [N] of global classes. No gradient.
    """
    _check("linear_cross_entropy_stats", x, weight, target)
    with torch.no_grad():
        return _stats(x, weight, target, vocab_start, softcap)


def linear_cross_entropy_grad(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor, *,
    num_classes: int, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, vocab_start: int = 0,
    out: torch.Tensor | None = None, need_dx: bool = True, need_dweight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx, dweight) of a shard: dx[N, D] is the shard's partial, dweight[V_local, D] in fp32 (fp64).

    `lse` [N] spans all shards; `dloss` [N] is the gradient of each token's loss, 0 where it is ignored.
    `num_classes` counts the whole vocabulary. `out`, where given, is added into and returned as dweight.
    """
    _check("linear_cross_entropy_grad", x, weight, target)
    check_device("linear_cross_entropy_grad", x, lse=lse, dloss=dloss)
    with torch.no_grad():
        if out is None and need_dweight:
            out = torch.zeros_like(weight, dtype=compute_dtype(weight.dtype))
        if out is not None:
            check(
                out.shape == weight.shape,
                lambda: f"linear_cross_entropy_grad: out {tuple(out.shape)} must be {tuple(weight.shape)}",
            )
        dweight = out if need_dweight else None
        dx = _grad(
            x, weight, target, lse, dloss.to(lse.dtype), dweight, vocab_start, num_classes, label_smoothing, z_loss,
            softcap, need_dx,
        )  # fmt: skip
    return (dx if need_dx else None), dweight


def _check(op: str, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
    check_floating(op, x=x, weight=weight)
    check_device(op, x, target=target)
    if target.dtype is not torch.int64:
        raise TypeError(f"{op}: target is {target.dtype}; expected torch.int64")
    check(
        x.shape[:-1] == target.shape and weight.dim() == 2 and x.shape[-1] == weight.shape[1],
        lambda: f"{op}: x {tuple(x.shape)}, weight {tuple(weight.shape)}, target {tuple(target.shape)} do not fit",
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves x, weight, target (the caller's), lse and what counts: 5 bytes per token. dx is the shard's partial."""

    @staticmethod
    def forward(ctx, x, weight, target, ignore_index, options, num_classes, vocab_start, all_reduce):
        label_smoothing, z_loss, softcap = options
        lse, hit, total = merge_stats(_stats(x, weight, target, vocab_start, softcap), all_reduce)
        counts = target != ignore_index
        ctx.save_for_backward(x, weight, target, lse, counts)
        ctx.options = dict(
            num_classes=num_classes, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            vocab_start=vocab_start,
        )  # fmt: skip
        return token_loss(
            lse, hit, total, counts, num_classes=num_classes, label_smoothing=label_smoothing, z_loss=z_loss
        )

    @staticmethod
    def backward(ctx, dloss):
        x, weight, target, lse, counts = ctx.saved_tensors
        dx, dweight = linear_cross_entropy_grad(
            x, weight, target, lse, torch.where(counts, dloss, 0.0), need_dx=ctx.needs_input_grad[0],
            need_dweight=ctx.needs_input_grad[1], **ctx.options,
        )  # fmt: skip
        return dx, None if dweight is None else dweight.to(weight.dtype), None, None, None, None, None, None


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    weight_per_token: torch.Tensor | None = None,
    vocab_start: int = 0,
    num_classes: int | None = None,
    reduction: str = "mean",
    all_reduce: AllReduce | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """Cross entropy of `x[..., D] @ weight[V_local, D]^T` with int64 `target[...]`; logits are never stored.

    With `all_reduce(tensor, "max" | "sum")` the weight is one shard (of no rows, too), its first class is
    `vocab_start`, and `num_classes` (needed for label smoothing and debug) counts the whole vocabulary; dx is then
    the shard's partial, to be summed by the caller. `weight_per_token`, `debug` and errors as `cross_entropy`. Saves
    5 bytes per token beyond the caller's x, weight and target, and makes one chunk of logits at a time.
    """
    _check("linear_cross_entropy", x, weight, target)
    check_options("linear_cross_entropy", target, weight_per_token, label_smoothing, softcap, reduction)
    check(
        num_classes is not None or all_reduce is None or (label_smoothing == 0.0 and not debug),
        lambda: f"linear_cross_entropy: {'debug' if debug else 'label smoothing'} over shards needs num_classes",
    )
    num_classes = num_classes or weight.shape[0]
    check(
        all_reduce is not None or weight.shape[0] > 0,
        lambda: f"linear_cross_entropy: weight {tuple(weight.shape)} has no classes",
    )
    if debug:
        check_targets("linear_cross_entropy", target, num_classes, ignore_index)
    flat = target.reshape(-1)
    loss = _LinearCrossEntropy.apply(
        x.reshape(-1, x.shape[-1]), weight, flat, ignore_index, (label_smoothing, z_loss, softcap),
        num_classes, vocab_start, all_reduce,
    )  # fmt: skip
    return reduce_losses(loss.view(target.shape), target != ignore_index, weight_per_token, reduction)
