"""Triton: attention backward in three kernels, no atomics. Maths and names: see flash.py; tiles: flash_forward.py.

delta = dout . out - dlse per row; then dq, one program per tile of queries walking its keys; then dk and dv, one
program per tile of keys walking the queries that see it, over all heads of its group in order. Both compute the
scores again from q, k and lse. In the third kernel tiles are transposed, [BLOCK_COL, BLOCK_ROW]: probabilities are
then the left operand of their products as they are.
"""

import triton
import triton.language as tl

from plait.kernels.flash_forward import find_tile, keep_tile, key_range, load_rows, score_tile, store_rows, visible
from plait.kernels.philox import philox_load_key


@triton.jit
def attention_delta_kernel(
    dout_ptr, out_ptr, dlse_ptr, delta_ptr,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dout_dim,
    stride_dlse_batch, stride_dlse_head, stride_dlse_token, num_tokens, num_heads,
    HAS_DLSE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads, batch). out is contiguous [B, T, H, Kv], delta [B, H, T]."""
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_ROW + tl.arange(0, BLOCK_ROW)
    dout_ptr += batch * stride_dout_batch + head * stride_dout_head
    out_ptr += (batch * num_tokens * num_heads + head) * VALUE_DIM
    dout = load_rows(dout_ptr, rows, num_tokens, stride_dout_token, stride_dout_dim, VALUE_DIM, BLOCK_VALUE)
    out = load_rows(out_ptr, rows, num_tokens, num_heads * VALUE_DIM, 1, VALUE_DIM, BLOCK_VALUE)
    delta = tl.sum(dout.to(COMPUTE) * out.to(COMPUTE), 1)
    if HAS_DLSE:
        dlse_ptr += batch * stride_dlse_batch + head * stride_dlse_head
        delta -= tl.load(dlse_ptr + rows.to(tl.int64) * stride_dlse_token, mask=rows < num_tokens, other=0.0)
    tl.store(delta_ptr + (batch * num_heads + head) * num_tokens + rows, delta, mask=rows < num_tokens)


@triton.jit
def load_stats(lse_ptr, delta_ptr, rows, num_rows):
    """(lse in base 2, delta); +inf and 0 for rows that see nothing or do not exist: their probabilities are 0.

    Such a row drops the gradient of its lse whatever it is.
    """
    exists = rows < num_rows
    lse = tl.load(lse_ptr + rows, mask=exists, other=float("-inf"))
    dead = lse == float("-inf")
    delta = tl.load(delta_ptr + rows, mask=exists, other=0.0)
    return tl.where(dead, float("inf"), lse * 1.4426950408889634), tl.where(dead, 0.0, delta)


@triton.jit
def probability_tile(
    left, right, lse, rows, cols, extent, scales,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """(probabilities, tanh of the softcap or scores) of left right^T; lse, rows and cols broadcast against it."""
    scores, bounded = score_tile(left, right, scales, SOFTCAP, COMPUTE)
    p = tl.exp2(scores - lse)
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
    dq, q, dout, lse, delta, keys, values, rows, extent, low, high, scales, counter, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_COL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds ds k over keys [low, high) to dq (without the scale)."""
    k_ptr, stride_k_token, stride_k_dim = keys
    v_ptr, stride_v_token, stride_v_dim = values
    num_cols = extent[1]
    for first_col in range(low, high, BLOCK_COL):
        cols = first_col + tl.arange(0, BLOCK_COL)
        k = load_rows(k_ptr, cols, num_cols, stride_k_token, stride_k_dim, HEAD_DIM, BLOCK_HEAD)
        v = load_rows(v_ptr, cols, num_cols, stride_v_token, stride_v_dim, VALUE_DIM, BLOCK_VALUE)
        p, bounded = probability_tile(
            q, k, lse[:, None], rows[:, None], cols[None, :], extent, scales, CAUSAL, WINDOW, SOFTCAP, MASKED, COMPUTE
        )  # [BLOCK_ROW, BLOCK_COL]
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee", out_dtype=COMPUTE)
        if DROPOUT:
            dp = tl.where(keep_tile(counter, rows, first_col, BLOCK_COL), dp * keep_scale, 0.0)
        ds = score_gradient(p, bounded, dp, delta[:, None], SOFTCAP)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee", out_dtype=COMPUTE)
    return dq


