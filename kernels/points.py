"""Named launches of the Triton kernels at the shapes that training uses, for inspection without a GPU.

A point is what the launcher would launch for meta tensors of that shape: nothing is allocated, nothing runs.
"""

from collections.abc import Callable
from functools import partial

import torch

from plait.kernels import flash_points, gated, loss_points, matmul_points, norm_rows, rotary_triton, stream_points
from plait.kernels.inspect import meta
from plait.kernels.launch import Launch


def _norm(num_cols: int, backward: bool, residual: bool = False, centred: bool = False) -> Launch:
    """rms_norm, or (centred) layer_norm with a bias."""
    x, weight, rstd = meta(8192, num_cols), meta(num_cols), meta(8192, dtype=torch.float32)
    extra, mean, bias = x if residual else None, rstd if centred else None, weight if centred else None
    if backward:
        sums = meta(257, num_cols, dtype=torch.float32)
        dbias = sums if centred else None
        return norm_rows.backward_launch(x, x, weight, mean, rstd, extra, x, sums, dbias, 257)
    return norm_rows.forward_launch(x, extra, weight, bias, 1e-6, x, x, mean, rstd)


def _swiglu(num_cols: int, backward: bool) -> Launch:
    gate_up, out = meta(8192, 2 * num_cols), meta(8192, num_cols)
    return gated.backward_launch(out, gate_up, gate_up) if backward else gated.forward_launch(gate_up, out)


def _geglu(num_cols: int, backward: bool, tanh: bool) -> Launch:
    gate_up, out = meta(8192, 2 * num_cols), meta(8192, num_cols)
    if backward:
        return gated.geglu_backward_launch(out, gate_up, gate_up, tanh)
    return gated.geglu_forward_launch(gate_up, out, tanh)


def _rope(head_dim: int, interleaved: bool, packed: bool = False) -> Launch:
    """q and k into new tensors, or (packed) q and k side by side in a packed projection, in place."""
    table = meta(4096, head_dim // 2, dtype=torch.float32)
    angles = rotary_triton.Angles(table, table, 0, head_dim // 2, 1)
    q, k = meta(2, 4096, 32, head_dim), meta(2, 4096, 8, head_dim)
    both = meta(2, 4096, 48, head_dim)[:, :, :40]
    turn = partial(rotary_triton.rope_launch, angles=angles, num_pairs=head_dim // 2, inverse=False)
    launch = (
        turn(both, None, both, None, interleaved=interleaved)
        if packed
        else turn(q, k, meta(*q.shape), meta(*k.shape), interleaved=interleaved)
    )
    assert launch is not None
    return launch


def _anywhere(make: Callable[[], Launch]) -> Callable[..., Launch]:
    """A point whose launch is the same on every architecture."""

    def launch(arch: str = "sm_90") -> Launch:
        return make()

    return launch


def points(every: bool = False) -> dict[str, Callable[..., Launch]]:
    """Every point by name, as a function of arch="sm_90" that makes its launch there.

    `every` adds the whole table of attention: all head dims, dtypes and switches.
    """
    found: dict[str, Callable[[], Launch]] = {}
    for side in ("forward", "backward"):
        backward = side == "backward"
        found[f"swiglu.{side}"] = partial(_swiglu, 14336, backward)
        found[f"geglu.{side}"] = partial(_geglu, 14336, backward, False)
        found[f"geglu_tanh.{side}"] = partial(_geglu, 14336, backward, True)
        found[f"rms_norm.{side}.128"] = partial(_norm, 128, backward)
        for num_cols in (64, 4096, 8192, 65536):
            found[f"rms_norm.{side}.{num_cols}"] = partial(_norm, num_cols, backward)
            found[f"rms_norm_residual.{side}.{num_cols}"] = partial(_norm, num_cols, backward, True)
            found[f"layer_norm.{side}.{num_cols}"] = partial(_norm, num_cols, backward, False, True)
            found[f"layer_norm_residual.{side}.{num_cols}"] = partial(_norm, num_cols, backward, True, True)
    for head_dim in (64, 128):
        found[f"rope.halves.{head_dim}"] = partial(_rope, head_dim, False)
        found[f"rope.neighbours.{head_dim}"] = partial(_rope, head_dim, True)
        found[f"rope.packed.{head_dim}"] = partial(_rope, head_dim, False, True)
    found |= loss_points.points() | stream_points.points()
    return (
        {name: _anywhere(make) for name, make in found.items()} | flash_points.points(every) | matmul_points.points()
    )
