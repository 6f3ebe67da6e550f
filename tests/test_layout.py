"""Who writes what: every byte once, and by each of its holders about the same number."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.ckpt import Sharded
from plait.ckpt.layout import SMALL_BYTES, lay_out, shares_of
from plait.ckpt.leaf import Leaf, leaf_of

MIB = 1 << 20
SIZES = st.sampled_from([0, 1, 64, 20_000, SMALL_BYTES // 4 + 1, 100_000, 300_000, 600_000, 2_000_000])  # elements


def fake(numel: int) -> torch.Tensor:
    """fp32 without memory: only sizes count here."""
    return torch.empty(1).expand(numel)


def written(leaves_of, ranks: int) -> tuple[list[int], list[tuple]]:
    """Bytes by rank, and (name, box, first, last element) of all shares."""
    loads, ranges = [], []
    for rank in range(ranks):
        shares = shares_of(leaves_of(rank), rank, ranks)
        loads.append(sum(share.num_bytes for share in shares))
        ranges += [(s.leaf.name, s.leaf.box, *(s.flat or (0, s.leaf.tensor.numel()))) for s in shares]
    return loads, ranges


def covers(ranges: list[tuple], wanted: dict[tuple, int]) -> bool:
    """True when the ranges of each (name, box) fill its elements once."""
    at = dict.fromkeys(wanted, 0)
    for name, box, first, last in sorted(ranges):
        if at.get((name, box)) != first:
            return False
        at[name, box] = last
    return at == wanted


def check_even(loads: list[int], sizes: list[int]) -> None:
    """No holder is further above the mean than the largest part that was dealt, or the small ones of replica 0."""
    parts = [4 * n // min(len(loads), max(1, 4 * n // MIB)) for n in sizes if 4 * n > SMALL_BYTES]
    small = sum(4 * n for n in sizes if 4 * n <= SMALL_BYTES)
    assert max(loads) <= max(small, sum(loads) / len(loads) + max(parts, default=0) + 8)


@settings(deadline=None)
@given(st.lists(SIZES, max_size=30), st.integers(1, 9))
def test_bare_tensors_are_shared_evenly_by_all_ranks(sizes, ranks):
    leaves = [leaf_of(f"w{i}", "", fake(n)) for i, n in enumerate(sizes)]
    loads, ranges = written(lambda rank: leaves, ranks)
    check_even(loads, sizes)
    assert covers([r for r in ranges], {(leaf.name, leaf.box): leaf.tensor.numel() for leaf in leaves})


@settings(deadline=None)
@given(st.lists(SIZES, max_size=12), st.lists(SIZES, max_size=12), st.integers(1, 3), st.integers(1, 3))
def test_data_and_tensor_parallel_replicas_share_evenly(cut, whole, dp, tp):
    """dp x tp: tensors that tp cuts are repeated over dp, the norms over both; and all of it is written once."""

    def leaves_of(rank: int) -> list[Leaf]:
        d, t = divmod(rank, tp)
        over_dp = tuple(range(t, dp * tp, tp))
        shards = [
            Sharded(fake(n), (tp * n,), (t * n,), replica=(d, dp), holders=over_dp) for n in cut
        ]  # one shard of n elements on each tp rank
        norms = [Sharded(fake(n), (n,), (0,), replica=(rank, dp * tp), holders="all") for n in whole]
        return [leaf_of(f"{i}", "", value) for i, value in enumerate([*shards, *norms])]

    loads, ranges = written(leaves_of, dp * tp)
    for t in range(tp):
        of_cut = [
            sum(s.num_bytes for s in shares_of(leaves_of(d * tp + t)[: len(cut)], d * tp + t, dp * tp))
            for d in range(dp)
        ]
        check_even(of_cut, cut)
    of_whole = [sum(s.num_bytes for s in shares_of(leaves_of(r)[len(cut) :], r, dp * tp)) for r in range(dp * tp)]
    check_even(of_whole, whole)
    boxes = {(leaf.name, leaf.box): leaf.tensor.numel() for r in range(dp * tp) for leaf in leaves_of(r)}
    assert covers(ranges, boxes) and sum(loads) == 4 * sum(boxes.values())


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 3))
def test_an_expert_is_written_once_by_the_ranks_that_have_it(sizes, ep, copies):
    """ep x copies ranks: each expert lives on `copies` of them, and no other rank knows of it."""

    def leaves_of(rank: int) -> list[Leaf]:
        expert, copy = divmod(rank, copies)
        values = [Sharded(fake(n), (n,), (0,), replica=(copy, copies), holders=expert) for n in sizes]
        return [leaf_of(f"expert{expert}/{i}", "", value) for i, value in enumerate(values)]

    loads, ranges = written(leaves_of, ep * copies)
    for expert in range(ep):
        check_even(loads[expert * copies : (expert + 1) * copies], sizes)
    boxes = {(leaf.name, leaf.box): leaf.tensor.numel() for r in range(ep * copies) for leaf in leaves_of(r)}
    assert covers(ranges, boxes)


@settings(deadline=None)
@given(st.lists(SIZES, max_size=10), st.integers(2, 4), st.randoms(use_true_random=False))
def test_shards_of_unknown_holders_are_still_written_once(sizes, count, chance):
    """Each by itself: what else its other holders hold is not known, and does not matter."""
    leaves = {
        index: [
            leaf_of(f"w{i}", "", Sharded(fake(n), (n,), (0,), replica=(index, count))) for i, n in enumerate(sizes)
        ]
        for index in range(count)
    }
    for some in leaves.values():
        chance.shuffle(some)
    _, ranges = written(lambda rank: leaves[rank], count)
    assert covers(ranges, {(leaf.name, leaf.box): leaf.tensor.numel() for leaf in leaves[0]})


def test_planning_512_ranks_takes_a_second():
    """Case 8: 2000 tensors over 512 ranks, planned by each rank alone."""
    import time

    leaves = [leaf_of(f"layer.{i}.weight", "", fake(1_000_000 + i)) for i in range(2000)]
    began = time.monotonic()
    layout = lay_out(shares_of(leaves, 17, 512))
    assert time.monotonic() - began < 20 and layout.data_bytes > 0


def test_small_tensors_share_one_file():
    """Case 42: of 64 ranks one writes all small ones, so that a restore of a slice opens few files."""
    leaves = [leaf_of(f"norm{i}", "", fake(64)) for i in range(100)] + [leaf_of("big", "", fake(40_000_000))]
    writers = {
        share.leaf.name: [rank for rank in range(64) if share.leaf.name in names_of(leaves, rank)]
        for share in shares_of(leaves[:100], 0, 64)
    }
    assert len(writers) == 100 and all(ranks == [0] for ranks in writers.values())
    assert sum("big" in names_of(leaves, rank) for rank in range(64)) == 64


def names_of(leaves: list[Leaf], rank: int) -> set[str]:
    return {share.leaf.name for share in shares_of(leaves, rank, 64)}
