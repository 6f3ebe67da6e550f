"""Interleaved 1F1B (Narayanan et al. 2021): v chunks per rank, stage = chunk * P + rank; the bubble shrinks by v.

Forwards go in groups of micro-batches: the whole group through chunk 0, then chunk 1, ...; backwards the same with
the chunks from last to first. Groups have P micro-batches; when P does not divide M, max(1, M // P) groups differ by
one at most, the larger first. So any M works, and every M >= P reaches the ideal time (docs/schedules.md).

    lane   = warmup steady cooldown, with REDUCE_GRAD after each stage's last B
    warmup: F * ((v - 1) G + 2 (P - r - 1)), G the first group's size (v = 1: 1F1B's warm-up)
    steady: (F B)*      cooldown: B*
"""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op
from plait.parallel.schedules.schedule import Schedule, add_reduce_grad


def interleaved(num_ranks: int, chunks: int, num_microbatches: int) -> Schedule:
    """`chunks` stages on each of `num_ranks` ranks; any M.

    Peak of live activations on rank 0 for v > 1: P (1 + (P - 1) / (P v)) shares of a rank when P divides M (more
    otherwise, the first group being larger), at most M; bubble over ideal time (P - 1) / (v M) for M >= P.
    """
    stage_to_rank = tuple(stage % num_ranks for stage in range(num_ranks * chunks)) if num_ranks > 0 else ()
    groups = _groups(num_ranks, num_microbatches) if num_ranks > 0 else []
    lanes = tuple(_lane(rank, num_ranks, chunks, groups) for rank in range(num_ranks))
    return Schedule(f"interleaved_v{chunks}", num_ranks * chunks, num_microbatches, lanes, stage_to_rank)


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Micro-batches in max(1, M // P) consecutive groups, larger ones first."""
    num_groups = max(1, num_microbatches // num_ranks)
    size, odd = divmod(num_microbatches, num_groups)
    starts = [group * size + min(group, odd) for group in range(num_groups + 1)]
    return [range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True)]


def _lane(rank: int, num_ranks: int, chunks: int, groups: list[range]) -> tuple[Action, ...]:
    """The lane of one rank."""
    forwards, backwards = [], []
    for group in groups:
        for chunk in range(chunks):
            forwards += [Action(chunk * num_ranks + rank, Op.F, m) for m in group]
            backwards += [Action((chunks - 1 - chunk) * num_ranks + rank, Op.B, m) for m in group]
    per_rank_below = 2 if chunks > 1 else 1
    warmup = (chunks - 1) * len(groups[0]) + per_rank_below * (num_ranks - rank - 1)
    num_warmup = min(warmup, len(forwards))
    lane = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        lane += [forward, backward]
    lane += backwards[len(forwards) - num_warmup :]
    return add_reduce_grad(lane)
