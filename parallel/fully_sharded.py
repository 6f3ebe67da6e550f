"""ZeRO-3: weights, gradients and optimizer state sharded over dp, by torch's FSDP2 below the stages of a pipeline.

Not here: the flat buckets of ZeRO-0 to 2 (data.py). The one idea: FSDP2 gathers a unit's weights before they are used
and scatters its gradients, so what is left to do is what it does not know: sums over the replicas of a partial
gradient and over the copies of a tied weight (on shards: a sum of parts is a part of the sum), which element is
counted by whom, and which box of the full tensor a shard is. `FullySharded` has the methods of `DataParallel`, and
`ShardedAdamW` takes it as it takes that one: one "bucket" per parameter, which is this rank's shard.

Every micro-batch gathers each unit twice and scatters its gradients once, 1.5 times the bytes of ZeRO-1 per
micro-batch (Rajbhandari et al. 2020, section 7; torch.distributed.fsdp.fully_shard). With a pipeline several
micro-batches are under way, so a stage's weights stay gathered while it is one of the next `WHOLE_STAGES` that its
rank computes: UNSHARD in the lane gathers them, RESHARD lets go of them.

Sharded in a node (`in_node`; PyTorch's HSDP) a gather never leaves its node, and what crosses nodes is the sum of a
shard's gradients, once per step; the price is memory: every node holds all weights, gradients and moments once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOf

from plait.parallel.buckets import Slot, main_dtype
from plait.parallel.collectives import Handle, all_reduce
from plait.parallel.data import Shard, check_wire_dtype, check_zero3, decays, slots_of, tied_pair
from plait.parallel.grad_norm import GridNorm, norm_power_of
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.placement import Placement
from plait.parallel.schedules import Schedule

Units = Callable[[nn.Module], Sequence[nn.Module]]
WHOLE_STAGES = 2  # the one that computes, and the next, which is gathered meanwhile


def layers_of(stage: nn.Module) -> list[nn.Module]:
    """The default units that are gathered one by one: the children of `stage.layers`, in order."""
    layers = getattr(stage, "layers", None)
    return list(layers.values() if isinstance(layers, nn.ModuleDict) else layers or ())


@dataclass(eq=False)
class ShardedParam:
    """This rank's shard of a parameter, with the face of a `Bucket`: all of it is owned, counted and updated here."""

    slot: Slot
    param: nn.Parameter  # a DTensor over dp, fp32 or fp64; replicated over nodes where they are sharded in a node
    shard: Placement  # the box of the full tensor that this rank's shard is; its shape may hold a 0
    steps: tuple[Axis, ...]  # to sum the gradient over, beside dp
    params: Tensor  # flat, in the model's dtype: what is saved as the weight; the shard itself unless that is narrow
    main: Tensor | None  # flat fp32 master weights, where the model's dtype is narrower: FSDP2's own shard

    gather = ()  # an update sends nothing: the next use gathers

    @property
    def local(self) -> Tensor:
        """The shard, flat."""
        data: Any = self.param.data
        return data.to_local().view(-1)

    @property
    def owned(self) -> tuple[int, int]:
        return 0, self.params.numel()

    def grads_in(self, start: int, stop: int) -> Tensor:
        """Returns a range of the shard's gradient; zeros when there is none."""
        grad: Any = self.param.grad
        if grad is None:
            return torch.zeros_like(self.local[start:stop])
        return grad.to_local().view(-1)[start:stop]

    def runs(self, key: Callable[[Slot], Any]) -> Iterator[tuple[Any, int, int]]:
        """Yields the one run there is."""
        yield key(self.slot), 0, self.params.numel()


