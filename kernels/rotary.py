"""rope: rotates pairs (i, i + R/2) of the first R channels of every head, half-split as Hugging Face Llama does.

out[i] = x[i] * cos[i] - x[i + R/2] * sin[i], out[i + R/2] = x[i + R/2] * cos[i] + x[i] * sin[i].
R = 2 * cos.shape[-1] may be less than the head dim; channels from R on pass through. The gradient is the rotation by
the opposite angle, so that nothing but the tables is saved. q and k in one call. Arithmetic in fp32 (fp64 for fp64).
"""

from typing import NamedTuple

import torch

from plait.kernels.launch import below_autograd, check, check_device, check_floating, compute_dtype, register


def _rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    dtype = compute_dtype(x.dtype)
    half = cos.shape[-1]
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)  # [T, 1, R/2] or [B, T, 1, R/2]
    first, second, rest = x.to(dtype).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def rope_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle; differentiable by torch in q and k."""
    return _rotate_ref(q, cos, sin), _rotate_ref(k, cos, sin)


class Tables(NamedTuple):
    """cos and sin as wide as the rotation, the sign in the sine: (cos, cos), (-sin, sin), (sin, -sin)."""

    cos: torch.Tensor  # [T, 1, R] or [B, T, 1, R], fp32 (fp64)
    sin: torch.Tensor
    inverse_sin: torch.Tensor


def tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Tables:
    """The tables of `rotate_` for tensors of `dtype`, from cos and sin [T, R/2] or [B, T, R/2]."""
    wide = compute_dtype(dtype)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    return Tables(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), torch.cat((sin, -sin), -1))


def rotate_(x: torch.Tensor, turn: Tables, inverse: bool = False) -> torch.Tensor:
    """Rotates x[B, T, H, K] in place, for all heads alike, without checks or graph; returns it.

    x * cos + (second half, first half) * sin: no strided half is written.
    """
    rotary = turn.cos.shape[-1]
    part = x if rotary == x.shape[-1] else x[..., :rotary]
    swapped = torch.cat((part[..., rotary // 2 :], part[..., : rotary // 2]), dim=-1)
    sin = turn.inverse_sin if inverse else turn.sin
    if x.dtype is turn.cos.dtype:
        part.mul_(turn.cos).addcmul_(swapped, sin)
    else:
        part.copy_(torch.mul(part, turn.cos).addcmul_(swapped, sin))
    return x


def _rope_kernel(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    turn = tables(cos, sin, q.dtype)
    copies = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    q, k = (rotate_(x, turn, inverse) for x in copies)
    return q, k


def _rope_inplace_kernel(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> None:
    turn = tables(cos, sin, q.dtype)
    rotate_(q, turn, inverse)
    rotate_(k, turn, inverse)


class _Rope(torch.autograd.Function):
    """Saves cos and sin, the caller's; nothing of its own."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, inverse):
        with below_autograd():
            out = _rope(q, k, cos, sin, inverse)
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return out

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *_rope(dq, dk, cos, sin, not ctx.inverse), None, None, None


_rope = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse) -> (Tensor, Tensor)",
    _rope_kernel,
    lambda q, k, cos, sin, inverse: (q.new_empty(q.shape), k.new_empty(k.shape)),
    _Rope.apply,
)
_rope_inplace = register(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool inverse) -> ()",
    _rope_inplace_kernel,
    lambda q, k, cos, sin, inverse: None,
)


def _check(op: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_floating(op, q=q, k=k)
    check_device(op, q, cos=cos, sin=sin)
    check(
        q.dim() == 4 and k.dim() == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3],
        lambda: f"{op}: q {tuple(q.shape)} and k {tuple(k.shape)} must be [B, T, heads, K] and agree in B, T, K",
    )
    check(
        cos.shape == sin.shape and tuple(cos.shape[:-1]) in (tuple(q.shape[1:2]), tuple(q.shape[:2])),
        lambda: f"{op}: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [T, R/2] or [B, T, R/2]",
    )
    check(
        2 * cos.shape[-1] <= q.shape[3],
        lambda: f"{op}: cos of {cos.shape[-1]} pairs needs a head dim of {2 * cos.shape[-1]}, got {q.shape[3]}",
    )


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) rotated: q[B, T, H, K], k[B, T, KV, K], cos and sin [T, R/2] or [B, T, R/2] with R <= K.

    Saves the tables only, which get no gradient. Raises TypeError on dtypes, ValueError on shapes and devices.
    """
    _check("rope", q, k, cos, sin)
    return _rope(q, k, cos, sin, False)


def rope_(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` in place, without a gradient: for tensors that no graph needs. Returns (q, k)."""
    _check("rope_", q, k, cos, sin)
    _rope_inplace(q, k, cos, sin, False)
    return q, k
