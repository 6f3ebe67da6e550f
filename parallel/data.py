"""Data parallelism: gradients summed over dp while the last micro-batch's backward still runs.

Not here: when micro-batches run (pipeline.py), and the update (sharded_adamw.py). The one idea: the gradient of a
parameter is complete after three sums, always in this order: over the two copies of a tied weight (`tie`), over the
replicas of a partial gradient (`Placement.sum_axes`), over dp. A bucket of plain parameters needs only the last one
and starts it by itself, as soon as its last gradient has arrived in the last micro-batch (`open`) and all buckets
before it have started, so that all dp ranks start the same messages in the same order. Tied and partial ones wait for
`tie` and `reduce`. The sum is a sum: the loss is already divided by the tokens of the global batch. With ZeRO-2 a
bucket of plain parameters is summed after every micro-batch instead (sharded_grads.py).

    dp.zero_grad(); ...; dp.open(s) before the last backward of stage s; dp.tie(s); dp.reduce(s); dp.finish(); step
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from plait.parallel.buckets import Bucket, Slot, fill, layout_of, overlap
from plait.parallel.collectives import all_gather
from plait.parallel.grad_norm import GridNorm, clip_factor, norm_power_of
from plait.parallel.gradients import grad_home
from plait.parallel.mesh import GridShape, Mesh, on_nodes
from plait.parallel.placement import Placement, placement_of
from plait.parallel.schedules import Op, Schedule
from plait.parallel.schedules.action import singles
from plait.parallel.sharded_adamw import ShardedAdamW
from plait.parallel.sharded_grads import GradShards
from plait.parallel.wire import advance_all

if TYPE_CHECKING:
    from plait.parallel.fully_sharded import ShardedParam

__all__ = ["DataParallel", "Shard", "ShardedAdamW", "clip_factor", "decays"]


def decays(name: str, param: Tensor) -> bool:
    """The default rule of weight decay: `param.decay` where set, else matrices decay, vectors and scalars do not."""
    return bool(getattr(param, "decay", param.dim() >= 2))


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank owns: `flat` is its range within the flat logical box of `placement`.

    `start`, `stop` is the same range in the flat buffers of `bucket`. `replica` = (index, count) over all ranks that
    own the same part. `primary` is False for the copy of a tied weight that is not the first one.
    """

    name: str
    stage: int
    placement: Placement
    flat: tuple[int, int]
    replica: tuple[int, int]
    primary: bool
    bucket: Bucket | ShardedParam
    start: int
    stop: int


