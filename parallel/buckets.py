"""Flat buckets: parameters and main gradients side by side in memory, reduced as one message.

Not here: when a bucket may start (data.py) and its update (sharded_adamw.py). The one idea: a bucket owns two flat
buffers of one layout, `params` in the model's dtype and `grads` in fp32 (fp64 for fp64), and each parameter becomes a
view of the first. So a reduction, a norm and an update each see a few long tensors instead of many short ones.

Every slot begins at a multiple of ALIGN elements and the whole is a multiple of ALIGN times the size of dp, so that
all shards are equal; the gaps are zero and stay zero under AdamW.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor, nn

from plait.parallel.mesh import Axis
from plait.parallel.placement import Placement
from plait.parallel.wire import Nodes, Phase, Relay, gathered, scattered_sum, shard_of, whole_sum

ALIGN = 64  # elements: 128 bytes at 16 bits, the alignment that vector loads and TMA ask for


@dataclass(eq=False)
class Slot:
    """A parameter and its place in a bucket."""

    name: str
    param: nn.Parameter
    placement: Placement
    stages: tuple[int, ...]  # local stages that use it
    decay: bool
    counted: bool  # this rank counts it in the norm of the grid; its replicas and tied copies do not
    tied: bool = False  # a copy of a weight that another stage holds too
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements held here, padding of the vocabulary included."""
        return self.param.numel()


