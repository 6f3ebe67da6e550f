"""Triton: products with a gate: swiglu(x weight^T) in one pass over x, and the gradient of a gated activation.

The second is the input gradient of the layer after the gate: dout weight^T is the gradient of hidden = act(gate) *
up, and never leaves the registers: dgate and dup are stored instead, and hidden where a weight gradient asks for it.
Neither splits K. What a product is made of is in matmul_triton.py, the gate in gated.py.
"""

import triton
import triton.language as tl

from plait.kernels.activations import sigmoid
from plait.kernels.gated import gate_of
from plait.kernels.matmul_triton import block_of, halves_of, load_operand, operand, place_of, product_of, store_tile


@triton.jit
def swiglu_kernel(
    x_ptr, weight_ptr, out_ptr, gate_up_ptr, num_rows, num_cols, num_inner, stride_x_row, stride_x_inner,
    stride_weight_row, stride_weight_inner,
    DESCRIPTORS: tl.constexpr, STORE_DESCRIPTOR: tl.constexpr, X_INNER: tl.constexpr, WEIGHT_INNER: tl.constexpr,
    PRECISION: tl.constexpr, COMPUTE: tl.constexpr, KEEP_PRE: tl.constexpr, SPECIALIZED: tl.constexpr,
    BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (programs,). out [M, F] and gate_up [M, 2F] are contiguous; num_cols is F, weight has 2F rows."""
    x_source = operand(
        x_ptr, num_rows, num_inner, stride_x_row, stride_x_inner, DESCRIPTORS, X_INNER, BLOCK_ROW, BLOCK_INNER
    )
    weight_source = operand(
        weight_ptr, 2 * num_cols, num_inner, stride_weight_row, stride_weight_inner, DESCRIPTORS, WEIGHT_INNER,
        BLOCK_COL, BLOCK_INNER,
    )  # fmt: skip
    out = operand(out_ptr, num_rows, num_cols, num_cols, 1, STORE_DESCRIPTOR, True, BLOCK_ROW, BLOCK_COL)
    num_tiles_row = tl.cdiv(num_rows, BLOCK_ROW)
    num_tiles_col = tl.cdiv(num_cols, BLOCK_COL)
    num_tiles = num_tiles_row * num_tiles_col
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), warp_specialize=SPECIALIZED):
        tile_row, tile_col = place_of(tile, num_tiles_row, num_tiles_col, GROUP)
        first_row = tile_row * BLOCK_ROW
        first_col = tile_col * BLOCK_COL
        gate = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
        up = tl.zeros([BLOCK_ROW, BLOCK_COL], COMPUTE)
        for inner in tl.range(0, num_inner, BLOCK_INNER):
            x = load_operand(
                x_source, first_row, inner, num_rows, num_inner, stride_x_row, stride_x_inner, DESCRIPTORS, X_INNER,
                BLOCK_ROW, BLOCK_INNER,
            )  # fmt: skip
            # A gate tile may reach into up's rows: those columns of it are not stored.
            gate_weight = load_operand(
                weight_source, first_col, inner, 2 * num_cols, num_inner, stride_weight_row, stride_weight_inner,
                DESCRIPTORS, WEIGHT_INNER, BLOCK_COL, BLOCK_INNER,
            )  # fmt: skip
            up_weight = load_operand(
                weight_source, num_cols + first_col, inner, 2 * num_cols, num_inner, stride_weight_row,
                stride_weight_inner, DESCRIPTORS, WEIGHT_INNER, BLOCK_COL, BLOCK_INNER,
            )  # fmt: skip
            gate = tl.dot(x, gate_weight.T, gate, input_precision=PRECISION, out_dtype=COMPUTE)
            up = tl.dot(x, up_weight.T, up, input_precision=PRECISION, out_dtype=COMPUTE)
        if KEEP_PRE:
            store_tile(
                out, gate_up_ptr, gate, first_row, first_col, num_rows, num_cols, 2 * num_cols, False,
                BLOCK_ROW, BLOCK_COL,
            )  # fmt: skip
            store_tile(
                out, gate_up_ptr + num_cols, up, first_row, first_col, num_rows, num_cols, 2 * num_cols, False,
                BLOCK_ROW, BLOCK_COL,
            )  # fmt: skip
        store_tile(
            out, out_ptr, gate * sigmoid(gate) * up, first_row, first_col, num_rows, num_cols, num_cols,
            STORE_DESCRIPTOR, BLOCK_ROW, BLOCK_COL,
        )  # fmt: skip


@triton.jit
def _store_gradients(
    dhidden, gate_up_ptr, grad_ptr, hidden_ptr, first_row, first_col, num_rows, num_cols,
    FORM: tl.constexpr, KEEP_HIDDEN: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr,
):  # fmt: skip
    """dgate and dup of a part of a tile, and with KEEP_HIDDEN what it was the gradient of."""
    rows = first_row + tl.arange(0, BLOCK_ROW)
    mask = (rows < num_rows)[:, None] & (first_col + tl.arange(0, BLOCK_COL) < num_cols)[None, :]
    gate_ptrs = block_of(gate_up_ptr, first_row, first_col, 2 * num_cols, BLOCK_ROW, BLOCK_COL)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(dhidden.dtype)
    up = tl.load(gate_ptrs + num_cols, mask=mask, other=0.0).to(dhidden.dtype)
    value, slope = gate_of(gate, FORM)
    element = grad_ptr.dtype.element_ty
    dhidden = dhidden.to(element).to(dhidden.dtype)  # as if it had been stored
    grad_ptrs = block_of(grad_ptr, first_row, first_col, 2 * num_cols, BLOCK_ROW, BLOCK_COL)
    tl.store(grad_ptrs, (dhidden * up * slope).to(element), mask=mask)
    tl.store(grad_ptrs + num_cols, (dhidden * value).to(element), mask=mask)
    if KEEP_HIDDEN:
        hidden_ptrs = block_of(hidden_ptr, first_row, first_col, num_cols, BLOCK_ROW, BLOCK_COL)
        tl.store(hidden_ptrs, (value * up).to(element), mask=mask)


@triton.jit
def gated_grad_kernel(
    dout_ptr, weight_ptr, gate_up_ptr, grad_ptr, hidden_ptr, num_rows, num_cols, num_inner, stride_dout_row,
    stride_dout_inner, stride_weight_row, stride_weight_inner,
    DESCRIPTORS: tl.constexpr, DOUT_INNER: tl.constexpr, WEIGHT_INNER: tl.constexpr, PRECISION: tl.constexpr,
    COMPUTE: tl.constexpr, FORM: tl.constexpr, KEEP_HIDDEN: tl.constexpr, PARTS: tl.constexpr,
    SPECIALIZED: tl.constexpr, BLOCK_ROW: tl.constexpr, BLOCK_COL: tl.constexpr, BLOCK_INNER: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (programs,). num_cols is F: weight [F, K]; gate_up and grad [M, 2F], hidden [M, F], all contiguous."""
    dout = operand(
        dout_ptr, num_rows, num_inner, stride_dout_row, stride_dout_inner, DESCRIPTORS, DOUT_INNER,
        BLOCK_ROW, BLOCK_INNER,
    )  # fmt: skip
    weight = operand(
        weight_ptr, num_cols, num_inner, stride_weight_row, stride_weight_inner, DESCRIPTORS, WEIGHT_INNER,
        BLOCK_COL, BLOCK_INNER,
    )  # fmt: skip
    num_tiles_row = tl.cdiv(num_rows, BLOCK_ROW)
    num_tiles_col = tl.cdiv(num_cols, BLOCK_COL)
    num_tiles = num_tiles_row * num_tiles_col
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), warp_specialize=SPECIALIZED):
        tile_row, tile_col = place_of(tile, num_tiles_row, num_tiles_col, GROUP)
        first_row = tile_row * BLOCK_ROW
        first_col = tile_col * BLOCK_COL
        acc, _ = product_of(
            dout, weight, first_row, first_col, 0, num_inner, num_rows, num_cols, num_inner,
            stride_dout_row, stride_dout_inner, stride_weight_row, stride_weight_inner,
            DOUT_INNER, WEIGHT_INNER, DESCRIPTORS, PRECISION, COMPUTE, False, BLOCK_ROW, BLOCK_COL, BLOCK_INNER,
        )  # fmt: skip
        parts = (acc,)
        if PARTS == 2:
            parts = halves_of(acc)
        elif PARTS == 4:
            left, right = halves_of(acc)
            parts = halves_of(left) + halves_of(right)
        for i in tl.static_range(PARTS):
            _store_gradients(
                parts[i], gate_up_ptr, grad_ptr, hidden_ptr, first_row, first_col + i * (BLOCK_COL // PARTS),
                num_rows, num_cols, FORM, KEEP_HIDDEN, BLOCK_ROW, BLOCK_COL // PARTS,
            )  # fmt: skip
