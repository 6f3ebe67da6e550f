"""The grid: mesh, collectives, tensor parallel layers, data parallel buckets, pipeline and its schedules.

Names are imported on first use, so that a stack that wants only a schedule or only the mesh pays for nothing else.
"""

from __future__ import annotations

import importlib
from typing import Any

# public name -> the module that has it
_HOME = {
    "Axis": "mesh",
    "GridShape": "mesh",
    "Mesh": "mesh",
    "check_grid": "mesh",
    "parse_mesh": "mesh",
    "Placement": "placement",
    "gather_full": "placement",
    "placement_of": "placement",
    "DataParallel": "data",
    "ShardedAdamW": "sharded_adamw",
    "GradSink": "gradients",
    "ColumnParallelLinear": "layers",
    "RowParallelLinear": "layers",
    "VocabParallelEmbedding": "vocab",
    "VocabParallelHead": "vocab",
    "RMSNorm": "layers",
    "Dropout": "layers",
    "Pipeline": "pipeline",
    "StepResult": "pipeline",
    "TensorSpec": "pipeline",
}


def __getattr__(name: str) -> Any:
    if name == "schedules":
        return importlib.import_module("plait.parallel.schedules")
    if name not in _HOME:
        raise AttributeError(f"module 'plait.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"plait.parallel.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_HOME, "schedules"])
