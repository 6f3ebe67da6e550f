"""The grid: pure rank arithmetic by properties, refusals with their text, and groups on real ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.parallel.mesh import ORDER, Axis, GridShape, Mesh, check_grid, parse_mesh
from tests.ranks import run_ranks

grids = st.dictionaries(st.sampled_from(ORDER), st.integers(1, 4), min_size=1).map(GridShape.of)


@settings(deadline=None)
@given(grids)
def test_coords_and_ranks_are_inverse(grid):
    assert grid.world_size == math.prod(grid.shape)
    seen = {tuple(grid.coords(rank).values()) for rank in range(grid.world_size)}
    assert len(seen) == grid.world_size
    assert all(grid.rank_of(**grid.coords(rank)) == rank for rank in range(grid.world_size))


@settings(deadline=None)
@given(grids, st.sets(st.sampled_from(ORDER)))
def test_groups_cover_the_world_once(grid, names):
    groups = grid.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {math.prod(grid.sizes.get(name, 1) for name in names)}
    for group in groups:
        assert list(group) == sorted(group)
        for rank in group:
            assert grid.ranks(rank, *names) == group


@settings(deadline=None)
@given(grids)
def test_an_axis_lists_its_ranks_by_coordinate(grid):
    """What makes group ranks equal coords: along one axis, ascending rank is ascending coord."""
    for name in grid.names:
        for rank in range(grid.world_size):
            line = grid.ranks(rank, name)
            assert [grid.coords(other)[name] for other in line] == list(range(grid.sizes[name]))


@settings(deadline=None)
@given(grids)
def test_the_innermost_axis_has_consecutive_ranks(grid):
    name = grid.names[-1]
    assert all(group == tuple(range(group[0], group[0] + len(group))) for group in grid.groups(name))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 100))
def test_split_gives_everything_once(size, n):
    offset = 0
    for coord in range(size):
        axis = Axis("tp", size, coord, tuple(range(size)))
        start, count = axis.split(n)
        assert start == offset and count in (n // size, -(-n // size))
        assert (start, count) == Axis("tp", size, 0, tuple(range(size))).split(n, coord)
        offset += count
    assert offset == n


def test_default_order_puts_dp_outermost_and_tp_innermost():
    grid = GridShape.of({"tp": 2, "pp": 2, "dp": 2})
    assert grid.names == ("dp", "pp", "tp")
    assert grid.coords(5) == {"dp": 1, "pp": 0, "tp": 1}
    assert (grid.ranks(5, "tp"), grid.ranks(5, "pp"), grid.ranks(5, "dp")) == ((4, 5), (5, 7), (1, 5))
    assert GridShape.of({"tp": 2, "pp": 2, "dp": 2}, ("tp", "pp", "dp", "cp")).ranks(5, "dp") == (4, 5)


def test_neighbours():
    axis = Axis("pp", 3, 1, (2, 5, 8))
    assert (axis.prev, axis.next) == (2, 8)
    assert Axis("pp", 3, 0, (2, 5, 8)).prev is None and Axis("pp", 3, 2, (2, 5, 8)).next is None
    with pytest.raises(ValueError, match="disagree"):
        Axis("pp", 3, 1, (2, 5))


def test_parse_mesh():
    assert parse_mesh("dp=2,pp=2,tp=2") == {"dp": 2, "pp": 2, "tp": 2}
    assert parse_mesh(" tp = 4 ") == {"tp": 4}


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=-1", "dp=2;tp=2", "=2", "dp=2,,tp=2", "dp=1.5", "2=2"])
def test_parse_mesh_names_the_part_it_cannot_read(text):
    with pytest.raises(ValueError, match="cannot read"):
        parse_mesh(text)


def test_parse_mesh_refuses_an_axis_twice():
    with pytest.raises(ValueError, match="'tp' is given twice"):
        parse_mesh("tp=2,tp=2")


@pytest.mark.parametrize(
    ("sizes", "world", "text"),
    [
        ({"dp": 2, "tp": 3}, 8, "dp=2 x tp=3 needs 6 ranks, but the world has 8"),
        ({"dp": 0}, 1, "dp=0: a size must be an integer of at least 1"),
        ({"dp": True}, 1, "dp=True: a size must be an integer"),
        ({"ep": 2}, 2, "axis 'ep' is not known"),
        ({}, 2, "needs 1 ranks, but the world has 2"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused_before_any_rank_talks(sizes, world, text):
    with pytest.raises(ValueError, match=text):
        check_grid(sizes, world)


def test_one_rank_needs_no_process_group():
    assert not dist.is_initialized()
    for mesh in (Mesh.single(), Mesh.create(dp=1, pp=1, tp=1), Mesh.create()):
        assert (mesh.world_size, mesh.rank, mesh.device_mesh) == (1, 0, None)
        assert mesh.device == torch.device("cpu")
        for name in ("dp", "tp", "pp", "cp", "unheard"):
            assert mesh.axis(name) == Axis(name, 1, 0, (0,))
        assert mesh.group("dp", "tp") is None and mesh.ranks("dp", "tp") == (0,)
    with pytest.raises(ValueError, match="dp=2 needs 2 ranks, but the world has 1"):
        Mesh.create(dp=2)
    with pytest.raises(ValueError, match="timeout_s=0 must be above 0"):
        Mesh.create(timeout_s=0)
    with pytest.raises(ValueError, match="device_type='xpu' must be 'cpu' or 'cuda'"):
        Mesh.single("xpu")


def body_grid(rank):
    for bad in ({"dp": 2, "tp": 2}, {"dp": 8, "tp": 2}, {"dp": 4, "ep": 2}):
        with pytest.raises(ValueError):
            Mesh.create(**bad)
    mesh = Mesh.create(dp=2, pp=2, tp=2, timeout_s=30)
    assert mesh.rank == rank and mesh.coords() == mesh.grid.coords(rank)
    for names in (("dp",), ("tp",), ("pp",), ("dp", "pp"), ("dp", "pp", "tp")):
        axis = mesh.axis(*names)
        assert axis.ranks == mesh.ranks(*names) and axis.ranks[axis.coord] == rank
        assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        assert dist.get_rank(axis.group) == axis.coord
        assert mesh.axis(*names).group is axis.group  # made once
    assert mesh.rank_of(pp=0) == rank - 2 * mesh.axis("pp").coord
    pair = mesh.grid.ranks(rank, "pp", "tp")[:2] if rank in mesh.grid.ranks(rank, "pp", "tp")[:2] else None
    if pair:  # only members call
        assert dist.get_process_group_ranks(mesh.new_group(pair)) == list(pair)
    with pytest.raises(ValueError, match="must be ascending"):
        mesh.new_group((3, 1))
    return mesh.coords()


@pytest.mark.ranks
def test_groups_on_eight_ranks():
    assert run_ranks(8, body_grid)[6] == {"dp": 1, "pp": 1, "tp": 0}


def body_device_mesh(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = Mesh.create(dp=2, tp=2)
    full = torch.arange(12.0).view(4, 3)
    tensor = distribute_tensor(full, mesh.device_mesh["tp"], [Shard(0)])
    assert torch.equal(tensor.to_local(), full[2 * mesh.axis("tp").coord :][:2])
    assert torch.equal(tensor.full_tensor(), full)
    assert mesh.device_mesh["dp"].get_group() is mesh.axis("dp").group
    line = Mesh.create(dp=4)
    assert line.device_mesh.mesh_dim_names == ("dp",) and line.device_mesh.size() == 4


@pytest.mark.ranks
def test_the_device_mesh_serves_dtensor():
    run_ranks(4, body_device_mesh)


def body_fsdp(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = Mesh.create(dp=2, tp=1)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    x = torch.randn(2, 3, 4)
    model(x).pow(2).sum().backward()
    want = model.weight.grad / 2  # FSDP averages
    model.zero_grad()
    fully_shard(model, mesh=mesh.device_mesh["dp"])
    model(x[rank]).pow(2).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), want)


@pytest.mark.ranks
def test_the_device_mesh_serves_fsdp2():
    run_ranks(2, body_fsdp)


def body_unequal(rank: int) -> list[int]:
    """Ranks 0 and 3 make a group that 1 and 2 know nothing of; then all four make one."""
    mesh = Mesh.create(dp=4)
    if rank in (0, 3):
        mesh.new_group((0, 3))
    if rank == 3:
        mesh.new_group((3,))
    group = Mesh.create(dp=2, tp=2).group("dp", "tp")
    total = torch.tensor([rank])
    dist.all_reduce(total, group=group)
    return total.tolist()


def test_members_that_made_unequal_numbers_of_groups_do_not_wait_for_ever():
    assert run_ranks(4, body_unequal, timeout=30) == [[6]] * 4
