"""rope: rotates pairs of the first R channels of every head of q and k, in one launch.

out[i] = x[i] * cos[i] - x[j] * sin[i], out[j] = x[j] * cos[i] + x[i] * sin[i], with j = i + R/2 (half-split, as
Hugging Face's Llama) or, interleaved (as Meta's Llama and GPT-J), the pairs (2 i, 2 i + 1). R = 2 * cos.shape[-1] may
be less than the head dim; channels from R on pass through. The gradient is the rotation by the opposite angle, so
that nothing but the tables is saved. Arithmetic in fp32 (fp64 for fp64). Two accesses per element each way. The
kernel is in rotary_triton.py.
"""

from typing import NamedTuple

import torch

from plait.kernels.launch import check, check_device, check_floating, compute_dtype, use_triton
from plait.kernels.plans import Built, Site, planned
from plait.kernels.registration import below_autograd, register
from plait.kernels.rotary_triton import Angles, rope_launch
from plait.kernels.tables import shares_memory


def _rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    dtype = compute_dtype(x.dtype)
    half = cos.shape[-1]
    cos, sin = cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)  # [T, 1, R/2] or [B, T, 1, R/2]
    turned, rest = x.to(dtype).split((2 * half, x.shape[-1] - 2 * half), dim=-1)
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    dim = -1 if interleaved else -2
    first, second = pairs.unbind(dim)
    out = torch.stack((first * cos - second * sin, second * cos + first * sin), dim).flatten(-2)
    return torch.cat((out, rest), dim=-1).to(x.dtype)


def rope_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle; differentiable by torch in q and k."""
    return _rotate_ref(q, cos, sin, interleaved), _rotate_ref(k, cos, sin, interleaved)


class Tables(NamedTuple):
    """cos and sin as wide as the rotation, the sign in the sine: (cos, cos), (-sin, sin), (sin, -sin).

    Interleaved, the two of a pair are neighbours.
    """

    cos: torch.Tensor  # [T, 1, R] or [B, T, 1, R], fp32 (fp64)
    sin: torch.Tensor
    inverse_sin: torch.Tensor


def tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype, interleaved: bool = False) -> Tables:
    """The tables of `rotate_` for tensors of `dtype`, from cos and sin [T, R/2] or [B, T, R/2]."""
    wide = compute_dtype(dtype)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    if interleaved:
        pairs = ((cos, cos), (-sin, sin), (sin, -sin))
        return Tables(*(torch.stack(pair, -1).flatten(-2) for pair in pairs))
    return Tables(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), torch.cat((sin, -sin), -1))


def rotate_(x: torch.Tensor, turn: Tables, inverse: bool = False, interleaved: bool = False) -> torch.Tensor:
    """Rotates x[B, T, H, K] of any strides in place, for all heads alike, without checks or graph; returns it.

    Plain path: x * cos + (second half, first half) * sin: no strided half is written.
    """
    rotary = turn.cos.shape[-1]
    if use_triton(x):
        sin = turn.sin[..., 1:] if interleaved else turn.sin[..., rotary // 2 :]
        planned(_build_turn, (x, turn.cos, sin), inverse, interleaved)
        torch.autograd.graph.increment_version(x)
        return x
    part = x if rotary == x.shape[-1] else x[..., :rotary]
    if interleaved:
        swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rotary else part
    else:
        swapped = torch.cat((part[..., rotary // 2 :], part[..., : rotary // 2]), dim=-1)
    sin = turn.inverse_sin if inverse else turn.sin
    if x.dtype is turn.cos.dtype:
        part.mul_(turn.cos).addcmul_(swapped, sin)
    else:
        part.copy_(torch.mul(part, turn.cos).addcmul_(swapped, sin))
    return x


def _build_turn(
    site: Site, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, interleaved: bool
) -> Built:
    """x in place by the cosines of `Tables`, and its sines from the first positive one on."""
    batch = cos.stride(0) if cos.dim() == 4 else 0
    angles = Angles(cos, sin, batch, cos.stride(-3), 1 + interleaved)  # one of each pair is read
    launch = rope_launch(
        x, None, x, None, angles, cos.shape[-1] // 2, inverse=inverse, interleaved=interleaved
    )  # fmt: skip
    return Built((), [] if launch is None else [launch])


def _angles(cos: torch.Tensor, sin: torch.Tensor) -> Angles:
    """The caller's tables [T, R/2] or [B, T, R/2], of any strides."""
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    return Angles(cos, sin, cos.stride(0) if cos.dim() == 3 else 0, cos.stride(-2), cos.stride(-1))