@triton.jit
def attention_query_gradient_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, rng_ptr, cu_q_ptr, cu_k_ptr, dq_ptr,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dout_dim,
    stride_q_batch, stride_q_token, stride_q_head, stride_q_dim,
    stride_k_batch, stride_k_token, stride_k_head, stride_k_dim,
    stride_v_batch, stride_v_token, stride_v_head, stride_v_dim,
    num_tokens, num_keys, num_heads, group, num_docs, window, scale, pre_scale, post_scale,
    threshold, keep_scale, head_offset, sample_offset,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_DOCS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, heads, batch). dq is contiguous [B, T, H, K]."""
    head = tl.program_id(1)
    batch = tl.program_id(2)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
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
        lse, delta = load_stats(lse_ptr + stats, delta_ptr + stats, rows, num_rows)
        dq = tl.zeros([BLOCK_ROW, BLOCK_HEAD], COMPUTE)
        key_low, key_high = 0, 0
        if DROPOUT:
            key_low, key_high = philox_load_key(rng_ptr)
        counter = (key_low, key_high, batch + sample_offset, head + head_offset, row_start, threshold)
        keys = (k_ptr, stride_k_token, stride_k_dim)
        values = (v_ptr, stride_v_token, stride_v_dim)
        extent = (num_rows, num_cols, window)
        scales = (pre_scale, post_scale)
        low, full_low, full_high, high = key_range(
            first_row, num_rows, num_cols, window, CAUSAL, WINDOW, BLOCK_ROW, BLOCK_COL
        )
        if WINDOW:
            dq = _query_gradient(
                dq, q, dout, lse, delta, keys, values, rows, extent, low, full_low, scales, counter, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, DROPOUT, True, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE, BLOCK_COL,
                COMPUTE,
            )  # fmt: skip
        dq = _query_gradient(
            dq, q, dout, lse, delta, keys, values, rows, extent, full_low, full_high, scales, counter, keep_scale,
            CAUSAL, WINDOW, SOFTCAP, DROPOUT, False, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE, BLOCK_COL,
            COMPUTE,
        )  # fmt: skip
        dq = _query_gradient(
            dq, q, dout, lse, delta, keys, values, rows, extent, full_high, high, scales, counter, keep_scale,
            CAUSAL, WINDOW, SOFTCAP, DROPOUT, True, HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE, BLOCK_COL,
            COMPUTE,
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
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds ds^T q (without the scale) and p^T dout over rows [low, high) to dk and dv.

    queries and gradients are (pointer, stride of a token, stride of a channel), stats the pointers to lse and delta.
    One loop with the mask in every step: apart loops for whole tiles cost registers that this kernel lacks. Rows past
    the end need no mask, since `load_stats` makes their probabilities 0; keys past the end are not stored.
    """
    q_ptr, stride_q_token, stride_q_dim = queries
    dout_ptr, stride_dout_token, stride_dout_dim = gradients
    lse_ptr, delta_ptr = stats
    num_rows = extent[0]
    for first_row in range(low, high, BLOCK_ROW):
        rows = first_row + tl.arange(0, BLOCK_ROW)
        q = load_rows(q_ptr, rows, num_rows, stride_q_token, stride_q_dim, HEAD_DIM, BLOCK_HEAD)
        dout = load_rows(dout_ptr, rows, num_rows, stride_dout_token, stride_dout_dim, VALUE_DIM, BLOCK_VALUE)
        lse, delta = load_stats(lse_ptr, delta_ptr, rows, num_rows)
        p, bounded = probability_tile(
            k, q, lse[None, :], rows[None, :], cols[:, None], extent, scales,
            CAUSAL, WINDOW, SOFTCAP, CAUSAL or WINDOW, COMPUTE,
        )  # [BLOCK_COL, BLOCK_ROW]  # fmt: skip
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee", out_dtype=COMPUTE)
        dropped = p
        if DROPOUT:
            keep = tl.trans(keep_tile(counter, rows, first_col, BLOCK_COL))
            dropped = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision="ieee", out_dtype=COMPUTE)
        ds = score_gradient(p, bounded, dp, delta[None, :], SOFTCAP)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee", out_dtype=COMPUTE)
    return dk, dv


@triton.jit
def attention_key_gradient_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, rng_ptr, cu_q_ptr, cu_k_ptr, dk_ptr, dv_ptr,
    stride_dout_batch, stride_dout_token, stride_dout_head, stride_dout_dim,
    stride_q_batch, stride_q_token, stride_q_head, stride_q_dim,
    stride_k_batch, stride_k_token, stride_k_head, stride_k_dim,
    stride_v_batch, stride_v_token, stride_v_head, stride_v_dim,
    num_tokens, num_keys, num_heads, group, num_docs, window, scale, pre_scale, post_scale,
    threshold, keep_scale, head_offset, sample_offset,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_DOCS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of keys, key heads, batch). dk and dv are contiguous [B, S, KV, K or Kv]."""
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    first_col, col_start, num_cols, row_start, num_rows = find_tile(
        cu_k_ptr, cu_q_ptr, num_keys, num_tokens, num_docs, tl.program_id(0), PACKED, BLOCK_COL, BLOCK_DOCS
    )
    if first_col < num_cols:
        batch_64 = batch.to(tl.int64)
        kv_64 = kv_head.to(tl.int64)
        row_64 = tl.zeros((), tl.int64) + row_start
        col_64 = tl.zeros((), tl.int64) + col_start
        num_kv_heads = num_heads // group
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
        low, high = row_range(first_col, num_rows, num_cols, window, CAUSAL, WINDOW, BLOCK_ROW, BLOCK_COL)
        for member in range(group):
            head = kv_head * group + member
            head_64 = head.to(tl.int64)
            q_head = q_ptr + batch_64 * stride_q_batch + head_64 * stride_q_head + row_64 * stride_q_token
            dout_head = dout_ptr + batch_64 * stride_dout_batch + head_64 * stride_dout_head
            dout_head += row_64 * stride_dout_token
            stats = (batch_64 * num_heads + head_64) * num_tokens + row_64
            counter = (key_low, key_high, batch + sample_offset, head + head_offset, row_start, threshold)
            dk, dv = _key_gradient(
                dk, dv, k, v, (q_head, stride_q_token, stride_q_dim), (dout_head, stride_dout_token, stride_dout_dim),
                (lse_ptr + stats, delta_ptr + stats), cols, first_col, extent, low, high, (pre_scale, post_scale),
                counter, keep_scale, CAUSAL, WINDOW, SOFTCAP, DROPOUT, HEAD_DIM, VALUE_DIM, BLOCK_HEAD,
                BLOCK_VALUE, BLOCK_ROW, BLOCK_COL, COMPUTE,
            )  # fmt: skip
        store_rows(
            dk_ptr + place * HEAD_DIM, dk * scale, cols, num_cols, num_kv_heads * HEAD_DIM, HEAD_DIM, BLOCK_HEAD
        )
        store_rows(dv_ptr + place * VALUE_DIM, dv, cols, num_cols, num_kv_heads * VALUE_DIM, VALUE_DIM, BLOCK_VALUE)
