"""What actions, messages and memory cost: per stage (`Costs`), or per layer with embedding and head (`LayerCosts`).

Not the files that hold them (cost_files.py) and not the clock (simulate.py). Times are in any one unit, memory in any
one unit; a number stands for all stages, a list has one entry per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from plait.parallel.schedules.action import BACKWARD, COMPUTE, Action, Op, singles
from plait.parallel.schedules.machine import Product
from plait.parallel.schedules.partition import split_layers
from plait.parallel.schedules.schedule import Schedule

Time = float | Fraction
PerStage = Time | Sequence[Time]


@dataclass(frozen=True)
class Costs:
    """Time of each operation of one stage; a number for all stages, or one per stage. A pair costs the sum.

    `send` is the latency of a message between ranks, by the maker's stage; `send_grad` that of a gradient, where it
    differs. REDUCE_GRAD and TIE_GRAD are free: they overlap what follows. `activation` is what one micro-batch of the
    stage keeps from F to B (or I), None: one rank's share, 1/v; `deferred` how much of it stays from I to W, 0 to 1.
    split: False where the module cannot take its weight gradient apart: its I then takes the time of B, its W none
    (what the executor does), and `search` uses neither there.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    input: PerStage = 1.0
    weight: PerStage = 1.0
    send: PerStage = 0.0
    send_grad: PerStage | None = None
    activation: PerStage | None = None
    deferred: PerStage = 1.0
    split: bool | Sequence[bool] = True

    @staticmethod
    def unit(schedule: Schedule) -> Costs:
        """One unit of forward per rank and micro-batch: a rank with v stages gives 1/v to each; B = 2F, I = W = F."""
        shares = [Fraction(1, len(schedule.stages_of(rank))) for rank in schedule.stage_to_rank]
        return Costs(shares, [2 * share for share in shares], shares, shares, Fraction(0))

    def of(self, action: Action) -> Time:
        """Time of a single action; 0 for what is not computing."""
        if action.op not in COMPUTE:
            return Fraction(0)
        if action.op in (Op.I, Op.W) and not self.splits(action.stage):
            return at(self.backward, action.stage) if action.op is Op.I else Fraction(0)
        return at(self._table(action.op), action.stage)

    def splits(self, stage: int) -> bool:
        """Whether the stage's weight gradient can be taken apart from its input gradient."""
        return self.split if isinstance(self.split, bool) else self.split[stage]

    def latency(self, product: Product) -> Time:
        """How long the message that carries the product is on its way between two ranks."""
        stage, kind, _ = product
        return at(self.send if kind == "F" or self.send_grad is None else self.send_grad, stage)

    def _table(self, op: Op) -> PerStage:
        return {Op.F: self.forward, Op.B: self.backward, Op.I: self.input, Op.W: self.weight}[op]

    def num_stages(self) -> int | None:
        """How many stages the lists are for; None where all are numbers. ValueError where they disagree."""
        fields = (getattr(self, name) for name in _PER_STAGE)
        lengths = {len(field) for field in fields if isinstance(field, Sequence)}
        if len(lengths) > 1:
            raise ValueError(f"costs: lists for {' and '.join(map(str, sorted(lengths)))} stages; they must agree")
        return lengths.pop() if lengths else None

    def check(self, schedule: Schedule) -> None:
        """Raises ValueError when a per-stage cost has not one entry per stage."""
        for name in _PER_STAGE:
            cost = getattr(self, name)
            if isinstance(cost, Sequence) and len(cost) != schedule.num_stages:
                raise ValueError(f"costs.{name} has {len(cost)} entries for {schedule.num_stages} stages")


_PER_STAGE = ("forward", "backward", "input", "weight", "send", "send_grad", "activation", "deferred", "split")


def at(cost: PerStage, stage: int) -> Time:
    """The stage's entry."""
    return cost[stage] if isinstance(cost, Sequence) else cost


