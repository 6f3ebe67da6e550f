"""The losses on a CUDA device: against plain torch, twice, in a CUDA graph, beyond 2^31 logits, and their memory."""

import pytest
import torch

from plait.kernels import cross_entropy, linear_cross_entropy, loss_chunks, merge_stats
from tests.cases import captured, normal
from tests.loss_cases import run_into, run_once, targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


def _inputs(rows, cols, classes, dtype):
    """x, weight (logits have a deviation of 1) and targets, a third of them ignored."""
    x, weight = normal(rows, cols, dtype=dtype), normal(classes, cols, seed=1).mul_(cols**-0.5).to(dtype)
    target = targets(rows, classes=classes)
    target[::3] = -100
    return x.to(DEVICE), weight.to(DEVICE), target.to(DEVICE)


def small_chunks(monkeypatch):
    """Chunks of 128 tokens and slices of 128 classes."""
    for name in ("_GPU_CHUNK_ROWS", "_GPU_MOST_ROWS", "_GPU_SLICE_COLS"):
        monkeypatch.setattr(loss_chunks, name, 128)
    monkeypatch.setattr(loss_chunks, "_GPU_LEAST_ELEMENTS", 0)


def _gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [50_257, 32_000])
@pytest.mark.parametrize("early", [False, True])
def test_at_most_twice_as_far_off_as_plain_torch_and_the_same_twice(dtype, classes, early, monkeypatch):
    small_chunks(monkeypatch)
    *inputs, target = _inputs(300, 256, classes, dtype)
    plain = torch.nn.functional.cross_entropy
    ours = [
        _gradients(lambda x, w: linear_cross_entropy(x, w, target, grad_in_forward=early), *inputs) for _ in range(2)
    ]
    theirs = _gradients(lambda x, w: plain(x @ w.t(), target), *inputs)
    exact = _gradients(lambda x, w: plain(x @ w.t(), target), *(x.double() for x in inputs))
    for mine, again, other, want in zip(*ours, theirs, exact, strict=True):
        assert torch.equal(mine, again)
        step = torch.finfo(dtype).eps * want.norm()
        assert (mine.double() - want).norm() <= 2.0 * (other.double() - want).norm() + step


def test_more_than_two_billion_logits():
    """17,000 rows of 131,072: a row beyond element 2^31 has the loss and gradient that it has alone."""
    logits = torch.randn(17_000, 131_072, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    target = targets(17_000, classes=131_072).to(DEVICE)
    value = cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(value.sum(), logits)
    last = logits[-1:].detach().clone().requires_grad_()
    alone = cross_entropy(last, target[-1:], reduction="none")
    assert torch.equal(value[-1:], alone)
    assert torch.equal(grad[-1:], torch.autograd.grad(alone.sum(), last)[0])


def test_peak_memory_is_one_chunk_beyond_the_results():
    x, weight, target = _inputs(2048, 128, 128_256, torch.bfloat16)
    dloss, dweight = torch.ones(2048, device=DEVICE), torch.zeros_like(weight, dtype=torch.float32)
    loss_chunks.head_stats(x, weight, target, 0, 0.0)  # compiles, and makes cuBLAS's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lse = merge_stats(loss_chunks.head_stats(x, weight, target, 0, 0.0))[0]
    loss_chunks.head_grad(x, weight, target, lse, dloss, dweight, 0, 128_256, 0.0, 0.0, 0.0, True)
    # 6 bytes per logit of 768 rows, dx, and 64 MiB for workspaces and numbers per token.
    assert torch.cuda.max_memory_allocated() - before <= 6 * 768 * 128_256 + x.nbytes + (64 << 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_made_in_the_forward_have_the_bits_of_those_made_in_the_backward(dtype, monkeypatch):
    small_chunks(monkeypatch)
    x, weight, target = _inputs(300, 256, 50_257, dtype)
    late, early = (run_into(target, x, weight, **form) for form in ({}, {"loss_grad": 1.0}))
    assert all(torch.equal(a, b) for a, b in zip(late, early, strict=True))
    new = run_once(linear_cross_entropy, target, x, weight, grad_in_forward=True)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(new, early, strict=True))


@pytest.mark.parametrize(
    "form", [{"weight_grad_out": True}, {"weight_grad_out": True, "loss_grad": 1.0}, {"grad_in_forward": False}]
)
def test_peak_memory_is_a_tenth_of_plain_torchs(form):
    """The sizes and forms of docs/kernels.md's table, cuBLAS's workspace beside both: 0.102 for the tightest."""
    x, weight, target = _inputs(8192, 4096, 128_256, torch.bfloat16)
    if "weight_grad_out" in form:
        form = {**form, "weight_grad_out": torch.zeros_like(weight, dtype=torch.float32)}

    def peak(function):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(*leaves).backward()
        return torch.cuda.max_memory_allocated() - before

    theirs = peak(lambda x, w: torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w).float(), target))
    assert peak(lambda x, w: linear_cross_entropy(x, w, target, **form)) <= 0.102 * theirs


def test_a_captured_graph_gives_the_same_bits():
    x, weight, target = _inputs(300, 64, 1000, torch.bfloat16)
    dloss = torch.ones(300, device=DEVICE)

    def step():
        lse = merge_stats(loss_chunks.head_stats(x, weight, target, 0, 5.0))[0]
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        return (
            lse,
            dweight,
            loss_chunks.head_grad(x, weight, target, lse, dloss, dweight, 0, 1000, 0.1, 0.01, 5.0, True),
        )

    want = step()
    graph, got = captured(step)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
