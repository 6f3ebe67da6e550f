"""Philox-4x32-10: random bits that depend on a key and a position only, in plain torch and in Triton, bit for bit.

Not a generator object: there is no state. The key is a mix of the int64 pair `rng = (seed, offset)`; the counter of
an element is (column // 4, row, head, sample) and its word is number column % 4 of the four that one call gives. So
neither tile sizes nor the split over ranks nor recompute can change a mask. Each word counts by its top 24 bits:
probabilities are multiples of 2^-24, exact in fp32.

Source of the rounds and constants: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); the
key mix is the finaliser of splitmix64.
"""

import torch
import triton
import triton.language as tl

_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
# 64-bit constants of splitmix64 as signed int64, since torch has no full uint64 arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_A = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_B = 0x94D049BB133111EB - (1 << 64)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 (wrapping); the shifts are logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_A
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_B
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def philox_key(rng: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(key_low, key_high), 0-dim int64 holding 32 bits each, of `rng` int64 [2] = (seed, offset)."""
    mixed = _mix(_mix(rng[0] + _GOLDEN) + rng[1])
    return mixed & _MASK, (mixed >> 32) & _MASK


def philox_ref(
    key: tuple[torch.Tensor, torch.Tensor],
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four words of 32 bits in int64 per counter; the counters broadcast against each other."""
    key_a, key_b = key
    a, b, c, d = counter
    for _ in range(10):
        # The 64-bit product wraps as int64 but has the right bits.
        product_a, product_b = a * _MULTIPLIER_A, c * _MULTIPLIER_B
        a, b, c, d = (
            ((product_b >> 32) & _MASK) ^ b ^ key_a,
            product_b & _MASK,
            ((product_a >> 32) & _MASK) ^ d ^ key_b,
            product_a & _MASK,
        )
        key_a, key_b = (key_a + _WEYL_A) & _MASK, (key_b + _WEYL_B) & _MASK
    return a, b, c, d


def keep_threshold(p: float) -> int:
    """The number out of 2^24 below which an element is dropped."""
    return round(p * (1 << 24))


def keep_mask_ref(
    rng: torch.Tensor, p: float, samples: range, heads: range, rows: range, cols: range
) -> torch.Tensor:
    """Which elements dropout keeps: bool [samples, heads, rows, cols] of global indices, on rng's device."""

    def axis(values: range, dim: int) -> torch.Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = len(values)
        return torch.arange(values.start, values.stop, device=rng.device).view(shape)

    groups = range(cols.start // 4, (cols.stop + 3) // 4)
    counter = (axis(groups, 3), axis(rows, 2), axis(heads, 1), axis(samples, 0))
    words = torch.stack(philox_ref(philox_key(rng), counter), dim=-1).flatten(-2)
    first = cols.start - 4 * groups.start
    return (words[..., first : first + len(cols)] >> 8) >= keep_threshold(p)


@triton.jit
def philox_mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def philox_load_key(rng_ptr):
    """(key_low, key_high) as uint32 of the int64 pair at rng_ptr."""
    seed = tl.load(rng_ptr).to(tl.uint64, bitcast=True)
    offset = tl.load(rng_ptr + 1).to(tl.uint64, bitcast=True)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = philox_mix(philox_mix(seed + golden) + offset)
    return (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)


@triton.jit
def philox_words(a, b, c, d, key_low, key_high):
    """The four words of the counters (a, b, c, d), each a uint32 block of one shape: ten rounds."""
    zero = a * 0
    for _ in tl.static_range(10):
        low_a, high_a = a * 0xD2511F53, tl.umulhi(a, zero + 0xD2511F53)
        low_c, high_c = c * 0xCD9E8D57, tl.umulhi(c, zero + 0xCD9E8D57)
        a = high_c ^ b ^ key_low
        b = low_c
        c = high_a ^ d ^ key_high
        d = low_a
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return a, b, c, d


@triton.jit
def philox_keep_any(key_low, key_high, sample, head, rows, first_col, threshold, BLOCK_COL: tl.constexpr):
    """`philox_keep` from any first column on: a call for every element, where four share one."""
    cols = first_col + tl.arange(0, BLOCK_COL)
    zero = tl.zeros([rows.shape[0], BLOCK_COL], tl.uint32)
    a = zero + (cols // 4)[None, :].to(tl.uint32)
    b = zero + rows[:, None].to(tl.uint32)
    c = zero + head.to(tl.uint32)
    d = zero + sample.to(tl.uint32)
    a, b, c, d = philox_words(a, b, c, d, key_low, key_high)
    word = zero + (cols % 4)[None, :].to(tl.uint32)
    words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return (words >> 8).to(tl.int32) >= threshold


@triton.jit
def philox_keep(key_low, key_high, sample, head, rows, first_col, threshold, BLOCK_COL: tl.constexpr):
    """bool [len(rows), BLOCK_COL]: which of the columns first_col + [0, BLOCK_COL) are kept; first_col % 4 == 0."""
    groups = first_col // 4 + tl.arange(0, BLOCK_COL // 4)
    zero = tl.zeros([rows.shape[0], BLOCK_COL // 4], tl.uint32)
    a = zero + groups[None, :].to(tl.uint32)
    b = zero + rows[:, None].to(tl.uint32)
    c = zero + head.to(tl.uint32)
    d = zero + sample.to(tl.uint32)
    a, b, c, d = philox_words(a, b, c, d, key_low, key_high)
    # Words a, b, c, d belong to columns 0, 1, 2, 3 of a group.
    words = tl.join(tl.join(a, c), tl.join(b, d)).reshape([rows.shape[0], BLOCK_COL])
    return (words >> 8).to(tl.int32) >= threshold
