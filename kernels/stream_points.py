"""Launches of the kernels that stream memory once, by name, for inspection without a GPU.

adamw_, l2_norm, dropout, embedding, column sums: dtypes and sizes of training; tables stand for a model's parameters.
"""

from collections.abc import Callable
from functools import partial

import torch

from plait.kernels import adamw_triton, column_sums, dropout_op, embed_triton, norms, tables
from plait.kernels.inspect import meta
from plait.kernels.launch import Launch

_NUMEL, _TOKENS, _MODEL, _VOCAB = 1 << 24, 8192, 4096, 65536
_NUMBERS = (0.999, 0.001, 0.05, 0.9, 0.1, 0.95, 0.05, 1e-8)


def _table() -> torch.Tensor:
    return meta(1 << 12, dtype=torch.int64)


def _adamw(kind: str, dtypes: str) -> Launch:
    """fp32 alone; bf16 with masters and a clipping factor; bf16 rounded stochastically, all scalars on the device."""
    wide, scalar = meta(_NUMEL, dtype=torch.float32), torch.empty((), device="meta")
    tensors = [wide] * 4
    step = adamw_triton.Step(_NUMBERS)
    if dtypes == "bf16_master":
        tensors = [meta(_NUMEL), *[wide] * 4]
        step = step._replace(grad_scale=scalar)
    elif dtypes == "bf16_rounded":
        tensors = [meta(_NUMEL), meta(_NUMEL), wide, wide]
        rng, schedule = meta(2, dtype=torch.int64), meta(3, dtype=torch.float32)
        step = step._replace(schedule=schedule, grad_scale=scalar, loss_scale=scalar, rng=rng, found_inf=scalar)
    if kind == "run":
        return adamw_triton.run_launch(tensors, step, 0)
    strided = kind == "strided"
    return adamw_triton.table_launch(
        _table(), 100, 1 << 12, 4, tensors, step, aligned=kind == "table", strided=strided
    )  # fmt: skip


def _l2_norm(kind: str, dtype: torch.dtype) -> Launch:
    partial_sums = meta(1 << 13, dtype=torch.float32)
    if kind == "run":
        return norms.run_launch(meta(_NUMEL, dtype=dtype), partial_sums, 4)
    strided = kind == "strided"
    return norms.table_launch(
        _table(), partial_sums, 100, 1 << 13, 4, dtype, aligned=kind == "table", strided=strided
    )  # fmt: skip


def _finish() -> Launch:
    return norms.partials_launch(meta(1 << 13, dtype=torch.float32), torch.empty((), device="meta"))


def _column_sums() -> Launch:
    return column_sums.sum_launch(meta(264, _MODEL, dtype=torch.float32), meta(_MODEL))


def _write() -> Launch:
    """The writer of tables within a CUDA graph."""
    return tables.write_launches(list(range(2, 34)), _table())[0]


def _dropout(dtype: torch.dtype) -> Launch:
    x = meta(2, _TOKENS, _MODEL, dtype=dtype)
    return dropout_op.forward_launch(x, meta(2, dtype=torch.int64), 0.1, 0, 0, 0, meta(*x.shape, dtype=dtype))


def _embedding(dtype: torch.dtype) -> Launch:
    tokens, weight = meta(_TOKENS, dtype=torch.int64), meta(_VOCAB, _MODEL, dtype=dtype)
    return embed_triton.forward_launch(tokens, weight, 0, meta(_TOKENS, _MODEL, dtype=dtype))


def _embedding_gradient(stage: int, accumulate: bool) -> Launch:
    """From bf16 into an fp32 main gradient, or into a bf16 one of its own."""
    keys, dout = meta(_TOKENS, dtype=torch.int64), meta(_TOKENS, _MODEL)
    out = meta(_VOCAB, _MODEL, dtype=torch.float32 if accumulate else torch.bfloat16)
    partial_sums = meta(_TOKENS // 16, 2, _MODEL, dtype=torch.float32)
    return embed_triton.gradient_launches(dout, keys, keys, partial_sums, out, accumulate)[stage]


def points() -> dict[str, Callable[[], Launch]]:
    """Every point by name, as a function that makes its launch."""
    found: dict[str, Callable[[], Launch]] = {
        "column_sums": _column_sums,
        "l2_norm.finish": _finish,
        "tables.write": _write,
    }
    for dtypes in ("fp32", "bf16_master", "bf16_rounded"):
        for kind in ("run", "table", "narrow", "strided"):
            found[f"adamw.{kind}.{dtypes}"] = partial(_adamw, kind, dtypes)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for kind in ("run", "table", "narrow", "strided"):
            found[f"l2_norm.{kind}.{name}"] = partial(_l2_norm, kind, dtype)
        found[f"dropout.{name}"] = partial(_dropout, dtype)
        found[f"embedding.forward.{name}"] = partial(_embedding, dtype)
    for stage, name in enumerate(("windows", "crossing")):
        found[f"embedding.{name}"] = partial(_embedding_gradient, stage, False)
        found[f"embedding.{name}.accumulate"] = partial(_embedding_gradient, stage, True)
    return found
