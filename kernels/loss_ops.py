"""What loss.py differentiates: the head's loss and its gradients as registered ops, and two for vocabulary shards.

Not here: autograd, and the walk over chunks (loss_chunks.py, loss_whole.py). The one idea: these take tensors and
numbers only; a shard's statistics go through a callable, which no op can take, between two of them.
"""

from functools import partial

import torch

from plait.kernels.entropy import stats_like
from plait.kernels.launch import check, check_device, check_floating, compute_dtype
from plait.kernels.loss_chunks import head_grad, head_grad_new, head_stats
from plait.kernels.loss_whole import head_loss, head_loss_once
from plait.kernels.registration import register

stats_op = register(
    "linear_cross_entropy_stats(Tensor x, Tensor weight, Tensor target, int vocab_start, float softcap) -> Tensor",
    head_stats,
    lambda x, weight, target, vocab_start, softcap: stats_like(x),
)
_TERMS = "int vocab_start, int num_classes, float label_smoothing, float z_loss, float softcap"
_DIVISOR = "Tensor? divisor=None, int ignore_index=-100"
grad_op = register(
    "linear_cross_entropy_grad(Tensor x, Tensor weight, Tensor target, Tensor lse, Tensor dloss,"
    f" Tensor(a!)? dweight, {_TERMS}, bool need_dx, {_DIVISOR}) -> Tensor",
    head_grad,
    lambda x, weight, target, lse, dloss, dweight, *args: x.new_empty(x.shape if args[5] else (0,)),
)
grad_new_op = register(
    "linear_cross_entropy_grad_new(Tensor x, Tensor weight, Tensor target, Tensor lse, Tensor dloss,"
    f" {_TERMS}, bool need_dx, {_DIVISOR}) -> (Tensor, Tensor)",
    head_grad_new,
    lambda x, weight, target, lse, dloss, *args: (
        x.new_empty(x.shape if args[5] else (0,)), weight.new_empty(weight.shape)
    ),
)  # fmt: skip


def _losses_like(x: torch.Tensor, code: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new = partial(x.new_empty, dtype=compute_dtype(x.dtype))
    return new(() if code else x.shape[:1]), new(x.shape[:1]), new(() if code else (0,))


loss_op = register(
    f"linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, int code, {_TERMS})"
    " -> (Tensor, Tensor, Tensor)",
    head_loss,
    lambda x, weight, target, ignore_index, code, *terms: _losses_like(x, code),
)
once_op = register(
    "linear_cross_entropy_once(Tensor x, Tensor weight, Tensor target, Tensor? dloss, int ignore_index, int code,"
    f" {_TERMS}, bool need_dx, bool need_dweight, Tensor(a!)? out=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    head_loss_once,
    lambda x, weight, target, dloss, ignore_index, code, *args: (
        *_losses_like(x, code),
        x.new_empty(x.shape if args[5] else (0,)),
        weight.new_empty(
            weight.shape if args[6] and (len(args) < 8 or args[7] is None) else (0,), dtype=compute_dtype(x.dtype)
        ),
    ),
)


def linear_cross_entropy_stats(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, vocab_start: int = 0, softcap: float = 0.0
) -> torch.Tensor:
    """A shard's statistics [4, N] in fp32 (fp64): max, sum of exp relative to it, target's logit or 0, logit sum.

    x[N, D], weight[V_local, D] (padding rows cut off), target int64 [N] of global classes. No gradient.
    """
    check_head("linear_cross_entropy_stats", x, weight, target)
    with torch.no_grad():
        return stats_op(x, weight, target, vocab_start, softcap)


def linear_cross_entropy_grad(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor, *,
    num_classes: int, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, vocab_start: int = 0,
    out: torch.Tensor | None = None, need_dx: bool = True, need_dweight: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx, dweight) of a shard: dx[N, D] is the shard's partial, dweight[V_local, D] in fp32 (fp64).

    `lse` [N] spans all shards; `dloss` [N] is the gradient of each token's loss, 0 where it is ignored.
    `num_classes` counts the whole vocabulary. `out`, where given, is added into and returned as dweight.
    """
    check_head("linear_cross_entropy_grad", x, weight, target)
    check_device("linear_cross_entropy_grad", x, lse=lse, dloss=dloss)
    wide = compute_dtype(x.dtype)
    check(
        lse.shape == target.shape and dloss.shape == target.shape,
        lambda: (
            f"linear_cross_entropy_grad: lse {tuple(lse.shape)} and dloss {tuple(dloss.shape)} must have target's"
            f" shape {tuple(target.shape)}"
        ),
    )
    if lse.dtype is not wide:
        raise TypeError(f"linear_cross_entropy_grad: lse is {lse.dtype}; expected {wide}")
    with torch.no_grad():
        if out is None and need_dweight:
            out = torch.zeros_like(weight, dtype=wide)
        if out is not None:
            check_out("linear_cross_entropy_grad", "out", out, weight)
        dweight = out if need_dweight else None
        dx = grad_op(
            x, weight, target, lse, dloss.to(lse.dtype), dweight, vocab_start, num_classes, label_smoothing, z_loss,
            softcap, need_dx,
        )  # fmt: skip
    return (dx if need_dx else None), dweight


def check_head(op: str, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
    check_floating(op, 2, x=x, weight=weight)
    check_device(op, x, target=target)
    if target.dtype is not torch.int64:
        raise TypeError(f"{op}: target is {target.dtype}; expected torch.int64")
    of_x, sizes = x.shape, weight.shape
    if len(sizes) != 2 or of_x[:-1] != target.shape or of_x[-1] != sizes[1]:
        raise ValueError(f"{op}: x {tuple(of_x)}, weight {tuple(sizes)}, target {tuple(target.shape)} do not fit")


def check_out(op: str, name: str, out: torch.Tensor, weight: torch.Tensor) -> None:
    check_device(op, weight, **{name: out})
    wide = compute_dtype(weight.dtype)
    if out.dtype not in (wide, weight.dtype):
        raise TypeError(f"{op}: {name} is {out.dtype}; expected {wide} or {weight.dtype}")
    check(out.shape == weight.shape, lambda: f"{op}: {name} {tuple(out.shape)} must be {tuple(weight.shape)}")
