"""Embedding and head over vocabulary shards against plain torch on the whole vocabulary, in fp64.

Cases: (V, tp, options), each with and without sequence parallelism
    12, 1 / 12, 4    divides                          11, 2    one padding row on the last rank
    3, 4             the last rank has no valid row   10, 2    label smoothing over the whole vocabulary
    50257, 2         an odd vocabulary of training    grad_in_forward: both gradients beside the loss
    told: the forward knows the gradient of the sum, and adds the weight's to where it lives
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.kernels import loss_chunks as loss_kernels
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.placement import gather_full
from plait.parallel.random import init_normal_
from plait.parallel.vocab import VocabParallelEmbedding, VocabParallelHead, vocab_rows
from tests.ranks import run_ranks

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
B, T, D = 2, 8, 6
CASES = [
    (12, 1, {}),
    (12, 4, {}),
    (11, 2, {}),
    (3, 4, {}),
    (3, 4, {"label_smoothing": 0.1}),
    (10, 2, {"label_smoothing": 0.1}),
    (11, 2, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 2.0}),
    (12, 1, {"grad_in_forward": True}),
    (3, 4, {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 2.0, "grad_in_forward": True}),
    (11, 2, {"label_smoothing": 0.1, "grad_in_forward": True, "told": True}),
    (3, 4, {"softcap": 2.0, "z_loss": 1e-3, "grad_in_forward": True, "told": True}),
    (50_257, 2, {}),
]


def batch(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets; about a quarter of the targets do not count, unevenly over the samples."""
    generator = torch.Generator().manual_seed(vocab)
    tokens = torch.randint(vocab, (B, T), generator=generator)
    targets = torch.randint(vocab, (B, T), generator=generator)
    targets[1, : T // 2] = -100
    return tokens, targets


def weight_of(vocab: int, name: str) -> torch.Tensor:
    """The full matrix as the layers draw it."""
    layer = VocabParallelEmbedding(vocab, D, Axis.single(), dtype=torch.float64)
    layer.reset_parameters(3, 0.7, name)
    return layer.weight.detach()


def on_ranks(rank: int, tp: int, vocab: int, sequence_parallel: bool, tied: bool, deferring: bool, options: dict):
    """Loss, count, logits, full gradients of embedding and head on this rank; the loss is divided by the count."""
    mesh = Mesh.create(tp=tp) if tp > 1 else Mesh.single()
    axis = mesh.axis("tp")
    told = options.get("told", False)
    options = {name: value for name, value in options.items() if name != "told"}
    common = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
    embed = VocabParallelEmbedding(vocab, D, axis, **common)
    head = VocabParallelHead(D, vocab, axis, tied=embed if tied else None, **common, **options)
    embed.reset_parameters(3, 0.7, "embed")
    if not tied:
        head.reset_parameters(3, 0.7, "head")
    notified = []
    embed.weight.on_grad = notified.append
    embed.weight_grads.deferring = head.weight_grads.deferring = deferring
    tokens, targets = batch(vocab)
    hidden = embed(tokens)
    hidden.retain_grad()
    loss, count = head(torch.tanh(hidden), targets, sum_grad=1.0 / int((targets != -100).sum()) if told else None)
    (loss / count).backward()
    head.weight_grads.run(0), embed.weight_grads.run(0)
    return {
        "loss": loss.detach(),
        "count": count,
        "logits": head.logits(torch.tanh(hidden)),
        "local": head.logits(torch.tanh(hidden), gather=False).shape[-1],
        "dhidden": hidden.grad if not sequence_parallel else None,
        "embed": gather_full(embed.weight.grad, embed.weight.placement, mesh),
        "head": gather_full(head.weight.grad, head.weight.placement, mesh),
        "padding": float(head.weight.grad[head.num_valid :].abs().sum()),
        "notified": len(notified),
    }


def plain(vocab: int, tied: bool, options: dict) -> dict[str, torch.Tensor]:
    """The same by torch on the whole vocabulary."""
    embed = weight_of(vocab, "embed").clone().requires_grad_()
    head = embed if tied else weight_of(vocab, "head").clone().requires_grad_()
    tokens, targets = batch(vocab)
    hidden = F.embedding(tokens, embed)
    logits = torch.tanh(hidden) @ head.t()
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    flat, wanted = logits.view(-1, vocab), targets.view(-1)
    loss = F.cross_entropy(flat, wanted, label_smoothing=options.get("label_smoothing", 0.0), reduction="sum")
    counts = wanted != -100
    loss = loss + options.get("z_loss", 0.0) * (torch.logsumexp(flat, -1).square() * counts).sum()
    dhidden = torch.autograd.grad(loss / counts.sum(), hidden, retain_graph=True)[0]
    (loss / counts.sum()).backward()
    return {
        "loss": loss.detach(),
        "logits": logits.detach(),
        "dhidden": dhidden,
        "embed": embed.grad,
        "head": head.grad,
    }


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocab, tp, options", CASES)
def test_shards_of_a_vocabulary_equal_the_whole(vocab, tp, options, sequence_parallel):
    arguments = (tp, vocab, sequence_parallel, False, False, options)
    wanted = plain(vocab, False, options)
    for result in run_ranks(tp, on_ranks, *arguments) if tp > 1 else [on_ranks(0, *arguments)]:
        assert int(result["count"]) == int((batch(vocab)[1] != -100).sum())
        for name, value in wanted.items():
            if result[name] is not None:
                torch.testing.assert_close(
                    result[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.ranks
def test_ranks_agree_on_the_loss_bit_for_bit():
    results = run_ranks(4, on_ranks, 4, 11, True, False, False, {"label_smoothing": 0.1})
    for name in ("loss", "count", "embed", "head", "logits"):
        assert all(torch.equal(result[name], results[0][name]) for result in results), name


@pytest.mark.ranks
def test_padding_of_the_vocabulary_changes_no_loss_and_gets_no_gradient():
    """Case 30. Eleven classes on two ranks: the twelfth row is padding, whatever is written into it."""
    results = run_ranks(2, on_ranks, 2, 11, False, False, False, {"label_smoothing": 0.1})
    wanted = plain(11, False, {"label_smoothing": 0.1})
    for result, local in zip(results, (6, 5), strict=True):
        torch.testing.assert_close(result["loss"], wanted["loss"], **TOLERANCE)
        assert result["padding"] == 0.0 and result["local"] == local
        assert result["logits"].shape == (B, T, 11)


@pytest.mark.ranks
def test_a_rank_without_a_single_class_takes_part():
    """Three classes on four ranks: the last rank has padding only."""
    results = run_ranks(4, on_ranks, 4, 3, True, False, False, {})
    assert [result["local"] for result in results] == [1, 1, 1, 0]
    assert results[3]["padding"] == 0.0
    torch.testing.assert_close(results[3]["loss"], plain(3, False, {})["loss"], **TOLERANCE)


@pytest.mark.ranks
@pytest.mark.parametrize("once", [False, True, "told"])
@pytest.mark.parametrize("deferring", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_tied_head_adds_to_the_embedding_and_is_announced_once(tp, deferring, once):
    arguments = (tp, 11, True, True, deferring, {"grad_in_forward": bool(once), "told": once == "told"})
    wanted = plain(11, True, {})
    for result in run_ranks(tp, on_ranks, *arguments) if tp > 1 else [on_ranks(0, *arguments)]:
        torch.testing.assert_close(result["embed"], wanted["embed"], **TOLERANCE)
        assert result["notified"] == 1


@pytest.mark.ranks
@pytest.mark.parametrize("once", [False, True, "told"])
@pytest.mark.parametrize("tp", [1, 2])
def test_deferred_weight_gradients_of_the_vocabulary_have_the_same_bits(tp, once):
    results = []
    for deferring in (False, True):
        options = {"label_smoothing": 0.1, "grad_in_forward": bool(once), "told": once == "told"}
        arguments = (tp, 11, True, False, deferring, options)
        results.append(run_ranks(tp, on_ranks, *arguments)[0] if tp > 1 else on_ranks(0, *arguments))
    for name in ("loss", "embed", "head"):
        assert torch.equal(results[0][name], results[1][name]), name


def weighted(rank: int, once: bool) -> list[torch.Tensor]:
    """Weighted sum, total weight, and the gradients of their ratio by the input, the weights and the shard."""
    head = VocabParallelHead(D, 11, Mesh.create(tp=2).axis("tp"), dtype=torch.float64, grad_in_forward=once)
    head.reset_parameters(3, 0.7, "head")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(B, T, dtype=torch.float64, generator=generator).requires_grad_()
    total, share = head(x, batch(11)[1], weights)
    (total / share).backward()
    return [total.detach(), share.detach(), x.grad, weights.grad, head.weight.grad[: head.num_valid]]


@pytest.mark.ranks
@pytest.mark.parametrize("once", [False, True])
def test_weights_per_token_over_two_ranks(once):
    first, second = run_ranks(2, weighted, once)
    head = weight_of(11, "head").requires_grad_()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(B, T, dtype=torch.float64, generator=generator).requires_grad_()
    loss = F.cross_entropy((x @ head.t()).view(-1, 11), batch(11)[1].view(-1), reduction="none").view(B, T)
    share = (weights * (batch(11)[1] != -100)).sum()
    value = (loss * weights).sum()
    (value / share).backward()
    for a, b, want in zip(first, second, (value, share, x.grad, weights.grad), strict=False):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, want.detach(), **TOLERANCE)
    torch.testing.assert_close(torch.cat((first[4], second[4])), head.grad, **TOLERANCE)


def test_weights_that_do_not_fit_the_targets_are_refused():
    head = VocabParallelHead(D, 11, Axis.single())
    with pytest.raises(ValueError, match=r"weight_per_token \(2, 7\) must have targets' shape \(2, 8\)"):
        head(torch.randn(B, T, D), torch.zeros(B, T, dtype=torch.int64), torch.ones(2, 7))


def smoothed(rank: int, logits: torch.Tensor, targets: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Mean loss and the gradient of given logits: the identity is the input of a head that holds them as weights."""
    axis = Mesh.create(tp=2).axis("tp")
    head = VocabParallelHead(logits.shape[0], 10, axis, label_smoothing=0.1)
    start, _, valid = vocab_rows(10, axis)
    with torch.no_grad():
        head.weight.copy_(logits.t()[start : start + valid])
    loss, count = head(torch.eye(logits.shape[0]).unsqueeze(0), targets.unsqueeze(0))
    (loss / count).backward()
    return float(loss.detach() / count), head.weight.grad.t()


@pytest.mark.ranks
def test_label_smoothing_counts_the_whole_vocabulary_not_the_shard():
    """Case 29."""
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 4, 5, 9, 7])
    reference = logits.clone().requires_grad_()
    wanted = F.cross_entropy(reference, targets, label_smoothing=0.1)
    wanted.backward()
    results = run_ranks(2, smoothed, logits, targets)
    assert [loss for loss, _ in results] == pytest.approx([float(wanted.detach())] * 2, abs=1e-6)
    got = torch.cat([grad for _, grad in results], 1)
    torch.testing.assert_close(got, reference.grad, rtol=1e-6, atol=1e-6)


def _tensors(*values: object) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any op returns, and of the largest new one."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = self.new = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.numel = max(self.numel, value.numel())
                if not any(
                    value.untyped_storage()._cdata == x.untyped_storage()._cdata for x in _tensors(args, kwargs)
                ):
                    self.new = max(self.new, value.numel())
        return result


def test_logits_of_all_tokens_never_exist_at_once(monkeypatch):
    """64 tokens by 64 classes would be 4096 numbers; with chunks of 256 nothing larger than the weight exists."""
    monkeypatch.setattr(loss_kernels, "_CHUNK_ELEMENTS", 256)
    head = VocabParallelHead(8, 64, Axis.single())
    head.reset_parameters(0, 0.5, "head")
    x = torch.randn(1, 64, 8, requires_grad=True)
    targets = torch.randint(64, (1, 64))
    with Largest() as largest:
        head(x, targets)[0].backward()
    assert largest.numel <= 64 * 8


def test_a_forward_that_knows_the_gradient_of_the_sum_makes_no_weight_gradient_of_its_own(monkeypatch):
    """16 tokens, 96 classes of width 32: nothing of the weight's size beside the main gradient."""
    monkeypatch.setattr(loss_kernels, "_CHUNK_ELEMENTS", 256)
    head = VocabParallelHead(32, 96, Axis.single(), grad_in_forward=True)
    head.reset_parameters(0, 0.5, "head")
    x, targets = torch.randn(1, 16, 32, requires_grad=True), torch.randint(96, (1, 16))
    grads = []
    for told in (None, 0.5):
        head.weight.main_grad = torch.zeros(96, 32)
        with Largest() as largest:
            (0.5 * head(x, targets, sum_grad=told)[0]).backward()
        assert (largest.new >= 96 * 32) == (told is None)
        grads.append(head.weight.main_grad)
    assert torch.equal(*grads)


def test_a_gradient_of_the_sum_other_than_told_and_a_second_backward_are_refused():
    head = VocabParallelHead(D, 11, Axis.single(), grad_in_forward=True)
    x, targets = torch.randn(1, 4, D, requires_grad=True), torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="gradient of the loss is 1.0; expected 0.5"):
        head(x, targets, sum_grad=0.5)[0].backward()
    value = 0.5 * head(x, targets, sum_grad=0.5)[0]
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward of a forward with sum_grad"):
        value.backward()
    with torch.no_grad():  # an evaluation makes no gradient, whatever it is told
        grad = head.weight.grad.clone()
        head(x, targets, sum_grad=0.5)
        assert torch.equal(head.weight.grad, grad)


def test_shards_start_where_the_box_says_also_past_the_end():
    for size, vocab in ((2, 11), (4, 3), (4, 12), (8, 3)):
        start = 0
        for coord in range(size):
            layer = VocabParallelEmbedding(vocab, D, Axis("tp", size, coord, tuple(range(size))))
            placement = layer.weight.placement
            assert placement.offset[0] == min(start, vocab) and layer.weight.shape[0] == -(-vocab // size)
            start = placement.offset[0] + placement.shape[0]
        assert start == vocab


def test_a_head_refuses_what_does_not_fit():
    embed = VocabParallelEmbedding(11, D, Axis.single())
    with pytest.raises(ValueError, match=r"head \[12, 6\] cannot share an embedding of shape \[11, 6\]"):
        VocabParallelHead(D, 12, Axis.single(), tied=embed)
    head = VocabParallelHead(D, 11, Axis.single())
    with pytest.raises(ValueError, match=r"targets \(2, 7\) do not fit"):
        head(torch.randn(B, T, D), torch.zeros(B, 7, dtype=torch.int64))


def test_tokens_that_do_not_count_are_no_part_of_loss_or_gradient():
    head = VocabParallelHead(D, 11, Axis.single(), dtype=torch.float64)
    head.reset_parameters(0, 0.5, "head")
    x = torch.randn(1, 4, D, dtype=torch.float64, requires_grad=True)
    loss, count = head(x, torch.full((1, 4), -100))
    loss.backward()
    assert float(loss.detach()) == 0.0 and int(count) == 0
    assert float(x.grad.abs().sum()) == 0.0 and float(head.weight.grad.abs().sum()) == 0.0


def test_embedding_rows_are_drawn_by_their_place():
    whole = weight_of(11, "embed")
    local = torch.empty(4, D, dtype=torch.float64)
    layer = VocabParallelEmbedding(11, D, Axis("tp", 3, 2, (0, 1, 2)))
    init_normal_(local, layer.weight.placement, std=0.7, seed=3, name="embed.weight")
    assert torch.equal(local[:3], whole[8:]) and float(local[3].abs().sum()) == 0.0
