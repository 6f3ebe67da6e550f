"""Launchers of the attention kernels: outputs, arguments, grids. Tiles are in flash_tiles.py, checks in flash.py."""

import math
from typing import Any

import torch
import triton

from plait.kernels.attention_plain import Options, sink_gradient
from plait.kernels.flash_backward import (
    attention_delta_kernel,
    attention_key_gradient_kernel,
    attention_query_gradient_kernel,
)
from plait.kernels.flash_forward import attention_forward_kernel
from plait.kernels.flash_order import pairs_together
from plait.kernels.flash_tiles import RESIDENT_BYTES, delta_rows, derived_tile, fits_descriptor, padded, tile_of
from plait.kernels.launch import Launch, arch_of, compute_dtype, next_power_of_two, triton_dtype
from plait.kernels.philox import keep_threshold
from plait.kernels.plans import Built, Site, planned


def switches(q: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor | None, options: Options) -> dict[str, Any]:
    """The compile-time arguments that all kernels share."""
    return {
        "CAUSAL": options.causal,
        "WINDOW": options.window > 0,
        "SOFTCAP": options.softcap > 0.0,
        "DROPOUT": options.dropout_p > 0.0,
        "PACKED": cu_q is not None,
        "HEAD_DIM": q.shape[3],
        "VALUE_DIM": v.shape[3],
        "BLOCK_HEAD": padded(q.shape[3]),
        "BLOCK_VALUE": padded(v.shape[3]),
        "BLOCK_DOCS": 1 if cu_q is None else next_power_of_two(cu_q.shape[0] - 1),
        "COMPUTE": triton_dtype(q.dtype),
    }


def _scales(options: Options) -> tuple[float, float]:
    """(factor before the softcap, factor after it): together they give scores in base 2."""
    log2_e = 1.0 / math.log(2.0)
    if options.softcap:
        return options.scale / options.softcap, options.softcap * log2_e
    return options.scale * log2_e, 1.0


def _randomness(options: Options) -> tuple[int, float, int, int]:
    keep_scale = 1.0 / (1.0 - options.dropout_p)
    return keep_threshold(options.dropout_p), keep_scale, options.head_offset, options.sample_offset


