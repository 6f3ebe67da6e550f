"""Who a suite measures beside ours, whether they are here, and who of them was asked for. Imports none of them.

A provider that is missing is skipped with its reason when its case runs; this list says so beforehand.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from plait.bench.spec import Measured


class Need(NamedTuple):
    """What a provider needs: a module, "" for none beyond torch; whether it runs on a GPU alone; a shared library
    that can be loaded; programs on the path."""

    module: str = ""
    gpu: bool = False
    library: str = ""
    programs: tuple[str, ...] = ()


OURS = "plait"  # alone in --providers: nobody beside ours
NOT_ASKED = "not among the providers asked for"
_TORCH = Need()
# suite -> provider -> what it needs
PROVIDERS: dict[str, Mapping[str, Need]] = {
    "train": {"torch": _TORCH},
    "kernels": {
        "torch": _TORCH,
        "compile": _TORCH,
        "flash": Need(gpu=True),
        "cudnn": Need(gpu=True),
        "torch foreach": _TORCH,
        "torch fused": _TORCH,
        "liger": Need("liger_kernel", True),
        "flash_attn": Need("flash_attn", True),
    },
    "snapshots": {
        "torch.save": _TORCH,
        "safetensors": Need("safetensors"),
        "dcp": _TORCH,
        "dcp async": _TORCH,
        "dcp async cached": _TORCH,
        "dcp async thread": _TORCH,
        "dcp async process": _TORCH,
        "dcp async process behind": _TORCH,
        "dcp async pinned": Need(gpu=True),
        "torchsnapshot": Need("torchsnapshot"),
        "nvidia-resiliency-ext": Need("nvidia_resiliency_ext"),
        "deepspeed": Need("deepspeed", library="libaio.so.1", programs=("g++", "ninja")),  # it compiles its writer
        "orbax": Need("orbax"),
    },
    "pipeline": {"torch": _TORCH},
    "static": {
        "liger": Need("liger_kernel"),
        "tutorial": _TORCH,
        "tutorial 03": _TORCH,
        "tutorial 09": _TORCH,
    },
    "collectives": {"torch": _TORCH},
    "launch": {},  # what stands beside an op there is its floor: every case needs it
    "ceilings": {},  # torch's own products and copies, beside nobody
}
ALL = sorted({OURS, *(name for providers in PROVIDERS.values() for name in providers)})


def state_of(need: Need, gpu: bool) -> str:
    """ "found", or what is missing here."""
    if lacking := lack_of(need):
        return f"missing: {lacking}"
    return "needs a GPU" if need.gpu and not gpu else "found"


def lack_of(need: Need) -> str:
    """What of a provider is not installed here; "" when all is."""
    if need.module and importlib.util.find_spec(need.module) is None:
        return f"{need.module} is not installed"
    if need.library:
        try:
            ctypes.CDLL(need.library)
        except OSError as error:
            return str(error)
    absent = [program for program in need.programs if shutil.which(program) is None]
    return f"{absent[0]} is not on the path" if absent else ""


def check_asked(asked: Iterable[str], suites: Iterable[str]) -> None:
    """ValueError for a name that none of these suites measures, with the names that each of them has."""
    suites = list(suites)
    valid = {OURS, *(name for suite in suites for name in PROVIDERS.get(suite, {}))}
    for name in asked:
        if name not in valid:
            those = ", ".join(f"{suite} ({', '.join(PROVIDERS.get(suite, {})) or 'nobody'})" for suite in suites)
            raise ValueError(f"--providers: {name!r} is measured in none of: {those}; {OURS!r} is ours alone")


def asked_in(suite: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the asked that the suite has, ours alone where it has none of them; () asks for all."""
    return tuple(name for name in asked if name in PROVIDERS.get(suite, {})) or (OURS,) if asked else ()


def left_out(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a provider other than ours was not asked for; () asks for all."""
    return bool(wanted) and not name.startswith(OURS) and name not in wanted


def not_asked(names: Iterable[str], wanted: tuple[str, ...]) -> dict[str, Measured]:
    """What is said of those that were left out."""
    return {name: Measured(skipped=NOT_ASKED) for name in names if left_out(name, wanted)}
