"""Reads TTIR, the text that triton's front end makes of a kernel, into operations on integers. Walks nothing.

The one idea: of every operation only what decides how often something happens is read: integers, masks, shapes, the
argument that a pointer came from. Floats are no values here. The text is that of triton 3.x (`compiled.asm["ttir"]`),
one operation a line, regions in braces.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OP = re.compile(r'^(?:(%[^=]+?) = )?"?([a-z_]+\.[\w.]+)"?(.*)$')
_NAME = re.compile(r"%\w+(?:#\d+)?")
_LOC = re.compile(r" loc\(.*\)$")
_TILE = re.compile(r"(?:tensor|tensordesc)<(?:tensor<)?((?:\d+x)+)(?:!tt\.ptr<)?(\w+)")
_CARRIED = re.compile(r"(%\w+) = (%\w+(?:#\d+)?)")

Value = Any  # an int, a bool, an integer tensor, an argument's name for a pointer; None where it is not known
MEMORY_OPS = ("tt.load", "tt.store", "tt.descriptor_load", "tt.descriptor_store", "tt.atomic_rmw")


class Op(NamedTuple):
    """One operation, read once. `operands`: names used; `value`: makes the result's value from theirs, None for
    floats; shape and size (bytes of an element, or FLOP) of what is moved; pairs: carried name and where from."""

    results: list[str]
    name: str
    operands: list[str]
    value: Callable[..., Value] | None = None
    regions: tuple[list["Op"], ...] = ()
    given: tuple[list[str], ...] = ()  # each region's own arguments
    pairs: tuple[tuple[str, str], ...] = ()
    shape: tuple[int, ...] = ()
    size: float = 0.0
    offsets: tuple[str, ...] = ()


def parse(ttir: str) -> tuple[list[str], list[Op]]:
    """(names of the arguments, operations of the one public function)."""
    lines = iter([_LOC.sub("", line.strip()) for line in ttir.splitlines()])
    for line in lines:
        if line.startswith("tt.func public"):
            return re.findall(r"(%\w+): ", line), _region(lines)[0]
    raise ValueError("ttir: has no public function")


def _region(lines: Iterator[str]) -> tuple[list[Op], list[str], str]:
    """(operations, the region's arguments, closing line) up to the brace that closes the region."""
    ops: list[Op] = []
    arguments: list[str] = []
    for line in lines:
        if line.startswith("}"):
            return ops, arguments, line
        if line.startswith("^"):
            arguments = re.findall(r"(%\w+): ", line)
        elif match := _OP.match(line):
            regions, given = [], []
            while line.endswith("{"):
                inner, names, line = _region(lines)
                regions.append(inner)
                given.append(names)
            ops.append(_read(*match.groups(default=""))._replace(regions=tuple(regions), given=tuple(given)))
    raise ValueError("ttir: a region is not closed")


def _read(results: str, name: str, text: str) -> Op:
    """One operation without its regions."""
    uses, _, types = text.rpartition(" : ")
    op = Op(_results(results), name, _NAME.findall(text if name.startswith("scf.") else uses or text))
    if name in ("scf.for", "scf.while"):
        carried = text.split("iter_args(")[-1] if "iter_args(" in text or name == "scf.while" else ""
        return op._replace(pairs=tuple(_CARRIED.findall(carried)))
    if name == "tt.dot":
        (a, _), (b, _) = (_type(part) for part in types.split(" * ")[:2])
        return op._replace(size=2.0 * math.prod(a) * b[-1])
    if name in MEMORY_OPS:
        shape, size = _type(types)
        return op._replace(shape=shape, size=size, offsets=_bracketed(uses) if "descriptor" in name else ())
    if name == "tt.make_tensor_descriptor":
        return op._replace(offsets=_bracketed(uses))
    if name in ("tt.get_program_id", "tt.get_num_programs"):
        return op._replace(shape=("xyz".index(text.split()[0]),))
    return op._replace(value=_reader(name, text))


def _results(text: str) -> list[str]:
    """Names of the results: "%x", "%a, %b", or "%x:3" for %x#0, %x#1, %x#2."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = part.partition(":")
        found += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return found


def _bracketed(text: str) -> tuple[str, ...]:
    """Names between the first brackets."""
    return tuple(_NAME.findall(text[text.index("[") : text.index("]")]))


def _type(text: str) -> tuple[tuple[int, ...], float]:
    """(shape, bytes of an element) of the first tensor, descriptor or pointer; ValueError where there is none."""
    tile, single = _TILE.search(text), re.search(r"!tt\.ptr<(\w+)", text)
    if tile is None and single is None:
        raise ValueError(f"ttir: no type in {text!r}")
    dims, kind = tile.groups() if tile else ("", single.group(1))  # type: ignore[union-attr]
    bits = re.search(r"\d+", kind)
    return tuple(int(dim) for dim in dims.split("x") if dim), max(1.0, int(bits.group()) / 8) if bits else 8.0


def _divide(a: Value, b: Value) -> Value:
    """Towards zero, as the device does."""
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return torch.sign(a) * torch.sign(b) * (abs(a) // abs(b))


def _both(a: Value, b: Value) -> tuple[Tensor, Tensor]:
    return torch.as_tensor(a), torch.as_tensor(b)


def _least(a: Value, b: Value) -> Value:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.minimum(*_both(a, b))


def _most(a: Value, b: Value) -> Value:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.maximum(*_both(a, b))


def _select(condition: Value, a: Value, b: Value) -> Value:
    """Of pointers to two arguments, the one that the condition chooses."""
    if isinstance(condition, Tensor):
        return a if isinstance(a, str) and a == b else None if isinstance(a, str) else torch.where(condition, a, b)
    return a if condition else b


def _same(a: Value, *rest: Value) -> Value:
    return a


_COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_COMPARE |= {"ge": operator.ge}
_INTEGER: dict[str, Callable[..., Value]] = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "andi": operator.and_,
    "ori": operator.or_,
    "xori": operator.xor,
    "shli": operator.lshift,
    "shrsi": operator.rshift,
    "shrui": operator.rshift,
    "minsi": _least,
    "minui": _least,
    "maxsi": _most,
    "maxui": _most,
    "divsi": _divide,
    "divui": _divide,
    "ceildivsi": lambda a, b: -_divide(-a, b) if isinstance(a, int) else -(-a // b),
    "remsi": lambda a, b: a - b * _divide(a, b),
    "remui": lambda a, b: a - b * _divide(a, b),
    "select": _select,
    "extsi": _same,
    "extui": _same,
    "trunci": _same,
}
_SHAPED = ("tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans")


def _reader(name: str, text: str) -> Callable[..., Value] | None:
    """How the operation's integer comes from its operands'; None for floats and whatever reads memory."""
    if name == "arith.constant":
        constant = _constant(text)
        return None if constant is None else lambda: constant
    if name == "arith.cmpi":
        return _COMPARE[text.split(",")[0].strip()[-2:]]
    if name == "tt.make_range":
        end, start = (int(re.findall(rf"{word} = (\d+)", text)[0]) for word in ("end", "start"))
        return lambda: torch.arange(start, end, dtype=torch.int64)
    if name in ("tt.addptr", "tt.bitcast"):
        return _same
    if name in _SHAPED:
        return _shaper(name, text)
    return _INTEGER.get(name.removeprefix("arith.")) if name.startswith("arith.") else None


def _constant(text: str) -> Value:
    """An integer, a truth value, or a tensor full of one; None for a float."""
    match = re.match(r"\s*(?:dense<)?(-?\d+|true|false)>?(?: : (\S.*))?$", re.sub(r" \{.*\}", "", text))
    if match is None or re.search(r"x?b?f\d", match.group(2) or ""):
        return None
    value: Value = {"true": True, "false": False}.get(match.group(1))
    value = int(match.group(1)) if value is None else value
    tile = _TILE.search(match.group(2) or "")
    return value if tile is None else torch.full([int(dim) for dim in tile.group(1).split("x") if dim], value)


def _shaper(name: str, text: str) -> Callable[..., Value]:
    """What splat, broadcast, expand_dims, reshape and trans make of integers; of a pointer its argument."""
    tile = _TILE.search(text.split("->")[-1])
    shape = [int(dim) for dim in tile.group(1).split("x") if dim] if tile else []
    order = [int(n) for part in re.findall(r"order = array<i32: ([\d, ]+)>", text) for n in part.split(",")]

    def shaped(value: Value) -> Value:
        if isinstance(value, str):
            return value
        if order:
            return value.permute(order)
        value = torch.as_tensor(value)
        return value.reshape(shape) if name in ("tt.expand_dims", "tt.reshape") else value.expand(shape)

    return shaped
