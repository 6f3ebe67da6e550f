"""Collectives with their gradients (`copy_to`, `reduce_from`, ...) and without (`all_reduce`, `all_gather`, ...).

Not here: the traffic of the pipeline (p2p.py) and any decision what to reduce. The one idea: on CPU tensors every
collective is one direct exchange between the members, two for a large all-reduce (direct.py), and sums are
taken in the order of the coordinates. So all members, and an all-reduce and a reduce-scatter, get the same bits for
every element, 16-bit tensors are summed in fp32 and rounded once, and a pair of ranks needs one message each way,
where gloo's ring needs several. CUDA tensors take NCCL; without NCCL they are staged through host memory.

Every function takes an `Axis`; on an axis of size 1 nothing is called. Collectives of one axis must be started and
waited for in the same order by all its members. With `async_op=True` the caller gets a `Handle` and must `wait()`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.direct import (
    COMBINE,
    Handle,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait_for,
)
from plait.parallel.mesh import Axis

__all__ = [
    "Handle",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "copy_to",
    "gather_seq",
    "reduce_from",
    "reduce_scatter",
    "reduce_scatter_seq",
    "split_seq",
]

# torch 2.13 renames both and warns about the old names; 2.11 has only those.
_scatter_on_device: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_gather_on_device: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_NCCL_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


# ---- without gradients -------------------------------------------------------------------------------------------


@overload
def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum", async_op: Literal[False] = False) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum", *, async_op: Literal[True]) -> Handle: ...
def all_reduce(tensor: Tensor, axis: Axis, op: str = "sum", async_op: bool = False) -> Tensor | Handle:
    """Reduces `tensor` in place over the axis by "sum", "max" or "min"; returns it. Must be contiguous."""
    if op not in COMBINE:
        raise ValueError(f"op={op!r} must be one of {sorted(COMBINE)}")
    if axis.size == 1:
        return Handle(None, tensor) if async_op else tensor
    if not tensor.is_contiguous():
        raise ValueError(f"all_reduce works in place on contiguous tensors; got strides {tensor.stride()}")
    if _on_device(tensor, axis):
        handle = _device_handle(dist.all_reduce(tensor, _NCCL_OPS[op], axis.group, async_op=True), tensor)
    elif tensor.is_cuda:
        handle = _staged(all_reduce(tensor.cpu(), axis, op, async_op=True), tensor)
    else:
        handle = start_all_reduce(tensor, axis, op, tensor)
    return handle if async_op else handle.wait()


@overload
def reduce_scatter(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def reduce_scatter(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[True]
) -> Handle: ...
def reduce_scatter(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Handle:
    """Returns this coord's part along `dim` of the sum over the axis; `out` may be the part of `tensor` itself."""
    if axis.size == 1:
        result = tensor if out is None else out.copy_(tensor)
        return Handle(None, result) if async_op else result
    parts = _parts(tensor, axis, dim)
    out = tensor.new_empty(parts[0].shape) if out is None else out
    if tensor.is_cuda and not _on_device(tensor, axis):
        handle = _staged(reduce_scatter(tensor.cpu(), axis, dim, async_op=True), out)
    else:
        lies_in_order = tensor.is_contiguous() and parts[0].is_contiguous()
        flat = tensor.view(-1) if lies_in_order else torch.cat([part.reshape(-1) for part in parts])
        if tensor.is_cuda:
            work = _scatter_on_device(out.view(-1), flat, group=axis.group, async_op=True)
            handle = _device_handle(work, out, flat)
        else:
            handle = start_reduce_scatter(flat, axis, out)
    return handle if async_op else handle.wait()


@overload
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[False] = False
) -> Tensor: ...
@overload
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: Literal[True]
) -> Handle: ...
def all_gather(
    tensor: Tensor, axis: Axis, dim: int = 0, *, out: Tensor | None = None, async_op: bool = False
) -> Tensor | Handle:
    """Returns the members' tensors, all of one shape, side by side along `dim` in the order of the coordinates.

    `out` (only for dim 0) receives the result; `tensor` may be its own part of `out`.
    """
    if axis.size == 1:
        result = tensor if out is None else out.copy_(tensor)
        return Handle(None, result) if async_op else result
    if out is not None and (dim != 0 or not out.is_contiguous() or out.numel() != tensor.numel() * axis.size):
        raise ValueError(
            f"all_gather: out of shape {tuple(out.shape)} must be contiguous and whole, and dim 0 (got dim={dim})"
        )
    if tensor.is_cuda and not _on_device(tensor, axis):
        staged = all_gather(tensor.cpu(), axis, dim, async_op=True)
        handle = _staged(staged, out if out is not None else None, tensor.device)
    else:
        handle = _start_all_gather(tensor.contiguous(), axis, dim, out)
    return handle if async_op else handle.wait()