class DataParallel(GridNorm):
    """The flat buckets of this rank's stages, and the reduction of their gradients.

    Construction moves every parameter that requires a gradient into a bucket; `param.data` is a view from then on.
    `tied` maps a stage to this rank's copy of the tied weight and `tied_ranks` are the two global ranks that hold one
    (default: this rank alone where it has both, else first and last of the pp axis). `bucket_bytes`: see
    `plait.parallel.wire.measured_bucket_bytes`. `wire_dtype`: what gradients travel over dp in (bfloat16: half the
    bytes, one rounding of each rank's part and one of the sum; over nodes, one more). On a mesh with `node_size` the
    sum, and with ZeRO the gathering of new weights, goes node by node. Collective over dp, the replicas and the tied
    pair.
    """

    whole_stages = 0

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mesh: Mesh,
        *,
        zero: int = 0,
        bucket_bytes: int = 16 << 20,
        wire_dtype: torch.dtype | None = None,
        tied: Mapping[int, nn.Parameter] | None = None,
        tied_ranks: tuple[int, ...] | None = None,
        decay: Callable[[str, Tensor], bool] = decays,
    ) -> None:
        if zero not in (0, 1, 2):
            raise ValueError(
                f"zero={zero} must be 0 (nothing sharded), 1 (optimizer state) or 2 (gradients too); "
                "3 is plait.parallel.fully_sharded.FullySharded"
            )
        check_wire_dtype(wire_dtype)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        self.mesh, self.zero, self.bucket_bytes = mesh, zero, bucket_bytes
        self.axis = mesh.axis(*([name for name in ("dp", "cp") if name in mesh.sizes] or ["dp"]))
        self._tied_ranks = tied_pair(tied or {}, tied_ranks, mesh)
        slots = slots_of(stages, mesh, tied or {}, self._tied_ranks, decay)
        self.buckets = self._build(slots, bucket_bytes, wire_dtype)
        self._check_layout()
        self._stages = tuple(stages)
        self._early = {s: [b for b in self.buckets if not b.late and b.slots[0].stages == (s,)] for s in stages}
        self._shards = GradShards()
        self._opened: set[int] = set()
        self._reduced: set[int] = set()
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.param.on_grad = partial(self._arrived, bucket, slot)  # type: ignore[attr-defined]
                if bucket.shards_grads:
                    slot.param.lend_grad = partial(self._shards.lend, bucket)  # type: ignore[attr-defined]
                slot.param.register_post_accumulate_grad_hook(_take_grad)

    # ---- construction ----

    def _build(self, slots: Sequence[Slot], bucket_bytes: int, wire_dtype: torch.dtype | None) -> list[Bucket]:
        """Groups the slots by what they wait for, and cuts each group into buckets in backward order."""
        groups: dict[tuple, list[Slot]] = {}
        for slot in reversed(slots):
            partial_ranks = slot.placement.replica_ranks if slot.placement.sum_axes else ()
            late = slot.tied or bool(partial_ranks) or len(slot.stages) > 1
            is_vector = self.zero == 2 and not late and slot.param.dim() < 2  # sharded_grads.py says why
            groups.setdefault((late, slot.stages, slot.tied, is_vector, partial_ranks), []).append(slot)
        buckets = []
        nodes = self.mesh.across_nodes(self.axis)
        for (late, _, is_tied, _, ranks), members in sorted(groups.items(), key=lambda group: group[0][:4]):
            steps = [self.mesh.line("tied", self._tied_ranks)] if is_tied else []
            steps += [self.mesh.line("replicas", ranks)] if len(ranks) > 1 else []
            for some in fill(members, bucket_bytes):
                buckets.append(Bucket(some, self.axis, self.zero, tuple(steps), late, nodes, wire_dtype))
        return buckets

    def _check_layout(self) -> None:
        mine = zlib.crc32(layout_of(self.buckets).encode())
        sums = all_gather(torch.tensor([mine], device=self.mesh.device), self.axis).tolist()
        if len(set(sums)) > 1:
            raise ValueError(f"dp ranks {self.axis.ranks} hold different parameters (layout checksums {sums})")

    # ---- one step ----

    def zero_grad(self) -> None:
        """Begins a step: all accumulated gradients are zero. RuntimeError while reductions are under way."""
        if any(bucket.busy for bucket in self.buckets) or not self._shards.is_idle:
            raise RuntimeError("zero_grad while gradients are being reduced: finish() the step or drop() it")
        for bucket in self.buckets:
            bucket.reset()
            for slot in bucket.slots:
                slot.param.grad_uses_seen = 0  # type: ignore[attr-defined]  # of a step that was given up half way
        self._opened.clear()
        self._reduced.clear()

    def drop(self) -> None:
        """Gives a step up: ends what is under way, also when peers are gone, and zeroes what was accumulated."""
        for bucket in self.buckets:
            if bucket.sums is not None:
                bucket.sums.drop()
        self._shards.drop()
        self.zero_grad()

    def unshard(self, stage: int) -> None:
        """UNSHARD: nothing to do, the weights are whole; `reshard` likewise."""

    reshard = unshard

    def open(self, stage: int) -> None:
        """The last backward of the stage begins: from now on its buckets start as they fill."""
        self._check_stage(stage)
        self._opened.add(stage)

    def tie(self, stage: int) -> None:
        """TIE_GRAD: starts the sum over the two copies of the tied weight, if the stage holds one."""
        self._check_stage(stage)
        for bucket in self.buckets:
            if bucket.tied and stage in bucket.slots[0].stages and not bucket.started:
                bucket.start_reduce()

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: the stage's gradients are complete; starts what has not started by itself, in order."""
        self._check_stage(stage)
        self._reduced.add(stage)
        self._shards.complete([bucket for bucket in self._early[stage] if bucket.shards_grads])
        for bucket in self._early[stage]:
            if not bucket.started:
                bucket.start_reduce()
        for bucket in self.buckets:
            stages = bucket.slots[0].stages
            if bucket.late and stage in stages and self._reduced.issuperset(stages):
                if bucket.tied and not bucket.started:
                    raise RuntimeError(f"reduce({stage}) before tie({stage}): the copies of the tied weight differ")
                if not bucket.started:
                    bucket.start_reduce()

    def finish(self) -> None:
        """Waits until every gradient is complete. RuntimeError names a peer that did not answer."""
        missing = [stage for stage in self._stages if stage not in self._reduced]
        if missing:
            raise RuntimeError(f"finish() before reduce() of stages {missing}")
        self._shards.finish()
        advance_all([bucket.sums for bucket in self.buckets if bucket.sums is not None])

    def _arrived(self, bucket: Bucket, slot: Slot, param: Tensor) -> None:
        """Gradient-ready hook: counts the bucket down, and starts it and those that waited for it."""
        if bucket.shards_grads and not bucket.started:
            self._shards.arrived(bucket, slot, self._early[slot.stages[0]])
            return
        if bucket.started or slot in bucket.arrived:
            raise RuntimeError(
                f"a gradient of {slot.name} arrived after its bucket was complete: call zero_grad() before a step, "
                "and add_use(param) for each further layer that uses a weight"
            )
        stage = slot.stages[0]
        if bucket.late or stage not in self._opened:
            return
        bucket.arrived.add(slot)
        if len(bucket.arrived) < len(bucket.slots):
            return
        for other in self._early[stage]:
            if not other.started:
                if len(other.arrived) < len(other.slots):
                    return
                other.start_reduce()

    def _check_stage(self, stage: int) -> None:
        if stage not in self._early:
            raise ValueError(f"stage={stage} is not on this rank; it holds {list(self._stages)}")

    # ---- norm and shards ----

    @torch.no_grad()
    def norm_power(self, p: float = 2.0) -> Tensor:
        """This rank's part of sum |g|^p over the grid (max |g| for inf), fp64, 0-dim; after `finish`.

        Each element is counted by one rank of the grid, the same one whatever the ZeRO stage.
        """
        parts = []
        for bucket in self.buckets:
            for counted, start, stop in bucket.runs(lambda slot: slot.counted):
                common = overlap((start, stop), bucket.shard)
                if counted and common:
                    parts.append(bucket.grads_in(*common))
        return norm_power_of(parts, p, self.mesh.device)

    def shards(self) -> Iterator[Shard]:
        """Yields the owned part of every parameter, without padding; parts that are empty are left out."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                logical = (slot.offset, slot.offset + slot.placement.numel)
                common = overlap(logical, bucket.owned)
                if common is None:
                    continue
                ranks = slot.placement.replica_ranks
                index, count = (ranks.index(self.mesh.rank), len(ranks)) if ranks else (0, 1)
                if not self.zero:
                    index, count = self.axis.coord * count + index, self.axis.size * count
                yield Shard(
                    name=slot.name,
                    stage=slot.stages[0],
                    placement=slot.placement,
                    flat=(common[0] - slot.offset, common[1] - slot.offset),
                    replica=(index, count),
                    primary=not slot.tied or self._tied_ranks[0] == self.mesh.rank,
                    bucket=bucket,
                    start=common[0],
                    stop=common[1],
                )


def slots_of(
    stages: Mapping[int, nn.Module],
    mesh: Mesh,
    tied: Mapping[int, nn.Parameter],
    tied_ranks: tuple[int, ...],
    decay: Callable[[str, Tensor], bool],
) -> list[Slot]:
    """Makes one slot per trainable parameter, however many modules and stages share it."""
    slots: dict[int, Slot] = {}
    ties = {id(param) for param in tied.values()} if tied_ranks else set()
    for stage, module in stages.items():
        for name, param in module.named_parameters():
            if not param.requires_grad:
                continue
            if id(param) in slots:
                slots[id(param)].stages += (stage,)
                continue
            placement, is_tied = placement_of(param), id(param) in ties
            alone = not placement.replica_ranks or placement.replica_ranks[0] == mesh.rank
            counted = alone and not (is_tied and tied_ranks[0] != mesh.rank)
            slots[id(param)] = Slot(name, param, placement, (stage,), decay(name, param), counted, tied=is_tied)
    if ties - set(slots):
        raise ValueError("tied: a tied weight is not a trainable parameter of the local stages")
    return list(slots.values())


def tied_pair(tied: Mapping[int, nn.Parameter], ranks: tuple[int, ...] | None, mesh: Mesh) -> tuple[int, ...]:
    """Returns the ranks to sum a tied weight's gradient over, () unless two hold a copy. ValueError for misuse."""
    if not tied:
        return ()
    pp = mesh.axis("pp")
    ends = (mesh.rank,) if len(tied) > 1 else (pp.ranks[0], pp.ranks[-1])  # in V shape one rank has both
    ranks = tuple(sorted(set(ranks or ends)))
    if len({id(param) for param in tied.values()}) > 1:
        raise ValueError("tied: this rank holds two copies of the tied weight; let its stages share one Parameter")
    if mesh.rank not in ranks:
        raise ValueError(f"tied: rank {mesh.rank} holds a copy, but tied_ranks={ranks} do not name it")
    return ranks if len(ranks) > 1 else ()