class Part(NamedTuple):
    """What one layer, the embedding or the head costs: times of F, I and W, and the memory kept from F to B."""

    forward: Time = 0.0
    input: Time = 0.0
    weight: Time = 0.0
    activation: Time = 0.0


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a model that is yet to be cut into stages: one layer, the embedding before and the head after them.

    `layers_of`: layers per stage, in stage order; None: as even as can be, the rest to the first stages, as the
    executor's model is cut.
    """

    num_layers: int
    layer: Part
    embedding: Part = Part()
    head: Part = Part()
    send: Time = 0.0
    deferred: Time = 1.0
    split: bool = True
    layers_of: tuple[int, ...] | None = None

    def stages(self, num_stages: int) -> Costs:
        """The costs per stage; ValueError where the layers cannot be cut so."""
        counts = [len(layers) for layers in split_layers(self.num_layers, num_stages, self.layers_of)]
        ends = (0, num_stages - 1)
        rows = [
            [
                count * layer + (stage == ends[0]) * embedding + (stage == ends[1]) * head
                for layer, embedding, head in zip(self.layer, self.embedding, self.head, strict=True)
            ]
            for stage, count in enumerate(counts)
        ]
        forward, inputs, weight, activation = (list(column) for column in zip(*rows, strict=True))
        return Costs(
            forward,
            [i + w for i, w in zip(inputs, weight, strict=True)],
            inputs,
            weight,
            self.send,
            activation=activation if any(activation) else None,
            deferred=self.deferred,
            split=self.split,
        )


def balanced_layers(costs: LayerCosts, stage_to_rank: Sequence[int]) -> tuple[int, ...]:
    """Layers per stage so that the busiest rank, embedding and head counted, does the least that it can.

    Every stage has one; each further layer goes to the rank with least to do, there to the stage with least. As all
    layers cost the same no other counts do better. Costs as even as the layers give `split_layers`' counts.
    """
    num_stages = len(stage_to_rank)
    counts = [1] * len(split_layers(costs.num_layers, num_stages))  # which refuses too few layers
    layer, embedding, head = (sum(part[:3]) for part in (costs.layer, costs.embedding, costs.head))
    work: list[Time] = [
        layer + (stage == 0) * embedding + (stage == num_stages - 1) * head for stage in range(num_stages)
    ]
    while sum(counts) < costs.num_layers:
        ranks = [sum(w for w, r in zip(work, stage_to_rank, strict=True) if r == rank) for rank in stage_to_rank]
        least = min(range(num_stages), key=lambda stage: (ranks[stage], work[stage], stage))
        counts[least] += 1
        work[least] += layer
    return tuple(counts)


AnyCosts = Costs | LayerCosts


def shared(costs: AnyCosts, schedule: Schedule) -> Costs:
    """The costs per stage: a number is a rank's share, of which each of its stages has an equal part."""
    if isinstance(costs, LayerCosts):
        return costs.stages(schedule.num_stages)

    def part(cost: PerStage) -> PerStage:
        if isinstance(cost, Sequence):
            return cost
        shares: list[Time] = [cost / len(schedule.stages_of(rank)) for rank in schedule.stage_to_rank]
        return shares

    return Costs(
        part(costs.forward),
        part(costs.backward),
        part(costs.input),
        part(costs.weight),
        costs.send,
        costs.send_grad,
        None if costs.activation is None else part(costs.activation),
        costs.deferred,
        costs.split,
    )


def layer_costs(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    ffn_dim: int,
    vocab_size: int,
    seq: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rows: int = 1,
    flop_per_s: float = 1.0,
    link_bytes_per_s: float = 0.0,
    element_bytes: int = 2,
) -> LayerCosts:
    """Costs of a Llama-style decoder by FLOP, for a micro-batch of `rows` sequences of `seq` tokens.

    torchtitan's convention: a weight that multiplies costs 2 FLOP per token in each of F, I and W; attention of h
    heads of size q over s tokens 4 h q s forward, twice that backward, all of it in I (it has no weights); no causal
    half; norms as their parameters. The embedding is looked up: no FLOP; the head multiplies. flop_per_s: what a rank
    reaches; 1 leaves the costs in FLOP. A message is rows * seq * dim elements over link_bytes_per_s (0: free).
    `activation` is 34 dim bytes a token and layer (Korthikanti et al. 2022 with a flash attention), 2 dim for the
    embedding's output, and 4 vocab_size for the head's logits.
    """
    kv, size = num_kv_heads or num_heads, head_dim or dim // num_heads
    weights = 2 * dim * size * (num_heads + kv) + 3 * dim * ffn_dim + 2 * dim
    attention = 4 * num_heads * size * seq
    tokens = rows * seq
    second = 1.0 / flop_per_s
    multiply = 2 * tokens * second
    norm_and_head = (vocab_size + 1) * dim
    return LayerCosts(
        num_layers,
        Part(
            multiply * weights + tokens * attention * second,
            multiply * weights + 2 * tokens * attention * second,
            multiply * weights,
            34.0 * dim * tokens,
        ),
        Part(activation=2.0 * dim * tokens),
        Part(multiply * norm_and_head, multiply * norm_and_head, multiply * norm_and_head, 4.0 * vocab_size * tokens),
        tokens * dim * element_bytes / link_bytes_per_s if link_bytes_per_s else 0.0,
    )


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[Time, ...]:
    """The most that each rank holds at once, in the unit of `activation`; without one, in one rank's shares.

    A stage's activations count from F to B (or I), its queued weight gradient `deferred` of them from I to W; a stage
    that cannot split queues nothing.
    """
    peaks = []
    for rank, lane in enumerate(schedule.lanes):
        share = Fraction(1, max(1, len(schedule.stages_of(rank))))
        now: Time = Fraction(0)
        most: Time = Fraction(0)
        for single in singles(lane):
            size = share if costs.activation is None else at(costs.activation, single.stage)
            kept = at(costs.deferred, single.stage) * size if costs.splits(single.stage) else 0
            if single.op is Op.F:
                now += size
            most = max(most, now)
            if single.op in BACKWARD:
                now -= size
            if single.op is Op.I:
                now += kept
            elif single.op is Op.W:
                now -= kept
            most = max(most, now)
        peaks.append(most)
    return tuple(peaks)