class FullySharded(GridNorm):
    """FSDP2 over the dp axis for this rank's stages, with the methods of `DataParallel`.

    `units` says which modules of a stage are gathered one by one; the rest of a stage is one more unit. Parameters in
    16 bits become fp32 shards that are gathered in 16 bits; gradients are summed in fp32. `in_node`: shard over the
    dp ranks of a node of the mesh (`node_size`) and replicate over the nodes; a stage's last micro-batch must then
    reach every parameter, as it starts the sums over nodes. `wire_dtype`: what gradients travel and are added up in
    (None: fp32, or fp64). ValueError, with the reason, for what does not go together: a schedule that splits backward
    (FSDP2 scatters gradients at the end of I, before W has made them), a context-parallel axis, nodes that dp does
    not cut evenly.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        schedule: Schedule | None = None,
        *,
        in_node: bool = False,
        wire_dtype: torch.dtype | None = None,
        units: Units = layers_of,
        tied: Mapping[int, nn.Parameter] | None = None,
        tied_ranks: tuple[int, ...] | None = None,
        decay: Callable[[str, Tensor], bool] = decays,
    ) -> None:
        check_wire_dtype(wire_dtype)
        check_zero3(mesh.grid, schedule, node_size=mesh.node_size if in_node else None)
        self.mesh, self.zero, self.axis = mesh, 3, mesh.axis("dp")
        nodes = mesh.across_nodes(self.axis) if in_node else None
        self._inside, self._across = nodes or (self.axis, Axis.single("dp_across_nodes", mesh.rank))
        self._stages = dict(stages)
        ranks = tied_pair(tied or {}, tied_ranks, mesh)
        slots = slots_of(stages, mesh, tied or {}, ranks, decay)
        shared = [slot.name for slot in slots if len(slot.stages) > 1]
        if shared:
            raise ValueError(f"zero=3: {', '.join(shared)} is shared by two stages of one rank; use zero=2")
        dtypes = [slot.param.dtype for slot in slots]  # of the model; the shards may be wider
        kept = mesh.axis("pp").size > 1  # several micro-batches use a stage's weights in turn
        self.whole_stages = WHOLE_STAGES if kept else 0
        self._tied_sums: list[Handle] = []  # under way
        torch_mesh = _torch_mesh(mesh, self._inside, self._across)
        for stage in stages.values():
            _wrap(stage, torch_mesh, self._inside.size, units, wire_dtype, reshard=not kept)
        named = {stage: dict(module.named_parameters()) for stage, module in stages.items()}
        self.buckets = [
            _sharded(slot, named[slot.stages[0]][slot.name], dtype, mesh, self._inside, ranks)
            for slot, dtype in zip(slots, dtypes, strict=True)
        ]

    # ---- one step ----

    def zero_grad(self) -> None:
        """Begins a step: there are no gradients."""
        for bucket in self.buckets:
            bucket.param.grad = None
        for stage in self._stages.values():
            self._cross_nodes(stage, now=False)

    def drop(self) -> None:
        """Gives a step up: there are no gradients and no gathered weights."""
        self._tied_sums = []  # what is under way ends by itself, or never, when a peer is gone
        self.finish()
        self.zero_grad()

    def unshard(self, stage: int) -> None:
        """UNSHARD: starts to gather the stage's weights; what uses them waits."""
        for module in self._units(stage):
            module.unshard(async_op=True)

    def reshard(self, stage: int) -> None:
        """RESHARD: lets go of the stage's gathered weights."""
        for module in self._units(stage):
            module.reshard()

    def open(self, stage: int) -> None:
        """FSDP2 scatters the gradients of every micro-batch; from now on their sums cross the nodes, too."""
        self._cross_nodes(self._stages[stage], now=True)

    def tie(self, stage: int) -> None:
        """TIE_GRAD: starts the sum of the two copies' shards of the tied weight's gradient, if the stage holds one.

        Nobody waits here: before the other copy is complete its rank may need what this rank computes next.
        """
        for bucket in self.buckets:
            if bucket.slot.tied and stage in bucket.slot.stages:
                self._sum(bucket)

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: sums partial gradients over their replicas; dp was summed by FSDP2."""
        for bucket in self.buckets:
            if stage == bucket.slot.stages[0]:
                if bucket.param.grad is None and self._across.size > 1:
                    raise RuntimeError(
                        f"{bucket.slot.name} got no gradient in the last micro-batch, which sums those of all "
                        "over the nodes: shard it over all of dp (in_node=False)"
                    )
                if not bucket.slot.tied:
                    self._sum(bucket)

    def finish(self) -> None:
        """Ends the step: waits for the tied weight's sum, lets go of gathered weights (an update makes them old)."""
        sums, self._tied_sums = self._tied_sums, []
        for handle in sums:
            handle.wait()
        for stage in self._stages:
            self.reshard(stage)

    def _units(self, stage: int) -> Iterator[FSDPModule]:
        return (module for module in self._stages[stage].modules() if isinstance(module, FSDPModule))

    def _cross_nodes(self, stage: nn.Module, *, now: bool) -> None:
        """Whether scattered gradients are summed over the nodes at once, or kept until they are."""
        if self._across.size > 1:
            assert isinstance(stage, FSDPModule)
            stage.set_requires_all_reduce(now)

    @torch.no_grad()
    def _sum(self, bucket: ShardedParam) -> None:
        for axis in bucket.steps:
            grad: Any = bucket.param.grad
            handle = all_reduce(bucket.grads_in(*bucket.owned), axis, async_op=True)
            if bucket.slot.tied:
                self._tied_sums.append(handle)
            else:
                handle.wait()
            if grad is None:
                raise RuntimeError(f"{bucket.slot.name} got no gradient, so its sum over ranks {axis.ranks} is lost")

    # ---- norm and shards ----

    @torch.no_grad()
    def norm_power(self, p: float = 2.0) -> Tensor:
        """As `DataParallel.norm_power`: this rank's part of sum |g|^p over the grid, fp64, 0-dim."""
        counted = [bucket for bucket in self.buckets if bucket.slot.counted and self._across.coord == 0]
        parts = [bucket.grads_in(*bucket.owned) for bucket in counted]
        return norm_power_of([part for part in parts if part.numel()], p, self.mesh.device)

    def shards(self) -> Iterator[Shard]:
        """Yields the shard of every parameter as its box of the full tensor; what is empty here is left out."""
        for bucket in self.buckets:
            if bucket.shard.numel == 0:
                continue
            ranks, node = bucket.slot.placement.replica_ranks, self._across
            index, count = (ranks.index(self.mesh.rank), len(ranks)) if ranks else (0, 1)
            yield Shard(
                name=bucket.slot.name,
                stage=bucket.slot.stages[0],
                placement=bucket.shard,
                flat=(0, bucket.shard.numel),
                replica=(node.coord * count + index, node.size * count),
                primary=not bucket.slot.tied or bucket.slot.counted,
                bucket=bucket,
                start=0,
                stop=bucket.shard.numel,
            )


