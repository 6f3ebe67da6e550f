"""Triton: attention backward in three kernels, no atomics. Maths and names: see flash.py; tiles: flash_forward.py.

delta = dout . out - dlse per row; then dq, one program per tile of queries walking its keys; then dk and dv, one
program per tile of keys walking the queries that see it, over all heads of its group in order. Both compute the
scores again from q, k and lse. In the third kernel tiles are transposed, [BLOCK_COL, BLOCK_ROW]: probabilities are
then the left operand of their products as they are.
"""

import triton
import triton.language as tl

from plait.kernels.flash_forward import (
    bound_scores,
    find_pair,
    find_tile,
    keep_tile,
    key_range,
    load_rows,
    load_tile,
    row_source,
    store_rows,
    visible,
)
from plait.kernels.philox import philox_load_key


@triton.jit(do_not_specialize=("num_tiles", "num_pairs"))
def attention_delta_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, delta_ptr, base_ptr,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dout_dim,
    stride_dlse_batch, stride_dlse_head, stride_dlse_token, num_tokens, num_heads, num_tiles, num_pairs,
    HAS_DLSE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * heads * batch). out is contiguous [B, T, H, Kv]; lse, delta and base are [B, H, T].

    base is lse in base 2, as the other kernels subtract it. Rows that see nothing get base +inf, so that their
    probabilities are 0, and delta 0: such a row drops the gradient of its lse whatever it is.
    """
    tile, head, batch = find_pair(tl.program_id(0), num_tiles, num_heads, num_pairs, 1)
    head = head.to(tl.int64)
    batch = batch.to(tl.int64)
    rows = tile * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    dout_ptr += batch * stride_dout_batch + head * stride_dout_head
    out_ptr += (batch * num_tokens * num_heads + head) * VALUE_DIM
    dout = load_rows(dout_ptr, rows, num_tokens, stride_dout_token, stride_dout_dim, VALUE_DIM, BLOCK_VALUE)
    out = load_rows(out_ptr, rows, num_tokens, num_heads * VALUE_DIM, 1, VALUE_DIM, BLOCK_VALUE)
    delta = tl.sum(dout.to(COMPUTE) * out.to(COMPUTE), 1)
    if HAS_DLSE:
        dlse_ptr += batch * stride_dlse_batch + head * stride_dlse_head
        delta -= tl.load(dlse_ptr + rows.to(tl.int64) * stride_dlse_token, mask=rows < num_tokens, other=0.0)
    place = (batch * num_heads + head) * num_tokens + rows
    lse = tl.load(lse_ptr + place, mask=rows < num_tokens, other=0.0)
    dead = lse == float("-inf")
    base = tl.where(dead, float("inf"), lse * 1.4426950408889634)
    tl.store(delta_ptr + place, tl.where(dead, 0.0, delta), mask=rows < num_tokens)
    tl.store(base_ptr + place, base, mask=rows < num_tokens)


@triton.jit
def load_stats(base_ptr, delta_ptr, rows, num_rows):
    """(base, delta) of rows; 0 past the end, where q and dout are 0 too, so that no product has a share of it."""
    exists = rows < num_rows
    return tl.load(base_ptr + rows, mask=exists, other=0.0), tl.load(delta_ptr + rows, mask=exists, other=0.0)


@triton.jit
def probability_tile(
    products, base, rows, cols, extent, scales,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(probabilities, tanh of the softcap or scores) from q k^T; base, rows and cols broadcast against it."""
    scores, bounded = bound_scores(products, scales[0], scales[1], SOFTCAP)
    p = tl.exp2(scores - base)
    if MASKED:
        p = tl.where(visible(rows, cols, extent, CAUSAL, WINDOW), p, 0.0)
    return p, bounded


@triton.jit
def score_gradient(p, bounded, dp, delta, SOFTCAP: tl.constexpr):
    """The gradient of the scores (without the scale) from that of the probabilities."""
    ds = p * (dp - delta)
    if SOFTCAP:
        ds *= 1.0 - bounded * bounded
    return ds


