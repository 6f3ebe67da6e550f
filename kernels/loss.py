"""linear_cross_entropy: head matmul and loss in chunks of tokens, for vocabulary shards too.

The loss is entropy.py's. The target's logit and the log-sum-exp come from the same product, so the loss without
smoothing is never negative. The weight gradient is fp32 (fp64 for fp64). The chunks are loss_chunks.py's. Two forms:
- gradients in the forward: three products, as plain torch. dx and dweight (fp32) wait for the backward, which
  multiplies them by the gradient of the loss. For a reduced loss only, whose tokens' shares are known beforehand.
- gradients in the backward: the logits are made again, four products, and nothing waits.
The bits are the same where the gradient of the loss is 1; else dx, rounded once, is multiplied and rounded again.

Memory beyond inputs and outputs: 5 bytes per token from forward to backward (lse and whether it counts; 8 in the
first form: lse and the token's share), and one chunk of logits at a time. On a GPU that is 4 bytes per logit, and for
the gradient of 16-bit inputs 2 more. The fp32 weight gradient is a buffer too where the weight has 16 bits: 4 bytes
per element, until it is rounded.
"""

from functools import partial

import torch

from plait.kernels.entropy import (
    AllReduce,
    check_options,
    check_targets,
    cross_entropy_ref,
    merge_stats,
    reduce_losses,
    stats_like,
    token_loss,
)
from plait.kernels.launch import (
    check,
    check_device,
    check_floating,
    compute_dtype,
    once_differentiable,
    register,
    watched,
)
from plait.kernels.loss_chunks import head_grad, head_once, head_stats


def linear_cross_entropy_ref(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: float
) -> torch.Tensor:
    """The oracle of linear_cross_entropy on one whole vocabulary; options as `cross_entropy_ref`."""
    dtype = compute_dtype(x.dtype)
    return cross_entropy_ref(x.to(dtype) @ weight.to(dtype).t(), target, **options)  # type: ignore[arg-type]


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
_once = register(
    "linear_cross_entropy_once(Tensor x, Tensor weight, Tensor target, Tensor dloss, int vocab_start,"
    " int num_classes, float label_smoothing, float z_loss, float softcap, bool need_dx, bool need_dweight)"
    " -> (Tensor, Tensor, Tensor)",
    head_once,
    lambda x, weight, target, dloss, *args: (
        x.new_empty((3, x.shape[0]), dtype=compute_dtype(x.dtype)),
        x.new_empty(x.shape if args[-2] else (0,)),
        weight.new_empty(weight.shape if args[-1] else (0,), dtype=compute_dtype(x.dtype)),
    ),
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
            check_device("linear_cross_entropy_grad", x, out=out)
            if out.dtype not in (wide, x.dtype):
                raise TypeError(f"linear_cross_entropy_grad: out is {out.dtype}; expected {wide} or {x.dtype}")
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
    """Losses per token. Saves x, weight, target (the caller's), lse and what counts: 5 bytes per token."""

    @staticmethod
    def forward(ctx, x, weight, target, ignore_index, terms, all_reduce):
        stats = _stats(x, weight, target, terms["vocab_start"], terms["softcap"])
        lse, hit, total = merge_stats(stats, all_reduce)
        counts = target != ignore_index
        ctx.save_for_backward(x, weight, target, lse, counts)
        ctx.terms = terms
        return _token_loss((lse, hit, total), counts, terms)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        x, weight, target, lse, counts = ctx.saved_tensors
        dx, dweight = linear_cross_entropy_grad(
            x, weight, target, lse, torch.where(counts, dloss, 0.0), need_dx=ctx.needs_input_grad[0],
            need_dweight=ctx.needs_input_grad[1], **ctx.terms,
        )  # fmt: skip
        return dx, None if dweight is None else dweight.to(weight.dtype), None, None, None, None


class _LinearCrossEntropyOnce(torch.autograd.Function):
    """The reduced loss. Saves 8 bytes per token (lse, its share), dx, dweight in fp32 (fp64); with weights 4 more.

    A backward hands over dx and dweight, scaled in place. A second one, over a graph that was kept, makes the logits
    again. Under the compiler, which may not see tensors leave, they are scaled into new ones.
    """

    @staticmethod
    def forward(ctx, x, weight, target, weights, ignore_index, terms, reduction, all_reduce):
        counts = target != ignore_index
        dloss, divisor = _shares(counts, weights, reduction, compute_dtype(x.dtype))
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        wanted = {"need_dx": need_dx, "need_dweight": need_dweight, **terms}
        if all_reduce is None:
            merged, dx, dweight = _once(x, weight, target, dloss, **wanted)
        else:
            merge = partial(merge_stats, all_reduce=all_reduce)
            merged, dx, dweight = head_once(x, weight, target, dloss, merge=merge, **wanted)
        loss = _token_loss(merged.unbind(0), counts, terms)
        value = reduce_losses(loss, counts, weights, reduction)
        dweights = None
        if weights is not None and ctx.needs_input_grad[3]:
            dweights = loss
            if reduction == "mean":  # the divisor is a constant where the weights add up to 0
                constant = torch.where(counts, weights.to(divisor.dtype), 0.0).sum() == 0.0
                dweights = torch.where(counts, loss - torch.where(constant, 0.0, value), 0.0) / divisor
        ctx.terms, ctx.held = terms, None
        kept = (dx, dweight) if torch.compiler.is_compiling() else ()
        if not kept:
            ctx.held = [dx, dweight]
        ctx.save_for_backward(x, weight, target, merged[0], dloss, dweights, *kept)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalue):
        x, weight, target, lse, dloss, dweights, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if kept:
            dx, dweight = (total * dvalue for total in kept)
        elif ctx.held is not None:
            (dx, dweight), ctx.held = ctx.held, None
            for total in (dx, dweight):
                _scale_(total, dvalue)
        else:
            dx, dweight = linear_cross_entropy_grad(
                x, weight, target, lse, dloss * dvalue, need_dx=needs[0], need_dweight=needs[1], **ctx.terms
            )
        return (
            dx if needs[0] else None,
            dweight.to(weight.dtype) if needs[1] else None,
            None,
            None if dweights is None else dweights * dvalue,
            None, None, None, None,
        )  # fmt: skip


