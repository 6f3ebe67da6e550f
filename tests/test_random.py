"""Stateless randomness: equal bits on every grid, other bits everywhere else; and the captured generators."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.layers import ColumnParallelLinear, RowParallelLinear
from plait.parallel.mesh import Axis
from plait.parallel.placement import Placement
from plait.parallel.random import capture_generators, init_normal_, mix, restore_generators, rng_key, splitmix64
from plait.parallel.vocab import VocabParallelEmbedding, VocabParallelHead
from tests.ranks import run_ranks

LAYERS = {
    "column": lambda axis: ColumnParallelLinear(6, 16, axis),
    "gate_up": lambda axis: ColumnParallelLinear(6, (2, 16), axis),
    "replicated kv": lambda axis: ColumnParallelLinear(6, (2, 8), axis, units=2),
    "row": lambda axis: RowParallelLinear(16, 6, axis),
    "embedding": lambda axis: VocabParallelEmbedding(11, 6, axis),
    "head": lambda axis: VocabParallelHead(6, 11, axis),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("size", [2, 4])
def test_initial_weights_are_the_same_bits_on_every_grid(kind, size):
    whole = LAYERS[kind](Axis.single())
    whole.reset_parameters(7, 0.02, "layers.1.w")
    for coord in range(size):
        layer = LAYERS[kind](Axis("tp", size, coord, tuple(range(size))))
        layer.reset_parameters(7, 0.02, "layers.1.w")
        placement = layer.weight.placement
        assert torch.equal(placement.local(layer.weight.detach()), whole.weight.detach()[placement.box])
        assert not layer.weight.detach()[placement.shape[0] :].any()


def test_rows_names_and_seeds_draw_different_numbers_of_the_right_spread():
    full = Placement.whole((64, 128))
    draws = [
        init_normal_(torch.empty(64, 128), full, std=0.5, seed=seed, name=name)
        for seed, name in ((1, "a"), (1, "b"), (2, "a"))
    ]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert torch.equal(draws[0], init_normal_(torch.empty(64, 128), full, std=0.5, seed=1, name="a"))
    assert draws[0].unique(dim=0).shape[0] == 64
    # 8192 draws: the standard error of the mean is 0.0055, of the deviation 0.0039; five of each.
    assert abs(float(draws[0].mean())) < 0.028 and abs(float(draws[0].std()) - 0.5) < 0.02


def test_other_dtypes_are_the_same_draw_rounded():
    full = Placement.whole((4, 32))
    exact = init_normal_(torch.empty(4, 32), full, std=1.0, seed=1, name="a")
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(
            init_normal_(torch.empty(4, 32, dtype=dtype), full, std=1.0, seed=1, name="a"), exact.to(dtype)
        )


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_a_spread_that_is_no_number_is_refused(std):
    with pytest.raises(ValueError, match="std must be a finite number >= 0.*for embed.weight"):
        init_normal_(torch.empty(1, 4), Placement.whole((1, 4)), std=std, seed=0, name="embed.weight")


def test_initialising_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    init_normal_(torch.empty(4, 8), Placement.whole((4, 8)), std=1.0, seed=1, name="a")
    assert torch.equal(torch.get_rng_state(), before)


sites = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(-1, 200), st.integers(0, 9))


@given(sites, sites)
def test_keys_differ_exactly_where_their_sites_differ(a, b):
    assert torch.equal(rng_key(*a), rng_key(*b)) == (a == b)
    assert rng_key(*a).dtype == torch.int64 and rng_key(*a).shape == (2,)


@given(st.lists(st.one_of(st.integers(0, 2**64 - 1), st.text()), max_size=4))
def test_mix_is_a_word_and_depends_on_order_and_kind(parts):
    assert 0 <= mix(*parts) < 2**64
    assert mix(*parts) != mix(*parts, 0)
    if parts[::-1] != parts:
        assert mix(*parts) != mix(*parts[::-1])


def test_mix_keeps_its_published_values():
    """A changed key would change every run. The first SplitMix64 words of seed 0 (Vigna), and one of ours."""
    assert [splitmix64(0), splitmix64(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert mix(1, "embed.weight") == 0x48854191B68E2798
    assert mix(1, "embed.weight") != mix("1", "embed.weight")


# ---- generators of others ----------------------------------------------------------------------------------------


def draw() -> list[float]:
    """Some numbers from each generator of the process."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
    ]


def is_plain(value) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (int, float, str, bytes)


def test_captured_generators_go_on_where_they_were():
    draw()
    state = capture_generators()
    assert is_plain(state)
    first = draw()
    assert draw() != first
    restore_generators(state)
    assert draw() == first


def own_stream(rank: int) -> tuple[list[float], list[float]]:
    """Draws before and after a restore on a rank whose generators were seeded by its rank."""
    random.seed(rank), numpy.random.seed(rank), torch.manual_seed(rank)
    state = capture_generators()
    first = draw()
    draw()
    restore_generators(state)
    return first, draw()


@pytest.mark.ranks
def test_each_rank_restores_its_own_stream():
    """Case 46."""
    results = run_ranks(4, own_stream)
    assert all(before == after for before, after in results)
    assert len({tuple(before) for before, _ in results}) == 4