def broadcast(tensor: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Copies the tensor of the member at coord `source` into everybody's `tensor`, in place; returns it."""
    if not 0 <= source < axis.size:
        raise ValueError(f"source={source} is not a coord of axis {axis.name} of size {axis.size}")
    if axis.size == 1:
        return tensor
    if _on_device(tensor, axis):
        dist.broadcast(tensor, axis.ranks[source], axis.group)
        return tensor
    host = tensor.detach().cpu().contiguous()
    wait_for(dist.broadcast(host, axis.ranks[source], axis.group, async_op=True), "broadcast", axis)
    return tensor if host.data_ptr() == tensor.data_ptr() else tensor.copy_(host)


def barrier(axis: Axis) -> None:
    """Returns once every member of the axis has come here."""
    if axis.size > 1:
        all_reduce(torch.zeros(1), axis) if not _nccl(axis) else dist.barrier(axis.group)


# ---- with gradients ----------------------------------------------------------------------------------------------


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return _summed(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grad, ctx.axis, ctx.dim), None, None


class _ReduceScatterSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _SplitSeq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _parts(x, axis, dim)[axis.coord].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Forward: identity, into a region where each member does a part. Backward: all-reduce."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Forward: all-reduce of the members' partial sums. Backward: identity."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_seq(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Forward: all-gather along `dim`. Backward: reduce-scatter (each member used the whole for its own part)."""
    return x if axis.size == 1 else _GatherSeq.apply(x, axis, dim)


def reduce_scatter_seq(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Forward: reduce-scatter of the members' partial sums along `dim`. Backward: all-gather."""
    return x if axis.size == 1 else _ReduceScatterSeq.apply(x, axis, dim)


def split_seq(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Forward: this coord's part along `dim` of a replicated tensor. Backward: all-gather."""
    return x if axis.size == 1 else _SplitSeq.apply(x, axis, dim)


def _start_all_gather(tensor: Tensor, axis: Axis, dim: int, out: Tensor | None) -> Handle:
    """All-gather of a contiguous tensor, on the CPU by messages straight into place, on CUDA by NCCL."""
    size = axis.size
    stacked = tensor.new_empty((size, *tensor.shape)) if out is None else out
    slots = stacked.view(size, *tensor.shape)
    work, source = None, tensor
    if tensor.is_cuda:
        work = _gather_on_device(stacked.view(-1), tensor.view(-1), group=axis.group, async_op=True)
    elif tensor.numel():
        work, source = start_all_gather(tensor, axis, slots)

    def finish(_keep: Tensor = source) -> Tensor:
        if work is not None:
            wait_for(work, "all_gather", axis)
        if out is not None or not tensor.dim():
            return stacked
        return stacked.flatten(0, 1) if dim == 0 else torch.cat(slots.unbind(0), dim)

    return Handle(finish)


def _summed(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis as a new tensor; `x`, which others may hold, stays as it is."""
    if x.is_cuda:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)
    return start_all_reduce(x.contiguous(), axis, "sum", None).wait()


def _parts(tensor: Tensor, axis: Axis, dim: int) -> tuple[Tensor, ...]:
    if tensor.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of shape {tuple(tensor.shape)} is not divisible by axis {axis.name} of size {axis.size}"
        )
    return tensor.chunk(axis.size, dim) if tensor.shape[dim] else (tensor,) * axis.size


# ---- CUDA tensors ------------------------------------------------------------------------------------------------


def _nccl(axis: Axis) -> bool:
    return "nccl" in dist.get_backend_config(axis.group)


def _on_device(tensor: Tensor, axis: Axis) -> bool:
    """True where the group itself can move the CUDA tensor."""
    return tensor.is_cuda and _nccl(axis)


def _device_handle(work: Any, result: Tensor, *keep: Tensor) -> Handle:
    """A handle for work on a CUDA stream: waiting makes the current stream wait; `keep` stays alive until then."""

    def finish(_keep: tuple[Tensor, ...] = keep) -> Tensor:
        work.wait()
        return result

    return Handle(finish)


def _staged(handle: Handle, out: Tensor | None, device: torch.device | None = None) -> Handle:
    """A handle that copies a result in host memory to the device, into `out` or a new tensor."""
    return Handle(lambda: out.copy_(handle.wait()) if out is not None else handle.wait().to(device))