def _small_inputs(
    q: torch.Tensor, rng: torch.Tensor | None, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """(rng, cu_q, cu_k) with unit stride, as the kernels read them; q stands for what is absent and never read."""
    return tuple(q if x is None else x.contiguous() for x in (rng, cu_q, cu_k))


def _window(q: torch.Tensor, k: torch.Tensor, options: Options) -> int:
    """The window, at most what all rows see: more would overflow the kernels' 32-bit positions."""
    return min(options.window, q.shape[1] + k.shape[1])


def _num_tiles(length: int, block: int, cu: torch.Tensor | None) -> int:
    """Tiles of one batch row; packed, each document may add one that is not full."""
    return triton.cdiv(length, block) + (0 if cu is None else cu.shape[0] - 1)


def _programs(
    num_tiles: int, num_heads: int, group: int, walked: tuple[torch.Tensor, torch.Tensor], options: Options
) -> tuple[tuple[int], tuple[int, int, int]]:
    """(grid, (num_tiles, num_pairs, together)): which program does which tile.

    A pair of (batch, head) walks `walked`, [B, T, heads, width] each: its share of the heads, which `group` pairs
    share where there are fewer of them.
    """
    num_pairs = walked[0].shape[0] * num_heads
    heads = max(1, walked[0].shape[2] // num_heads)  # dk and dv: a key head walks the queries of its group
    pair_bytes = sum(x.shape[1] * heads * x.shape[3] * x.element_size() for x in walked)
    varies = options.causal and not options.window  # else tiles are equal, and one head after the other is best in L2
    together = pairs_together(num_pairs, group, pair_bytes, RESIDENT_BYTES) if varies else 1
    return (num_tiles * num_pairs,), (num_tiles, num_pairs, together)


def forward_launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rng: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, options: Options, out: torch.Tensor, lse: torch.Tensor,
    arch: int | None = None,
) -> Launch:  # fmt: skip
    """out [B, T, H, Kv] and lse [B, H, T] are contiguous outputs; `arch` (80, 90, 100) defaults to q's card."""
    _, num_tokens, num_heads, _ = q.shape
    arch = arch or arch_of(q)
    tile = tile_of("forward", q, k, v, options, arch)
    if tile.specialized and (cu_q is not None or sinks is not None or not fits_descriptor(q)):
        _, tile = derived_tile("forward", padded(max(q.shape[3], v.shape[3])), q, k, v, options, arch)
    group = num_heads // k.shape[2]
    grid, order = _programs(_num_tiles(num_tokens, tile.block_row, cu_q), num_heads, group, (k, v), options)
    arguments = (
        q, k, v, q if sinks is None else sinks.contiguous(), *_small_inputs(q, rng, cu_q, cu_k), out, lse,
        *q.stride(), *k.stride(), *v.stride(), num_tokens, k.shape[1], num_heads, group,
        1 if cu_q is None else cu_q.shape[0] - 1, _window(q, k, options), *_scales(options), *_randomness(options),
        *order,
    )  # fmt: skip
    constants = switches(q, v, cu_q, options) | {
        "SINKS": sinks is not None,
        "FOLDED": options.scale > 0.0 and not options.softcap,
        "DESCRIPTORS": tile.descriptors,
        "SPECIALIZED": tile.specialized,
        "BLOCK_ROW": tile.block_row,
        "BLOCK_COL": tile.block_col,
    }
    return Launch(attention_forward_kernel, grid, arguments, constants, tile.num_warps, tile.num_stages)


def delta_launch(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    base: torch.Tensor,
) -> Launch:  # fmt: skip
    """out [B, T, H, Kv] and lse are contiguous; delta and base [B, H, T] are the contiguous outputs."""
    batch, num_tokens, num_heads, value_dim = out.shape
    extra = delta if dlse is None else dlse
    num_rows = delta_rows(value_dim)
    constants = {
        "HAS_DLSE": dlse is not None,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE": padded(value_dim),
        "BLOCK_ROW": num_rows,
        "COMPUTE": triton_dtype(out.dtype),
    }
    num_tiles, num_pairs = triton.cdiv(num_tokens, num_rows), batch * num_heads
    sizes = (num_tokens, num_heads, num_tiles, num_pairs)
    arguments = (dout, out, lse, extra, delta, base, *dout.stride(), *extra.stride(), *sizes)
    return Launch(attention_delta_kernel, (num_tiles * num_pairs,), arguments, constants)


def gradient_launches(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, base: torch.Tensor, delta: torch.Tensor,
    rng: torch.Tensor | None, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, options: Options,
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, arch: int | None = None,
) -> tuple[Launch, Launch]:  # fmt: skip
    """(the launch that writes dq, the one that writes dk and dv), all three contiguous."""
    _, num_tokens, num_heads, _ = q.shape
    kv_heads = k.shape[2]
    group = num_heads // kv_heads
    inputs = (dout, q, k, v, base, delta, *_small_inputs(q, rng, cu_q, cu_k))
    numbers = (
        *dout.stride(), *q.stride(), *k.stride(), *v.stride(), num_tokens, k.shape[1], num_heads, group,
        1 if cu_q is None else cu_q.shape[0] - 1, _window(q, k, options), options.scale, *_scales(options),
        *_randomness(options),
    )  # fmt: skip
    shared = switches(q, v, cu_q, options)
    arch = arch or arch_of(q)
    row = tile_of("dq", q, k, v, options, arch)
    grid, order = _programs(_num_tiles(num_tokens, row.block_row, cu_q), num_heads, group, (k, v), options)
    constants = shared | {"BLOCK_ROW": row.block_row, "BLOCK_COL": row.block_col, "DESCRIPTORS": row.descriptors}
    query = Launch(
        attention_query_gradient_kernel, grid, (*inputs, dq, *numbers, *order), constants, row.num_warps,
        row.num_stages,
    )  # fmt: skip
    col = tile_of("dkdv", q, k, v, options, arch, dout)
    grid, order = _programs(_num_tiles(k.shape[1], col.block_col, cu_k), kv_heads, 1, (q, dout), options)
    constants = shared | {"BLOCK_ROW": col.block_row, "BLOCK_COL": col.block_col, "DESCRIPTORS": col.descriptors}
    key = Launch(
        attention_key_gradient_kernel, grid, (*inputs, dk, dv, *numbers, *order), constants,
        col.num_warps, col.num_stages,
    )  # fmt: skip
    return query, key


def _build_forward(
    site: Site, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    rng: torch.Tensor | None, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, *numbers: Any,
) -> Built:  # fmt: skip
    options = Options(*numbers)
    shape, stats = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
    dtype = compute_dtype(q.dtype)
    if cu_q is None:
        out, lse = site.empty(shape, q.dtype), site.empty(stats, dtype)
    else:  # rows past the last document are not visited
        out, lse = site.full(shape, q.dtype, 0.0), site.full(stats, dtype, float("-inf"))
    if not q.numel():
        return Built((out, lse))
    return Built((out, lse), [forward_launch(q, k, v, sinks, rng, cu_q, cu_k, options, out, lse, site.arch)])


def launch_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rng: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, T, H, Kv], lse [B, H, T]); `options` are those of `Options`, in order."""
    found: tuple[torch.Tensor, torch.Tensor] = planned(_build_forward, (q, k, v, sinks, rng, cu_q, cu_k), *options)
    return found


def _build_backward(
    site: Site, dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, rng: torch.Tensor | None, cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None, *numbers: Any,
) -> Built:  # fmt: skip
    """Results (dq, dk, dv, delta, an empty tensor)."""
    options = Options(*numbers)
    if cu_q is None and q.numel():
        dq, dk, dv = (site.empty(x.shape, x.dtype) for x in (q, k, v))
    else:  # rows past the last document are not visited
        dq, dk, dv = (site.full(x.shape, x.dtype, 0.0) for x in (q, k, v))
    lse = lse.contiguous()
    delta, base, empty = (site.empty(shape, lse.dtype) for shape in (lse.shape, lse.shape, (0,)))
    if not q.numel():
        return Built((dq, dk, dv, delta, empty))
    first = delta_launch(dout, dlse, out.contiguous(), lse, delta, base)
    query, key = gradient_launches(
        dout, q, k, v, base, delta, rng, cu_q, cu_k, options, dq, dk, dv, site.arch
    )  # fmt: skip
    return Built((dq, dk, dv, delta, empty), [first, query, key] if k.numel() else [first, query])


def launch_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, rng: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv, dsinks [H] or empty)."""
    dq, dk, dv, delta, empty = planned(_build_backward, (dout, dlse, q, k, v, out, lse, rng, cu_q, cu_k), *options)
    return dq, dk, dv, empty if sinks is None else sink_gradient(sinks, lse, delta)
