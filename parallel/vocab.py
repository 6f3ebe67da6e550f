"""Layers over the vocabulary: token embedding, and the output projection together with its loss.

Not here: the softmax itself (plait.kernels.loss). The one idea: rank r of the axis holds ceil(V / size) rows of the
full [V, D] matrix from row r * ceil(V / size) on; where V does not divide, the last rows of the last shards are
padding that is 0, gets no gradient and never enters a loss. An embedding is a sum in which one rank has the row and
the others zeros; a loss needs a few numbers per token from each rank, never its logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.kernels import embed, linear, merge_stats, token_loss
from plait.kernels.launch import compute_dtype
from plait.kernels.loss import as_told
from plait.kernels.loss_chunks import head_grad, head_once, head_stats
from plait.parallel.collectives import all_gather, all_reduce, reduce_scatter
from plait.parallel.gradients import GradSink, add_use, grad_home, notify
from plait.parallel.mesh import Axis
from plait.parallel.placement import Placement, placed, placement_of
from plait.parallel.random import init_normal_


def vocab_rows(vocab_size: int, axis: Axis) -> tuple[int, int, int]:
    """Returns (first row, rows with padding, valid rows) of this coord's shard of a vocabulary."""
    rows = -(-vocab_size // axis.size)
    start = axis.coord * rows
    return start, rows, max(0, min(rows, vocab_size - start))


def _vocab_weight(
    vocab_size: int, dim: int, axis: Axis, dtype: torch.dtype | None, device: torch.device | str | None
) -> nn.Parameter:
    start, rows, valid = vocab_rows(vocab_size, axis)
    zeros = torch.zeros(rows, dim, dtype=dtype, device=device)
    return placed(zeros, Placement((vocab_size, dim), (min(start, vocab_size), 0), (valid, dim)))


class VocabParallelEmbedding(nn.Module):
    """Rows of the full [V, D] matrix by token, split over the axis."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        axis: Axis,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.vocab_size, self.vocab_start = vocab_size, vocab_rows(vocab_size, axis)[0]
        self.weight = _vocab_weight(vocab_size, dim, axis, dtype, device)
        self.weight_grads = GradSink()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [B, T], the same on the whole axis, in [0, V) -> [B, T(/tp), D]."""
        return _Embed.apply(tokens, self, self.weight)

    def reset_parameters(self, seed: int, std: float, name: str) -> None:
        """Draws the weight as `name`.weight, the same bits on every grid; padding is 0."""
        init_normal_(self.weight, placement_of(self.weight), std=std, seed=seed, name=f"{name}.weight")


class _Embed(torch.autograd.Function):
    """Saves the tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layer: VocabParallelEmbedding, weight: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(tokens)
        rows = embed.forward(tokens, weight, layer.vocab_start)
        if layer.sequence_parallel:
            return reduce_scatter(rows, layer.axis, 1)
        return all_reduce(rows, layer.axis)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, None, None]:
        layer, sink = ctx.layer, ctx.layer.weight_grads
        if layer.sequence_parallel:
            dout = all_gather(dout, layer.axis, 1)
        (tokens,) = ctx.saved_tensors
        sink.add(sink.microbatch, _accumulate_rows, layer, tokens, dout)
        return None, None, None


def _accumulate_rows(layer: VocabParallelEmbedding, tokens: Tensor, dout: Tensor) -> None:
    """Adds each token's gradient to its row of this shard, in the order of the tokens."""
    weight = layer.weight
    embed.wgrad_into(dout, tokens, grad_home(weight), layer.vocab_start, True)
    notify(weight)


class VocabParallelHead(nn.Module):
    """The output projection [V, D], split over the axis, and its cross entropy; `tied` shares an embedding's weight.

    Options as `plait.kernels.linear_cross_entropy`. Padding never enters the loss: it is cut off before the product.
    With `grad_in_forward` the forward makes both gradients beside the loss: three products, not four. They wait for
    the backward (and, in a split one, the weight's for W): right where few micro-batches lie in between. Over shards
    the statistics are exchanged once per chunk of tokens. A forward that is told what gradient the sum will get does
    so too, but adds the weight's gradient to where it lives; what waits is the input's, in place of the input.
    """

    def __init__(
        self,
        dim: int,
        vocab_size: int,
        axis: Axis,
        *,
        tied: VocabParallelEmbedding | None = None,
        sequence_parallel: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        grad_in_forward: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel, self.grad_in_forward = axis, sequence_parallel, grad_in_forward
        self.vocab_size, self.ignore_index, self.softcap = vocab_size, ignore_index, softcap
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.vocab_start, _, self.num_valid = vocab_rows(vocab_size, axis)
        if tied is None:
            self.weight = _vocab_weight(vocab_size, dim, axis, dtype, device)
        else:
            if (tied.vocab_size, tied.weight.shape[1]) != (vocab_size, dim):
                shape = [tied.vocab_size, tied.weight.shape[1]]
                raise ValueError(f"head [{vocab_size}, {dim}] cannot share an embedding of shape {shape}")
            self.weight = tied.weight
            add_use(self.weight)
        self.weight_grads = GradSink()

    def forward(
        self, x: Tensor, targets: Tensor, weight_per_token: Tensor | None = None, *, sum_grad: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T(/tp), D], targets int64 [B, T] -> (sum of the token losses, number of tokens that count).

        Both are 0-dim and equal on the whole axis; the sum is fp32 (fp64 for fp64), the count int64. With
        `weight_per_token` [B, T], the same on the whole axis, both are weighted, and differentiable in the weights.
        `sum_grad` is the gradient that the sum will get (1 / the divisor): both gradients are then made here. Each
        such forward must have its backward, and another gradient is an error on the CPU, and NaN on a GPU. Without
        gradients (evaluation) it says nothing.
        """
        once = (self.grad_in_forward or sum_grad is not None) and torch.is_grad_enabled()
        if weight_per_token is None:
            return _Loss.apply(x, self, targets, self.weight, None, once, sum_grad)
        if weight_per_token.shape != targets.shape:
            raise ValueError(
                f"weight_per_token {tuple(weight_per_token.shape)} must have targets' shape {tuple(targets.shape)}"
            )
        weights = torch.where(targets != self.ignore_index, weight_per_token.to(compute_dtype(x.dtype)), 0.0)
        return _Loss.apply(x, self, targets, self.weight, weights, once, sum_grad)[0], weights.sum()

    @torch.no_grad()
    def logits(self, x: Tensor, *, gather: bool = True) -> Tensor:
        """x [B, T(/tp), D] -> logits [B, T, V] on every rank, or with gather=False this shard's valid columns."""
        if self.sequence_parallel:
            x = all_gather(x, self.axis, 1)
        local = linear(x, self.weight)
        if self.softcap:
            local = self.softcap * torch.tanh(local / self.softcap)
        if not gather:
            return local[..., : self.num_valid]
        return all_gather(local, self.axis, local.dim() - 1)[..., : self.vocab_size]

    def reset_parameters(self, seed: int, std: float, name: str) -> None:
        """Draws the weight as `name`.weight, the same bits on every grid; padding is 0."""
        init_normal_(self.weight, placement_of(self.weight), std=std, seed=seed, name=f"{name}.weight")


class _Loss(torch.autograd.Function):
    """Saves the gathered input, the targets and one log-sum-exp per token; with weights a loss per token.

    One small all-gather carries four numbers per token and rank. Backward makes the logits again in chunks; unless
    the sink defers, the same chunks give both gradients. With `once` both are made in the forward and held, but with
    `sum_grad` only dx is, and nothing else: the weight's is added to where it lives, and the backward announces it.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: VocabParallelHead, targets: Tensor, weight: Tensor, weights: Tensor | None,
        once: bool, sum_grad: float | None,
    ) -> Any:  # fmt: skip
        full = all_gather(x, layer.axis, 1) if layer.sequence_parallel else x
        if targets.shape != full.shape[:-1]:
            raise ValueError(f"targets {tuple(targets.shape)} do not fit the head's input {tuple(full.shape)}")
        rows, flat = full.reshape(-1, full.shape[-1]), targets.reshape(-1)
        counts = flat != layer.ignore_index
        shares = counts if weights is None else weights.reshape(-1)
        ctx.held, ctx.sum_grad = None, sum_grad
        if once:
            needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[3])
            (lse, hit, total), *ctx.held = _shard_once(layer, rows, flat, weight, shares, *needs, sum_grad)
        else:
            lse, hit, total = _merge(_shard_stats(layer, rows, flat, weight), layer.axis)
        loss = token_loss(
            lse, hit, total, counts,
            num_classes=layer.vocab_size, label_smoothing=layer.label_smoothing, z_loss=layer.z_loss,
        )  # fmt: skip
        count = counts.sum()
        ctx.layer, ctx.shape = layer, full.shape
        again = (None,) * 5 if once and sum_grad is not None else (rows, flat, lse, shares, weight)
        ctx.save_for_backward(*again, None if weights is None else loss.view(targets.shape))
        ctx.mark_non_differentiable(count)
        return (loss if weights is None else loss * shares).sum(), count

    @staticmethod
    def backward(ctx: Any, dsum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows, flat, lse, shares, weight, loss = ctx.saved_tensors
        layer, sink = ctx.layer, ctx.layer.weight_grads
        need_dx, need_dweight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        work: tuple[Any, ...]
        if ctx.held is not None:  # a graph that is kept makes the logits again the next time
            (dx, dweight), ctx.held = ctx.held, None
            factor, work = dsum, (_add_held, layer, dweight, dsum)
            if ctx.sum_grad is not None:
                factor, work = as_told(dsum, ctx.sum_grad), (notify, layer.weight)
            dx = dx.mul_(factor) if need_dx else None
        elif ctx.sum_grad is not None:
            raise RuntimeError(
                "VocabParallelHead: a second backward of a forward with sum_grad, which adds the gradient"
            )
        else:
            grad = partial(_shard_grad, layer, rows, flat, weight, lse, dsum * shares)
            together = need_dweight and not sink.deferring
            dx = grad(need_dx, together) if need_dx or together else None
            work = (notify, layer.weight) if together else (_later, layer, grad)
        reducing = None
        if dx is not None:
            dx = dx.view(ctx.shape)
            if layer.sequence_parallel:
                reducing = reduce_scatter(dx, layer.axis, 1, async_op=True)
            else:
                reducing = all_reduce(dx, layer.axis, async_op=True)
        if need_dweight:
            sink.add(sink.microbatch, *work)
        dweights = None if loss is None else loss * dsum
        return (None if reducing is None else reducing.wait()), None, None, None, dweights, None, None


def _shard_once(
    layer: VocabParallelHead, rows: Tensor, targets: Tensor, weight: Tensor, shares: Tensor, need_dx: bool,
    need_dweight: bool, sum_grad: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """([3, N] as `_merge`, this shard's part of dx [N, D], its dweight), for a gradient of the sum of 1.

    With `sum_grad` for that one, and dweight is empty: it was added to where it lives.
    """
    shares, home = shares.to(compute_dtype(rows.dtype)), None
    if sum_grad is not None:
        shares, home = shares * sum_grad, grad_home(layer.weight)[: layer.num_valid] if need_dweight else None
    merge = None if layer.axis.size == 1 else partial(_merge, axis=layer.axis)
    return head_once(
        rows, weight[: layer.num_valid], targets, shares, layer.vocab_start, layer.vocab_size,
        layer.label_smoothing, layer.z_loss, layer.softcap, need_dx, need_dweight, merge, home,
    )  # fmt: skip


def _add_held(layer: VocabParallelHead, dweight: Tensor, dsum: Tensor) -> None:
    """Adds a weight gradient made in the forward, scaled, to where it lives; notifies."""
    home = grad_home(layer.weight)[: layer.num_valid]
    home.add_(dweight.mul_(dsum))
    notify(layer.weight)


def _shard_stats(layer: VocabParallelHead, rows: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
    """[4, N] of this shard's valid rows: max, sum of exp relative to it, target's logit or 0, sum of logits."""
    return head_stats(rows, weight[: layer.num_valid], targets, layer.vocab_start, layer.softcap)


def _merge(stats: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """(log-sum-exp, target's logit, sum of logits) per token over all shards: equal bits on every rank."""
    if axis.size == 1:
        return merge_stats(stats)
    shards = all_gather(stats, axis).view(axis.size, 4, -1)
    top = shards[:, 0].amax(0)
    sum_exp = (shards[:, 1] * torch.exp(shards[:, 0] - top)).sum(0)
    hit, total = shards[:, 2:].sum(0).unbind(0)
    return top + sum_exp.log(), hit, total


def _shard_grad(
    layer: VocabParallelHead, rows: Tensor, targets: Tensor, weight: Tensor, lse: Tensor, dloss: Tensor,
    need_dx: bool, need_dweight: bool,
) -> Tensor | None:  # fmt: skip
    """Returns this shard's part of dx [N, D]; adds its weight gradient to where it lives. Does not notify."""
    out = grad_home(layer.weight)[: layer.num_valid] if need_dweight else None
    dx = head_grad(
        rows, weight[: layer.num_valid], targets, lse, dloss.to(lse.dtype), out, layer.vocab_start,
        layer.vocab_size, layer.label_smoothing, layer.z_loss, layer.softcap, need_dx,
    )  # fmt: skip
    return dx if need_dx else None


def _later(layer: VocabParallelHead, grad: Any) -> None:
    """The deferred weight gradient: makes the logits once more instead of keeping a [V, D] matrix per micro-batch."""
    grad(False, True)
    notify(layer.weight)
