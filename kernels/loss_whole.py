"""The head's loss where `weight` has all classes: a chunk is its product and one group of launches.

Not here: shards, whose statistics pass through a callable, and the walk itself (loss_chunks.py). The one idea: with
no word of another shard to wait for, a row's program goes on to its loss, and one more program adds the losses up; so
no pass of torch lies between the launches. Direct functions without checks or graph.
"""

from typing import Any

import torch

from plait.kernels.entropy import MEAN, build_losses, divisor_of, merge_stats, plain_losses
from plait.kernels.launch import Launch, compute_dtype, use_triton
from plait.kernels.loss_chunks import (
    add_gradients,
    chunks_of,
    dweight_into,
    dx_into,
    first_cols,
    gradients_like,
    head_once,
    head_stats,
    logits_into,
    room_for,
    some_rows,
    walk,
)
from plait.kernels.loss_triton import add_launch, grad_launch
from plait.kernels.plans import Built, Call, Site, planned


def _build_sum(site: Site, loss: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool) -> Built:
    """Results (the sum, divided by the tokens that count where `mean`; by what)."""
    value, divisor = site.empty((), loss.dtype), site.empty((), loss.dtype)
    return Built((value, divisor), [add_launch(loss, target, ignore_index, mean, value, divisor)])


def _build_once(
    site: Site, s: torch.Tensor, target: torch.Tensor, lse: torch.Tensor | None, loss: torch.Tensor | None,
    dloss: torch.Tensor | None, divisor: torch.Tensor | None, grad: torch.Tensor, ignore_index: int, vocab_start: int,
    num_classes: int, label_smoothing: float, z_loss: float, softcap: float, code: int,
) -> Built:  # fmt: skip
    """As `build_losses`, and the gradient of the logits, by the divisor found here where none is given."""
    terms = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    (value, lse, found), launches = build_losses(site, s, target, lse, loss, ignore_index, *terms, code)
    assert lse is not None
    divisor = found if divisor is None else divisor
    last = grad_launch(s, target, lse, dloss, *terms, grad, divisor, ignore_index)
    return Built((value, lse, divisor), [*launches, last])


def _build_head(
    site: Site, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *options: Any
) -> Built:  # fmt: skip
    """As `build_losses`, of one chunk: its product goes before."""
    room = room_for(site, x.shape[0], weight.shape[0], compute_dtype(x.dtype))
    built = build_losses(site, first_cols(room, weight.shape[0]), target, None, None, *options)
    return Built(built.results, [Call(logits_into, (x, weight, room)), *built.launches])


def head_loss(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int, code: int, vocab_start: int,
    num_classes: int, label_smoothing: float, z_loss: float, softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(loss [N], or reduced as REDUCTIONS[code] says; lse [N]; what the sum was divided by, empty for "none")."""
    if not use_triton(x):
        merged = merge_stats(head_stats(x, weight, target, vocab_start, softcap))
        return plain_losses(merged, target, ignore_index, num_classes, label_smoothing, z_loss, code)
    terms = (ignore_index, vocab_start, num_classes, label_smoothing, z_loss, softcap)
    chunks = chunks_of(x.shape[0], weight.shape[0], x.shape[1], x.is_cuda)
    divisor = None
    if len(chunks) == 1:
        loss, lse, divisor = planned(_build_head, (x, weight, target), *terms, code)
        return loss, lse, lse.new_empty(0) if divisor is None else divisor
    loss, lse = (torch.empty(x.shape[0], dtype=compute_dtype(x.dtype), device=x.device) for _ in range(2))
    for rows, _, s, _ in walk(x, weight, chunks, both=False):
        planned(build_losses, (s, target[rows], lse[rows], loss[rows]), *terms, 0)
    if code:
        loss, divisor = planned(_build_sum, (loss, target), ignore_index, code == MEAN)
    return loss, lse, lse.new_empty(0) if divisor is None else divisor


def _build_head_once(
    site: Site, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor | None,
    out: torch.Tensor | None, need_dx: bool, need_dweight: bool, *options: Any,
) -> Built:  # fmt: skip
    """As `_build_once`, of one chunk, with (dx, dweight): its three products go before and after."""
    (num_rows, num_local), wide = (x.shape[0], weight.shape[0]), compute_dtype(x.dtype)
    room = room_for(site, num_rows, num_local, wide)
    narrow = room if x.dtype is wide else room_for(site, num_rows, num_local, x.dtype)
    s, grad = first_cols(room, num_local), first_cols(narrow, num_local)
    built = _build_once(site, s, target, None, None, dloss, None, grad, *options)
    dx = site.empty(x.shape if need_dx else (0,), x.dtype)
    dweight = site.empty(weight.shape if need_dweight and out is None else (0,), wide)
    steps: list[Launch | Call] = [Call(logits_into, (x, weight, room)), *built.launches]
    if need_dx:
        steps.append(Call(dx_into, (narrow, weight, dx)))
    if need_dweight:
        steps.append(Call(dweight_into, (x, narrow, out is not None, dweight if out is None else out)))
    return Built((*built.results, dx, dweight), steps)


def head_loss_once(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, dloss: torch.Tensor | None, ignore_index: int,
    code: int, vocab_start: int, num_classes: int, label_smoothing: float, z_loss: float, softcap: float,
    need_dx: bool, need_dweight: bool, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The results of `head_loss`, and dx and dweight as `head_once`, with three products.

    dloss is the 0-dim gradient that the reduced loss will get (None: 1); for losses per token, [N], those of each.
    """
    terms = (vocab_start, num_classes, label_smoothing, z_loss, softcap)
    if not use_triton(x):
        if code:
            counts = target != ignore_index
            share = (1.0 if dloss is None else dloss) / divisor_of(counts, compute_dtype(x.dtype), code)
            dloss = torch.where(counts, share, 0.0)
        assert dloss is not None
        merged, dx, dweight = head_once(x, weight, target, dloss, *terms, need_dx, need_dweight, None, out)
        found = plain_losses(merged.unbind(0), target, ignore_index, *terms[1:4], code)
        return *found, dx, dweight
    chunks = chunks_of(x.shape[0], weight.shape[0], weight.shape[1], x.is_cuda)
    if len(chunks) == 1:
        options = (need_dx, need_dweight, ignore_index, *terms, code)
        value, lse, divisor, dx, dweight = planned(_build_head_once, (x, weight, target, dloss, out), *options)
        return value, lse, lse.new_empty(0) if divisor is None else divisor, dx, dweight
    dx, dweight = gradients_like(x, weight, need_dx, need_dweight, out)
    home = (dweight if out is None else out) if need_dweight else None
    # Where the losses are still 0, their sum tells the divisor, which the first gradient asks for.
    loss, lse = (torch.zeros(x.shape[0], dtype=dweight.dtype, device=x.device) for _ in range(2))
    divisor = planned(_build_sum, (loss, target), ignore_index, code == MEAN)[1] if code else None
    for rows, inputs, s, grad in walk(x, weight, chunks):
        upstream = dloss if code or dloss is None else some_rows(dloss, rows)
        tensors = (s, some_rows(target, rows), lse[rows], loss[rows], upstream, divisor, grad)
        planned(_build_once, tensors, ignore_index, *terms, 0)
        added = out is not None or rows.start > 0
        add_gradients(inputs, weight, grad, some_rows(dx, rows) if need_dx else None, home, added)
    value = planned(_build_sum, (loss, target), ignore_index, code == MEAN)[0] if code else loss
    return value, lse, lse.new_empty(0) if divisor is None else divisor, dx, dweight
