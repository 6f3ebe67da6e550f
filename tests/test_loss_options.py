"""Every option of the losses over every way to call them, against torch's own cross entropy in fp64.

An option that one entry point takes and another drops shows as a wrong value or gradient of one row of the table.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F

from plait.kernels import (
    cross_entropy,
    cross_entropy_ref,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_ref,
    linear_cross_entropy_stats,
    loss_chunks,
    merge_stats,
    token_loss,
)
from plait.kernels.entropy import reduce_losses
from plait.kernels.launch import INTERPRETED
from plait.parallel.mesh import Axis
from plait.parallel.vocab import VocabParallelHead
from tests.cases import interpret, needs_interpreter, needs_plain, normal
from tests.loss_cases import exchange_of, targets

NUM_CLASSES, DIM, SHAPE = 11, 4, (3, 5)
TERMS = ("label_smoothing", "z_loss", "softcap")
OPTIONS = {
    "none": {},
    "ignore_index": {"ignore_index": 4},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "weight_per_token": {"weighted": True},
    "all": {"ignore_index": 4, "label_smoothing": 0.2, "z_loss": 0.02, "softcap": 3.0, "weighted": True},
}


def _oracle(x, weight, target, weights, reduction, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0):
    """By torch's functions alone."""
    logits = (x @ weight.t()).flatten(0, -2)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    flat = target.flatten()
    counts = flat != ignore_index
    loss = F.cross_entropy(logits, flat, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none")
    loss = loss + z_loss * (counts * logits.logsumexp(-1).square())
    shares = counts.double() if weights is None else counts * weights.flatten()
    loss = (loss * shares).view(target.shape)
    return {"none": loss, "sum": loss.sum(), "mean": loss.sum() / shares.sum()}[reduction]


def _weighted(weights):
    return {} if weights is None else {"weight_per_token": weights}


def _logits(function):
    return lambda x, w, t, weights, reduction, **o: function(
        x @ w.t(), t, reduction=reduction, **_weighted(weights), **o
    )


def _linear(function, **more):
    return lambda x, w, t, weights, reduction, **o: function(
        x, w, t, reduction=reduction, **_weighted(weights), **o, **more
    )


def _head(once):
    """The layer, whose caller divides."""
    return lambda x, w, target, weights, reduction, **options: _Head.apply(
        x, w, target, weights, reduction, options, once
    )


class _Head(torch.autograd.Function):
    """Runs the layer's backward at once; the weight's gradient is where the layer puts it."""

    @staticmethod
    def forward(ctx, x, w, target, weights, reduction, options, once):
        head = VocabParallelHead(DIM, NUM_CLASSES, Axis.single(), dtype=x.dtype, grad_in_forward=once, **options)
        head.weight.data.copy_(w)
        leaves = [None if t is None else t.detach().requires_grad_() for t in (x, weights)]
        with torch.enable_grad():
            total, count = head(leaves[0], target, leaves[1])
            value = total if reduction == "sum" else total / count
            value.backward()
        ctx.grads = leaves[0].grad, head.weight.grad, None, None if weights is None else leaves[1].grad
        return value.detach()

    @staticmethod
    def backward(ctx, _):
        return *ctx.grads, None, None, None


def _direct(once, shards):
    """The functions without a graph, over vocabulary shards, as an autograd function of the whole."""

    def call(x, w, target, weights, reduction, **options):
        return _Direct.apply(x, w, target.flatten(), weights, reduction, options, once, shards).view(
            target.shape if reduction == "none" else ()
        )

    return call


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, target, weights, reduction, options, once, shards):
        rows, counts = x.flatten(0, -2), target != options.get("ignore_index", -100)
        terms = [options.get(name, 0.0) for name in TERMS]
        starts = [sum(shards[:i]) for i in range(len(shards))]
        parts = [w[a : a + n] for a, n in zip(starts, shards, strict=True)]
        stats = [
            linear_cross_entropy_stats(rows, p, target, vocab_start=a, softcap=terms[2])
            for p, a in zip(parts, starts, strict=True)
        ]
        merged = merge_stats(stats[0], exchange_of(stats, 0, [slice(0, len(target))])[0])
        loss = token_loss(*merged, counts, num_classes=NUM_CLASSES, label_smoothing=terms[0], z_loss=terms[1])
        with torch.enable_grad():
            leaves = [loss.requires_grad_()] + ([] if weights is None else [weights.flatten().requires_grad_()])
            value = reduce_losses(loss, counts, leaves[1] if leaves[1:] else None, reduction)
        upstream = torch.ones_like(value) if reduction != "none" else normal(*value.shape, seed=9)
        dloss, *dweights = torch.autograd.grad(value, leaves, upstream)
        grads = []
        for rank, (p, a) in enumerate(zip(parts, starts, strict=True)):
            if once:
                exchange = exchange_of(stats, rank, [slice(0, len(target))])[0]
                how = (a, NUM_CLASSES, *terms, True, True, lambda s, f=exchange: merge_stats(s, f))
                grads.append(loss_chunks.head_once(rows, p, target, dloss * counts, *how)[1:])
            else:
                how = {"num_classes": NUM_CLASSES, "vocab_start": a, **dict(zip(TERMS, terms, strict=True))}
                grads.append(linear_cross_entropy_grad(rows, p, target, merged[0], dloss * counts, **how))
        ctx.grads = (sum(dx for dx, _ in grads).view(x.shape), torch.cat([dw for _, dw in grads]))
        ctx.dweights = dweights[0].view(weights.shape) if dweights else None
        return value.detach()

    @staticmethod
    def backward(ctx, _):
        return *ctx.grads, None, ctx.dweights, None, None, None, None