def _build(
    site: Site, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool,
    interleaved: bool, in_place: bool,
) -> Built:  # fmt: skip
    q_out, k_out = (q, k) if in_place else (site.empty(q.shape, q.dtype), site.empty(k.shape, k.dtype))
    angles = _angles(cos, sin)
    launch = rope_launch(
        q, k, q_out, k_out, angles, cos.shape[-1], inverse=inverse, interleaved=interleaved
    )  # fmt: skip
    return Built((q_out, k_out), [] if launch is None else [launch])


def _rope_kernel(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if use_triton(q):
        found: tuple[torch.Tensor, torch.Tensor] = planned(_build, (q, k, cos, sin), inverse, interleaved, False)
        return found
    turn = tables(cos, sin, q.dtype, interleaved)
    copies = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    q, k = (rotate_(x, turn, inverse, interleaved) for x in copies)
    return q, k


def _rope_inplace_kernel(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool, interleaved: bool
) -> None:
    check(
        not (q.numel() and k.numel()) or q.data_ptr() != k.data_ptr(),
        lambda: "rope_: q and k begin at one address; expected tensors that share no element",
    )
    if use_triton(q):
        planned(_build, (q, k, cos, sin), inverse, interleaved, True)
        torch.autograd.graph.increment_version((q, k))
        return
    turn = tables(cos, sin, q.dtype, interleaved)
    rotate_(q, turn, inverse, interleaved)
    rotate_(k, turn, inverse, interleaved)


class _Rope(torch.autograd.Function):
    """Saves cos and sin, the caller's; nothing of its own."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, inverse, interleaved):
        with below_autograd():
            out = _rope(q, k, cos, sin, inverse, interleaved)
        ctx.save_for_backward(cos, sin)
        ctx.inverse, ctx.interleaved = inverse, interleaved
        return out

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return *_rope(dq, dk, cos, sin, not ctx.inverse, ctx.interleaved), None, None, None, None


_rope = register(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool inverse, bool interleaved) -> (Tensor, Tensor)",
    _rope_kernel,
    lambda q, k, cos, sin, inverse, interleaved: (q.new_empty(q.shape), k.new_empty(k.shape)),
    _Rope.apply,
)
_rope_inplace = register(
    "rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, bool inverse, bool interleaved) -> ()",
    _rope_inplace_kernel,
    lambda q, k, cos, sin, inverse, interleaved: None,
)


def _check(op: str, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_floating(op, 2, q=q, k=k)
    check_floating(op, 2, cos=cos, sin=sin)
    check_device(op, q, cos=cos, sin=sin)
    of_q, of_k, turned = q.shape, k.shape, cos.shape
    if not len(of_q) == len(of_k) == 4 or of_q[:2] != of_k[:2] or of_q[3] != of_k[3]:
        raise ValueError(
            f"{op}: q {tuple(of_q)} and k {tuple(of_k)} must be [B, T, heads, K] and agree in B, T, K"
        )  # fmt: skip
    if turned != sin.shape or turned[:-1] not in (of_q[1:2], of_q[:2]):
        raise ValueError(f"{op}: cos {tuple(turned)} and sin {tuple(sin.shape)} must be [T, R/2] or [B, T, R/2]")
    if 2 * turned[-1] > of_q[3]:
        raise ValueError(
            f"{op}: cos of {turned[-1]} pairs needs a head dim of {2 * turned[-1]}, got {of_q[3]}"
        )  # fmt: skip


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, k) rotated: q[B, T, H, K], k[B, T, KV, K], cos and sin [T, R/2] or [B, T, R/2] with R <= K.

    Saves the tables only, which get no gradient. Raises TypeError on dtypes, ValueError on shapes and devices.
    """
    _check("rope", q, k, cos, sin)
    return _rope(q, k, cos, sin, False, interleaved)


def rope_(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope` in place, without a gradient: for tensors that no graph needs. Returns (q, k).

    Raises as `rope`, and ValueError where two elements to be written share memory, or a graph would be wrong.
    """
    _check("rope_", q, k, cos, sin)
    recorded = torch.is_grad_enabled()
    for name, x in (("q", q), ("k", k)):
        if recorded and x.requires_grad:
            raise ValueError(
                f"rope_: {name} requires a gradient, which this has not; call rope, or in torch.no_grad()"
            )
        if shares_memory(x):
            raise ValueError(f"rope_: {name} has strides {x.stride()}; broadcast elements cannot be written in place")
    _rope_inplace(q, k, cos, sin, False, interleaved)
    return q, k
