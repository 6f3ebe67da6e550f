"""Triton: out[M, N] = epilogue(a[M, K] b[N, K]^T), and the second stage of a split K. See matmul.py.

One persistent program walks tiles in groups of GROUP rows of tiles, so that neighbours in time share operands in L2.
Operands may lie either way round: A_INNER says that K is the unit stride of a (x and dout in forward and dgrad), else
M is (dout in wgrad); B_INNER the same for b. With DESCRIPTORS tiles come by TMA, else by masked loads of any stride.
Sums are fp32 (fp64 for fp64). With SPLIT each program sums a span of K into its own slice of a workspace, and
`finish_kernel` adds the slices in order: no atomics, so that runs agree bit for bit. Offsets are 64-bit.
SPECIALIZED: the compiler gives the loads a group of warps of its own (Tile in matmul_tables.py); no bit changes.

The epilogue, in this order: + bias, keep pre, activation, * activation'(pre), dropout, + residual, + old out.
"""

import triton
import triton.language as tl

from plait.kernels.activations import activated, keep_rows, slope


@triton.jit
def place_of(tile, num_tiles_row, num_tiles_col, GROUP: tl.constexpr):
    """(row, col) of a tile: GROUP rows of tiles are walked column by column."""
    per_group = GROUP * num_tiles_col
    first = tile // per_group * GROUP
    height = tl.minimum(num_tiles_row - first, GROUP)
    inside = tile % per_group
    return first + inside % height, inside // height


