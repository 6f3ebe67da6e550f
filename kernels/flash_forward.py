"""Triton: attention forward, and the tile helpers that backward shares. Maths and names: see flash.py.

One program computes BLOCK_ROW queries of one head. It walks the keys that any of its rows sees in three ranges:
a left edge (window), a middle that every row sees whole and that is read without masks, and a right edge (diagonal,
end). Scores are kept in base 2 (times log2 e), so that exp2 is the only exponential. Rows and columns below are those
of the document; `row_start` and `col_start` place it in the packed batch.

Keys and values come by pointers or by TMA descriptors, which end at the document, so that rows behind it read as 0.
The scale costs no instruction of its own where it is positive and there is no softcap (`_attend`). Neither has been
timed on a card; `plait kernels explain attention.forward.128` prints what the compiler makes of them.
"""

import triton
import triton.language as tl

from plait.kernels.philox import philox_keep, philox_load_key


@triton.jit
def find_pair(index, num_tiles, num_heads, num_pairs, together):
    """(number of the tile, head, batch) of a program: (head, batch) pairs in sections of `together`.

    A section does the first tile of all its pairs, then the second: see flash_order.py. 32-bit: programs are fewer.
    """
    section = index // (num_tiles * together)
    first_pair = section * together
    width = tl.minimum(together, num_pairs - first_pair)
    inside = index - first_pair * num_tiles
    pair = first_pair + inside % width
    return inside // width, pair % num_heads, pair // num_heads


