"""Stochastic rounding of fp32 to bf16 or fp16: up with the probability of the distance, so that the mean is kept.

The random word of an element is a function of (rng, its 64-bit index) alone: Philox with counter (index // 4 low,
index // 4 high, 0, 0), word index % 4. So neither the layout of a tensor nor its split can change a bit. Values that
nearest rounding keeps finite stay finite; inf and NaN pass through. Same bits in torch and in Triton.

Also the division and the root rounded to nearest, as torch has them: Triton's own are approximate in fp32.
"""

import torch
import triton
import triton.language as tl

from plait.kernels.philox import philox_key, philox_ref, philox_words

_MASK = 0xFFFFFFFF
# fp16's smallest normal number and the inverse of its subnormal step.
_HALF_NORMAL, _HALF_STEPS = 2.0**-14, 2.0**24


def random_words_ref(rng: torch.Tensor, first_index: int, count: int) -> torch.Tensor:
    """The word of each of `count` elements from `first_index` on: 32 bits in int64, on rng's device."""
    first, last = first_index // 4, (first_index + count + 3) // 4
    group = torch.arange(first, last, device=rng.device)
    zero = torch.zeros_like(group)
    counter = (group & _MASK, (group >> 32) & _MASK, zero, zero)
    words = torch.stack(philox_ref(philox_key(rng), counter), dim=-1).flatten()
    return words[first_index - 4 * first :][:count]


def stochastic_round_ref(
    x: torch.Tensor, dtype: torch.dtype, rng: torch.Tensor, first_index: int = 0
) -> torch.Tensor:
    """fp32 `x` rounded to `dtype`; its first element has index `first_index`. Other dtypes are cast."""
    if x.dtype is not torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    words = random_words_ref(rng, first_index, x.numel()).view(x.shape)
    x = x.contiguous()
    bits = x.view(torch.int32).to(torch.int64) & _MASK
    if dtype is torch.bfloat16:
        kept = (bits + (words >> 16)) & 0xFFFF0000
        rounded = _as_float(kept)
    else:
        kept = (bits + (words >> 19)) & 0xFFFFE000
        steps = x.abs() * _HALF_STEPS
        whole = steps.floor()
        up = ((words >> 8).to(torch.float32) * 2.0**-24) < steps - whole
        small = (whole + up.to(torch.float32)) * (1.0 / _HALF_STEPS)
        rounded = torch.where(x.abs() < _HALF_NORMAL, torch.copysign(small, x), _as_float(kept))
    rounded = rounded.to(dtype)
    return torch.where(rounded.isfinite() & x.isfinite(), rounded, x.to(dtype))


def _as_float(bits: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits in int64 as the fp32 values with those bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@triton.jit
def divide(x, y):
    """x / y rounded to nearest; the precise division of fp32 has no fp64 form."""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def root(x):
    """The square root rounded to nearest."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def random_words(key_low, key_high, first_group, BLOCK: tl.constexpr):
    """uint32 [BLOCK]: the words of the elements 4 * first_group + [0, BLOCK)."""
    groups = (first_group + tl.arange(0, BLOCK // 4)).to(tl.uint64, bitcast=True)
    a = (groups & 0xFFFFFFFF).to(tl.uint32)
    b = (groups >> 32).to(tl.uint32)
    a, b, c, d = philox_words(a, b, a * 0, a * 0, key_low, key_high)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape([BLOCK])


@triton.jit
def stochastic_round(x, words, DTYPE: tl.constexpr):
    """fp32 x rounded to DTYPE, bf16 or fp16, by one word per element."""
    bits = x.to(tl.uint32, bitcast=True)
    if DTYPE == tl.bfloat16:
        rounded = ((bits + (words >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        rounded = ((bits + (words >> 19)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        steps = tl.abs(x) * 16777216.0
        whole = tl.floor(steps)
        up = (words >> 8).to(tl.float32) * (1.0 / 16777216.0) < steps - whole
        small = (whole + up.to(tl.float32)) * (1.0 / 16777216.0)
        small = (small.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)
        rounded = tl.where(tl.abs(x) < 6.103515625e-05, small, rounded)
    nearest = x.to(DTYPE)
    # Past the largest number there is none to round to; the bits of a NaN may have wrapped.
    limit = 3.3895313892515355e38 if DTYPE == tl.bfloat16 else 65504.0
    return tl.where((tl.abs(rounded) <= limit) & (x == x), rounded.to(DTYPE), nearest)