def _torch_mesh(mesh: Mesh, inside: Axis, across: Axis) -> DeviceMesh:
    """What FSDP2 shards over: dp, or (replicated over nodes, sharded in a node)."""
    assert mesh.device_mesh is not None
    if across.group is None or inside.group is None:
        return mesh.device_mesh["dp"]
    nodes = torch.tensor(mesh.axis("dp").ranks).view(across.size, inside.size)
    names = (across.name, inside.name)
    return DeviceMesh.from_group([across.group, inside.group], mesh.device.type, nodes, mesh_dim_names=names)


def _wrap(
    stage: nn.Module,
    torch_mesh: DeviceMesh,
    size: int,
    units: Units,
    wire_dtype: torch.dtype | None,
    *,
    reshard: bool,
) -> None:
    """Shards the units and then the rest of a stage. The loss is divided by the caller: sums stay sums."""
    narrow = {p.dtype for p in stage.parameters() if main_dtype(p.dtype) != p.dtype}
    if len(narrow) > 1:
        raise ValueError(
            f"zero=3: a stage has parameters in {sorted(map(str, narrow))}; one 16-bit dtype is possible"
        )
    wire_dtype = wire_dtype or (torch.float32 if narrow else None)
    policy = MixedPrecisionPolicy(next(iter(narrow), None), wire_dtype, None, False)
    stage.to(torch.float32) if narrow else None
    shared: dict[str, Any] = dict(
        mesh=torch_mesh, mp_policy=policy, reshard_after_forward=reshard,
        shard_placement_fn=lambda param: ShardOf(_dim(param, size)),
    )  # fmt: skip
    for module in (*units(stage), stage):
        fully_shard(module, **shared)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reshard_after_backward(reshard)


def _dim(param: Tensor, size: int) -> int:
    """The dim to cut: 0, unless that is too short and dim 1 divides (two matrices in one parameter, [2, F, in])."""
    return 1 if param.dim() > 2 and param.shape[0] < size and param.shape[1] % size == 0 else 0


def _sharded(
    slot: Slot, param: nn.Parameter, dtype: torch.dtype, mesh: Mesh, inside: Axis, tied_ranks: tuple[int, ...]
) -> ShardedParam:
    """`dtype`: the model's; `inside`: what the parameter is sharded over."""
    placement = slot.placement
    data: Any = param.data
    assert isinstance(data, DTensor)
    dim = data.placements[-1].dim  # type: ignore[attr-defined]
    chunk, coord = -(-data.shape[dim] // inside.size), inside.coord
    start = min(coord * chunk, placement.shape[dim])
    stop = min(start + chunk, placement.shape[dim])  # rows that pad a vocabulary are no part of the box
    shard = replace(
        placement,
        offset=(*placement.offset[:dim], placement.offset[dim] + start, *placement.offset[dim + 1 :]),
        shape=(*placement.shape[:dim], stop - start, *placement.shape[dim + 1 :]),
    )
    local = data.to_local().view(-1)
    narrow = main_dtype(dtype) != dtype
    partial_ranks = placement.replica_ranks if placement.sum_axes else ()
    steps = [mesh.line("tied", tied_ranks)] if slot.tied else []
    steps += [mesh.line("replicas", partial_ranks)] if len(partial_ranks) > 1 and not slot.tied else []
    slot.param = param
    param.placement = placement  # type: ignore[attr-defined]  # FSDP2 made a new parameter
    return ShardedParam(
        slot, param, shard, tuple(steps), local.to(dtype) if narrow else local, local if narrow else None
    )
