"""Placements: boxes and their refusals, and gathering with padding, replicas and missing parts."""

from __future__ import annotations

import pytest
import torch

from plait.parallel.mesh import Mesh
from plait.parallel.placement import Placement, gather_full, placement_of
from tests.ranks import run_ranks


def test_the_box_is_a_prefix_of_the_flat_tensor():
    placement = Placement((11, 3), (6, 0), (5, 3))
    padded = torch.arange(18.0).view(6, 3)
    assert placement.numel == 15 and placement.box == (slice(6, 11), slice(0, 3))
    assert torch.equal(placement.local(padded).reshape(-1), padded.view(-1)[: placement.numel])
    assert placement.local(padded).untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()
    assert Placement.whole(()).local(torch.tensor(1.0)).shape == ()


@pytest.mark.parametrize("shape", [(4, 3), (6, 4), (6,), (6, 3, 1)])
def test_a_tensor_that_does_not_hold_the_box_is_refused(shape):
    with pytest.raises(ValueError, match=r"does not hold the box \(5, 3\)"):
        Placement((11, 3), (6, 0), (5, 3)).local(torch.zeros(shape))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((4,), (0, 0), (4,)), "same number of dims"),
        (((4,), (2,), (3,)), "leaves the full tensor"),
        (((4,), (-1,), (3,)), "leaves the full tensor"),
        (((4,), (0,), (4,), (2, 1)), "ascending"),
        (((4,), (0,), (4,), (), ("tp",)), "needs replica_ranks"),
    ],
)
def test_refusals(arguments, text):
    with pytest.raises(ValueError, match=text):
        Placement(*arguments)


def test_a_foreign_parameter_is_whole():
    assert placement_of(torch.zeros(2, 3)) == Placement.whole((2, 3))


def body_gather(rank):
    mesh = Mesh.create(dp=2, tp=4)
    coord = mesh.axis("tp").coord
    full = torch.arange(33).view(11, 3)
    start, size = coord * 3, min(3, 11 - coord * 3)  # 3, 3, 3 and 2 rows; every shard holds 3
    shard = torch.full((3, 3), -1)
    shard[:size] = full[start : start + size]
    assert torch.equal(gather_full(shard, Placement((11, 3), (start, 0), (size, 3)), mesh), full)
    # KV heads < tp: two replicas of each half of dim 1
    half = coord // 2
    pair = (rank - coord % 2, rank - coord % 2 + 1)
    kv = torch.arange(16).view(2, 8)
    placement = Placement((2, 8), (0, half * 4), (2, 4), pair)
    assert torch.equal(gather_full(kv[:, half * 4 :][:, :4], placement, mesh), kv)
    with pytest.raises(ValueError, match="replicas of the box"):
        gather_full(kv[:, half * 4 :][:, :4] + (coord == 1), placement, mesh)
    with pytest.raises(ValueError, match="8 elements of the full tensor"):
        gather_full(kv[:, :4], Placement((2, 8), (0, 0), (2, 4)), mesh)
    assert torch.equal(gather_full(torch.tensor(4.0), Placement.whole(()), mesh), torch.tensor(4.0))


@pytest.mark.ranks
def test_gather_full():
    run_ranks(8, body_gather)


def test_gather_full_on_one_process():
    assert torch.equal(gather_full(torch.ones(3), Placement.whole((3,)), Mesh.single()), torch.ones(3))
