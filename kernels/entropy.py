"""cross_entropy of given logits, and what every loss over logits shares: the formula, its oracle, its statistics.

Per token, with s = softcap(logits), lse = log sum exp(s), t the target, V all classes:
    loss = lse - (1 - label_smoothing) * s_t - label_smoothing * mean(s) + z_loss * lse^2
    dloss/ds_j = p_j * (1 + 2 * z_loss * lse) - (1 - label_smoothing) * [j = t] - label_smoothing / V
An ignored token has loss 0 and no gradient; "mean" divides by the tokens that count, and is 0 when there are none
(torch gives NaN). Weights per token multiply the losses; "mean" then divides by the sum of those that count.
Arithmetic and statistics are fp32 (fp64 for fp64). The kernels are in loss_triton.py; the plain functions serve CPUs.
"""

import math
from collections.abc import Callable
from functools import partial

import torch

from plait.kernels.dropout_op import check_offsets
from plait.kernels.launch import check, check_device, check_floating, compute_dtype, use_triton
from plait.kernels.loss_triton import add_launch, grad_launch, token_loss_launch
from plait.kernels.plans import Built, Site, planned
from plait.kernels.registration import below_autograd, once_differentiable, register, without_zeros

AllReduce = Callable[[torch.Tensor, str], torch.Tensor]
REDUCTIONS = ("none", "sum", "mean")  # by code; all but the first are done by the kernel
MEAN = 2