def _token_loss(merged: tuple[torch.Tensor, ...], counts: torch.Tensor, terms: dict[str, float]) -> torch.Tensor:
    lse, hit, total = merged
    names = ("num_classes", "label_smoothing", "z_loss")
    return token_loss(lse, hit, total, counts, **{name: terms[name] for name in names})  # type: ignore[arg-type]


def _shares(
    counts: torch.Tensor, weights: torch.Tensor | None, reduction: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(derivative of `reduce_losses` by each token's loss, what "mean" divides by): the bits that autograd finds."""
    if weights is None:
        shares, divisor = counts.to(dtype), counts.sum().clamp(min=1).to(dtype)
    else:
        shares = torch.where(counts, weights.to(dtype), 0.0)
        total = shares.sum()
        divisor = torch.where(total == 0.0, 1.0, total)
    return (shares if reduction == "sum" else shares * (1.0 / divisor)), divisor


def _scale_(total: torch.Tensor, factor: torch.Tensor) -> None:
    """total *= factor; where a look at the factor costs no wait, a factor of 1 is no pass over memory."""
    looked_at = factor.device.type == "cpu" and type(factor) is torch.Tensor and not watched()
    if not looked_at or float(factor) != 1.0:
        total.mul_(factor)


def _wanted(grad_in_forward: bool | None, x: torch.Tensor, weight: torch.Tensor, reduction: str, local: bool) -> bool:
    """Whether both gradients are made in the forward."""
    check(
        not grad_in_forward or reduction != "none",
        lambda: "linear_cross_entropy: grad_in_forward needs a reduction; expected 'sum' or 'mean', got 'none'",
    )
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return False
    if grad_in_forward is None:
        return local and reduction != "none" and x.dtype is not torch.float16
    return grad_in_forward


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
    grad_in_forward: bool | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """Cross entropy of `x[..., D] @ weight[V_local, D]^T` with int64 `target[...]`; logits are never stored.

    With `all_reduce(tensor, "max" | "sum")` the weight is one shard (of no rows, too), its first class is
    `vocab_start`, and `num_classes` (needed for label smoothing and debug) counts the whole vocabulary; dx is then
    the shard's partial, to be summed by the caller. `weight_per_token`, `debug` and errors as `cross_entropy`. Saves
    5 bytes per token beyond the caller's x, weight and target, and makes one chunk of logits at a time.

    `grad_in_forward` makes both gradients beside the loss, three products in place of four, and keeps them for the
    backward: x's size, 4 (8) bytes per element of weight, and 8 per token in place of 5. By default it is done for a
    reduced loss of a whole vocabulary, but not in fp16, whose gradients need a loss scale before they are rounded.
    False is right where many forwards come before the first backward; True over shards exchanges twice per chunk and
    not twice in all.
    """
    _check("linear_cross_entropy", x, weight, target)
    check_options("linear_cross_entropy", target, weight_per_token, label_smoothing, softcap, reduction)
    check(
        num_classes is not None or all_reduce is None or not (label_smoothing or debug or grad_in_forward),
        lambda: (
            "linear_cross_entropy: label smoothing, debug and grad_in_forward over shards need num_classes, got None"
        ),
    )
    num_classes = num_classes or weight.shape[0]
    check(
        all_reduce is not None or weight.shape[0] > 0,
        lambda: f"linear_cross_entropy: weight {tuple(weight.shape)} has no classes",
    )
    if debug:
        check_targets("linear_cross_entropy", target, num_classes, ignore_index)
    flat, rows = target.reshape(-1), x.reshape(-1, x.shape[-1])
    terms = dict(
        vocab_start=vocab_start, num_classes=num_classes, label_smoothing=label_smoothing, z_loss=z_loss,
        softcap=softcap,
    )  # fmt: skip
    if _wanted(grad_in_forward, x, weight, reduction, all_reduce is None):
        weights = None if weight_per_token is None else weight_per_token.reshape(-1)
        return _LinearCrossEntropyOnce.apply(rows, weight, flat, weights, ignore_index, terms, reduction, all_reduce)
    loss = _LinearCrossEntropy.apply(rows, weight, flat, ignore_index, terms, all_reduce)
    return reduce_losses(loss.view(target.shape), target != ignore_index, weight_per_token, reduction)
