"""linear_cross_entropy: head matmul and loss in chunks of tokens, for vocabulary shards too.

The loss is entropy.py's, the ops are loss_ops.py's, the chunks loss_chunks.py's. The target's logit and the
log-sum-exp come from the same product, so the loss without smoothing is never negative. The weight gradient is fp32
(fp64 for fp64). Two forms:
- gradients in the forward: three products, as plain torch. dx and dweight (fp32) wait for the backward, which
  multiplies them by the gradient of the loss. For a reduced loss only, whose tokens' shares are known beforehand.
- gradients in the backward: the logits are made again, four products, and nothing waits.
The bits are the same where the gradient of the loss is 1; else dx, rounded once, is multiplied and rounded again. New
gradients of 16 bits on a GPU are summed in another order by the second form, so there they agree to their rounding.

Memory beyond inputs and outputs: 4 bytes per token from forward to backward (lse; with weights per token or over
shards 8 in the first form: the token's share), and one chunk of logits at a time, on a GPU 4 bytes per logit, and for
the gradient of 16-bit inputs 2 more. The first form sums a new weight gradient in fp32, 4 bytes per element, and
rounds it in the backward; on a GPU the second sums dx in fp32 instead. `weight_grad_out` takes the weight's gradient
in both, and nothing else as large is made. docs/kernels.md has the peak of each.
"""

from functools import partial

import torch

from plait.kernels.entropy import (
    REDUCTIONS,
    AllReduce,
    check_options,
    check_targets,
    cross_entropy_ref,
    merge_stats,
    reduce_losses,
    token_loss,
)
from plait.kernels.launch import compute_dtype
from plait.kernels.loss_chunks import head_once
from plait.kernels.loss_ops import check_head, check_out, grad_new_op, grad_op, loss_op, once_op, stats_op
from plait.kernels.registration import once_differentiable, watched


