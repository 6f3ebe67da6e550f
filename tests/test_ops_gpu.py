"""The ops with a gradient on a CUDA device: beside plain torch, twice, in a CUDA graph, and beyond 2^31 elements.

Not here: the losses (test_loss_gpu.py), the optimizer, norms of lists and embedding's gradient (test_stream_gpu.py).
"""

import functools

import pytest
import torch
from torch.nn import functional

from plait import kernels
from tests.cases import captured, normal
from tests.edges import lay_out

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
HUGE = 1 << 31  # elements: the first that 32 bits with a sign do not count
RNG = (5, -9)


def _gelu_linear(x, weight, bias, residual):
    return functional.gelu(functional.linear(x, weight, bias)) + residual


def _gate(x, weight):
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


def _halves(x, cos, sin):
    first, second = x.chunk(2, -1)
    cos, sin = (t.to(x.dtype).unsqueeze(-2) for t in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@functools.cache  # a captured graph may not copy them from the host
def _tables(num_tokens, num_pairs):
    angles = torch.arange(num_tokens).unsqueeze(1) * 0.01 ** (torch.arange(num_pairs) / num_pairs)
    return angles.cos().to(DEVICE), angles.sin().to(DEVICE)


def _rope(f):
    return lambda q, k: f(q, k, *_tables(q.shape[1], q.shape[3] // 2))


def _scores(q, k, v):
    """Causal, bottom-right aligned, grouped heads, every score stored."""
    num_rows, num_cols, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    seen = torch.ones(num_rows, num_cols, dtype=torch.bool, device=q.device).tril(num_cols - num_rows)
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _summed(f):
    return lambda x, residual, weight: f(x, weight, residual=residual)


# name -> (ours, its oracle, the same in plain torch, shapes). Odd sizes, more than one tile of each.
OPS = {
    "rms_norm": (
        _summed(kernels.rms_norm), _summed(kernels.rms_norm_ref),
        lambda x, r, w: (functional.rms_norm(x + r, w.shape, w, 1e-6), x + r), ((700, 1000), (700, 1000), (1000,)),
    ),
    "layer_norm": (
        kernels.layer_norm, kernels.layer_norm_ref,
        lambda x, w, b: functional.layer_norm(x, w.shape, w, b), ((700, 333), (333,), (333,)),
    ),
    "swiglu": (
        kernels.swiglu, kernels.swiglu_ref,
        lambda x: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], ((70, 2 * 1500),),
    ),
    "geglu": (
        kernels.geglu, kernels.geglu_ref,
        lambda x: functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], ((70, 2 * 1500),),
    ),
    "rope": (
        _rope(kernels.rope), _rope(kernels.rope_ref),
        lambda q, k: tuple(_halves(x, *_tables(q.shape[1], q.shape[3] // 2)) for x in (q, k)),
        ((2, 130, 6, 80), (2, 130, 2, 80)),
    ),
    "linear": (
        lambda x, w, b, r: kernels.linear(x, w, b, activation="gelu", residual=r),
        lambda x, w, b, r: kernels.linear_ref(x, w, b, activation="gelu", residual=r),
        _gelu_linear, ((3, 130, 520), (264, 520), (264,), (3, 130, 264)),
    ),
    "linear, small M and deep K": (
        kernels.linear, kernels.linear_ref, functional.linear, ((5, 8192), (136, 8192)),
    ),
    "linear_swiglu": (kernels.linear_swiglu, kernels.linear_swiglu_ref, _gate, ((390, 520), (2 * 264, 520))),
    "attention": (
        kernels.attention, kernels.attention_ref, _scores, ((2, 300, 4, 128), (2, 330, 2, 128), (2, 330, 2, 128)),
    ),
    "attention, head dims 96 and 64": (
        kernels.attention, kernels.attention_ref, _scores, ((1, 200, 4, 96), (1, 200, 1, 96), (1, 200, 1, 64)),
    ),
    "attention, head dim 192": (kernels.attention, kernels.attention_ref, _scores, ((1, 150, 2, 192),) * 3),
}  # fmt: skip
# Roundings that are ours alone: the value before an activation is kept in 16 bits. In fp32: sums in another order.
SPARE = {"linear": 4.0, "linear_swiglu": 4.0}
SPARE_FP32 = 8.0


def _leaves(shapes, dtype):
    scales = [x[-1] ** -0.5 if len(x) == 2 and i == 1 else 1.0 for i, x in enumerate(shapes)]  # of a weight [out, in]
    values = [normal(*s, seed=i) * scale for i, (s, scale) in enumerate(zip(shapes, scales, strict=True))]
    return [x.to(DEVICE, dtype).requires_grad_() for x in values]


def _run(function, leaves):
    """Outputs and gradients, for gradients of outputs that depend on shapes alone."""
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    grads = [normal(*y.shape, seed=9 + i).to(DEVICE, leaves[0].dtype).to(y.dtype) for i, y in enumerate(found)]
    return [y.detach() for y in found] + list(torch.autograd.grad(found, leaves, grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPS)
def test_at_most_twice_as_far_off_as_plain_torch_and_the_same_twice(name, dtype):
    ours, oracle, plain, shapes = OPS[name]
    leaves = _leaves(shapes, dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    mine, again, theirs = _run(ours, leaves), _run(ours, leaves), _run(plain, leaves)
    for i, (a, b, other, want) in enumerate(zip(mine, again, theirs, _run(oracle, wide), strict=True)):
        assert torch.equal(a, b), f"result {i} differs between two runs"
        spare = SPARE_FP32 if dtype is torch.float32 else SPARE.get(name, 1.0)
        step = spare * torch.finfo(dtype).eps * want.norm()
        error, limit = (a.double() - want).norm(), 2.0 * (other.double() - want).norm() + step
        assert error <= limit, f"result {i} is off by {error:.3e}, plain torch's limit is {limit:.3e}"


@pytest.mark.parametrize("layout", ["moved", "sliced", "stepped", "transposed"])
@pytest.mark.parametrize("name", OPS)
def test_other_layouts_agree_with_contiguous_inputs(name, layout):
    """Off a 16-byte boundary, rows apart by odd numbers, elements apart, transposed: no wide load, no descriptor."""
    ours, _, _, shapes = OPS[name]
    leaves = _leaves(shapes, torch.bfloat16)
    moved = [lay_out(x.detach(), layout).requires_grad_() for x in leaves]
    for a, b in zip(_run(ours, moved), _run(ours, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


ATTENTION = {
    "window": {"window": 33},
    "full, softcap": {"causal": False, "softcap": 2.0},
    "packed": {"cu_seqlens": ((0, 0, 76, 110, 300), (0, 7, 8, 150, 160))},
}


@pytest.mark.parametrize("option", ATTENTION)
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_with_options_agrees_with_the_oracle_and_recomputes_its_bits(option, sinks):
    options = dict(ATTENTION[option])
    if cu := options.get("cu_seqlens"):
        options["cu_seqlens"] = tuple(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in cu)
    options |= {"dropout_p": 0.2, "rng": torch.tensor(RNG, device=DEVICE), "head_offset": 3}
    leaves = _leaves(((1, 300, 4, 64), (1, 160, 2, 64), (1, 160, 2, 64)) + ((4,),) * sinks, torch.float32)

    def calling(f, **more):
        return lambda q, k, v, *sink: f(q, k, v, sinks=sink[0] if sink else None, **options, **more)

    got = _run(calling(kernels.attention), leaves)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    for a, b in zip(got, _run(calling(kernels.attention_ref), wide), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    again = _run(calling(kernels.attention, recompute=True), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_a_captured_forward_and_backward_follow_their_inputs(name):
    ours, _, _, shapes = OPS[name]
    leaves = _leaves(shapes, torch.bfloat16)
    grads = [torch.ones_like(y) for y in _run(ours, leaves)[: -len(leaves)]]

    def call():
        found = ours(*leaves)
        return torch.autograd.grad(found if isinstance(found, tuple) else (found,), leaves, grads)

    graph, found = captured(call)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.5)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True))


def _filled(*shape):
    return torch.empty(shape, device=DEVICE, dtype=torch.bfloat16).normal_()


def _close(a, b):
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.parametrize("op", [kernels.rms_norm, kernels.layer_norm, kernels.swiglu, kernels.geglu])
def test_a_row_beyond_32_bits_is_that_row_alone(op):
    x = _filled(HUGE // 4096 + 3, 4096).requires_grad_()
    last = x[-1:].detach().clone().requires_grad_()
    whole, alone = op(x), op(last)
    dout = torch.ones_like(whole[-1:]).expand_as(whole)
    (grad,), (own,) = torch.autograd.grad(whole, x, dout), torch.autograd.grad(alone, last, torch.ones_like(alone))
    assert torch.equal(whole[-1:], alone) and torch.equal(grad[-1:], own)


def test_a_product_of_rows_beyond_32_bits_is_that_of_those_rows_alone():
    x, weight = _filled(HUGE // 4096 + 3, 4096), _filled(64, 4096) * 2.0**-6
    _close(kernels.linear(x, weight)[-8:], kernels.linear(x[-8:], weight))
    _close(kernels.linear_dgrad(x, weight.t())[-8:], kernels.linear_dgrad(x[-8:], weight.t()))
    _close(kernels.linear_wgrad(x, x[:, :64]).diagonal(), x[:, :64].float().square().sum(0).bfloat16())


def test_rope_and_dropout_beyond_32_bits():
    tokens = HUGE // (32 * 128) + 5
    q, k = _filled(1, tokens, 32, 128), _filled(1, tokens, 1, 128)
    cos, sin = _tables(tokens, 64)
    turned = kernels.rope(q, k, cos, sin)[0][:, -2:]
    assert torch.equal(turned, kernels.rope(q[:, -2:], k[:, -2:], cos[-2:], sin[-2:])[0])
    rng, x = torch.tensor(RNG, device=DEVICE), q.view(1, tokens, 4096)
    dropped = kernels.dropout(x[:, -2:], 0.3, rng, row_offset=tokens - 2)
    assert torch.equal(kernels.dropout(x, 0.3, rng)[:, -2:], dropped)


def test_attention_beyond_32_bits():
    """A window keeps the work small: the last queries see the last keys only."""
    tokens = HUGE // (128 * 128) + 70
    q, k, v = (_filled(1, tokens, 128, 128).requires_grad_() for _ in range(3))
    out = kernels.attention(q, k, v, window=64)
    ends = [x[:, -128:].detach().requires_grad_() for x in (q, k, v)]
    alone = kernels.attention(*ends, window=64)
    _close(out[:, -64:].detach(), alone[:, -64:].detach())
    dout = torch.zeros_like(out)
    dout[:, -64:] = 1.0
    grads, own = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(alone, ends, dout[:, -128:])
    for a, b in zip(grads, own, strict=True):
        _close(a[:, -64:], b[:, -64:])
