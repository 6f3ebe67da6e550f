"""The rope kernel: q and k of any strides turned in one launch, in place or into other tensors.

A program takes one token and a block of heads of q or of k, so that a token's cosines are read once for many heads.
Every pair is read, turned and written by one program. In place this is safe because no element is read by two warps:
a tile has at least as many pairs as its warps have threads (`_num_warps`), and lanes of one warp read before they
write. Interleaved pairs are read as whole lines and taken apart in registers. Offsets are 64-bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from plait.kernels.launch import Launch, next_power_of_two, triton_dtype

# Pairs per program: 16 a thread of 4 warps, four 16-byte reads in flight in 16-bit (derived).
_BLOCK = 2048
_MAX_WARPS = 4


class Angles(NamedTuple):
    """Cosines and sines of pair i at (b, t): element b * batch + t * token + i * pair of each tensor."""

    cos: torch.Tensor
    sin: torch.Tensor
    batch: int
    token: int
    pair: int


@triton.jit
def _copy_rest(
    x_ptr, out_ptr, heads, num_heads, rotary, head_dim, stride_head, stride_dim, out_stride_head, out_stride_dim,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    dims = (rotary + tl.arange(0, BLOCK_REST)).to(tl.int64)
    mask = (heads < num_heads)[:, None] & (dims < head_dim)[None, :]
    x = tl.load(x_ptr + heads[:, None] * stride_head + dims[None, :] * stride_dim, mask=mask)
    tl.store(out_ptr + heads[:, None] * out_stride_head + dims[None, :] * out_stride_dim, x, mask=mask)


@triton.jit
def _turn_halves(
    x_ptr, out_ptr, cos_ptr, sin_ptr, heads, num_heads, num_pairs, sign, stride_pair,
    stride_head, stride_dim, out_stride_head, out_stride_dim,
    COMPUTE: tl.constexpr, BLOCK_PAIR: tl.constexpr,
):  # fmt: skip
    pairs = tl.arange(0, BLOCK_PAIR).to(tl.int64)
    mask = (heads < num_heads)[:, None] & (pairs < num_pairs)[None, :]
    cos = tl.load(cos_ptr + pairs * stride_pair, mask=pairs < num_pairs, other=0.0).to(COMPUTE)[None, :]
    sin = tl.load(sin_ptr + pairs * stride_pair, mask=pairs < num_pairs, other=0.0).to(COMPUTE)[None, :] * sign
    first_ptr = x_ptr + heads[:, None] * stride_head + pairs[None, :] * stride_dim
    first = tl.load(first_ptr, mask=mask, other=0.0).to(COMPUTE)  # [BLOCK_HEAD, BLOCK_PAIR]
    half = tl.cast(num_pairs, tl.int64)
    second = tl.load(first_ptr + half * stride_dim, mask=mask, other=0.0).to(COMPUTE)
    element = out_ptr.dtype.element_ty
    out_ptr += heads[:, None] * out_stride_head + pairs[None, :] * out_stride_dim
    tl.store(out_ptr, (first * cos - second * sin).to(element), mask=mask)
    tl.store(out_ptr + half * out_stride_dim, (second * cos + first * sin).to(element), mask=mask)


@triton.jit
def _turn_neighbours(
    x_ptr, out_ptr, cos_ptr, sin_ptr, heads, num_heads, num_pairs, sign, stride_pair,
    stride_head, stride_dim, out_stride_head, out_stride_dim,
    COMPUTE: tl.constexpr, BLOCK_PAIR: tl.constexpr,
):  # fmt: skip
    pairs = tl.arange(0, BLOCK_PAIR).to(tl.int64)
    dims = tl.arange(0, 2 * BLOCK_PAIR).to(tl.int64)
    mask = (heads < num_heads)[:, None] & (dims < 2 * num_pairs)[None, :]
    cos = tl.load(cos_ptr + pairs * stride_pair, mask=pairs < num_pairs, other=0.0).to(COMPUTE)[None, :]
    sin = tl.load(sin_ptr + pairs * stride_pair, mask=pairs < num_pairs, other=0.0).to(COMPUTE)[None, :] * sign
    x = tl.load(x_ptr + heads[:, None] * stride_head + dims[None, :] * stride_dim, mask=mask, other=0.0)
    first, second = tl.split(tl.reshape(x.to(COMPUTE), [heads.shape[0], BLOCK_PAIR, 2]))
    turned = tl.join(first * cos - second * sin, second * cos + first * sin)
    out = tl.reshape(turned, [heads.shape[0], 2 * BLOCK_PAIR]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads[:, None] * out_stride_head + dims[None, :] * out_stride_dim, out, mask=mask)


@triton.jit
def _turn(
    x_ptr, out_ptr, cos_ptr, sin_ptr, first_head, num_heads, num_pairs, head_dim, sign, stride_pair,
    stride_head, stride_dim, out_stride_head, out_stride_dim,
    INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_PAIR: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    heads = (first_head + tl.arange(0, BLOCK_HEAD)).to(tl.int64)
    if INTERLEAVED:
        _turn_neighbours(
            x_ptr, out_ptr, cos_ptr, sin_ptr, heads, num_heads, num_pairs, sign, stride_pair,
            stride_head, stride_dim, out_stride_head, out_stride_dim, COMPUTE, BLOCK_PAIR,
        )  # fmt: skip
    else:
        _turn_halves(
            x_ptr, out_ptr, cos_ptr, sin_ptr, heads, num_heads, num_pairs, sign, stride_pair,
            stride_head, stride_dim, out_stride_head, out_stride_dim, COMPUTE, BLOCK_PAIR,
        )  # fmt: skip
    if BLOCK_REST > 0:  # 0 in place, where the rest is already there
        _copy_rest(
            x_ptr, out_ptr, heads, num_heads, 2 * num_pairs, head_dim,
            stride_head, stride_dim, out_stride_head, out_stride_dim, BLOCK_REST,
        )  # fmt: skip


@triton.jit
def _rope(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr,
    num_tokens, num_q_heads, num_k_heads, num_pairs, head_dim, sign, stride_batch, stride_token, stride_pair,
    stride_q_batch, stride_q_token, stride_q_head, stride_q_dim,
    stride_k_batch, stride_k_token, stride_k_head, stride_k_dim,
    q_out_batch, q_out_token, q_out_head, q_out_dim, k_out_batch, k_out_token, k_out_head, k_out_dim,
    INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_HEAD: tl.constexpr, BLOCK_PAIR: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    cos_ptr += batch * stride_batch + token * stride_token
    sin_ptr += batch * stride_batch + token * stride_token
    block = tl.program_id(1)
    num_q_blocks = tl.cdiv(num_q_heads, BLOCK_HEAD)
    if block < num_q_blocks:
        _turn(
            q_ptr + batch * stride_q_batch + token * stride_q_token,
            q_out_ptr + batch * q_out_batch + token * q_out_token,
            cos_ptr, sin_ptr, block * BLOCK_HEAD, num_q_heads, num_pairs, head_dim, sign, stride_pair,
            stride_q_head, stride_q_dim, q_out_head, q_out_dim,
            INTERLEAVED, COMPUTE, BLOCK_HEAD, BLOCK_PAIR, BLOCK_REST,
        )  # fmt: skip
    else:
        _turn(
            k_ptr + batch * stride_k_batch + token * stride_k_token,
            k_out_ptr + batch * k_out_batch + token * k_out_token,
            cos_ptr, sin_ptr, (block - num_q_blocks) * BLOCK_HEAD, num_k_heads, num_pairs, head_dim, sign,
            stride_pair, stride_k_head, stride_k_dim, k_out_head, k_out_dim,
            INTERLEAVED, COMPUTE, BLOCK_HEAD, BLOCK_PAIR, BLOCK_REST,
        )  # fmt: skip


def _num_warps(block_head: int, block_pair: int) -> int:
    """8 pairs a thread; at least one pair, so that no two warps hold the same one."""
    return max(1, min(_MAX_WARPS, block_head * block_pair // 256))


def rope_launch(
    q: torch.Tensor, k: torch.Tensor | None, q_out: torch.Tensor, k_out: torch.Tensor | None, angles: Angles,
    num_pairs: int, *, inverse: bool, interleaved: bool,
) -> Launch | None:  # fmt: skip
    """Turns q [B, T, H, K] into q_out and k [B, T, KV, K] into k_out; None where there is nothing to turn.

    An output is its input (in place), or lies elsewhere. Without k only q is turned.
    """
    in_place = q_out is q
    num_batches, num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = 0 if k is None else k.shape[2]
    rest = 0 if in_place else head_dim - 2 * num_pairs
    widest = max(num_q_heads, num_k_heads)
    if not (num_batches * num_tokens * widest and (num_pairs or rest)):
        return None
    block_pair = next_power_of_two(num_pairs)
    block_rest = next_power_of_two(rest) if rest else 0
    block_head = min(next_power_of_two(widest), max(1, _BLOCK // max(block_pair, block_rest)))
    key, key_out = (q, q_out) if k is None or k_out is None else (k, k_out)
    arguments = (
        q, key, q_out, key_out, angles.cos, angles.sin,
        num_tokens, num_q_heads, num_k_heads, num_pairs, head_dim, -1.0 if inverse else 1.0,
        angles.batch, angles.token, angles.pair,
        *q.stride(), *key.stride(), *q_out.stride(), *key_out.stride(),
    )  # fmt: skip
    constants = {
        "INTERLEAVED": interleaved,
        "COMPUTE": triton_dtype(q.dtype),
        "BLOCK_HEAD": block_head,
        "BLOCK_PAIR": block_pair,
        "BLOCK_REST": block_rest,
    }
    blocks = triton.cdiv(num_q_heads, block_head) + triton.cdiv(num_k_heads, block_head)
    grid = (num_batches * num_tokens, blocks)
    return Launch(_rope, grid, arguments, constants, _num_warps(block_head, block_pair))