def linear_cross_entropy_ref(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: float
) -> torch.Tensor:
    """The oracle of linear_cross_entropy on one whole vocabulary; options as `cross_entropy_ref`."""
    dtype = compute_dtype(x.dtype)
    return cross_entropy_ref(x.to(dtype) @ weight.to(dtype).t(), target, **options)  # type: ignore[arg-type]


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses per token, or reduced as REDUCTIONS[code]. Saves x, weight, target (the caller's), lse: 4 bytes a token.

    A reduced loss saves one number more, what the sum was divided by.
    """

    @staticmethod
    def forward(ctx, x, weight, target, ignore_index, terms, code, all_reduce, home):
        value, lse, divisor = _losses(x, weight, target, ignore_index, terms, code, all_reduce)
        ctx.save_for_backward(x, weight, target, lse, divisor if code else None)
        # Others add into home meanwhile, which a saved tensor would not bear.
        ctx.terms, ctx.ignore_index, ctx.home = terms, ignore_index, home
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalue):
        x, weight, target, lse, divisor = ctx.saved_tensors
        if divisor is None:
            dvalue = torch.where(target != ctx.ignore_index, dvalue, 0.0)
        dx, dweight = _late(ctx, x, weight, target, lse, dvalue, divisor, *ctx.needs_input_grad[:2])
        return dx, dweight, None, None, None, None, None, None


class _LinearCrossEntropyOnce(torch.autograd.Function):
    """The reduced loss. Saves lse, 4 bytes per token, dx, dweight in fp32 (fp64); with weights or shards 4 or 8 more.

    A backward hands over dx and dweight, scaled in place. A second one, over a graph that was kept, makes the logits
    again. Under the compiler, which may not see tensors leave, they are scaled into new ones. With `home` there is no
    dweight: the forward has added it there, for a gradient of the loss of `loss_grad`.
    """

    @staticmethod
    def forward(ctx, x, weight, target, weights, ignore_index, terms, reduction, all_reduce, home, loss_grad):
        upstream = None
        if loss_grad is not None:
            upstream = torch.as_tensor(loss_grad, dtype=compute_dtype(x.dtype), device=x.device)
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        wanted = {**terms, "need_dx": need_dx, "need_dweight": need_dweight, "out": home if need_dweight else None}
        dweights = None
        if all_reduce is None and weights is None:
            code = REDUCTIONS.index(reduction)
            value, lse, divisor, dx, dweight = once_op(
                x, weight, target, upstream, ignore_index, code, *wanted.values()
            )
        else:
            counts, divisor = target != ignore_index, None
            upstream, total = _shares(counts, weights, reduction, upstream, compute_dtype(x.dtype))
            if all_reduce is None:
                loss, lse, _, dx, dweight = once_op(x, weight, target, upstream, ignore_index, 0, *wanted.values())
            else:
                merge = partial(merge_stats, all_reduce=all_reduce)
                merged, dx, dweight = head_once(x, weight, target, upstream, merge=merge, **wanted)
                loss, lse = _token_loss(merged.unbind(0), counts, terms), merged[0]
            value = reduce_losses(loss, counts, weights, reduction)
            if weights is not None and ctx.needs_input_grad[3]:
                dweights = loss
                if reduction == "mean":  # the divisor is a constant where the weights add up to 0
                    constant = torch.where(counts, weights.to(total.dtype), 0.0).sum() == 0.0
                    dweights = torch.where(counts, loss - torch.where(constant, 0.0, value), 0.0) / total
        ctx.terms, ctx.ignore_index, ctx.held, ctx.home, ctx.loss_grad = terms, ignore_index, None, home, loss_grad
        kept = (dx, dweight) if torch.compiler.is_compiling() else ()
        if not kept:
            ctx.held = [dx, dweight]
        ctx.save_for_backward(x, weight, target, lse, upstream, divisor, dweights, *kept)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalue):
        x, weight, target, lse, upstream, divisor, dweights, *kept = ctx.saved_tensors
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        factor = dvalue if ctx.loss_grad is None else as_told(dvalue, ctx.loss_grad)
        if kept:
            dx, dweight = (total * factor for total in kept)
        elif ctx.held is not None:
            (dx, dweight), ctx.held = ctx.held, None
            one = _is_one(factor)
            dx = dx if one else dx.mul_(factor)
            dweight = dweight if one else _scaled(dweight, factor, weight.dtype)
        else:
            again = factor if upstream is None else upstream * factor
            dx, dweight = _late(ctx, x, weight, target, lse, again, divisor, need_dx, need_dweight)
        return (
            dx if need_dx else None,
            dweight.to(weight.dtype) if need_dweight and ctx.home is None else None,
            None,
            None if dweights is None else dweights * dvalue,
            None, None, None, None, None, None,
        )  # fmt: skip


def _losses(x, weight, target, ignore_index, terms, code, all_reduce):
    """(losses per token or reduced, lse, divisor or empty); over shards always per token."""
    if all_reduce is None:
        return loss_op(x, weight, target, ignore_index, code, *terms.values())
    stats = stats_op(x, weight, target, terms["vocab_start"], terms["softcap"])
    lse, hit, total = merge_stats(stats, all_reduce)
    return _token_loss((lse, hit, total), target != ignore_index, terms), lse, lse.new_empty(0)


def _late(ctx, x, weight, target, lse, dloss, divisor, need_dx, need_dweight):
    """(dx, dweight) of a backward that makes the logits again; dweight is None where ctx.home has taken it."""
    if not (need_dx or need_dweight):
        return None, None
    terms = (*ctx.terms.values(), need_dx, divisor, ctx.ignore_index)
    if need_dweight and ctx.home is None:
        dx, dweight = grad_new_op(x, weight, target, lse, dloss, *terms)
    else:
        dx, dweight = grad_op(x, weight, target, lse, dloss, ctx.home if need_dweight else None, *terms), None
    return (dx if need_dx else None), dweight


def as_told(dvalue: torch.Tensor, loss_grad: float | torch.Tensor) -> torch.Tensor:
    """The factor of gradients made in the forward for `loss_grad`: 1 if the loss gets that, to a millionth, else NaN.

    Where a look at it costs no wait, a ValueError in place of NaN.
    """
    wrong = (dvalue - loss_grad).abs() > 1e-6 * dvalue.abs()
    if not torch.compiler.is_compiling() and _looked_at(dvalue) and bool(wrong):
        raise ValueError(
            f"linear_cross_entropy: the gradient of the loss is {float(dvalue)}; expected {float(loss_grad)}, with"
            " which the forward was told to make the gradients"
        )
    return torch.where(wrong, float("nan"), torch.ones_like(dvalue))


def _token_loss(merged: tuple[torch.Tensor, ...], counts: torch.Tensor, terms: dict[str, float]) -> torch.Tensor:
    lse, hit, total = merged
    names = ("num_classes", "label_smoothing", "z_loss")
    return token_loss(lse, hit, total, counts, **{name: terms[name] for name in names})  # type: ignore[arg-type]


def _shares(
    counts: torch.Tensor, weights: torch.Tensor | None, reduction: str, upstream: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(derivative of `reduce_losses` by each token's loss, what "mean" divides by): the bits that autograd finds.

    Times `upstream`, 0-dim, where that is given.
    """
    if weights is None:
        shares, divisor = counts.to(dtype), counts.sum().clamp(min=1).to(dtype)
    else:
        shares = torch.where(counts, weights.to(dtype), 0.0)
        total = shares.sum()
        divisor = torch.where(total == 0.0, 1.0, total)
    shares = shares if reduction == "sum" else shares * (1.0 / divisor)
    return (shares if upstream is None else shares * upstream), divisor


def _is_one(factor: torch.Tensor) -> bool:
    """Whether a pass over memory would change nothing, where a look at the factor costs no wait."""
    return _looked_at(factor) and float(factor) == 1.0


def _scaled(total: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total * factor, rounded to `dtype` in the same pass; in place where that is total's own."""
    if total.dtype is dtype:
        return total.mul_(factor)
    return torch.mul(total, factor, out=total.new_empty(total.shape, dtype=dtype))


def _looked_at(value: torch.Tensor) -> bool:
    return value.device.type == "cpu" and type(value) is torch.Tensor and not watched()


def _wants_gradient(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


def _in_forward(
    grad_in_forward: bool | None, x: torch.Tensor, weight: torch.Tensor, reduction: str, local: bool,
    weight_grad_out: torch.Tensor | None, loss_grad: float | torch.Tensor | None,
) -> bool:  # fmt: skip
    """Whether both gradients are made in the forward; ValueError where they cannot be."""
    op = "linear_cross_entropy"
    if reduction == "none" and (grad_in_forward or loss_grad is not None):
        raise ValueError(
            f"{op}: grad_in_forward and loss_grad need a reduction; expected 'sum' or 'mean', got 'none'"
        )
    if grad_in_forward and weight_grad_out is not None and loss_grad is None:
        raise ValueError(
            f"{op}: grad_in_forward with weight_grad_out needs loss_grad, the gradient that the loss will get"
        )
    if grad_in_forward is False and loss_grad is not None:
        raise ValueError(
            f"{op}: loss_grad is for gradients made in the forward; expected None with grad_in_forward=False"
        )
    if weight_grad_out is not None:
        check_out(op, "weight_grad_out", weight_grad_out, weight)
    if not _wants_gradient(x, weight):
        return False
    if grad_in_forward is None:
        whole = local and weight_grad_out is None and x.dtype is not torch.float16
        return loss_grad is not None or (whole and reduction != "none")
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
    weight_grad_out: torch.Tensor | None = None,
    loss_grad: float | torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """Cross entropy of `x[..., D] @ weight[V_local, D]^T` with int64 `target[...]`; logits are never stored.

    With `all_reduce(tensor, "max" | "sum")` the weight is one shard (of no rows, too), its first class is
    `vocab_start`, and `num_classes` (needed for label smoothing and debug) counts the whole vocabulary; dx is then
    the shard's partial, to be summed by the caller. `weight_per_token`, `debug` and errors as `cross_entropy`. Saves
    4 bytes per token beyond the caller's x, weight and target, and makes one chunk of logits at a time.

    `grad_in_forward` makes both gradients beside the loss, three products in place of four, and keeps them for the
    backward: x's size and 4 (8) bytes per element of weight. By default it is done for a
    reduced loss of a whole vocabulary, but not in fp16, whose gradients need a loss scale before they are rounded.
    False is right where many forwards come before the first backward, or memory is short; True over shards exchanges
    twice per chunk and not twice in all.

    `weight_grad_out` [V_local, D], fp32 (fp64) or the weight's dtype, takes the weight's gradient, if the weight
    requires one: each backward adds it there chunk by chunk, whatever it is asked for, and autograd gets None. Where
    `loss_grad`, the gradient that this value will get (1 / the divisor, times a loss scale), is known beforehand, the
    forward adds it, with three products and no buffer of the weight's size, and must have its one backward. Another
    gradient is then a ValueError on the CPU, and gives a dx of NaN on a GPU.
    """
    check_head("linear_cross_entropy", x, weight, target)
    check_options(
        "linear_cross_entropy", target, weight_per_token, label_smoothing, z_loss, softcap, ignore_index, reduction,
        vocab_start=vocab_start, num_classes=num_classes or 0,
    )  # fmt: skip
    early = bool(grad_in_forward) or loss_grad is not None
    if num_classes is None and all_reduce is not None and (label_smoothing or debug or early):
        raise ValueError(
            "linear_cross_entropy: label smoothing, debug and grad_in_forward over shards need num_classes, got None"
        )
    num_classes = num_classes or weight.shape[0]
    if all_reduce is None and not weight.shape[0]:
        raise ValueError(f"linear_cross_entropy: weight {tuple(weight.shape)} has no classes")
    if debug:
        check_targets("linear_cross_entropy", target, num_classes, ignore_index)
    flat, rows = target, x
    if target.dim() != 1:
        flat, rows = target.reshape(-1), x.reshape(-1, x.shape[-1])
    terms = dict(
        vocab_start=vocab_start, num_classes=num_classes, label_smoothing=label_smoothing, z_loss=z_loss,
        softcap=softcap,
    )  # fmt: skip
    if _in_forward(grad_in_forward, x, weight, reduction, all_reduce is None, weight_grad_out, loss_grad):
        weights = None if weight_per_token is None else weight_per_token.reshape(-1)
        return _LinearCrossEntropyOnce.apply(
            rows, weight, flat, weights, ignore_index, terms, reduction, all_reduce, weight_grad_out, loss_grad
        )
    # Weights per token and shards are reduced by torch, below.
    code = REDUCTIONS.index(reduction) if weight_per_token is None and all_reduce is None else 0
    if _wants_gradient(x, weight) or torch.compiler.is_compiling() or watched():
        value = _LinearCrossEntropy.apply(rows, weight, flat, ignore_index, terms, code, all_reduce, weight_grad_out)
    else:
        value = _losses(rows, weight, flat, ignore_index, terms, code, all_reduce)[0]
    if code:
        return value
    loss = value if flat is target else value.view(target.shape)
    return reduce_losses(loss, target != ignore_index, weight_per_token, reduction)