# Way to call -> (function, reductions that it has).
REDUCTIONS = ("mean", "sum", "none")
ENTRIES = {
    "cross_entropy": (_logits(cross_entropy), REDUCTIONS),
    "cross_entropy_ref": (_logits(cross_entropy_ref), REDUCTIONS),
    "linear_cross_entropy": (_linear(linear_cross_entropy), REDUCTIONS),
    "linear_cross_entropy late": (_linear(linear_cross_entropy, grad_in_forward=False), REDUCTIONS),
    "linear_cross_entropy once": (_linear(linear_cross_entropy, grad_in_forward=True), ("mean", "sum")),
    "linear_cross_entropy_ref": (_linear(linear_cross_entropy_ref), REDUCTIONS),
    "head late": (_head(False), ("mean", "sum")),
    "head once": (_head(True), ("mean", "sum")),
    "direct late": (_direct(False, (NUM_CLASSES,)), REDUCTIONS),
    "direct once": (_direct(True, (NUM_CLASSES,)), REDUCTIONS),
    "shards late": (_direct(False, (4, 0, 7)), REDUCTIONS),
    "shards once": (_direct(True, (4, 0, 7)), REDUCTIONS),
}
TABLE = [(e, o, r) for e, (_, reductions) in ENTRIES.items() for o in OPTIONS for r in reductions]


def _check(entry, name, reduction):
    options = dict(OPTIONS[name])
    target = targets(*SHAPE, classes=NUM_CLASSES)
    target[0, 1] = options.get("ignore_index", -100)
    weights = normal(*SHAPE, seed=4).abs() if options.pop("weighted", False) else None
    inputs = [normal(*SHAPE, DIM), normal(NUM_CLASSES, DIM, seed=1)] + ([] if weights is None else [weights])
    results = []
    for function in (ENTRIES[entry][0], _oracle):
        leaves = [t.clone().requires_grad_() for t in inputs]
        value = function(*leaves[:2], target, leaves[2] if leaves[2:] else None, reduction, **options)
        upstream = normal(*value.flatten().shape, seed=9).view(value.shape) if reduction == "none" else None
        results.append([value.detach(), *torch.autograd.grad(value, leaves, upstream)])
    # Numbers such as softcap reach an interpreted kernel in fp32.
    close = {"rtol": 1e-6, "atol": 1e-7} if INTERPRETED else {"rtol": 1e-9, "atol": 1e-11}
    for what, a, b in zip(("value", "dx", "dweight", "d weight_per_token"), *results, strict=False):
        torch.testing.assert_close(a, b, **close, msg=lambda text, what=what: f"{what}: {text}")


@needs_plain
@pytest.mark.parametrize("entry,name,reduction", TABLE)
def test_every_option_over_every_entry_point(entry, name, reduction):
    _check(entry, name, reduction)


@interpret
@needs_interpreter
@pytest.mark.parametrize("entry,name,reduction", [row for row in TABLE if row[1] == "all" and "ref" not in row[0]])
def test_all_options_over_every_entry_point_by_the_kernels(entry, name, reduction):
    _check(entry, name, reduction)


def test_every_entry_point_names_every_option():
    """A new option must reach all of them, and the table above."""
    names = {"ignore_index", *TERMS, "weight_per_token"}
    for function in (cross_entropy, cross_entropy_ref, linear_cross_entropy):
        assert names | {"reduction"} <= set(inspect.signature(function).parameters)
    head = {
        *inspect.signature(VocabParallelHead).parameters,
        *inspect.signature(VocabParallelHead.forward).parameters,
    }
    assert names <= head
    other = {
        "logits",
        "x",
        "weight",
        "target",
        "debug",
        "vocab_start",
        "num_classes",
        "all_reduce",
        "grad_in_forward",
        "weight_grad_out",
        "loss_grad",
    }
    for function in (cross_entropy, linear_cross_entropy):
        assert set(inspect.signature(function).parameters) - other == names | {"reduction"}
    assert set(OPTIONS) - {"none", "all"} == names
