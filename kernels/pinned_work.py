"""FLOP and bytes of a launch, from what the compiler read of the kernel (TTIR), for one launch's arguments.

Not the interpreter's count (bench/accesses.py): nothing runs, no address is known. The one idea: integers and masks
are computed, floats are not, so that every loop turns as often as it would and every load is counted by its mask.
TTIR is TTGIR before layouts and pipelining, which peels loops and moves loads and changes neither sum. Bytes are
those that programs ask for, by argument: what several programs read counts in each. FLOP are those of `tt.dot`, whole
tiles. A loop or a branch that memory decides (a table of runs) cannot be known: the work of that launch is None; a
mask that memory decides counts whole.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from plait.kernels.pinned_ir import MEMORY_OPS, Op, Value, parse

_ALL, _SAMPLES = 264, 64  # programs that are all walked: two a multiprocessor; of more, so many, spread over the grid
MEMORY = "memory"  # the argument of a pointer that was read from memory


class Unknown(Exception):
    """A value that only the device knows decides how often something happens."""


class Work(NamedTuple):
    """Of one launch. `loads` and `stores`: argument -> bytes that all programs ask for; flop: of all programs."""

    programs: int
    flop: float
    loads: dict[str, float]
    stores: dict[str, float]

    @property
    def flop_per_program(self) -> float:
        """The mean over the grid."""
        return self.flop / self.programs

    @property
    def bytes_per_program(self) -> float:
        """The mean over the grid, loads and stores."""
        return (sum(self.loads.values()) + sum(self.stores.values())) / self.programs


class _Program:
    """One program of the grid: the values of names, and what it has asked for."""

    def __init__(self, values: dict[str, Value], place: Sequence[int], grid: Sequence[int]) -> None:
        self.values, self.place, self.grid = dict(values), place, grid
        self.flop = 0.0
        self.loads: dict[str, float] = {}
        self.stores: dict[str, float] = {}

    def known(self, name: str) -> Value:
        """The value; Unknown where only the device knows it."""
        value = self.values.get(name)
        if value is None:
            raise Unknown(name)
        return value

    def run(self, ops: list[Op]) -> list[str]:
        """Walks a region; returns the names that it yields."""
        for op in ops:
            match op.name:
                case "scf.yield" | "scf.condition":
                    return op.operands
                case "scf.for":
                    self.loop(op)
                case "scf.while":
                    self.repeat(op)
                case "scf.if":
                    for region in op.regions[0 if self.known(op.operands[0]) else 1 :][:1]:
                        self.assign(op.results, self.run(region))
                case "tt.dot":
                    self.flop += op.size
                case "tt.get_program_id" | "tt.get_num_programs":
                    self.values[op.results[0]] = (self.place if "id" in op.name else self.grid)[op.shape[0]]
                case "tt.make_tensor_descriptor":
                    sizes = [self.known(name) for name in op.offsets]
                    self.values[op.results[0]] = (self.values.get(op.operands[0]) or MEMORY, sizes)
                case _ if op.name in MEMORY_OPS:
                    self.access(op)
                case _:
                    self.compute(op)
        return []

    def compute(self, op: Op) -> None:
        given = [self.values.get(name) for name in op.operands]
        unknown = op.value is None or any(value is None for value in given)
        if op.name == "tt.addptr":  # the argument is known where the offset is not
            unknown = given[0] is None
        for name in op.results:
            self.values[name] = None if unknown else op.value(*given)  # type: ignore[misc]

    def assign(self, targets: Sequence[str], sources: Sequence[str]) -> None:
        """Gives targets the values of sources, all at once."""
        for target, value in zip(targets, [self.values.get(source) for source in sources], strict=False):
            self.values[target] = value

    def loop(self, op: Op) -> None:
        """Walks every turn; where the turns at the start and at each quarter ask for the same, these and the last:
        the rest are like them."""
        low, high, step = (int(self.known(name)) for name in op.operands[1:4])
        carried = [name for name, _ in op.pairs]
        self.assign(carried, [name for _, name in op.pairs])
        turns = range(low, high, step)
        if len(turns) <= 6 or self.counts(carried) or not self.skip(op, turns):
            for value in turns:
                self.turn(op, value, carried)
        self.assign(op.results, carried)

    def turn(self, op: Op, value: int, carried: list[str]) -> None:
        self.values[op.operands[0]] = value
        self.assign(carried, self.run(op.regions[0]))

    def counts(self, carried: list[str]) -> bool:
        """Whether an integer is handed from turn to turn."""
        return any(self.values.get(name) is not None and not isinstance(self.values[name], str) for name in carried)

    def skip(self, op: Op, turns: range) -> bool:
        """Adds what the turns ask for if those at the quarters ask for the same; False: nothing was added."""
        first, *others = (self.alone(op, turns[len(turns) * quarter // 4]) for quarter in range(4))
        if any((one.flop, one.loads, one.stores) != (first.flop, first.loads, first.stores) for one in others):
            return False
        last = self.alone(op, turns[-1])
        for one, times in ((first, len(turns) - 1), (last, 1)):
            self.flop += times * one.flop
            for mine, theirs in ((self.loads, one.loads), (self.stores, one.stores)):
                for base, nbytes in theirs.items():
                    mine[base] = mine.get(base, 0.0) + times * nbytes
        return True

    def alone(self, op: Op, value: int) -> "_Program":
        """What one turn of a loop asks for."""
        program = _Program(self.values, self.place, self.grid)
        program.turn(op, value, [])
        return program

    def repeat(self, op: Op) -> None:
        carried = [name for name, _ in op.pairs]
        self.assign(carried, [name for _, name in op.pairs])
        while True:
            condition, *given = self.run(op.regions[0])
            if not self.known(condition):
                break
            self.assign(op.given[1], given)
            self.assign(carried, self.run(op.regions[1]))
        self.assign(op.results, given)

    def access(self, op: Op) -> None:
        """Adds a load's or a store's bytes to its argument's; a load's result is not known."""
        elements = float(math.prod(op.shape))
        base = self.values.get(op.operands[0]) or MEMORY
        if op.offsets:
            base, bounds = self.known(op.operands[0])
            offsets = [self.known(name) for name in op.offsets]
            reach = zip(op.shape, bounds, offsets, strict=True)
            elements = float(math.prod(max(0, min(dim, bound - offset)) for dim, bound, offset in reach))
        else:
            mask = self.values.get(next(iter(op.operands[1 if op.name == "tt.load" else 2 :]), ""))
            if mask is not None:
                elements *= float(torch.as_tensor(mask).double().mean())
        sides = {"tt.atomic_rmw": (self.loads, self.stores)}.get(op.name)
        for side in sides or ((self.stores,) if "store" in op.name else (self.loads,)):
            side[base] = side.get(base, 0.0) + elements * op.size
        for name in op.results:
            self.values[name] = None


def _needed(ops: list[Op]) -> set[str]:
    """Names whose integers decide a loop, a branch, a mask, a pointer's argument or a descriptor's reach."""
    wanted: set[str] = set()
    uses: dict[str, list[str]] = {}
    _collect(ops, [], uses, wanted)
    todo = list(wanted)
    while todo:
        for name in uses.get(todo.pop(), []):
            if name not in wanted:
                wanted.add(name)
                todo.append(name)
    return wanted


def _collect(ops: list[Op], yields: list[str], uses: dict[str, list[str]], wanted: set[str]) -> None:
    """Adds what every name comes from, and what is wanted for itself; `yields`: the names that a yield goes to."""

    def comes_from(targets: Sequence[str], sources: Sequence[str]) -> None:
        for target, source in zip(targets, sources, strict=False):
            uses.setdefault(target, []).append(source)

    for op in ops:
        carried = [name for name, _ in op.pairs]
        comes_from(carried, [name for _, name in op.pairs])
        if op.name in ("scf.yield", "scf.condition"):
            comes_from(yields, op.operands)
            wanted.update(op.operands[:1] if op.name == "scf.condition" else [])
        elif op.name == "scf.if":
            wanted.add(op.operands[0])
            for region in op.regions:
                _collect(region, op.results, uses, wanted)
        elif op.name == "scf.for":
            wanted.update(op.operands[1:4])
            comes_from(op.results, carried)
            _collect(op.regions[0], carried, uses, wanted)
        elif op.name == "scf.while":
            comes_from(op.results, op.given[1])
            _collect(op.regions[0], ["", *op.given[1]], uses, wanted)
            _collect(op.regions[1], carried, uses, wanted)
        elif op.name in MEMORY_OPS:
            mask = op.operands[1 if op.name == "tt.load" else 2 :][:1]
            wanted.update([op.operands[0], *(op.offsets or mask)])
        else:
            for name in op.results:
                uses.setdefault(name, []).extend(op.operands)


def _pruned(ops: list[Op], wanted: set[str]) -> list[Op]:
    """The operations that count or whose results are wanted, in order; a region without any is left out."""
    kept = []
    for op in ops:
        if op.name.startswith("scf."):
            op = op._replace(regions=tuple(_pruned(region, wanted) for region in op.regions))
            inside = [inner.name for region in op.regions for inner in region]
            if op.name in ("scf.yield", "scf.condition") or set(inside) - {"scf.yield"} or wanted & set(op.results):
                kept.append(op)
        elif op.name == "tt.dot" or op.name in MEMORY_OPS or wanted.intersection(op.results):
            kept.append(op)
    return kept


def _sampled(grid: Sequence[int]) -> list[tuple[int, ...]]:
    """Programs that stand for the grid: all of a small one, else the middles of equal parts of each dim."""
    everything = math.prod(grid) <= _ALL
    each = round(_SAMPLES ** (1 / sum(n > 1 for n in grid))) if not everything else 0
    dims = [
        range(n) if everything or n <= each else [(2 * i + 1) * n // (2 * each) for i in range(each)] for n in grid
    ]
    return [(x, y, z) for z in dims[2] for y in dims[1] for x in dims[0]]


def work(ttir: str, arguments: dict[str, Any], grid: Sequence[int]) -> Work | None:
    """The work of a launch; None where memory decides it.

    `arguments`: the kernel's by name, numbers as they are, tensors and descriptors as anything else. Of a grid of
    more than 264 programs 64 are walked and stand for all: exact where programs are alike, within 4 % where they
    are not, as in causal attention (the tiles at the diagonal).
    """
    names, ops = parse(ttir)
    ops = _pruned(ops, _needed(ops))
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}
    values = {name: numbers.get(name[1:], name[1:]) for name in names}
    full = [*grid, 1, 1, 1][:3]
    programs = []
    for place in _sampled(full):
        programs.append(_Program(values, place, full))
        try:
            programs[-1].run(ops)
        except Unknown:
            return None
    scale = math.prod(full) / len(programs)

    def total(sides: list[dict[str, float]]) -> dict[str, float]:
        keys = sorted({key for side in sides for key in side})
        return {key: scale * sum(side.get(key, 0.0) for side in sides) for key in keys}

    flop = scale * sum(one.flop for one in programs)
    return Work(math.prod(full), flop, total([p.loads for p in programs]), total([p.stores for p in programs]))
