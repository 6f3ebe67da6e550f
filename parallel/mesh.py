"""The grid of ranks: named axes, coordinates, and the process group of every axis.

Not here: any communication (collectives.py, p2p.py) and any knowledge of a model. The one idea: a grid is a row-major
box of ranks, the outermost axis first, so that every question about "who" is pure arithmetic (`GridShape`); `Mesh`
adds this process, its device and its process groups to it. An axis of size 1 is an ordinary `Axis` whose collectives
do nothing, so that nobody has to ask whether it exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

ORDER = ("dp", "cp", "pp", "tp")  # outermost first: tp neighbours get consecutive ranks, hence one NVLink domain


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes written as "dp=2,pp=2,tp=2"; ValueError names the part that cannot be read."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        if not equals or not name.isidentifier() or not (number.isascii() and number.isdigit()):
            raise ValueError(f"mesh {text!r}: cannot read {part!r}; write it like 'dp=2,pp=2,tp=2'")
        if name in sizes:
            raise ValueError(f"mesh {text!r}: axis {name!r} is given twice")
        sizes[name] = int(number)
    return sizes


def check_grid(sizes: Mapping[str, int], world_size: int, order: tuple[str, ...] = ORDER) -> None:
    """Raises ValueError unless sizes are positive, names are in `order` and the product is `world_size`."""
    if len(set(order)) != len(order):
        raise ValueError(f"order={order!r} names an axis twice")
    for name, size in sizes.items():
        if name not in order:
            raise ValueError(f"mesh axis {name!r} is not known; order={order!r} lists the axes, outermost first")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh axis {name}={size!r}: a size must be an integer of at least 1")
    product = math.prod(sizes.values())
    if product != world_size:
        text = " x ".join(f"{name}={size}" for name, size in sizes.items()) or "1"
        raise ValueError(f"mesh {text} needs {product} ranks, but the world has {world_size}")


@dataclass(frozen=True)
class GridShape:
    """Names and sizes of the axes, outermost first; all rank arithmetic of the grid, without processes."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int], order: tuple[str, ...] = ORDER) -> GridShape:
        """Sorts `sizes` by `order`; ValueError for names or sizes that make no grid."""
        check_grid(sizes, math.prod(size for size in sizes.values() if isinstance(size, int)), order)
        names = tuple(name for name in order if name in sizes)
        return cls(names, tuple(sizes[name] for name in names))

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis name, outermost first."""
        return dict(zip(self.names, self.shape, strict=True))

    def stride(self, name: str) -> int:
        """Returns the distance in ranks between neighbours on an axis."""
        return math.prod(self.shape[self.names.index(name) + 1 :])

    def coords(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of `rank` on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is not in a grid of {self.world_size} ranks")
        result = {}
        for name, size in zip(reversed(self.names), reversed(self.shape), strict=True):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name in self.names}

    def rank_of(self, **coords: int) -> int:
        """Returns the rank at these coordinates; an axis not given counts as 0."""
        for name, coord in coords.items():
            size = self.sizes.get(name, 1)
            if not 0 <= coord < size:
                raise ValueError(f"coordinate {name}={coord} is not on an axis of size {size}")
        rank = 0
        for name, size in zip(self.names, self.shape, strict=True):
            rank = rank * size + coords.get(name, 0)
        return rank

    def ranks(self, rank: int, *names: str) -> tuple[int, ...]:
        """Returns the ranks, ascending, that differ from `rank` at most on the axes `names`."""
        members = [rank]
        for name, coord in self.coords(rank).items():
            if name in names:
                members = [m + (c - coord) * self.stride(name) for m in members for c in range(self.sizes[name])]
        return tuple(sorted(members))

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """Returns every group along the axes `names`: they cover the world, each rank once."""
        first = (rank for rank in range(self.world_size) if not any(self.coords(rank).get(name) for name in names))
        return tuple(self.ranks(rank, *names) for rank in first)


@dataclass(frozen=True)
class Axis:
    """One axis of the grid as a rank sees it: the line of ranks through it, and its place on the line."""

    name: str
    size: int = 1
    coord: int = 0
    ranks: tuple[int, ...] = (0,)  # global ranks by coordinate
    group: ProcessGroup | None = field(default=None, repr=False, compare=False)  # None on an axis of size 1

    def __post_init__(self) -> None:
        if not 0 <= self.coord < self.size or len(self.ranks) != self.size:
            raise ValueError(
                f"axis {self.name}: size={self.size}, coord={self.coord} and ranks={self.ranks} disagree"
            )

    @classmethod
    def single(cls, name: str = "tp", rank: int = 0) -> Axis:
        """Returns an axis of size 1 that needs no process group."""
        return cls(name, 1, 0, (rank,), None)

    @property
    def prev(self) -> int | None:
        """Global rank of the neighbour at coord - 1, None at the start of the line."""
        return self.ranks[self.coord - 1] if self.coord > 0 else None

    @property
    def next(self) -> int | None:
        """Global rank of the neighbour at coord + 1, None at the end of the line."""
        return self.ranks[self.coord + 1] if self.coord + 1 < self.size else None

    def split(self, n: int, coord: int | None = None) -> tuple[int, int]:
        """Returns (offset, size) of this coord's share of `n` things; the first n % size coords get one more."""
        if n < 0:
            raise ValueError(f"axis {self.name}: cannot split n={n}; it must be at least 0")
        place = self.coord if coord is None else coord
        share, extra = divmod(n, self.size)
        return place * share + min(place, extra), share + (place < extra)


