"""DTensors as boxes: torch's own arithmetic is the oracle; what is not a box is refused by path."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from plait.ckpt import Replicas, StateError
from plait.ckpt.box import Box
from plait.ckpt.dtensors import Cut, cut, runs_of
from plait.ckpt.state import flatten


@st.composite
def placements(draw):
    """A mesh and how it cuts one dim of n: plain and strided shards, and copies."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    plain = st.sampled_from([Shard(0), Replicate()])
    strided = st.integers(1, 3).map(lambda factor: _StridedShard(0, split_factor=factor))
    return draw(st.integers(0, 13)), mesh, [draw(plain | strided) for _ in mesh]


def runs_on(n: int, mesh: list[int], how: list, coordinate: tuple[int, ...]) -> list[tuple[int, int]]:
    each = zip(mesh, coordinate, how, strict=True)
    return runs_of(n, [Cut(s, at, getattr(p, "split_factor", None)) for s, at, p in each if not p.is_replicate()])


@settings(deadline=None)
@given(placements())
def test_every_even_or_plain_cut_is_torchs_and_covers_each_index_once(case):
    n, mesh, how = case
    even = n % prod(s * getattr(p, "split_factor", 1) for s, p in zip(mesh, how, strict=True)) == 0
    seen: list[int] = []
    for coordinate in product(*map(range, mesh)):
        runs = runs_on(n, mesh, how, coordinate)
        indices = [i for start, stop in runs for i in range(start, stop)]
        shape, offset = _compute_local_shape_and_global_offset((n,), tuple(mesh), list(coordinate), how)
        if even or not any(isinstance(p, _StridedShard) for p in how):
            assert len(indices) == shape[0] and (not indices or indices[0] == offset[0])
        assert all(a[1] != b[0] for a, b in zip(runs, runs[1:], strict=False)), "neighbours are one run"
        if all(c == 0 for c, p in zip(coordinate, how, strict=True) if p.is_replicate()):
            seen += indices
    assert sorted(seen) == list(range(n))


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
def test_fsdp_over_tensor_parallelism_along_one_dim_is_always_one_box(n, dp, tp):
    """What FSDP2 calls _StridedShard(split_factor=tp), Shard is tp's cut first and dp's inside it."""
    how = [_StridedShard(0, split_factor=tp), Shard(0)]
    for d, t in product(range(dp), range(tp)):
        runs = runs_on(n, [dp, tp], how, (d, t))
        inner = cut(cut([(0, n)], tp, t), dp, d)
        assert runs == inner and len(runs) <= 1


def on_fake_rank(rank: int, world_size: int, work):
    """Runs `work()` as one rank of a group that only pretends to be there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        return work()
    finally:
        dist.destroy_process_group()


def leaf_of_rank(rank: int, sizes: tuple[int, ...], how, full: tuple[int, ...], local: tuple[int, ...], over=None):
    def work():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp", "tp")[-len(sizes) :])
        own = mesh if over is None else mesh[over]
        stride = torch.empty(full, device="meta").stride()
        tensor = DTensor.from_local(
            torch.zeros(local), own, how, shape=torch.Size(full), stride=stride, run_check=False
        )
        value = tensor if over is None else Replicas(tensor, over=mesh)
        return flatten({"w": value}).tensors["w"]

    return on_fake_rank(rank, prod(sizes), work)


def test_shards_on_two_dims_and_copies_on_a_third():
    """3-D mesh, rank 5 = (1, 0, 1): rows over dp, columns over tp, copies over cp."""
    leaf = leaf_of_rank(5, (2, 2, 2), [Shard(0), Replicate(), Shard(1)], (5, 7), (2, 3))
    assert leaf.box == Box((3, 4), (2, 3)) and leaf.replica == (0, 2) and leaf.full_shape == (5, 7)


def test_an_empty_shard_lies_inside_its_tensor():
    leaf = leaf_of_rank(3, (4,), [Shard(0)], (6, 2), (0, 2))
    assert leaf.box == Box((6, 0), (0, 2))


def test_replicas_over_a_mesh_count_the_dims_that_a_dtensor_has_not():
    """dp x tp, the DTensor on tp alone: its copies are those over dp."""
    leaf = leaf_of_rank(3, (2, 2), [Shard(0)], (4, 2), (2, 2), over="tp")
    assert leaf.box == Box((2, 0), (2, 2)) and leaf.replica == (1, 2)


@pytest.mark.parametrize(
    ("how", "local", "text"),
    [
        ([Partial()], (4, 2), r"state\['w'\] is a DTensor with a partial placement"),
        ([_StridedShard(0, split_factor=2)], (2, 2), r"state\['w'\] is a DTensor .* lies in several places"),
        ([Shard(0)], (3, 2), r"state\['w'\] is a DTensor .* whose shard is \(3, 2\), not \(2, 2\)"),
    ],
)
def test_what_is_no_box_is_refused_by_path(how, local, text):
    with pytest.raises(StateError, match=text):
        leaf_of_rank(0, (2,), how, (4, 2), local)


def test_a_mesh_without_this_rank_is_refused_by_path():
    def work():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        whole = torch.distributed.device_mesh.DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",), _init_backend=False)
        assert mesh.size() == 4
        tensor = DTensor.from_local(torch.zeros(2), whole, [Replicate()], run_check=False)
        with pytest.raises(StateError, match=r"state\['w'\] is a DTensor on a mesh that this rank is not part of"):
            flatten({"w": tensor})
        with pytest.raises(StateError, match="this rank is not in the mesh that Replicas names"):
            flatten({"w": Replicas(torch.zeros(1), over=whole)})

    on_fake_rank(0, 4, work)