@triton.jit
def operand(
    ptr, num_outer, num_inner, stride_outer, stride_inner, DESCRIPTORS: tl.constexpr, INNER: tl.constexpr,
    BLOCK_OUTER: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """What load_operand reads: a descriptor of the matrix, or its pointer."""
    if DESCRIPTORS:
        if INNER:
            return tl.make_tensor_descriptor(
                ptr, [num_outer, num_inner], [stride_outer, 1], [BLOCK_OUTER, BLOCK_INNER]
            )
        else:
            return tl.make_tensor_descriptor(
                ptr, [num_inner, num_outer], [stride_inner, 1], [BLOCK_INNER, BLOCK_OUTER]
            )
    else:
        return ptr


@triton.jit
def load_operand(
    source, outer, inner, num_outer, num_inner, stride_outer, stride_inner, DESCRIPTORS: tl.constexpr,
    INNER: tl.constexpr, BLOCK_OUTER: tl.constexpr, BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """[BLOCK_OUTER, BLOCK_INNER] from (outer, inner) on; 0 outside of the matrix."""
    if DESCRIPTORS:
        if INNER:
            return source.load([outer, inner])
        else:
            return source.load([inner, outer]).T
    else:
        rows = tl.arange(0, BLOCK_OUTER)
        cols = tl.arange(0, BLOCK_INNER)
        start = source + tl.cast(outer, tl.int64) * stride_outer + tl.cast(inner, tl.int64) * stride_inner
        # Transposed by its two ranges and not as a whole: AMD's compiler has no transpose of pointers.
        along, across = rows.to(tl.int64) * stride_outer, cols.to(tl.int64) * stride_inner
        in_rows, in_cols = outer + rows < num_outer, inner + cols < num_inner
        if INNER:
            mask = in_rows[:, None] & in_cols[None, :]
            return tl.load(start + (along[:, None] + across[None, :]), mask=mask, other=0.0)
        else:  # read as it lies, so that the copy to shared memory is wide and asynchronous
            mask = in_cols[:, None] & in_rows[None, :]
            return tl.load(start + (across[:, None] + along[None, :]), mask=mask, other=0.0).T


@triton.jit
def product_of(
    a, b, first_row, first_col, low, high, num_rows, num_cols, num_inner,
    stride_a_row, stride_a_inner, stride_b_col, stride_b_inner,
    A_INNER: tl.constexpr, B_INNER: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr, SUMS: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """(a b^T, with SUMS the sums of a's rows) over [low, high) of K."""
    acc = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
    sums = tl.zeros([BLOCK_ROW], COMPUTE)
    for inner in tl.range(low, high, BLOCK_INNER):
        x = load_operand(
            a, first_row, inner, num_rows, num_inner, stride_a_row, stride_a_inner, DESCRIPTORS, A_INNER,
            BLOCK_ROW, BLOCK_INNER,
        )  # fmt: skip
        w = load_operand(
            b, first_col, inner, num_cols, num_inner, stride_b_col, stride_b_inner, DESCRIPTORS, B_INNER,
            BLOCK_COL, BLOCK_INNER,
        )  # fmt: skip
        acc = tl.dot(x, w.T, acc, input_precision=PRECISION, out_dtype=COMPUTE)
        if SUMS:
            sums += tl.sum(x.to(COMPUTE), 1)
    return acc, sums


@triton.jit
def block_of(base_ptr, first_row, first_col, stride_row, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr):
    """Pointers of a tile whose columns are contiguous."""
    rows = tl.arange(0, BLOCK_ROW).to(tl.int64)
    start = base_ptr + tl.cast(first_row, tl.int64) * stride_row + first_col
    return start + rows[:, None] * stride_row + tl.arange(0, BLOCK_COL)[None, :]


@triton.jit
def epilogue(
    acc, first_row, first_col, num_rows, num_cols, bias_ptr, pre_ptr, residual_ptr, rng_ptr, out_ptr,
    stride_pre_row, stride_residual_row, stride_out_row,
    num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP_PRE: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    RESIDUAL: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """The tile of out, not yet rounded; stores pre."""
    cols = first_col + tl.arange(0, BLOCK_COL)
    mask = (first_row + tl.arange(0, BLOCK_ROW) < num_rows)[:, None] & (cols < num_cols)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + cols, mask=cols < num_cols, other=0.0).to(acc.dtype)[None, :]
    if KEEP_PRE:
        pre_ptrs = block_of(pre_ptr, first_row, first_col, stride_pre_row, BLOCK_ROW, BLOCK_COL)
        tl.store(pre_ptrs, acc.to(pre_ptr.dtype.element_ty), mask=mask)
    acc = activated(acc, ACTIVATION)
    if SLOPE != 0:
        pre_ptrs = block_of(pre_ptr, first_row, first_col, stride_pre_row, BLOCK_ROW, BLOCK_COL)
        acc *= slope(tl.load(pre_ptrs, mask=mask, other=0.0).to(acc.dtype), SLOPE)
    if DROPOUT:
        keep = keep_rows(
            rng_ptr, first_row, first_col, num_tokens, sample_offset, row_offset, col_offset, threshold,
            DROPOUT, BLOCK_ROW, BLOCK_COL,
        )  # fmt: skip
        acc = tl.where(keep, acc * keep_scale, 0.0)
    if RESIDUAL:
        residual_ptrs = block_of(residual_ptr, first_row, first_col, stride_residual_row, BLOCK_ROW, BLOCK_COL)
        acc += tl.load(residual_ptrs, mask=mask, other=0.0).to(acc.dtype)
    if ACCUMULATE:
        out_ptrs = block_of(out_ptr, first_row, first_col, stride_out_row, BLOCK_ROW, BLOCK_COL)
        acc += tl.load(out_ptrs, mask=mask, other=0.0).to(acc.dtype)
    return acc


@triton.jit
def store_tile(
    out, out_ptr, value, first_row, first_col, num_rows, num_cols, stride_row, DESCRIPTOR: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    value = value.to(out_ptr.dtype.element_ty)
    if DESCRIPTOR:
        out.store([first_row, first_col], value)
    else:
        rows = first_row + tl.arange(0, BLOCK_ROW)
        mask = (rows < num_rows)[:, None] & (first_col + tl.arange(0, BLOCK_COL) < num_cols)[None, :]
        tl.store(block_of(out_ptr, first_row, first_col, stride_row, BLOCK_ROW, BLOCK_COL), value, mask=mask)


@triton.jit
def halves_of(x):
    """The left and right half of the columns."""
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    return x.reshape([rows, 2, cols // 2]).permute(0, 2, 1).split()


@triton.jit
def _finish_part(
    acc, out, first_row, first_col, num_rows, num_cols, bias_ptr, pre_ptr, residual_ptr, rng_ptr, out_ptr,
    stride_pre_row, stride_residual_row, stride_out_row,
    num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale, STORE_DESCRIPTOR: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP_PRE: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr,
    RESIDUAL: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    acc = epilogue(
        acc, first_row, first_col, num_rows, num_cols, bias_ptr, pre_ptr, residual_ptr, rng_ptr, out_ptr,
        stride_pre_row, stride_residual_row, stride_out_row,
        num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale,
        BIAS, ACTIVATION, KEEP_PRE, SLOPE, DROPOUT, RESIDUAL, ACCUMULATE, BLOCK_ROW, BLOCK_COL,
    )  # fmt: skip
    store_tile(
        out, out_ptr, acc, first_row, first_col, num_rows, num_cols, stride_out_row, STORE_DESCRIPTOR,
        BLOCK_ROW, BLOCK_COL,
    )  # fmt: skip


@triton.jit
def store_sums(sums_ptr, sums, first_row, num_rows, ACCUMULATE: tl.constexpr, BLOCK_ROW: tl.constexpr):
    rows = first_row + tl.arange(0, BLOCK_ROW)
    if ACCUMULATE:
        sums += tl.load(sums_ptr + rows, mask=rows < num_rows, other=0.0).to(sums.dtype)
    tl.store(sums_ptr + rows, sums.to(sums_ptr.dtype.element_ty), mask=rows < num_rows)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, out_ptr, bias_ptr, pre_ptr, residual_ptr, rng_ptr, sums_ptr, num_rows, num_cols, num_inner,
    stride_a_row, stride_a_inner, stride_b_col, stride_b_inner, stride_out_row, stride_pre_row, stride_residual_row,
    num_splits, steps, num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale,
    A_INNER: tl.constexpr, B_INNER: tl.constexpr, DESCRIPTORS: tl.constexpr, STORE_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    KEEP_PRE: tl.constexpr, SLOPE: tl.constexpr, DROPOUT: tl.constexpr, RESIDUAL: tl.constexpr,
    ACCUMULATE: tl.constexpr, SUMS: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr,
    SPECIALIZED: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (programs,). Each of num_splits parts of K has `steps` blocks; out is [num_splits, M, N] with SPLIT."""
    a = operand(
        a_ptr, num_rows, num_inner, stride_a_row, stride_a_inner, DESCRIPTORS, A_INNER, BLOCK_ROW, BLOCK_INNER
    )
    b = operand(
        b_ptr, num_cols, num_inner, stride_b_col, stride_b_inner, DESCRIPTORS, B_INNER, BLOCK_COL, BLOCK_INNER
    )
    out = operand(
        out_ptr, num_rows, num_cols, stride_out_row, 1, STORE_DESCRIPTOR, True, BLOCK_ROW, BLOCK_COL // PARTS
    )
    num_tiles_row = tl.cdiv(num_rows, BLOCK_ROW)
    num_tiles_col = tl.cdiv(num_cols, BLOCK_COL)
    num_tiles = num_tiles_row * num_tiles_col
    first, num_jobs = tl.program_id(0), num_tiles * num_splits
    for job in tl.range(first, num_jobs, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZED):
        split = job // num_tiles
        tile_row, tile_col = place_of(job % num_tiles, num_tiles_row, num_tiles_col, GROUP)
        first_row = tile_row * BLOCK_ROW
        first_col = tile_col * BLOCK_COL
        low = 0
        high = num_inner
        if SPLIT:
            low = split * steps * BLOCK_INNER
            high = tl.minimum(low + steps * BLOCK_INNER, num_inner)
        if SUMS:
            if tile_col == 0:
                acc, sums = product_of(
                    a, b, first_row, first_col, low, high, num_rows, num_cols, num_inner,
                    stride_a_row, stride_a_inner, stride_b_col, stride_b_inner,
                    A_INNER, B_INNER, DESCRIPTORS, PRECISION, COMPUTE, True, BLOCK_ROW, BLOCK_COL, BLOCK_INNER,
                )  # fmt: skip
                store_sums(
                    sums_ptr + split * num_rows, sums, first_row, num_rows, ACCUMULATE and not SPLIT, BLOCK_ROW
                )
            else:
                acc, _ = product_of(
                    a, b, first_row, first_col, low, high, num_rows, num_cols, num_inner,
                    stride_a_row, stride_a_inner, stride_b_col, stride_b_inner,
                    A_INNER, B_INNER, DESCRIPTORS, PRECISION, COMPUTE, False, BLOCK_ROW, BLOCK_COL, BLOCK_INNER,
                )  # fmt: skip
        else:
            acc, _ = product_of(
                a, b, first_row, first_col, low, high, num_rows, num_cols, num_inner,
                stride_a_row, stride_a_inner, stride_b_col, stride_b_inner,
                A_INNER, B_INNER, DESCRIPTORS, PRECISION, COMPUTE, False, BLOCK_ROW, BLOCK_COL, BLOCK_INNER,
            )  # fmt: skip
        if SPLIT:
            slice_ptr = out_ptr + tl.cast(split, tl.int64) * num_rows * num_cols
            store_tile(
                out, slice_ptr, acc, first_row, first_col, num_rows, num_cols, num_cols, False, BLOCK_ROW, BLOCK_COL
            )
        else:
            # In parts of BLOCK_COL / PARTS columns: the registers of one part at a time.
            parts = (acc,)
            if PARTS == 2:
                parts = halves_of(acc)
            elif PARTS == 4:
                left, right = halves_of(acc)
                parts = halves_of(left) + halves_of(right)
            for i in tl.static_range(PARTS):
                _finish_part(
                    parts[i], out, first_row, first_col + i * (BLOCK_COL // PARTS), num_rows, num_cols, bias_ptr,
                    pre_ptr, residual_ptr, rng_ptr, out_ptr, stride_pre_row, stride_residual_row, stride_out_row,
                    num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale, STORE_DESCRIPTOR,
                    BIAS, ACTIVATION, KEEP_PRE, SLOPE, DROPOUT, RESIDUAL, ACCUMULATE, BLOCK_ROW, BLOCK_COL // PARTS,
                )  # fmt: skip


@triton.jit
def finish_kernel(
    partial_ptr, partial_sums_ptr, out_ptr, bias_ptr, pre_ptr, residual_ptr, rng_ptr, sums_ptr, num_rows, num_cols,
    stride_out_row, stride_pre_row, stride_residual_row, num_splits, num_tokens, sample_offset, row_offset,
    col_offset, threshold, keep_scale,
    COMPUTE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, KEEP_PRE: tl.constexpr, SLOPE: tl.constexpr,
    DROPOUT: tl.constexpr, RESIDUAL: tl.constexpr, ACCUMULATE: tl.constexpr, SUMS: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, column tiles). Adds the num_splits slices of partial [num_splits, M, N] in order."""
    first_row = tl.program_id(0) * BLOCK_ROW
    first_col = tl.program_id(1) * BLOCK_COL
    rows = first_row + tl.arange(0, BLOCK_ROW)
    cols = first_col + tl.arange(0, BLOCK_COL)
    mask = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    ptrs = block_of(partial_ptr, first_row, first_col, num_cols, BLOCK_ROW, BLOCK_COL)
    slice_size = (tl.zeros((), tl.int64) + num_rows) * num_cols
    acc = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
    for split in range(num_splits):
        acc += tl.load(ptrs + split * slice_size, mask=mask, other=0.0)
    acc = epilogue(
        acc, first_row, first_col, num_rows, num_cols, bias_ptr, pre_ptr, residual_ptr, rng_ptr, out_ptr,
        stride_pre_row, stride_residual_row, stride_out_row,
        num_tokens, sample_offset, row_offset, col_offset, threshold, keep_scale,
        BIAS, ACTIVATION, KEEP_PRE, SLOPE, DROPOUT, RESIDUAL, ACCUMULATE, BLOCK_ROW, BLOCK_COL,
    )  # fmt: skip
    store_tile(
        out_ptr, out_ptr, acc, first_row, first_col, num_rows, num_cols, stride_out_row, False, BLOCK_ROW, BLOCK_COL
    )
    if SUMS:
        if first_col == 0:
            sums = tl.zeros([BLOCK_ROW], COMPUTE)
            for split in range(num_splits):
                sums += tl.load(partial_sums_ptr + split * num_rows + rows, mask=rows < num_rows, other=0.0)
            store_sums(sums_ptr, sums, first_row, num_rows, ACCUMULATE, BLOCK_ROW)