@dataclass(eq=False)
class Bucket:
    """Slots that are reduced together. `steps` are the axes to sum over before dp; with any, the bucket is late."""

    slots: list[Slot]
    axis: Axis  # dp
    zero: int
    steps: tuple[Axis, ...] = ()
    late: bool = False
    nodes: Nodes | None = None  # of dp, where it spans several
    wire_dtype: torch.dtype | None = None  # what gradients travel over dp in; None: their own
    main: ClassVar[Tensor | None] = None  # master weights are the optimizer's own
    params: Tensor = field(init=False)
    grads: Tensor = field(init=False)  # of everything, or with `shards_grads` of this rank's shard
    full: Tensor | None = field(default=None, init=False)  # with `shards_grads`: where a micro-batch's gradients go
    passes: int = field(default=0, init=False)  # with `shards_grads`: sums started in this step
    arrivals: Counter[Slot] = field(
        default_factory=Counter, init=False
    )  # with `shards_grads`: gradients in this step
    arrived: set[Slot] = field(default_factory=set, init=False)
    started: bool = field(default=False, init=False)
    sums: Relay | None = field(default=None, init=False)  # under way or done

    def __post_init__(self) -> None:
        """Sorts the slots into few runs, allocates, and moves the parameters into the flat buffer."""
        self.slots.sort(key=lambda slot: (not slot.decay, not slot.counted))  # stable
        end = 0
        for slot in self.slots:
            slot.offset = end
            end += round_up(slot.numel, ALIGN)
        numel = round_up(max(end, ALIGN), ALIGN * self.axis.size)
        first = self.slots[0].param
        self.params = torch.zeros(numel, dtype=first.dtype, device=first.device)
        held = numel // self.axis.size if self.shards_grads else numel
        self.grads = torch.zeros(held, dtype=main_dtype(first.dtype), device=first.device)
        if self.wire_dtype == self.grads.dtype:
            self.wire_dtype = None  # as it is, without a copy
        for slot in self.slots:
            view = self.view(self.params, slot)
            view.copy_(slot.param.detach())
            slot.param.data = view
            slot.param.grad = None
            main_grad = None if self.shards_grads else self.view(self.grads, slot)
            slot.param.main_grad = main_grad  # type: ignore[attr-defined]

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Returns the slot's part of a flat tensor of this layout, in the parameter's shape."""
        return flat[slot.offset : slot.offset + slot.numel].view(slot.param.shape)

    @property
    def tied(self) -> bool:
        """True when it holds a tied weight; such a bucket holds nothing else."""
        return self.slots[0].tied

    @property
    def numel(self) -> int:
        """Elements of the flat buffers."""
        return self.params.numel()

    @property
    def shards_grads(self) -> bool:
        """True with ZeRO-2, but for a late bucket: its other sums need the whole gradient."""
        return self.zero >= 2 and not self.late and self.axis.size > 1

    def grads_in(self, start: int, stop: int) -> Tensor:
        """Returns the accumulated gradients of a range of the flat buffers, with ZeRO-2 a range of the shard."""
        first = self.shard[0] if self.shards_grads else 0
        return self.grads[start - first : stop - first]

    @property
    def shard(self) -> tuple[int, int]:
        """The range of the flat buffers that is this dp coord's to own (ZeRO-1, 2) and to count (always)."""
        return shard_of(self.numel, self.axis, self.nodes)

    @property
    def owned(self) -> tuple[int, int]:
        """The range that this rank updates: its shard with ZeRO-1 and 2, else everything."""
        return self.shard if self.zero else (0, self.numel)

    def runs(self, key: Callable[[Slot], Hashable]) -> Iterator[tuple[Hashable, int, int]]:
        """Yields (key, start, stop) for each run of neighbouring slots with one key; the runs cover the bucket."""
        groups = [(value, next(iter(slots)).offset) for value, slots in groupby(self.slots, key)]
        stops = [*(start for _, start in groups[1:]), self.numel]
        for (value, start), stop in zip(groups, stops, strict=True):
            yield value, start, stop

    # ---- one step ----

    def reset(self) -> None:
        """Forgets the gradients and the progress of a step. No reduction may be under way."""
        self.grads.zero_()
        self.arrived.clear()
        self.started = False
        self.sums = None
        self.passes = 0
        self.arrivals.clear()
        if self.shards_grads:
            self.give_back()

    def give_back(self) -> None:
        """Lets go of the lent buffer: the next micro-batch's gradients need another one."""
        self.full = None
        for slot in self.slots:
            slot.param.main_grad = None  # type: ignore[attr-defined]

    def start_reduce(self) -> None:
        """Starts the first sum; the others start as `sums` advances."""
        self.started = True
        phases = [Phase("all_reduce", axis, (0, self.numel)) for axis in self.steps]
        phases += self.scatter if self.zero else whole_sum(self.numel, self.axis, self.nodes, self.wire_dtype)
        self.sums = Relay(phases, self.grads)

    @property
    def scatter(self) -> list[Phase]:
        """The sum over dp of which this rank keeps its shard."""
        return scattered_sum(self.numel, self.axis, self.nodes, self.wire_dtype)

    @property
    def gather(self) -> list[Phase]:
        """Brings the shards of all dp ranks together; nothing to do without ZeRO."""
        return gathered(self.numel, self.axis, self.nodes) if self.zero and self.axis.size > 1 else []

    @property
    def busy(self) -> bool:
        """True while a sum is under way."""
        return self.sums is not None and not self.sums.is_done


def round_up(number: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is at least `number`."""
    return -(-number // unit) * unit


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of main gradients, master weights and moments: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the common part of two ranges, None when it is empty."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


def fill(slots: Iterable[Slot], bucket_bytes: int) -> list[list[Slot]]:
    """Cuts slots, in the order in which backward finishes them, into lists of at most `bucket_bytes` of gradients.

    A larger parameter gets a list of its own. Slots of different dtype or device never share one.
    """
    open_lists: dict[Hashable, tuple[list[Slot], int]] = {}
    result: list[list[Slot]] = []
    for slot in slots:
        kind = (slot.param.dtype, slot.param.device)
        size = slot.numel * main_dtype(slot.param.dtype).itemsize
        members, used = open_lists.get(kind, ([], 0))
        if not members or used + size > bucket_bytes:
            members, used = [], 0
            result.append(members)
        members.append(slot)
        open_lists[kind] = (members, used + size)
    return result


def layout_of(buckets: Sequence[Bucket]) -> str:
    """Returns what dp ranks must agree on, as text: names, offsets, sizes and dtypes in order."""
    return repr([[(s.name, s.offset, s.numel, str(s.param.dtype), s.decay) for s in b.slots] for b in buckets])
