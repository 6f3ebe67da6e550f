"""Who a suite measures beside ours, and whether they are here. Imports none of them.

A provider that is missing is skipped with its reason when its case runs; this list says so beforehand.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple


class Need(NamedTuple):
    """What a provider needs: a module, "" for none beyond torch; whether it runs on a GPU alone."""

    module: str = ""
    gpu: bool = False


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
        "dcp": _TORCH,
        "safetensors": Need("safetensors"),
        "torchsnapshot": Need("torchsnapshot"),
        "nvidia-resiliency-ext": Need("nvidia_resiliency_ext"),
        "deepspeed": Need("deepspeed"),
    },
    "pipeline": {"torch": _TORCH},
    "static": {
        "liger": Need("liger_kernel"),
        "tutorial": _TORCH,
        "tutorial 03": _TORCH,
        "tutorial 09": _TORCH,
    },
    "launch": {"empty op": _TORCH, "bare launch": _TORCH, "floor": _TORCH},
    "collectives": {"torch": _TORCH},
    "ceilings": {"torch": _TORCH},
}
ALL = sorted({name for providers in PROVIDERS.values() for name in providers})


def state_of(need: Need, gpu: bool) -> str:
    """ "found", or what is missing here."""
    if need.module and importlib.util.find_spec(need.module) is None:
        return f"missing: {need.module} is not installed"
    return "needs a GPU" if need.gpu and not gpu else "found"


def left_out(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a provider other than ours was not asked for; () asks for all."""
    return bool(wanted) and name != "plait" and name not in wanted
