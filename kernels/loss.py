"""cross_entropy and linear_cross_entropy: head matmul and loss in chunks of tokens, for vocabulary shards too.

Per token, with s = softcap(logits), lse = log sum exp(s), t the target, V all classes:
    loss = lse - (1 - label_smoothing) * s_t - label_smoothing * mean(s) + z_loss * lse^2
    dloss/ds_j = p_j * (1 + 2 * z_loss * lse) - (1 - label_smoothing) * [j = t] - label_smoothing / V
An ignored token has loss 0 and no gradient; "mean" divides by the tokens that count, and is 0 when there are none
(torch gives NaN). The target's logit and the log-sum-exp come from the same product, so the loss without smoothing
is never negative. Statistics and the weight gradient are fp32 (fp64 for fp64); at most `_CHUNK_ELEMENTS` logits
exist at a time, and none is stored for backward.
"""

from collections.abc import Callable

import torch

from plait.kernels.launch import check, check_device, check_floating, compute_dtype, register

AllReduce = Callable[[torch.Tensor, str], torch.Tensor]
# Logits that exist at one time: 2^24 is 64 MiB in fp32, small beside the weight of a 128k vocabulary (derived).
_CHUNK_ELEMENTS = 1 << 24
_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy_ref(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
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
    return _reduce(torch.where(counts, loss, 0.0), counts, reduction)


def linear_cross_entropy_ref(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: float
) -> torch.Tensor:
    """The oracle of linear_cross_entropy on one whole vocabulary; options as `cross_entropy_ref`."""
    dtype = compute_dtype(x.dtype)
    return cross_entropy_ref(x.to(dtype) @ weight.to(dtype).t(), target, **options)  # type: ignore[arg-type]


def _reduce(loss: torch.Tensor, counts: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counts.sum().clamp(min=1)


def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """softcap * tanh(logits / softcap), in place."""
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _local_target(target: torch.Tensor, vocab_start: int, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(column in the shard or 0, whether the target lies in it)."""
    local = target - vocab_start if vocab_start else target
    inside = (local >= 0) & (local < num_local)
    return local.masked_fill(~inside, 0), inside


def _stats_of(s: torch.Tensor, target: torch.Tensor, vocab_start: int, out: torch.Tensor) -> torch.Tensor:
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


def _grad_of(
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
        s = _capped(_logits(x[rows], weight), softcap)
        _stats_of(s, target[rows], vocab_start, stats[:, rows])
    return stats


def head_grad(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor,
    dweight: torch.Tensor | None, vocab_start: int, num_classes: int, label_smoothing: float, z_loss: float,
    softcap: float, need_dx: bool,
) -> torch.Tensor:  # fmt: skip
    """dx (empty without need_dx), without checks or graph; adds into dweight in its own dtype."""
    dx = torch.empty_like(x) if need_dx else x.new_empty(0)
    for rows in _chunks(x.shape[0], weight.shape[0]):
        s = _capped(_logits(x[rows], weight), softcap)
        grad = _grad_of(
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


def _ce_kernel(logits: torch.Tensor, target: torch.Tensor, softcap: float) -> torch.Tensor:
    """[4, N]: max, sum_exp, target logit, logit sum of given logits [N, V]."""
    wide = logits.to(compute_dtype(logits.dtype), copy=True)
    return _stats_of(_capped(wide, softcap), target, 0, _stats_like(wide))


def _ce_grad_kernel(
    logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dloss: torch.Tensor,
    label_smoothing: float, z_loss: float, softcap: float,
) -> torch.Tensor:  # fmt: skip
    s = _capped(logits.to(lse.dtype, copy=True), softcap)
    grad = _grad_of(s, target, lse, dloss, 0, logits.shape[1], label_smoothing, z_loss, softcap)
    return grad.to(logits.dtype)


def _stats_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((4, x.shape[0]), dtype=compute_dtype(x.dtype))


_stats = register(
    "linear_cross_entropy_stats(Tensor x, Tensor weight, Tensor target, int vocab_start, float softcap) -> Tensor",
    head_stats,
    lambda x, weight, target, vocab_start, softcap: _stats_like(x),
)
_grad = register(
    "linear_cross_entropy_grad(Tensor x, Tensor weight, Tensor target, Tensor lse, Tensor dloss,"
    " Tensor(a!)? dweight, int vocab_start, int num_classes, float label_smoothing, float z_loss, float softcap,"
    " bool need_dx) -> Tensor",
    head_grad,
    lambda x, *args: x.new_empty(x.shape if args[-1] else (0,)),
)
_ce_stats = register(
    "cross_entropy_stats(Tensor logits, Tensor target, float softcap) -> Tensor",
    _ce_kernel,
    lambda logits, target, softcap: _stats_like(logits),
)
_ce_grad = register(
    "cross_entropy_grad(Tensor logits, Tensor target, Tensor lse, Tensor dloss, float label_smoothing, float z_loss,"
    " float softcap) -> Tensor",
    _ce_grad_kernel,
    lambda logits, *args: logits.new_empty(logits.shape),
)


def merge_stats(stats: torch.Tensor, all_reduce: AllReduce | None = None) -> tuple[torch.Tensor, ...]:
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
    loss = lse - (1.0 - label_smoothing) * hit
    if label_smoothing:
        loss = loss - (label_smoothing / num_classes) * total
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(counts, loss, 0.0)


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


def _check_options(op: str, label_smoothing: float, softcap: float, reduction: str) -> None:
    check(reduction in _REDUCTIONS, lambda: f"{op}: reduction {reduction!r}; expected one of {_REDUCTIONS}")
    check(0.0 <= label_smoothing <= 1.0, lambda: f"{op}: label_smoothing is {label_smoothing}; expected 0 to 1")
    check(softcap >= 0.0, lambda: f"{op}: softcap is {softcap}; expected >= 0 (0 is off)")


class _CrossEntropy(torch.autograd.Function):
    """Saves logits and target (the caller's) and lse: 4 bytes per token."""

    @staticmethod
    def forward(ctx, logits, target, ignore_index, label_smoothing, z_loss, softcap):
        lse, hit, total = merge_stats(_ce_stats(logits, target, softcap))
        counts = target != ignore_index
        ctx.save_for_backward(logits, target, lse, counts)
        ctx.options = (label_smoothing, z_loss, softcap)
        num_classes = logits.shape[1]
        return token_loss(
            lse, hit, total, counts, num_classes=num_classes, label_smoothing=label_smoothing, z_loss=z_loss
        )

    @staticmethod
    def backward(ctx, dloss):
        logits, target, lse, counts = ctx.saved_tensors
        dloss = torch.where(counts, dloss, 0.0)
        return _ce_grad(logits, target, lse, dloss, *ctx.options), None, None, None, None, None


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


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of `logits[..., V]` with int64 `target[...]`, in fp32 (fp64); "none" gives a loss per token.

    Saves 4 bytes per token. Raises TypeError on dtypes, ValueError on shapes, devices and options.
    """
    check_floating("cross_entropy", logits=logits)
    check_device("cross_entropy", logits, target=target)
    if target.dtype is not torch.int64:
        raise TypeError(f"cross_entropy: target is {target.dtype}; expected torch.int64")
    check(
        logits.shape[:-1] == target.shape,
        lambda: f"cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)} do not fit",
    )
    _check_options("cross_entropy", label_smoothing, softcap, reduction)
    flat = target.reshape(-1)
    rows = logits.reshape(flat.numel(), logits.shape[-1])
    loss = _CrossEntropy.apply(rows, flat, ignore_index, label_smoothing, z_loss, softcap).view(target.shape)
    return _reduce(loss, target != ignore_index, reduction)


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
    _check_options("linear_cross_entropy", label_smoothing, softcap, reduction)
    check(
        num_classes is not None or all_reduce is None or label_smoothing == 0.0,
        lambda: "linear_cross_entropy: label smoothing over shards needs num_classes",
    )
    flat = target.reshape(-1)
    loss = _LinearCrossEntropy.apply(
        x.reshape(-1, x.shape[-1]), weight, flat, ignore_index, (label_smoothing, z_loss, softcap),
        num_classes or weight.shape[0], vocab_start, all_reduce,
    )  # fmt: skip
    return _reduce(loss.view(target.shape), target != ignore_index, reduction)
