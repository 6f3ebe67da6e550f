"""The ops of plait.kernels that have peers, by name.

What a problem is: problem.py; its work by formula: kernel_work.py; its shapes: kernel_shapes.py. Builds, times and
compares nothing. `adamw_`, which steps a state, is kernel_jobs.py's.
"""

from __future__ import annotations

from collections.abc import Callable

from plait.bench.problem import Maker, Params, Problem
from plait.bench.problems_product import (
    attention,
    linear,
    linear_cross_entropy,
    linear_dgrad,
    linear_swiglu,
    linear_wgrad,
)
from plait.bench.problems_stream import (
    cross_entropy,
    dropout,
    embedding,
    geglu,
    l2_norm,
    layer_norm,
    layer_norm_residual,
    rms_norm,
    rms_norm_residual,
    rope,
    swiglu,
)

PROBLEMS: dict[str, Callable[[Params, Maker], Problem]] = {
    "rms_norm": rms_norm,
    "rms_norm_residual": rms_norm_residual,
    "layer_norm": layer_norm,
    "layer_norm_residual": layer_norm_residual,
    "swiglu": swiglu,
    "geglu": geglu,
    "attention": attention,
    "linear": linear,
    "linear_swiglu": linear_swiglu,
    "linear_dgrad": linear_dgrad,
    "linear_wgrad": linear_wgrad,
    "rope": rope,
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "embedding": embedding,
    "dropout": dropout,
    "l2_norm": l2_norm,
}
