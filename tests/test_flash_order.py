"""The order of attention's tiles: every tile once, heavy ones first, and what an order costs by the makespan."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from plait.kernels.attention_plain import Options
from plait.kernels.flash_forward import find_pair
from plait.kernels.flash_launch import delta_launch, forward_launch, gradient_launches
from plait.kernels.flash_order import (
    causal_costs,
    lower_bound,
    makespan,
    makespan_of_lists,
    pairs_together,
    tile_order,
)
from plait.kernels.flash_tiles import RESIDENT_BYTES
from plait.kernels.inspect import meta
from tests.cases import interpret, needs_interpreter

# (tiles, pairs, together): one pair, sections that end early, all together, more than there are.
ORDERS = ((5, 1, 1), (3, 7, 3), (4, 6, 6), (1, 5, 2), (6, 4, 1))
SLOTS = 132  # multiprocessors of an H200
PLAIN = Options(True, 1.0, 0, 0.0, 0.0, 0, 0)


@pytest.mark.parametrize("num_tiles,num_pairs,together", ORDERS)
def test_every_tile_of_every_pair_comes_once(num_tiles, num_pairs, together):
    order = tile_order(num_tiles, num_pairs, together)
    assert sorted(order) == [(number, pair) for number in range(num_tiles) for pair in range(num_pairs)]
    for first in range(0, num_pairs, together):  # a section is whole before the next starts, its numbers only grow
        size = num_tiles * min(together, num_pairs - first)
        section = order[first * num_tiles :][:size]
        assert {pair // together for _, pair in section} == {first // together}
        assert [number for number, _ in section] == sorted(number for number, _ in section)


@triton.jit
def _order_kernel(out_ptr, num_tiles, num_heads, num_pairs, together):
    number, head, batch = find_pair(tl.program_id(0), num_tiles, num_heads, num_pairs, together)
    tl.store(out_ptr + 2 * tl.program_id(0), number)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, batch * num_heads + head)


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_tiles,num_pairs,together", ORDERS)
def test_the_kernels_walk_that_order(num_tiles, num_pairs, together):
    out = torch.full((num_tiles * num_pairs, 2), -1, dtype=torch.int32)
    _order_kernel[(len(out),)](out, num_tiles, num_pairs if num_pairs % 2 else 2, num_pairs, together)
    assert [tuple(row) for row in out.tolist()] == tile_order(num_tiles, num_pairs, together)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9))
def test_a_makespan_lies_between_the_bound_and_what_list_scheduling_can_lose(costs, slots):
    bound = lower_bound(costs, slots)
    assert bound <= makespan(costs, slots) <= sum(costs) / slots + max(costs) * (1 - 1 / slots) + 1e-9
    # Graham 1969: heaviest first ends within 4/3 - 1/(3 slots) of the best, which is at least the bound.
    heavy_first = sorted(costs, reverse=True)
    pairs = heavy_first[slots - 1 : slots + 1]  # of slots + 1 jobs two share a slot
    best = max(bound, sum(pairs) if len(pairs) == 2 else 0)
    assert makespan(heavy_first, slots) <= max(best, bound * (4 / 3 - 1 / (3 * slots))) * (4 / 3) + 1e-9
    assert bound <= makespan_of_lists(heavy_first, slots) <= bound + max(costs)


def test_makespans_by_hand():
    assert makespan([3, 3, 2, 2, 2], 2) == 7 and makespan([2, 2, 2, 3, 3], 2) == 7 and makespan([1], 4) == 1
    assert makespan([1, 1, 4], 2) == 5 and makespan([4, 1, 1], 2) == 4
    assert makespan_of_lists([4, 3, 2, 1], 2) == 5 and makespan_of_lists([5, 1, 1, 1], 2) == 6
    assert lower_bound([4, 1, 1], 2) == 4 and lower_bound([2, 2, 2], 2) == 3


# Causal, 128 tokens a tile: (tokens, pairs), ours over the bound at most, one pair after the other at least.
PRICES = {
    (1024, 32): (1.04, 1.54),
    (2048, 32): (1.04, 1.28),
    (2048, 128): (1.01, 1.07),
    (4096, 8): (1.01, 1.57),
    (4096, 32): (1.01, 1.13),
    (4096, 64): (1.01, 1.06),
    (8192, 32): (1.01, 1.05),
    (16384, 32): (1.01, 1.0),
}


@pytest.mark.parametrize("num_tokens,num_pairs", PRICES)
def test_heads_together_end_sooner_than_one_after_the_other(num_tokens, num_pairs):
    """In sections that fit the L2 cache: head dim 128, bf16, four query heads a key head."""
    num_tiles, most, least = num_tokens // 128, *PRICES[num_tokens, num_pairs]
    together = pairs_together(num_pairs, 4, 2 * num_tokens * 128 * 2, RESIDENT_BYTES)
    ours, apart = (causal_costs(num_tiles, num_pairs, n) for n in (together, 1))
    bound = lower_bound(ours, SLOTS)
    assert makespan(ours, SLOTS) <= most * bound and makespan(apart, SLOTS) >= least * bound
    # Why there is no persistent form: the best list by number gains less than a hundredth.
    assert makespan_of_lists(causal_costs(num_tiles, num_pairs, num_pairs), SLOTS) >= 0.99 * makespan(ours, SLOTS)


def test_sections_fit_the_cache():
    assert pairs_together(64, 4, 1 << 20, 8 << 20) == 32  # eight key heads of four query heads each
    assert pairs_together(16, 4, 1 << 20, 8 << 20) == 16 and pairs_together(64, 4, 9 << 20, 8 << 20) == 1
    assert pairs_together(3, 1, 0, 8 << 20) == 3  # no keys at all


def _orders(num_tokens, options=PLAIN, batch=1):
    q, k = meta(batch, num_tokens, 32, 128), meta(batch, num_tokens, 8, 128)
    stats = meta(batch, 32, num_tokens, dtype=torch.float32)
    none = (None, None, None)
    forward = forward_launch(q, k, k, None, *none, options, q, stats, 90)
    both = gradient_launches(q, q, k, k, stats, stats, *none, options, q, k, k, 90)
    for launch in (forward, *both):
        (num_programs,) = launch.grid
        num_tiles, num_pairs, together = launch.arguments[-3:]
        assert num_programs == num_tiles * num_pairs
        yield num_pairs, together


def test_launches_take_all_heads_together_while_they_fit_and_one_by_one_where_tiles_are_equal():
    assert list(_orders(2048)) == [(32, 32), (32, 32), (8, 8)]
    # 16k tokens: 8 MiB of keys and values a key head, 32 MiB of queries and gradients.
    assert list(_orders(16384, batch=2)) == [(64, 16), (64, 16), (16, 1)]
    for equal in (PLAIN._replace(causal=False), PLAIN._replace(window=256)):
        assert list(_orders(2048, equal)) == [(32, 1), (32, 1), (8, 1)]


def test_a_batch_past_65535_is_launched():
    """A grid's second and third dim end there, so all launches have one."""
    assert [num_pairs for num_pairs, _ in _orders(2, batch=70_000)] == [2_240_000, 2_240_000, 560_000]
    out, stats = meta(70_000, 2, 32, 128), meta(70_000, 32, 2, dtype=torch.float32)
    assert delta_launch(out, None, out, stats, stats, stats).grid == (2_240_000,)
