"""The least time of a launch by a data sheet: bytes over the memory's rate, or FLOP over the matrix units'.

Not a measurement and not the suite's roofline (bench/roofline.py, whose table of cards this one agrees with: a test).
Kernels import nothing of bench, so the four cards that the gate compiles for are here. Bytes: of each argument what
all programs ask for, at most all of it, as if the cache kept what is read twice. FLOP: those of `tt.dot` at the rate
of its inputs; other arithmetic is left out, so that the time is a bound from below.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from plait.kernels.launch import Launch


class Roof(NamedTuple):
    """A card's data sheet: bytes/s, dense FLOP/s by the dtype of a product's inputs ("tfloat32" beside "float32")."""

    card: str
    bytes_per_s: float
    flop_per_s: dict[str, float]


def _roof(card: str, bytes_per_s: float, half: float, tfloat32: float, single: float) -> Roof:
    rates = {"bfloat16": half, "float16": half, "tfloat32": tfloat32, "float32": single}
    return Roof(card, bytes_per_s, rates)


# Sources and dates: bench/peaks.py.
ROOFS = {
    "sm_80": _roof("A100-SXM4-80GB", 2.04e12, 312e12, 156e12, 19.5e12),
    "sm_90": _roof("H200", 4.8e12, 989e12, 494.5e12, 67e12),
    "sm_100": _roof("B200", 8.0e12, 2250e12, 1125e12, 74.4e12),
    "gfx942": _roof("MI300X", 5.3e12, 1307e12, 653.7e12, 163.4e12),
}
_DOT = re.compile(r"tt\.dot .* : tensor<[\dx]+x(\w+)> ")
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class Bound(NamedTuple):
    """us: microseconds at least; by: "memory" or "compute", whichever takes longer."""

    us: float
    by: str


def dot_dtypes(ttir: str) -> set[str]:
    """Dtypes of the inputs of a kernel's products, "tfloat32" where fp32 may be rounded to it."""
    found = set()
    for line in ttir.splitlines():
        if match := _DOT.search(line):
            dtype = _DTYPES.get(match.group(1), match.group(1))
            found.add("tfloat32" if dtype == "float32" and "inputPrecision = tf32" in line else dtype)
    return found


def _most_bytes(value: Any) -> float:
    """All of an argument, elements that lie over each other once; no limit for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return math.inf
    dims = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride]
    return float(math.prod(dims) * value.element_size())


def least_bytes(launch: Launch, work: Mapping[str, Any]) -> float:
    """Bytes that memory must move: loads and stores of each argument, no more than all of it each way."""
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    sides = (work["loads"], work["stores"])
    return sum(min(asked, _most_bytes(arguments.get(name))) for side in sides for name, asked in side.items())


def bound(roof: Roof, nbytes: float, flop: float, dtypes: set[str]) -> Bound:
    """The larger of both times; of several dtypes of products the fastest counts. KeyError for a dtype not listed."""
    rate = max((roof.flop_per_s[dtype] for dtype in dtypes), default=math.inf)
    us, by = max((nbytes / roof.bytes_per_s * 1e6, "memory"), (flop / rate * 1e6, "compute"))
    return Bound(us, by)
