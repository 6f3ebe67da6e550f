"""rope: rotates pairs (i, i + R/2) of the first R channels of every head, half-split as Hugging Face Llama does.

out[i] = x[i] * cos[i] - x[i + R/2] * sin[i], out[i + R/2] = x[i + R/2] * cos[i] + x[i] * sin[i].
R = 2 * cos.shape[-1] may be less than the head dim; channels from R on pass through. The gradient is the rotation by
the opposite angle, so that nothing but the tables is saved. q and k in one call. Arithmetic in fp32 (fp64 for fp64).
"""

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


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + (second half, first half) * sin, with tables as wide as the rotation; no strided write."""
    wide = x.to(cos.dtype)
    rotary = cos.shape[-1]
    part = wide if rotary == x.shape[-1] else wide[..., :rotary]
    swapped = torch.cat((part[..., rotary // 2 :], part[..., : rotary // 2]), dim=-1)
    out = torch.mul(part, cos).addcmul_(swapped, sin)
    if rotary < x.shape[-1]:
        out = torch.cat((out, wide[..., rotary:]), dim=-1)
    return out.to(x.dtype)


def _tables(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, cos) and (-sin, sin), the signs swapped for the inverse: [T, 1, R] or [B, T, 1, R]."""
    dtype = compute_dtype(x.dtype)
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)
    signed = (sin, -sin) if inverse else (-sin, sin)
    return torch.cat((cos, cos), dim=-1), torch.cat(signed, dim=-1)


def _rope_kernel(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = _tables(q, cos, sin, inverse)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rope_inplace_kernel(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> None:
    for x, y in zip((q, k), _rope_kernel(q, k, cos, sin, inverse), strict=True):
        x.copy_(y)


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