@triton.jit
def _query_gradient(
    dq, q, dout, base, delta, keys, values, rows, extent, low, high, scales, counter, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_COL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds ds k over keys [low, high) to dq (without the scale). keys and values are what row_source gives."""
    num_cols = extent[1]
    for first_col in range(low, high, BLOCK_COL):
        cols = first_col + tl.arange(0, BLOCK_COL)
        k = load_tile(keys, first_col, cols, num_cols, DESCRIPTORS, HEAD_DIM, BLOCK_HEAD)
        v = load_tile(values, first_col, cols, num_cols, DESCRIPTORS, VALUE_DIM, BLOCK_VALUE)
        # Both products start before the first is read: the exponentials run beside the second.
        products = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=COMPUTE)  # [BLOCK_ROW, BLOCK_COL]
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee", out_dtype=COMPUTE)
        p, bounded = probability_tile(
            products, base[:, None], rows[:, None], cols[None, :], extent, scales, CAUSAL, WINDOW, SOFTCAP, MASKED
        )
        if DROPOUT:
            dp = tl.where(keep_tile(counter, rows, first_col, BLOCK_COL), dp * keep_scale, 0.0)
        ds = score_gradient(p, bounded, dp, delta[:, None], SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee", out_dtype=COMPUTE)
    return dq


@triton.jit(do_not_specialize=("num_tiles", "num_pairs", "together"))
def attention_query_gradient_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, base_ptr, delta_ptr, rng_ptr, cu_q_ptr, cu_k_ptr, dq_ptr,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dout_dim,
    stride_q_batch, stride_q_token, stride_q_head, stride_q_dim,
    stride_k_batch, stride_k_token, stride_k_head, stride_k_dim,
    stride_v_batch, stride_v_token, stride_v_head, stride_v_dim,
    num_tokens, num_keys, num_heads, group, num_docs, window, scale, pre_scale, post_scale,
    threshold, keep_scale, head_offset, sample_offset, num_tiles, num_pairs, together,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_DOCS: tl.constexpr,
    COMPUTE: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * heads * batch). dq is contiguous [B, T, H, K]."""
    number, head, batch = find_pair(tl.program_id(0), num_tiles, num_heads, num_pairs, together)
    tile = num_tiles - 1 - number
    first_row, row_start, num_rows, col_start, num_cols = find_tile(
        cu_q_ptr, cu_k_ptr, num_tokens, num_keys, num_docs, tile, PACKED, BLOCK_ROW, BLOCK_DOCS
    )
    if first_row < num_rows:
        batch_64 = batch.to(tl.int64)
        head_64 = head.to(tl.int64)
        kv_head = (head // group).to(tl.int64)
        row_64 = tl.zeros((), tl.int64) + row_start
        col_64 = tl.zeros((), tl.int64) + col_start
        dout_ptr += batch_64 * stride_dout_batch + head_64 * stride_dout_head + row_64 * stride_dout_token
        q_ptr += batch_64 * stride_q_batch + head_64 * stride_q_head + row_64 * stride_q_token
        k_ptr += batch_64 * stride_k_batch + kv_head * stride_k_head + col_64 * stride_k_token
        v_ptr += batch_64 * stride_v_batch + kv_head * stride_v_head + col_64 * stride_v_token
        dq_ptr += ((batch_64 * num_tokens + row_64) * num_heads + head_64) * HEAD_DIM
        stats = (batch_64 * num_heads + head_64) * num_tokens + row_64

        rows = first_row + tl.arange(0, BLOCK_ROW)
        q = load_rows(q_ptr, rows, num_rows, stride_q_token, stride_q_dim, HEAD_DIM, BLOCK_HEAD)
        dout = load_rows(dout_ptr, rows, num_rows, stride_dout_token, stride_dout_dim, VALUE_DIM, BLOCK_VALUE)
        base, delta = load_stats(base_ptr + stats, delta_ptr + stats, rows, num_rows)
        dq = tl.zeros([BLOCK_ROW, BLOCK_HEAD], COMPUTE)
        key_low, key_high = 0, 0
        if DROPOUT:
            key_low, key_high = philox_load_key(rng_ptr)
        counter = (key_low, key_high, batch + sample_offset, head + head_offset, row_start, threshold)
        keys = row_source(k_ptr, num_cols, stride_k_token, stride_k_dim, DESCRIPTORS, HEAD_DIM, BLOCK_COL, BLOCK_HEAD)
        values = row_source(
            v_ptr, num_cols, stride_v_token, stride_v_dim, DESCRIPTORS, VALUE_DIM, BLOCK_COL, BLOCK_VALUE
        )
        extent = (num_rows, num_cols, window)
        scales = (pre_scale, post_scale)
        low, full_low, full_high, high = key_range(
            first_row, num_rows, num_cols, window, CAUSAL, WINDOW, BLOCK_ROW, BLOCK_COL
        )
        if WINDOW:
            dq = _query_gradient(
                dq, q, dout, base, delta, keys, values, rows, extent, low, full_low, scales, counter, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, DROPOUT, True, DESCRIPTORS, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE,
                BLOCK_COL, COMPUTE,
            )  # fmt: skip
        dq = _query_gradient(
            dq, q, dout, base, delta, keys, values, rows, extent, full_low, full_high, scales, counter, keep_scale,
            CAUSAL, WINDOW, SOFTCAP, DROPOUT, False, DESCRIPTORS, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE,
            BLOCK_COL, COMPUTE,
        )  # fmt: skip
        dq = _query_gradient(
            dq, q, dout, base, delta, keys, values, rows, extent, full_high, high, scales, counter, keep_scale,
            CAUSAL, WINDOW, SOFTCAP, DROPOUT, True, DESCRIPTORS, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE,
            BLOCK_COL, COMPUTE,
        )  # fmt: skip
        store_rows(dq_ptr, dq * scale, rows, num_rows, num_heads * HEAD_DIM, HEAD_DIM, BLOCK_HEAD)


@triton.jit
def row_range(
    first_col, num_rows, num_cols, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """(low, high): the rows that see some key of a tile; low is a multiple of BLOCK_ROW."""
    first = first_col - (num_cols - num_rows)  # the row whose diagonal is the tile's first key
    low = 0
    high = num_rows
    if CAUSAL:
        low = tl.maximum(first, 0)
    if WINDOW:
        high = tl.minimum(high, first + BLOCK_COL - 1 + window)
        if not CAUSAL:
            low = tl.maximum(first - window + 1, 0)
    return low // BLOCK_ROW * BLOCK_ROW, high


@triton.jit
def _key_gradient(
    dk, dv, k, v, queries, gradients, stats, cols, first_col, extent, low, high, scales, counter, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds ds^T q (without the scale) and p^T dout over rows [low, high) to dk and dv.

    queries and gradients are what row_source gives, stats the pointers to base and delta. One loop with the mask in
    every step: apart loops for whole tiles cost registers that this kernel lacks (6 spills at head dim 128 on sm_90).
    Rows past the end need no mask: q and dout are 0 there. Keys past the end are not stored.
    """
    base_ptr, delta_ptr = stats
    num_rows = extent[0]
    for first_row in range(low, high, BLOCK_ROW):
        rows = first_row + tl.arange(0, BLOCK_ROW)
        q = load_tile(queries, first_row, rows, num_rows, DESCRIPTORS, HEAD_DIM, BLOCK_HEAD)
        dout = load_tile(gradients, first_row, rows, num_rows, DESCRIPTORS, VALUE_DIM, BLOCK_VALUE)
        base, delta = load_stats(base_ptr, delta_ptr, rows, num_rows)
        # Both products start before the first is read: the exponentials run beside the second.
        products = tl.dot(k, tl.trans(q), input_precision="ieee", out_dtype=COMPUTE)  # [BLOCK_COL, BLOCK_ROW]
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee", out_dtype=COMPUTE)
        p, bounded = probability_tile(
            products, base[None, :], rows[None, :], cols[:, None], extent, scales,
            CAUSAL, WINDOW, SOFTCAP, CAUSAL or WINDOW,
        )  # fmt: skip
        dropped = p
        if DROPOUT:
            keep = tl.trans(keep_tile(counter, rows, first_col, BLOCK_COL))
            dropped = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee", out_dtype=COMPUTE)
        ds = score_gradient(p, bounded, dp, delta[None, :], SOFTCAP)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee", out_dtype=COMPUTE)
    return dk, dv


@triton.jit(do_not_specialize=("num_tiles", "num_pairs", "together"))
def attention_key_gradient_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, base_ptr, delta_ptr, rng_ptr, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dout_dim,
    stride_q_batch, stride_q_token, stride_q_head, stride_q_dim,
    stride_k_batch, stride_k_token, stride_k_head, stride_k_dim,
    stride_v_batch, stride_v_token, stride_v_head, stride_v_dim,
    num_tokens, num_keys, num_heads, group, num_docs, window, scale, pre_scale, post_scale,
    threshold, keep_scale, head_offset, sample_offset, num_tiles, num_pairs, together,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_DOCS: tl.constexpr,
    COMPUTE: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys * key heads * batch). dk and dv are contiguous [B, S, KV, K or Kv]."""
    num_kv_heads = num_heads // group
    tile, kv_head, batch = find_pair(tl.program_id(0), num_tiles, num_kv_heads, num_pairs, together)
    first_col, col_start, num_cols, row_start, num_rows = find_tile(
        cu_k_ptr, cu_q_ptr, num_keys, num_tokens, num_docs, tile, PACKED, BLOCK_COL, BLOCK_DOCS
    )
    if first_col < num_cols:
        batch_64 = batch.to(tl.int64)
        kv_64 = kv_head.to(tl.int64)
        row_64 = tl.zeros((), tl.int64) + row_start
        col_64 = tl.zeros((), tl.int64) + col_start
        k_ptr += batch_64 * stride_k_batch + kv_64 * stride_k_head + col_64 * stride_k_token
        v_ptr += batch_64 * stride_v_batch + kv_64 * stride_v_head + col_64 * stride_v_token
        place = (batch_64 * num_keys + col_64) * num_kv_heads + kv_64
        cols = first_col + tl.arange(0, BLOCK_COL)
        k = load_rows(k_ptr, cols, num_cols, stride_k_token, stride_k_dim, HEAD_DIM, BLOCK_HEAD)
        v = load_rows(v_ptr, cols, num_cols, stride_v_token, stride_v_dim, VALUE_DIM, BLOCK_VALUE)
        dk = tl.zeros([BLOCK_COL, BLOCK_HEAD], COMPUTE)
        dv = tl.zeros([BLOCK_COL, BLOCK_VALUE], COMPUTE)
        key_low, key_high = 0, 0
        if DROPOUT:
            key_low, key_high = philox_load_key(rng_ptr)
        extent = (num_rows, num_cols, window)
        scales = (pre_scale, post_scale)
        low, high = row_range(first_col, num_rows, num_cols, window, CAUSAL, WINDOW, BLOCK_ROW, BLOCK_COL)
        for member in range(group):
            head = kv_head * group + member
            head_64 = head.to(tl.int64)
            q_head = q_ptr + batch_64 * stride_q_batch + head_64 * stride_q_head + row_64 * stride_q_token
            dout_head = dout_ptr + batch_64 * stride_dout_batch + head_64 * stride_dout_head
            dout_head += row_64 * stride_dout_token
            queries = row_source(
                q_head, num_rows, stride_q_token, stride_q_dim, DESCRIPTORS, HEAD_DIM, BLOCK_ROW, BLOCK_HEAD
            )
            gradients = row_source(
                dout_head, num_rows, stride_dout_token, stride_dout_dim, DESCRIPTORS, VALUE_DIM, BLOCK_ROW,
                BLOCK_VALUE,
            )  # fmt: skip
            offset = (batch_64 * num_heads + head_64) * num_tokens + row_64
            stats = (base_ptr + offset, delta_ptr + offset)
            counter = (key_low, key_high, batch + sample_offset, head + head_offset, row_start, threshold)
            dk, dv = _key_gradient(
                dk, dv, k, v, queries, gradients, stats, cols, first_col, extent, low, high, scales, counter,
                keep_scale, CAUSAL, WINDOW, SOFTCAP, DROPOUT, DESCRIPTORS, HEAD_DIM, VALUE_DIM, BLOCK_HEAD,
                BLOCK_VALUE, BLOCK_ROW, BLOCK_COL, COMPUTE,
            )  # fmt: skip
        store_rows(
            dk_ptr + place * HEAD_DIM, dk * scale, cols, num_cols, num_kv_heads * HEAD_DIM, HEAD_DIM, BLOCK_HEAD
        )
        store_rows(dv_ptr + place * VALUE_DIM, dv, cols, num_cols, num_kv_heads * VALUE_DIM, VALUE_DIM, BLOCK_VALUE)
