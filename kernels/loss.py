"""linear_cross_entropy: head matmul and loss in chunks of tokens, for vocabulary shards too.

The loss is entropy.py's. The target's logit and the log-sum-exp come from the same product, so the loss without
smoothing is never negative. The weight gradient is fp32 (fp64 for fp64); at most `_CHUNK_ELEMENTS` logits exist at a
time, and none is stored for backward.
"""

import torch

from plait.kernels.entropy import (
    AllReduce,
    capped,
    check_options,
    cross_entropy_ref,
    merge_stats,
    plain_grad,
    plain_stats,
    reduce_losses,
    stats_like,
    token_loss,
)
from plait.kernels.launch import check, check_device, check_floating, compute_dtype, register

# Logits that exist at one time: 2^24 is 64 MiB in fp32, small beside the weight of a 128k vocabulary (derived).
_CHUNK_ELEMENTS = 1 << 24


def linear_cross_entropy_ref(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: float
) -> torch.Tensor:
    """The oracle of linear_cross_entropy on one whole vocabulary; options as `cross_entropy_ref`."""
    dtype = compute_dtype(x.dtype)
    return cross_entropy_ref(x.to(dtype) @ weight.to(dtype).t(), target, **options)  # type: ignore[arg-type]


def _chunks(num_rows: int, num_local: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, num_local))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T in the compute dtype, not rounded to 16 bits in between."""
    dtype = compute_dtype(x.dtype)
    if x.dtype == dtype:
        return torch.mm(x, weight.t())
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=dtype)
    return torch.mm(x.to(dtype), weight.to(dtype).t())


def head_stats(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, vocab_start: int, softcap: float
) -> torch.Tensor:
    """`linear_cross_entropy_stats` without checks: for code that has a backward of its own."""
    stats = torch.empty(4, x.shape[0], dtype=compute_dtype(x.dtype), device=x.device)
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
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    for rows in _chunks(x.shape[0], weight.shape[0]):
        s = capped(_logits(x[rows], weight), softcap)
        grad = plain_grad(
            s, target[rows], lse[rows], dloss[rows], vocab_start, num_classes, label_smoothing, z_loss, softcap
        )
        narrow = grad.to(x.dtype)
        if need_dx:
            torch.mm(narrow, weight, out=dx[rows])
        if dweight is not None and dweight.dtype == x.dtype:
            dweight.addmm_(narrow.t(), x[rows])
        elif dweight is not None and x.is_cuda:
            dweight.add_(torch.mm(narrow.t(), x[rows], out_dtype=dweight.dtype))
        elif dweight is not None:
            dweight.addmm_(grad.t(), x[rows].to(dweight.dtype))
    return dx


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
    """Saves x, weight, target (the caller's) and lse: 4 bytes per token. dx is the shard's partial."""

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
    vocab_start: int = 0,
    num_classes: int | None = None,
    reduction: str = "mean",
    all_reduce: AllReduce | None = None,
) -> torch.Tensor:
    """Cross entropy of `x[..., D] @ weight[V_local, D]^T` with int64 `target[...]`; logits are never stored.

    With `all_reduce(tensor, "max" | "sum")` the weight is one shard, its first class is `vocab_start`, and
    `num_classes` (needed for label smoothing) counts the whole vocabulary; dx is then the shard's partial, to be
    summed by the caller. Saves 4 bytes per token. Errors as `cross_entropy`.
    """
    _check("linear_cross_entropy", x, weight, target)
    check_options("linear_cross_entropy", label_smoothing, softcap, reduction)
    check(
        num_classes is not None or all_reduce is None or label_smoothing == 0.0,
        lambda: "linear_cross_entropy: label smoothing over shards needs num_classes",
    )
    flat = target.reshape(-1)
    loss = _LinearCrossEntropy.apply(
        x.reshape(-1, x.shape[-1]), weight, flat, ignore_index, (label_smoothing, z_loss, softcap),
        num_classes or weight.shape[0], vocab_start, all_reduce,
    )  # fmt: skip
    return reduce_losses(loss.view(target.shape), target != ignore_index, reduction)