def check_wire_dtype(wire_dtype: torch.dtype | None) -> None:
    """Raises ValueError for a dtype that gradients cannot travel in."""
    if wire_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"wire_dtype={wire_dtype} must be None (as accumulated), float32, bfloat16 or float16")


def check_zero3(grid: GridShape, schedule: Schedule | None = None, *, node_size: int | None = None) -> None:
    """Raises ValueError, with the reason and what would do, for a grid or a schedule that zero=3 cannot have.

    `node_size`: sharded in nodes of so many ranks, and replicated over them.
    """
    sizes = grid.sizes
    lanes = () if schedule is None else schedule.lanes
    if schedule is not None and any(action.op in (Op.I, Op.W) for lane in lanes for action in singles(lane)):
        raise ValueError(
            f"zero=3 with schedule {schedule.name}: it splits backward, and FSDP2 scatters the gradients at the end "
            "of I, before W has made them; use zero=2, or a schedule with whole backwards"
        )
    if sizes.get("cp", 1) > 1:
        raise ValueError(f"zero=3 shards over dp alone, and cp={sizes['cp']}; use zero=2")
    if sizes.get("dp", 1) < 2:
        raise ValueError("zero=3 shards over dp, which has one rank; use zero=0")
    for ranks in () if node_size is None else grid.groups("dp"):
        if on_nodes(ranks, node_size or grid.world_size) is None:
            raise ValueError(
                f"zero=3 in nodes of {node_size} ranks needs several nodes with as many ranks of dp each, 2 or more; "
                f"one dp group is ranks {ranks}"
            )


def _take_grad(param: nn.Parameter) -> None:
    """Moves a gradient that autograd itself accumulated into the bucket, which owns it from then on."""
    if param.grad is None:
        return
    with torch.no_grad():
        grad_home(param).add_(param.grad)
    param.grad = None
    param.on_grad(param)  # type: ignore[attr-defined]