@dataclass(frozen=True)
class Mesh:
    """The grid, seen from one rank. A value to pass around: build it once, hand out its axes.

    `device_mesh` is a torch DeviceMesh over the same process groups, for users of DTensor and FSDP2 (None without
    process groups). `new_group`, and `axis` or `group` on first use of several names, create a process group: every
    member has to call them, in the same order; other ranks need not.
    """

    grid: GridShape
    rank: int = 0
    device: torch.device = torch.device("cpu")
    device_mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)
    timeout_s: float = 600.0
    node_size: int = 0  # ranks of a node, which are consecutive; 0: all are on one
    _groups: dict[tuple[tuple[int, ...], str], ProcessGroup] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def create(
        cls,
        *,
        order: tuple[str, ...] = ORDER,
        device_type: str | None = None,
        timeout_s: float = 600.0,
        node_size: int = 0,
        **sizes: int,
    ) -> Mesh:
        """Builds the grid on the initialised world; collective. Keywords are axis sizes: `Mesh.create(dp=2, tp=2)`.

        `device_type` is "cuda" when the world has NCCL, else "cpu"; the CUDA device is the current one. `timeout_s`
        bounds every wait in the groups made here. `node_size`: ranks of a node, which are consecutive, as torchrun's
        LOCAL_WORLD_SIZE; 0: all ranks are on one. Without a process group only a grid of one rank is possible.
        ValueError, before any rank talks, when the sizes do not multiply to the world size.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s!r} must be above 0 seconds")
        if node_size < 0:
            raise ValueError(f"node_size={node_size} must be at least 0: the ranks of a node, 0 for one node")
        running = dist.is_available() and dist.is_initialized()
        check_grid(sizes, dist.get_world_size() if running else 1, order)
        grid = GridShape.of(sizes or {"dp": 1}, order)
        if not running:
            return cls(grid, 0, pick_device(device_type, "gloo"), None, timeout_s)
        rank = dist.get_rank()
        device = pick_device(device_type, dist.get_backend_config())
        mesh = cls(grid, rank, device, None, timeout_s, node_size)
        groups = [mesh.new_group(grid.ranks(rank, name)) for name in grid.names]
        ranks = torch.arange(grid.world_size).view(grid.shape)
        if len(groups) == 1:
            device_mesh = DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=grid.names)
        else:
            device_mesh = DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=grid.names)
        return cls(grid, rank, device, device_mesh, timeout_s, node_size, mesh._groups)

    @classmethod
    def single(cls, device_type: str | None = None) -> Mesh:
        """Returns the grid of one rank; needs no process group."""
        return cls(GridShape.of({"dp": 1}), 0, pick_device(device_type, "gloo"))

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis name, outermost first; only the axes that were given."""
        return self.grid.sizes

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return self.grid.world_size

    def coords(self, rank: int | None = None) -> dict[str, int]:
        """Returns the coordinates of `rank`, or of this rank."""
        return self.grid.coords(self.rank if rank is None else rank)

    def rank_of(self, **coords: int) -> int:
        """Returns the rank at these coordinates; axes not given keep this rank's own coordinate."""
        return self.grid.rank_of(**{**self.coords(), **coords})

    def ranks(self, *names: str) -> tuple[int, ...]:
        """Returns the ranks, ascending, of the group along the axes `names` through this rank."""
        return self.grid.ranks(self.rank, *names)

    def axis(self, *names: str) -> Axis:
        """Returns the axis `name`, or several taken as one line ("dp", "cp"); an unknown name has size 1."""
        line = self.ranks(*names)
        return self.line("_".join(names), line) if len(line) > 1 else Axis.single("_".join(names), self.rank)

    def line(self, name: str, ranks: tuple[int, ...]) -> Axis:
        """Returns any set of ranks, with this one, as an Axis; its members create the group on first use."""
        if len(ranks) == 1:
            return Axis.single(name, self.rank)
        return Axis(name, len(ranks), ranks.index(self.rank), ranks, self.new_group(ranks))

    def across_nodes(self, axis: Axis) -> tuple[Axis, Axis] | None:
        """Returns (axis inside this node, axis across nodes) of an axis that has as many ranks, above 1, on each of
        several nodes; else None. Its members create the groups together."""
        nodes = on_nodes(axis.ranks, self.node_size or self.world_size)
        if nodes is None:
            return None
        inside = self.line(f"{axis.name}_in_node", next(ranks for ranks in nodes if self.rank in ranks))
        return inside, self.line(f"{axis.name}_across_nodes", tuple(ranks[inside.coord] for ranks in nodes))

    def group(self, *names: str) -> ProcessGroup | None:
        """Returns the process group along the axes `names`; None when it would hold one rank."""
        return self.axis(*names).group

    def new_group(self, ranks: tuple[int, ...], purpose: str = "") -> ProcessGroup:
        """Returns the process group of these ascending global ranks, this one among them; created by its members.

        One group per ranks and `purpose`: another purpose has a communicator of its own.
        """
        if tuple(sorted(set(ranks))) != tuple(ranks) or self.rank not in ranks or ranks[-1] >= self.world_size:
            raise ValueError(
                f"ranks={ranks}: must be ascending, below {self.world_size} and contain this rank, {self.rank}"
            )
        if (ranks, purpose) not in self._groups:
            limit = timedelta(seconds=self.timeout_s)
            self._even_out(ranks)
            self._groups[ranks, purpose] = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
        return self._groups[ranks, purpose]

    def _even_out(self, ranks: tuple[int, ...]) -> None:
        """Brings the members of a new group to the same number of groups made, by making groups of one rank.

        torch names a locally synchronised group by its ranks and by how many groups the process has made (2.11 to
        2.13, `_hash_ranks_to_str`): members with unequal numbers would wait under different names until the timeout.
        Ranks at the ends of a pipeline do make more groups than those between them.
        """
        store, world = dist.distributed_c10d._get_default_store(), dist.distributed_c10d._world
        made = len(world.pg_names)
        generation = store.add(f"plait/mesh/{ranks}/{self.rank}", 1)
        store.set(f"plait/mesh/{ranks}/{self.rank}/{generation}", str(made))
        most = max(int(store.get(f"plait/mesh/{ranks}/{rank}/{generation}")) for rank in ranks)
        for _ in range(most - made):
            dist.new_group([self.rank], backend="gloo", use_local_synchronization=True)


def on_nodes(ranks: Sequence[int], node_size: int) -> list[tuple[int, ...]] | None:
    """Returns the ranks by node where several nodes have as many of them, above 1, each; else None."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // node_size, []).append(rank)
    sizes = {len(some) for some in nodes.values()}
    return [tuple(some) for some in nodes.values()] if len(nodes) > 1 and len(sizes) == 1 and sizes != {1} else None


def pick_device(device_type: str | None, backend: str) -> torch.device:
    """Returns the device to compute on: the current CUDA device for NCCL or when asked for, else the CPU."""
    kind = device_type or ("cuda" if "nccl" in backend and torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r} must be 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device_type='cuda', but torch finds no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
