"""adamw_, l2_norm, dropout and embedding on a CUDA device: against the oracles, twice, and in a CUDA graph."""

import pytest
import torch

from plait.kernels import adamw_, adamw_ref, dropout, dropout_ref, embedding, embedding_wgrad, l2_norm
from plait.kernels.rounding import stochastic_round_ref
from tests.cases import captured, normal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
NUMBERS = dict(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
# One body with a tail, small ones, several chunks, nothing.
SHAPES = ((4099,), (64, 64), (), (300, 257), (0,), (17,), (1 << 20,))


def _lists(dtype=torch.bfloat16):
    """Parameters, gradients, moments, masters; the last parameter's tensors are strided."""
    roles = (dtype, torch.float32, torch.float32, torch.float32, torch.float32)
    lists = [
        [normal(*s, dtype=d, seed=10 * i + k).to(DEVICE) for i, s in enumerate(SHAPES)] for k, d in enumerate(roles)
    ]
    for tensors, dtype_of_role in zip(lists, roles, strict=True):
        tensors.append(normal(40, 30, dtype=dtype_of_role).to(DEVICE)[:, ::2])
    lists[3] = [v.square() for v in lists[3]]
    return lists


def _clone(lists):
    return [[x.clone() for x in some] for some in lists]


def _equal(first, second):
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("rounded", [False, True])
def test_adamw_agrees_with_the_oracle_and_with_itself(rounded):
    """Products and sums may be fused on the device: moments and weights within 4 ulp of fp32 numbers of order 1."""
    rng = torch.tensor([5, 9], device=DEVICE) if rounded else None
    starts = [100 * i for i in range(len(SHAPES) + 1)]
    before, runs = _lists(), []
    for _ in range(2):
        lists = _clone(before)
        scale = torch.tensor(0.5, device=DEVICE)
        adamw_(
            *lists, step=3, lr=0.01, grad_scale=scale, rng=rng, first_indices=starts if rounded else None, **NUMBERS
        )
        runs.append(lists)
    assert _equal(*runs)
    for i, row in enumerate(zip(*before, strict=True)):
        want = adamw_ref(*(x.cpu() for x in row), step=3, lr=0.01, grad_scale=0.5, **NUMBERS)
        got = [some[i].cpu() for some in runs[0]]
        for a, b in zip((got[2], got[3], got[4]), want[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=4 * 2.0**-23, atol=4 * 2.0**-23)
        if rng is None:
            assert torch.equal(got[0], got[4].to(torch.bfloat16))
        else:
            assert torch.equal(got[0], stochastic_round_ref(got[4], torch.bfloat16, rng.cpu(), starts[i]))


def test_norm_agrees_with_fp64_and_with_itself():
    tensors = [x for some in _lists()[:2] for x in some]
    got = l2_norm(tensors)
    assert torch.equal(got, l2_norm(tensors))
    want = sum(x.double().square().sum() for x in tensors).sqrt()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_has_the_bits_of_the_oracle(dtype):
    x, rng = normal(3, 70, 530, dtype=dtype), torch.tensor([3, 4])
    for view in (x, x.mT, x[:, ::2], x[:, :1].expand(3, 7, 530)):
        for col_offset in (0, 3):
            got = dropout(view.to(DEVICE), 0.3, rng.to(DEVICE), row_offset=5, col_offset=col_offset)
            assert torch.equal(got.cpu(), dropout_ref(view, 0.3, rng, row_offset=5, col_offset=col_offset))


def test_embedding_and_its_gradient():
    tokens = torch.randint(0, 90, (5000,), generator=torch.Generator().manual_seed(0))
    tokens[1000:4000] = 7  # one run of many windows
    weight, dout = normal(80, 600, dtype=torch.bfloat16), normal(5000, 600, dtype=torch.bfloat16)
    rows = embedding(tokens.to(DEVICE), weight.to(DEVICE), vocab_start=5)
    assert torch.equal(rows.cpu(), embedding(tokens, weight, vocab_start=5))
    want = torch.ones(80, 600, dtype=torch.float64)
    inside = (tokens >= 5) & (tokens < 85)
    want.index_add_(0, tokens[inside] - 5, dout[inside].double())
    runs = []
    for _ in range(2):
        out = torch.ones(80, 600, device=DEVICE)
        runs.append(embedding_wgrad(tokens.to(DEVICE), dout.to(DEVICE), out, vocab_start=5, accumulate=True).cpu())
    assert torch.equal(*runs)
    torch.testing.assert_close(runs[0].double(), want, rtol=1e-5, atol=1e-3)


def test_a_graph_steps_adamw_with_the_step_and_rate_of_each_replay():
    before = _lists()
    mine, step = _clone(before), torch.tensor(1, device=DEVICE)
    lr, rng = torch.tensor(0.01, dtype=torch.float64, device=DEVICE), torch.tensor([5, 9], device=DEVICE)
    graph, _ = captured(lambda: adamw_(*mine, step=step, lr=lr, rng=rng, **NUMBERS))
    for some, kept in zip(mine, before, strict=True):
        for x, y in zip(some, kept, strict=True):
            x.copy_(y)
    want = _clone(before)
    for number, rate in ((1, 0.01), (2, 0.005), (3, 0.002)):
        step.fill_(number)
        lr.fill_(rate)
        graph.replay()
        adamw_(*want, step=step.clone(), lr=lr.clone(), rng=rng, **NUMBERS)
    assert _equal(mine, want)


def test_graphs_of_the_other_ops_follow_their_inputs():
    x, rng = torch.ones(2, 30, 40, device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    tokens, table = torch.arange(50, device=DEVICE) % 9, normal(9, 40, dtype=torch.float32).to(DEVICE)
    dout, tensors = normal(50, 40, dtype=torch.float32).to(DEVICE), [torch.ones(n, device=DEVICE) for n in range(9)]

    def call():
        sums = embedding_wgrad(tokens, dout, torch.empty(9, 40, device=DEVICE))
        return l2_norm(tensors), dropout(x, 0.5, rng), embedding(tokens, table), sums

    graph, found = captured(call)
    for tensor in tensors:
        tensor.fill_(2.0)
    rng.fill_(7)
    tokens.copy_(tokens.flip(0))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, call(), strict=True))
