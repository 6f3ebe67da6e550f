"""AdamW over the flat buckets of `DataParallel`: on everything, or with ZeRO on this rank's shard of each bucket.

Not here: the learning rate of a step (the training loop), and files (`pieces` says what there is to save).
The one idea: the update of a bucket is one call per run of parameters with equal weight decay, on long flat tensors;
with ZeRO the new weights then travel to the other dp ranks while the next bucket is updated.

fp32 master weights exist for 16-bit parameters only; moments are fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from plait import kernels
from plait.parallel.buckets import Bucket
from plait.parallel.placement import Placement
from plait.parallel.wire import Relay, advance_all

if TYPE_CHECKING:
    from plait.parallel.data import DataParallel
    from plait.parallel.fully_sharded import FullySharded, ShardedParam


@dataclass(frozen=True)
class Piece:
    """What to save of a parameter, as flat views of live memory over one range of its flat logical box.

    Writing into the views restores it; afterwards `ShardedAdamW.gather_params` brings the weights to the dp ranks.
    The other fields are those of `plait.parallel.data.Shard`.
    """

    name: str
    stage: int
    placement: Placement
    flat: tuple[int, int]
    replica: tuple[int, int]
    primary: bool
    param: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(eq=False)
class _State:
    """Master weights and moments of the owned range of a bucket."""

    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor


class ShardedAdamW:
    """AdamW with decoupled weight decay. `steps` counts the updates done and is part of the state to save."""

    def __init__(
        self, dp: DataParallel | FullySharded, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas={betas} must both be in [0, 1)")
        if eps <= 0.0:
            raise ValueError(f"eps={eps} must be above 0")
        self.dp, self.betas, self.eps = dp, betas, eps
        self.steps = 0
        self._buckets: list[Bucket | ShardedParam] = [*dp.buckets]
        self._states = [self._new_state(bucket) for bucket in self._buckets]
        self._step_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._write_hooks: OrderedDict[int, Callable[[Sequence[Tensor]], Any]] = OrderedDict()
        self.refresh_master()

    @staticmethod
    def _new_state(bucket: Bucket | ShardedParam) -> _State:
        start, stop = bucket.owned
        like = bucket.grads_in(start, stop)
        master = bucket.main
        if master is None and bucket.params.dtype != like.dtype:
            master = torch.empty_like(like)
        return _State(master, torch.zeros_like(like), torch.zeros_like(like))

    # ---- hooks ----

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Calls `hook(optimizer, args, kwargs)` before each step, like torch's optimizers do."""
        handle = RemovableHandle(self._step_hooks)
        self._step_hooks[handle.id] = hook
        return handle

    def register_write_pre_hook(self, hook: Callable[[Sequence[Tensor]], Any]) -> RemovableHandle:
        """Calls `hook(tensors)` before each write: of a bucket's update, and of the all-gather of its weights.

        The tensors are flat views that cover all that is about to change, not the parameters themselves.
        """
        handle = RemovableHandle(self._write_hooks)
        self._write_hooks[handle.id] = hook
        return handle

    def _before_write(self, *tensors: Tensor | None) -> None:
        written = [tensor for tensor in tensors if tensor is not None]
        for hook in list(self._write_hooks.values()):
            hook(written)

    # ---- the update ----

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float = 0.0, grad_scale: Tensor | float | None = None) -> None:
        """Updates all weights from the reduced gradients times `grad_scale`; collective over dp with ZeRO."""
        for hook in list(self._step_hooks.values()):
            hook(self, (lr, weight_decay, grad_scale), {})
        self.steps += 1
        gathers: list[Relay] = []
        for bucket, state in zip(self._buckets, self._states, strict=True):
            self._update(bucket, state, lr, weight_decay, grad_scale)
            gathers += self._start_gather(bucket)
        advance_all(gathers)

    def _update(
        self,
        bucket: Bucket | ShardedParam,
        state: _State,
        lr: float,
        weight_decay: float,
        grad_scale: Tensor | float | None,
    ) -> None:
        first, last = bucket.owned
        self._before_write(bucket.params[first:last], state.master, state.exp_avg, state.exp_avg_sq)
        for decay, start, stop in bucket.runs(lambda slot: slot.decay):
            start, stop = max(start, first), min(stop, last)
            if start >= stop:
                continue
            here = slice(start - first, stop - first)
            kernels.adamw_(
                [bucket.params[start:stop]],
                [bucket.grads_in(start, stop)],
                [state.exp_avg[here]],
                [state.exp_avg_sq[here]],
                None if state.master is None else [state.master[here]],
                step=self.steps,
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                eps=self.eps,
                weight_decay=weight_decay if decay else 0.0,
                grad_scale=grad_scale,
            )

    def _start_gather(self, bucket: Bucket | ShardedParam) -> list[Relay]:
        """Starts to bring the bucket's shards of the weights to all dp ranks; nothing to do without ZeRO."""
        phases = bucket.gather
        if not phases:
            return []
        self._before_write(bucket.params)
        return [Relay(phases, bucket.params)]

    # ---- state ----

    @torch.no_grad()
    def refresh_master(self) -> None:
        """Sets the master weights from the parameters: after someone else has written those."""
        for bucket, state in zip(self._buckets, self._states, strict=True):
            if state.master is not None:
                self._before_write(state.master)
                first, last = bucket.owned
                state.master.copy_(bucket.params[first:last])

    @torch.no_grad()
    def gather_params(self) -> None:
        """Brings each dp rank's shard of the weights to all, after `pieces` were restored; nothing without ZeRO."""
        advance_all([gather for bucket in self._buckets for gather in self._start_gather(bucket)])

    def pieces(self) -> Iterator[Piece]:
        """Yields what this rank has to save or restore, in a fixed order."""
        states = dict(zip(self._buckets, self._states, strict=True))
        for shard in self.dp.shards():
            state, first = states[shard.bucket], shard.bucket.owned[0]
            here = slice(shard.start - first, shard.stop - first)
            yield Piece(
                name=shard.name,
                stage=shard.stage,
                placement=shard.placement,
                flat=shard.flat,
                replica=shard.replica,
                primary=shard.primary,
                param=shard.bucket.params[shard.start : shard.stop],
                master=None if state.master is None else state.master[here],
                exp_avg=state.exp_avg[here],
                exp_avg_sq=state.exp_avg_sq[here],
            )