def cross_entropy_ref(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    weight_per_token: torch.Tensor | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """The oracle; differentiable by torch."""
    s = logits.to(compute_dtype(logits.dtype))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    counts = target != ignore_index
    lse = torch.logsumexp(s, dim=-1)
    hit = s.gather(-1, target.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - (1.0 - label_smoothing) * hit + z_loss * lse.square()
    if label_smoothing:
        loss = loss - label_smoothing * s.mean(-1)
    return reduce_losses(torch.where(counts, loss, 0.0), counts, weight_per_token, reduction)


def reduce_losses(
    loss: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor | None, reduction: str
) -> torch.Tensor:
    """The losses per token, which are 0 where `counts` is False, weighted and reduced; differentiable by torch."""
    if weights is not None:
        weights = torch.where(counts, weights.to(loss.dtype), 0.0)
        loss = loss * weights
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if weights is None:
        return loss.sum() / counts.sum().clamp(min=1)
    total = weights.sum()
    return loss.sum() / torch.where(total == 0.0, 1.0, total)


def capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(logits / softcap), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _local_target(target: torch.Tensor, vocab_start: int, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column in the shard or 0, whether the target lies in it)."""
    local = target - vocab_start if vocab_start else target
    inside = (local >= 0) & (local < num_local)
    return local.masked_fill(~inside, 0), inside


def plain_stats(s: torch.Tensor, target: torch.Tensor, vocab_start: int, out: torch.Tensor) -> torch.Tensor:
    """Gives out [4, n], now (max, sum of exp(s - max), target's s or 0, sum of s) of rows s[n, V_local], consumed."""
    top, sum_exp, hit, total = out.unbind(0)
    column, inside = _local_target(target, vocab_start, s.shape[1])
    hit.copy_(s.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(~inside, 0.0))
    torch.sum(s, 1, out=total)
    torch.amax(s, 1, out=top)
    # A row of -inf only: exp(-inf - lowest) = 0 where -inf - -inf would be NaN.
    s.sub_(top.clamp(min=torch.finfo(s.dtype).min).unsqueeze(1)).exp_()
    torch.sum(s, 1, out=sum_exp)
    return out


def plain_grad(
    s: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor, vocab_start: int,
    num_classes: int, label_smoothing: float, z_loss: float, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """dloss/dlogits of rows s[n, V_local] after the softcap; s is consumed."""
    column, inside = _local_target(target, vocab_start, s.shape[1])
    slope = 1.0 - (s / softcap).square_() if softcap else None
    grad = s.sub_(lse.unsqueeze(1)).exp_()
    if z_loss:
        grad.mul_((1.0 + 2.0 * z_loss * lse).unsqueeze(1))
    if label_smoothing:
        grad.sub_(label_smoothing / num_classes)
    grad.scatter_add_(1, column.unsqueeze(1), (inside.to(s.dtype) * (label_smoothing - 1.0)).unsqueeze(1))
    grad.mul_(dloss.unsqueeze(1))
    return grad if slope is None else grad.mul_(slope)


def stats_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((4, x.shape[0]), dtype=compute_dtype(x.dtype))


def merge_stats(
    stats: torch.Tensor, all_reduce: AllReduce | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(lse, target logit, logit sum) per token of the whole vocabulary from a shard's stats [4, N].

    `all_reduce(tensor, "max" | "sum")` combines shards and may work in place; called twice, with [N] and [3, N].
    """
    top, sums = stats[0], stats[1:]
    if all_reduce is not None:
        full = all_reduce(top.clone(), "max")
        scale = torch.where(top == full, 1.0, torch.exp(top - full))
        sums = all_reduce(torch.cat(((sums[0] * scale).unsqueeze(0), sums[1:])), "sum")
        top = full
    return top + sums[0].log(), sums[1], sums[2]


def token_loss(
    lse: torch.Tensor, hit: torch.Tensor, total: torch.Tensor, counts: torch.Tensor, *,
    num_classes: int, label_smoothing: float = 0.0, z_loss: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """The loss per token of `merge_stats`; 0 where `counts` is False."""
    loss = lse - ((1.0 - label_smoothing) * hit if label_smoothing else hit)
    if label_smoothing:
        loss = loss - (label_smoothing / num_classes) * total
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(counts, loss, 0.0)


def plain_losses(
    merged: tuple[torch.Tensor, ...], target: torch.Tensor, ignore_index: int, num_classes: int,
    label_smoothing: float, z_loss: float, code: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The results of `build_losses` (an empty divisor for None) from those of `merge_stats`."""
    lse, hit, total = merged
    counts = target != ignore_index
    loss = token_loss(
        lse, hit, total, counts, num_classes=num_classes, label_smoothing=label_smoothing, z_loss=z_loss
    )  # fmt: skip
    if not code:
        return loss, lse, lse.new_empty(0)
    divisor = divisor_of(counts, lse.dtype, code)
    return loss.sum() / divisor, lse, divisor


def divisor_of(counts: torch.Tensor, dtype: torch.dtype, code: int) -> torch.Tensor:
    """What the sum of the losses is divided by, 0-dim: at least 1."""
    return counts.sum().clamp(min=1).to(dtype) if code == MEAN else torch.ones((), dtype=dtype, device=counts.device)


def check_options(
    op: str,
    target: torch.Tensor,
    weights: torch.Tensor | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    ignore_index: int,
    reduction: str,
    **indices: int,
) -> None:
    """TypeError or ValueError, naming the option, unless all are valid."""
    if weights is not None:
        check_floating(op, weight_per_token=weights)
        check_device(op, target, weight_per_token=weights)
        check(
            weights.shape == target.shape,
            lambda: f"{op}: weight_per_token {tuple(weights.shape)} must have target's shape {tuple(target.shape)}",
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction {reduction!r}; expected one of {REDUCTIONS}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing is {label_smoothing}; expected 0 to 1")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"{op}: z_loss is {z_loss}; expected a finite number >= 0")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"{op}: softcap is {softcap}; expected a finite number >= 0 (0 is off)")
    if not isinstance(ignore_index, (int, torch.SymInt)) and not hasattr(ignore_index, "__index__"):
        raise TypeError(f"{op}: ignore_index is {ignore_index!r}; expected an integer")
    if indices:
        check_offsets(op, **indices)


def check_targets(op: str, target: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """ValueError naming the first target that is neither ignored nor a class. Waits for the device."""
    wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
    if bool(wrong.any()):
        place = int(wrong.flatten().nonzero()[0])
        value = int(target.flatten()[place])
        raise ValueError(f"{op}: target {value} at token {place} is not a class; expected 0 to {num_classes - 1}")


def build_losses(
    site: Site, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor | None, loss: torch.Tensor | None,
    ignore_index: int, vocab_start: int, num_classes: int, label_smoothing: float, z_loss: float, softcap: float,
    code: int,
) -> Built:  # fmt: skip
    """Results (loss [N] or its reduction, lse [N], divisor or None), the first two into `loss` and `lse` if given."""
    num_rows, dtype = logits.shape[0], compute_dtype(logits.dtype)
    lse = site.empty((num_rows,), dtype) if lse is None else lse
    loss = site.empty((num_rows,), dtype) if loss is None else loss
    terms = (ignore_index, vocab_start, num_classes, label_smoothing, z_loss, softcap)
    launches = [token_loss_launch(logits, target, *terms, lse, loss)] if num_rows else []
    if not code:
        return Built((loss, lse, None), launches)
    value, divisor = site.empty((), dtype), site.empty((), dtype)
    launches.append(add_launch(loss, target, ignore_index, code == MEAN, value, divisor))
    return Built((value, lse, divisor), launches)


def _build_grad(
    site: Site, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, divisor: torch.Tensor | None,
    dloss: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> Built:  # fmt: skip
    out, terms = site.empty(logits.shape, logits.dtype), (0, logits.shape[1], label_smoothing, z_loss, softcap)
    if not logits.shape[0]:
        return Built((out,))
    return Built((out,), [grad_launch(logits, target, lse, dloss, *terms, out, divisor, ignore_index)])


def _kernel(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    softcap: float, code: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(loss [N], or reduced as REDUCTIONS[code] says; lse [N]; what the sum was divided by, empty for "none")."""
    if use_triton(logits):
        options = (ignore_index, 0, logits.shape[1], label_smoothing, z_loss, softcap, code)
        value, lse, divisor = planned(build_losses, (logits, target, None, None), *options)
        return value, lse, lse.new_empty(0) if divisor is None else divisor
    wide = logits.to(compute_dtype(logits.dtype), copy=True)
    stats = plain_stats(capped(wide, softcap), target, 0, stats_like(wide))
    return plain_losses(merge_stats(stats), target, ignore_index, logits.shape[1], label_smoothing, z_loss, code)


def _fake(logits, target, ignore_index, label_smoothing, z_loss, softcap, code):
    like = partial(logits.new_empty, dtype=compute_dtype(logits.dtype))
    rows = logits.shape[:1]
    return like(() if code else rows), like(rows), like(() if code else (0,))


def _grad_kernel(
    logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, divisor: torch.Tensor, dloss: torch.Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """The gradient of logits from that of `_kernel`'s first result."""
    reduced = divisor.dim() == 0
    if not reduced:
        dloss = torch.where(target != ignore_index, dloss, 0.0)
    terms = (label_smoothing, z_loss, softcap)
    if use_triton(logits):
        tensors = (logits, target, lse, divisor if reduced else None, dloss)
        found: torch.Tensor = planned(_build_grad, tensors, ignore_index, *terms)[0]
        return found
    if reduced:
        dloss = torch.where(target != ignore_index, dloss / divisor, 0.0)
    s = capped(logits.to(lse.dtype, copy=True, memory_format=torch.contiguous_format), softcap)
    return plain_grad(s, target, lse, dloss, 0, logits.shape[1], *terms).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Saves logits and target (the caller's), lse and a number: 4 bytes per token (8 in fp64)."""

    @staticmethod
    def forward(ctx, logits, target, ignore_index, label_smoothing, z_loss, softcap, code):
        with below_autograd():
            value, lse, divisor = _cross_entropy(logits, target, ignore_index, label_smoothing, z_loss, softcap, code)
        ctx.save_for_backward(logits, target, lse, divisor)
        ctx.options = (ignore_index, label_smoothing, z_loss, softcap)
        without_zeros(ctx, lse, divisor)
        return value, lse, divisor

    @staticmethod
    @once_differentiable
    def backward(ctx, dvalue, *_):
        return _cross_entropy_grad(*ctx.saved_tensors, dvalue, *ctx.options), *(None,) * 6


_cross_entropy = register(
    "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing, float z_loss,"
    " float softcap, int code) -> (Tensor, Tensor, Tensor)",
    _kernel,
    _fake,
    _CrossEntropy.apply,
)
_cross_entropy_grad = register(
    "cross_entropy_grad(Tensor logits, Tensor target, Tensor lse, Tensor divisor, Tensor dloss, int ignore_index,"
    " float label_smoothing, float z_loss, float softcap) -> Tensor",
    _grad_kernel,
    lambda logits, *args: logits.new_empty(logits.shape),
)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    weight_per_token: torch.Tensor | None = None,
    reduction: str = "mean",
    debug: bool = False,
) -> torch.Tensor:
    """Cross entropy of `logits[..., V]` with int64 `target[...]`, in fp32 (fp64); "none" gives a loss per token.

    `weight_per_token` has target's shape and a gradient; "mean" divides by its sum over tokens that count (0 gives
    0). Saves 4 bytes per token beyond the caller's logits and target: lse. With `debug` a target that is no class
    raises ValueError, at the price of waiting for the device; without, it hits no logit. Raises TypeError on dtypes,
    ValueError on shapes, devices and options.
    """
    check_floating("cross_entropy", logits=logits)
    check_device("cross_entropy", logits, target=target)
    if target.dtype is not torch.int64:
        raise TypeError(f"cross_entropy: target is {target.dtype}; expected torch.int64")
    check(
        logits.dim() >= 1 and logits.shape[:-1] == target.shape and logits.shape[-1] > 0,
        lambda: f"cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)} do not fit",
    )
    check_options(
        "cross_entropy", target, weight_per_token, label_smoothing, z_loss, softcap, ignore_index, reduction
    )  # fmt: skip
    if debug:
        check_targets("cross_entropy", target, logits.shape[-1], ignore_index)
    flat = target
    if target.dim() != 1:
        flat = target.reshape(-1)
        logits = logits.reshape(flat.numel(), logits.shape[-1])
    code = 0 if weight_per_token is not None else REDUCTIONS.index(reduction)
    value: torch.Tensor = _cross_entropy(logits, flat, ignore_index, label_smoothing, z_loss, softcap, code)[0]
    if code:
        return value
    loss = value.view(target.shape)
    if weight_per_token is None:
        return loss
    return reduce_losses(loss, target != ignore_index, weight_per_token, reduction)