@triton.jit
def find_tile(
    cu_own_ptr, cu_other_ptr, num_own, num_other, num_docs, tile,
    PACKED: tl.constexpr, BLOCK_OWN: tl.constexpr, BLOCK_DOCS: tl.constexpr,
):  # fmt: skip
    """(first row of the tile, own start, own length, other start, other length) of the document that holds `tile`.

    Tiles count BLOCK_OWN rows of the own side, document by document; one past the last gives an own length of 0.
    """
    if PACKED:
        docs = tl.arange(0, BLOCK_DOCS)
        valid = docs < num_docs
        starts = tl.load(cu_own_ptr + docs, mask=valid, other=0)
        ends = tl.load(cu_own_ptr + docs + 1, mask=valid, other=0)
        tiles = tl.where(valid, (ends - starts + BLOCK_OWN - 1) // BLOCK_OWN, 0)
        last_tile = tl.cumsum(tiles, 0)
        doc = tl.sum((last_tile <= tile).to(tl.int32), 0)
        first_tile = tl.sum(tl.where(docs < doc, tiles, 0), 0)
        inside = doc < num_docs
        doc = tl.minimum(doc, num_docs - 1)
        own_start = tl.load(cu_own_ptr + doc)
        other_start = tl.load(cu_other_ptr + doc)
        own_length = tl.where(inside, tl.load(cu_own_ptr + doc + 1) - own_start, 0)
        return (
            (tile - first_tile) * BLOCK_OWN, own_start, own_length,
            other_start, tl.load(cu_other_ptr + doc + 1) - other_start,
        )  # fmt: skip
    else:
        return tile * BLOCK_OWN, 0, num_own, 0, num_other


@triton.jit
def load_rows(base_ptr, rows, num_rows, stride_row, stride_dim, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """[len(rows), BLOCK_WIDTH]; rows outside [0, num_rows) and channels past WIDTH are 0."""
    dims = tl.arange(0, BLOCK_WIDTH)
    ptrs = base_ptr + rows.to(tl.int64)[:, None] * stride_row + dims.to(tl.int64)[None, :] * stride_dim
    mask = (rows < num_rows)[:, None]
    if WIDTH != BLOCK_WIDTH:
        mask = mask & (dims < WIDTH)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def row_source(
    base_ptr, num_rows, stride_row, stride_dim, DESCRIPTORS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """What load_tile reads tiles of BLOCK_ROWS rows from: a TMA descriptor, or pointer and strides."""
    if DESCRIPTORS:
        return tl.make_tensor_descriptor(base_ptr, [num_rows, WIDTH], [stride_row, 1], [BLOCK_ROWS, BLOCK_WIDTH])
    else:
        return base_ptr, stride_row, stride_dim


@triton.jit
def load_tile(
    source, first, rows, num_rows, DESCRIPTORS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """The tile whose rows are first + [0, BLOCK_ROWS), also given as `rows`; outside of the source it is 0."""
    if DESCRIPTORS:
        return source.load([first, 0])
    else:
        base_ptr, stride_row, stride_dim = source
        return load_rows(base_ptr, rows, num_rows, stride_row, stride_dim, WIDTH, BLOCK_WIDTH)


@triton.jit
def store_rows(base_ptr, value, rows, num_rows, stride_row, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    dims = tl.arange(0, BLOCK_WIDTH)
    ptrs = base_ptr + rows.to(tl.int64)[:, None] * stride_row + dims[None, :]
    mask = (rows < num_rows)[:, None] & (dims < WIDTH)[None, :]
    tl.store(ptrs, value.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bound_scores(products, pre_scale, post_scale, SOFTCAP: tl.constexpr):
    """(scores in base 2, tanh of the softcap or the scores again) from q k^T."""
    scaled = products * pre_scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), with 2 log2 e folded into exp2; exact at both ends.
        bounded = 1.0 - 2.0 / (tl.exp2(scaled * 2.8853900817779268) + 1.0)
        return bounded * post_scale, bounded
    else:
        return scaled, scaled


@triton.jit
def score_tile(left, right, scales, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr):
    """(scores in base 2, tanh of the softcap or the scores again) of left right^T; scales as the launcher gives."""
    products = tl.dot(left, tl.trans(right), input_precision="ieee", out_dtype=COMPUTE)
    pre_scale, post_scale = scales
    return bound_scores(products, pre_scale, post_scale, SOFTCAP)


@triton.jit
def visible(rows, cols, extent, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """bool: whether a row that exists sees a key: bottom-right aligned causal mask, window, end of the keys.

    `rows` and `cols` are 2-D and broadcast against each other; extent = (rows, keys, window) of the document.
    """
    num_rows, num_cols, window = extent
    last = rows + (num_cols - num_rows)  # the key on the row's diagonal
    if CAUSAL:
        seen = cols <= last
    else:
        seen = cols < num_cols
    if WINDOW:
        seen = seen & (cols > last - window)
        if not CAUSAL:
            seen = seen & (cols < last + window)
    return seen


@triton.jit
def keep_tile(counter, rows, first_col, BLOCK_COL: tl.constexpr):
    """bool [rows, BLOCK_COL]: what is kept; counter = (key_low, key_high, sample, head, row_start, threshold)."""
    key_low, key_high, sample, head, row_start, threshold = counter
    return philox_keep(key_low, key_high, sample, head, row_start + rows, first_col, threshold, BLOCK_COL)


@triton.jit
def key_range(
    first_row, num_rows, num_cols, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """(low, full_low, full_high, high): [low, high) are seen by some row of a tile, [full_low, full_high) by all.

    All but `high` are multiples of BLOCK_COL.
    """
    last = first_row + (num_cols - num_rows)  # the diagonal of the first row
    low = 0
    full_low = 0
    high = num_cols
    full_high = num_cols
    if CAUSAL:
        high = tl.minimum(high, last + BLOCK_ROW)
        full_high = tl.minimum(full_high, last + 1)
    if WINDOW:
        high = tl.minimum(high, last + BLOCK_ROW - 1 + window)
        full_high = tl.minimum(full_high, last + window)
        low = tl.maximum(last - window + 1, 0) // BLOCK_COL * BLOCK_COL
        full_low = (tl.maximum(last + BLOCK_ROW - window, 0) + BLOCK_COL - 1) // BLOCK_COL * BLOCK_COL
    high = tl.maximum(high, 0)
    full_high = tl.maximum(full_high, 0) // BLOCK_COL * BLOCK_COL
    end = (high + BLOCK_COL - 1) // BLOCK_COL * BLOCK_COL
    low = tl.minimum(low, end)
    full_low = tl.minimum(tl.maximum(full_low, low), end)
    full_high = tl.minimum(tl.maximum(full_high, full_low), end)
    return low, full_low, full_high, high


@triton.jit
def _scaled(scores, scales, FOLDED: tl.constexpr):
    if FOLDED:
        return scores * scales[0]
    else:
        return scores


@triton.jit
def _attend(
    acc, top, total, q, keys, values, rows, extent, low, high, scales, counter, keep_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr, MASKED: tl.constexpr,
    FOLDED: tl.constexpr, DESCRIPTORS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_COL: tl.constexpr, COMPUTE: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Folds keys [low, high) into (acc, top, total): out before division, maximum score, sum of exponentials.

    keys and values are what row_source gives. FOLDED (a positive scale, no softcap): the maximum is taken before the
    scale, which then costs nothing: it is part of the fused multiply-add in front of exp2.
    """
    num_cols = extent[1]
    for first_col in tl.range(low, high, BLOCK_COL, warp_specialize=SPECIALIZED):
        cols = first_col + tl.arange(0, BLOCK_COL)
        k = load_tile(keys, first_col, cols, num_cols, DESCRIPTORS, HEAD_DIM, BLOCK_HEAD)
        if FOLDED:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=COMPUTE)  # [BLOCK_ROW, BLOCK_COL]
        else:
            scores, _ = score_tile(q, k, scales, SOFTCAP, COMPUTE)
        if MASKED:
            seen = visible(rows[:, None], cols[None, :], extent, CAUSAL, WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, _scaled(tl.max(scores, 1), scales, FOLDED))
        # A row that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(_scaled(scores, scales, FOLDED) - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(keep_tile(counter, rows, first_col, BLOCK_COL), p * keep_scale, 0.0)
        v = load_tile(values, first_col, cols, num_cols, DESCRIPTORS, VALUE_DIM, BLOCK_VALUE)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee", out_dtype=COMPUTE)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=("num_tiles", "num_pairs", "together"))
def attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, rng_ptr, cu_q_ptr, cu_k_ptr, out_ptr, lse_ptr,
    stride_q_batch, stride_q_token, stride_q_head, stride_q_dim,
    stride_k_batch, stride_k_token, stride_k_head, stride_k_dim,
    stride_v_batch, stride_v_token, stride_v_head, stride_v_dim,
    num_tokens, num_keys, num_heads, group, num_docs, window, pre_scale, post_scale,
    threshold, keep_scale, head_offset, sample_offset, num_tiles, num_pairs, together,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_DOCS: tl.constexpr,
    COMPUTE: tl.constexpr, FOLDED: tl.constexpr, DESCRIPTORS: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * heads * batch). out is contiguous [B, T, H, Kv], lse [B, H, T]."""
    number, head, batch = find_pair(tl.program_id(0), num_tiles, num_heads, num_pairs, together)
    tile = num_tiles - 1 - number  # later tiles see more keys under a causal mask: they start first
    first_row, row_start, num_rows, col_start, num_cols = find_tile(
        cu_q_ptr, cu_k_ptr, num_tokens, num_keys, num_docs, tile, PACKED, BLOCK_ROW, BLOCK_DOCS
    )
    if first_row < num_rows:
        batch_64 = batch.to(tl.int64)
        head_64 = head.to(tl.int64)
        kv_head = (head // group).to(tl.int64)
        row_64 = tl.zeros((), tl.int64) + row_start
        col_64 = tl.zeros((), tl.int64) + col_start
        q_ptr += batch_64 * stride_q_batch + head_64 * stride_q_head + row_64 * stride_q_token
        k_ptr += batch_64 * stride_k_batch + kv_head * stride_k_head + col_64 * stride_k_token
        v_ptr += batch_64 * stride_v_batch + kv_head * stride_v_head + col_64 * stride_v_token
        out_ptr += ((batch_64 * num_tokens + row_64) * num_heads + head_64) * VALUE_DIM
        lse_ptr += (batch_64 * num_heads + head_64) * num_tokens + row_64

        rows = first_row + tl.arange(0, BLOCK_ROW)
        # The group of warps that loads takes descriptors alone, for q too.
        queries = row_source(
            q_ptr, num_rows, stride_q_token, stride_q_dim, SPECIALIZED, HEAD_DIM, BLOCK_ROW, BLOCK_HEAD
        )
        q = load_tile(queries, first_row, rows, num_rows, SPECIALIZED, HEAD_DIM, BLOCK_HEAD)
        acc = tl.zeros([BLOCK_ROW, BLOCK_VALUE], COMPUTE)
        top = tl.full([BLOCK_ROW], float("-inf"), COMPUTE)
        total = tl.zeros([BLOCK_ROW], COMPUTE)
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
        if SPECIALIZED:  # the compiler splits a loop among groups of warps, but no second one beside it
            full_high = low
        else:
            if WINDOW:
                acc, top, total = _attend(
                    acc, top, total, q, keys, values, rows, extent, low, full_low, scales, counter, keep_scale,
                    CAUSAL, WINDOW, SOFTCAP, DROPOUT, True, FOLDED, DESCRIPTORS,
                    HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE, BLOCK_COL, COMPUTE, False,
                )  # fmt: skip
            acc, top, total = _attend(
                acc, top, total, q, keys, values, rows, extent, full_low, full_high, scales, counter, keep_scale,
                CAUSAL, WINDOW, SOFTCAP, DROPOUT, False, FOLDED, DESCRIPTORS,
                HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE, BLOCK_COL, COMPUTE, False,
            )  # fmt: skip
        acc, top, total = _attend(
            acc, top, total, q, keys, values, rows, extent, full_high, high, scales, counter, keep_scale,
            CAUSAL, WINDOW, SOFTCAP, DROPOUT, True, FOLDED, DESCRIPTORS,
            HEAD_DIM, VALUE_DIM, BLOCK_HEAD, BLOCK_VALUE, BLOCK_COL, COMPUTE, SPECIALIZED,
        )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(COMPUTE) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            decay = tl.exp2(top - new_top)
            acc *= decay[:, None]
            total = total * decay + tl.exp2(sink - new_top)
            top = new_top
        dead = total == 0.0
        total = tl.where(dead, 1.0, total)
        lse = tl.where(dead, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
        out = acc * (1.0 / total)[:, None]
        store_rows(out_ptr, out, rows, num_rows, num_heads * VALUE_DIM, VALUE_DIM, BLOCK_VALUE)
        tl.store(lse_ptr + rows, lse, mask=rows < num_rows)
