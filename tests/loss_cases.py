"""What the tests of the losses share: their options, targets, vocabulary shards in one process, and live memory.

Nothing here is a test. test_loss.py takes it to the plain path, test_loss_triton.py to the interpreted kernels.
"""

import functools
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from plait.kernels.launch import INTERPRETED, compute_dtype
from tests.cases import close, compare, normal

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 3.0},
    "ignored": {"ignore_index": 4},
}


def accuracy(dtype):
    """A factor on the tolerance of `dtype`: numbers such as softcap reach an interpreted kernel in fp32."""
    return 1e3 if INTERPRETED and dtype is torch.float64 else 2.0


def targets(*shape, classes=11, seed=0):
    """Classes, int64, the same on every call with the same arguments."""
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def sharded(x, weight, target, sizes, **options):
    """loss, dx, dweight of vocabulary shards of `sizes`, all in this process, as ranks compute them."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shards = [weight[s : s + n] for s, n in zip(starts, sizes, strict=True)]
    softcap = options.get("softcap", 0.0)
    stats = [
        linear_cross_entropy_stats(x, w, target, vocab_start=s, softcap=softcap)
        for w, s in zip(shards, starts, strict=True)
    ]
    tops = torch.stack([s[0] for s in stats])

    def all_reduce_of(rank):
        def all_reduce(tensor, kind):
            if kind == "max":
                return tops.amax(0)
            # What the other ranks would send, their own scaled statistics, summed in the order of ranks.
            sent = [s[1:].clone() for s in stats]
            for other, top in zip(sent, tops, strict=True):
                other[0] *= torch.exp(top - tops.amax(0)) if top.isfinite().all() else 0.0
            assert torch.equal(sent[rank], tensor)
            return sum(sent)

        return all_reduce

    merged = [merge_stats(s, all_reduce_of(rank)) for rank, s in enumerate(stats)]
    smoothing, z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    num_classes = weight.shape[0]
    losses = [
        token_loss(*m, target != -100, num_classes=num_classes, label_smoothing=smoothing, z_loss=z) for m in merged
    ]
    counts = (target != -100).to(x.dtype)
    pieces = [
        linear_cross_entropy_grad(
            x, w, target, merged[rank][0], counts, vocab_start=s, num_classes=num_classes, **options
        )
        for rank, (w, s) in enumerate(zip(shards, starts, strict=True))
    ]  # fmt: skip
    return losses, sum(dx for dx, _ in pieces), torch.cat([dw for _, dw in pieces])


def exchange_of(stats, rank, slices):
    """all_reduce of one rank whose peers have `stats` (a [4, N] per rank), called twice for each of `slices`."""
    calls = [(kind, rows) for rows in slices for kind in ("max", "sum")]
    # not the same bits: BLAS may sum a product of fewer rows in another order
    same = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

    def all_reduce(tensor, kind):
        wanted, rows = calls.pop(0)
        assert kind == wanted
        parts = [s[:, rows] for s in stats]
        top = torch.stack([part[0] for part in parts]).amax(0)
        if kind == "max":
            same(tensor, parts[rank][0])
            return top
        sent = [part[1:].clone() for part in parts]
        for other, part in zip(sent, parts, strict=True):
            other[0] *= torch.where(part[0] == top, 1.0, torch.exp(part[0] - top))
        same(tensor, sent[rank])
        return sum(sent)

    return all_reduce, calls


def run_once(op, target, x, weight, weights=None, factor=1.0, **options):
    """[value, dx, dweight, dweights] of a reduced loss times `factor`."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight) + (() if weights is None else (weights,))]
    more = {} if weights is None else {"weight_per_token": leaves[2]}
    value = op(*leaves[:2], target, **more, **options)
    return [value.detach(), *torch.autograd.grad(value * factor, leaves)]


def run_into(target, x, weight, weights=None, factor=1.0, out=None, **options):
    """As `run_once` of linear_cross_entropy, the weight's gradient being what it adds into `out`, at first zeros."""
    out = torch.zeros_like(weight, dtype=compute_dtype(weight.dtype)) if out is None else out
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight) + (() if weights is None else (weights,))]
    more = {} if weights is None else {"weight_per_token": leaves[2]}
    value = linear_cross_entropy(*leaves[:2], target, weight_grad_out=out, **more, **options)
    (value * factor).backward()
    assert leaves[1].grad is None
    return [value.detach(), leaves[0].grad, out, *(leaf.grad for leaf in leaves[2:])]


def check_into(monkeypatch, options, dtype, form):
    """A buffer gets the bits of the new gradient, over chunks of five tokens, made in the backward or forward."""
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 5 * 11)
    monkeypatch.setattr(loss_chunks, "_CACHED_ELEMENTS", 2 * 11)
    target = targets(13)
    target[4] = options.get("ignore_index", -100)
    x, weight, weights = normal(13, 4, dtype=dtype), normal(11, 4, dtype=dtype, seed=1), normal(13, seed=2).to(dtype)
    for more in (None, weights):
        new = run_once(linear_cross_entropy, target, x, weight, more, 0.25, grad_in_forward=False, **options)
        runs = [run_into(target, x, weight, more, 0.25, **form, **options) for _ in range(2)]
        for what, a, b, again in zip(("value", "dx", "dweight", "dweights"), new, *runs, strict=False):
            assert torch.equal(b, again), what
            if what == "dweights":  # the mean's divisor is differentiated in another order
                close(b, a, dtype, what)
            else:
                assert torch.equal(b.to(a.dtype), a), what


def check_slices(monkeypatch, options, dtype):
    """New 16-bit gradients by slices of the vocabulary: at most twice plain torch's error, the same bits twice."""
    monkeypatch.setattr(
        loss_chunks, "_slices", lambda rows, num, on_gpu: [slice(i, min(i + 16, num)) for i in range(0, num, 16)]
    )
    target = targets(24, classes=41)
    target[4] = options.get("ignore_index", -100)
    x, weight = normal(24, 16, dtype=dtype), normal(41, 16, dtype=dtype, seed=1).mul_(0.25)
    ours = [run_once(linear_cross_entropy, target, x, weight, grad_in_forward=False, **options) for _ in range(2)]
    exact = run_once(linear_cross_entropy_ref, target, x.double(), weight.double(), **options)
    plain = run_once(lambda x, w, t, **o: cross_entropy_ref(x @ w.t(), t, **o), target, x, weight, **options)
    for a, again, b, want in zip(*ours, plain, exact, strict=True):
        assert torch.equal(a, again) and a.dtype == b.dtype or a.dim() == 0
        step = torch.finfo(dtype).eps * want.norm()
        assert (a.double() - want).norm() <= 2.0 * (b.double() - want).norm() + 0.25 * step


def check_shards_once(sizes, options, told=False):
    """Both gradients in the forward of every shard, exchanged over chunks of four and two tokens, like the whole.

    `told` what gradient the loss will get, each shard adds the weight's to its rows of one buffer.
    """
    x, weight, target = normal(6, 4), normal(7, 4, seed=1), targets(6, classes=7)
    target[2] = -100
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    shards = [weight[s : s + n] for s, n in zip(starts, sizes, strict=True)]
    stats = [
        linear_cross_entropy_stats(x, w, target, vocab_start=s, softcap=options.get("softcap", 0.0))
        for w, s in zip(shards, starts, strict=True)
    ]
    want = run_once(linear_cross_entropy_ref, target, x, weight, **options)
    results, home = [], torch.zeros_like(weight)
    for rank, (w, start) in enumerate(zip(shards, starts, strict=True)):
        all_reduce, calls = exchange_of(stats, rank, [slice(0, 4), slice(4, 6)])
        how = dict(vocab_start=start, num_classes=7, all_reduce=all_reduce, **options)
        if told:
            results.append(run_into(target, x, w, out=home[start : start + len(w)], loss_grad=1.0, **how))
        else:
            results.append(run_once(linear_cross_entropy, target, x, w, grad_in_forward=True, **how))
        assert not calls
    for result in results:
        torch.testing.assert_close(result[0], want[0])
    torch.testing.assert_close(sum(r[1] for r in results), want[1])
    torch.testing.assert_close(torch.cat([r[2] for r in results]), want[2])


def check_weights():
    """weight_per_token over reductions and entry points, its own gradient too."""
    target = targets(3, 5)
    target[0, 1] = -100
    weights, x, weight = normal(3, 5, seed=4), normal(3, 5, 4), normal(11, 4, seed=1)
    for reduction in ("mean", "sum", "none"):
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
        compare(
            lambda s, w, o=options: cross_entropy(s, target, weight_per_token=w, **o),
            lambda s, w, o=options: cross_entropy_ref(s, target, weight_per_token=w, **o),
            normal(3, 5, 11),
            weights,
        )
        compare(
            lambda x, w, v, o=options: linear_cross_entropy(x, w, target, weight_per_token=v, **o),
            lambda x, w, v, o=options: linear_cross_entropy_ref(x, w, target, weight_per_token=v, **o),
            x,
            weight,
            weights,
        )


def check_bad_logits(bad):
    """A logit of `bad`, at the target, elsewhere and in an ignored row: losses and gradients as torch's own."""
    for place in (2, 5):
        logits = normal(4, 11, dtype=torch.float32)
        logits[1, place] = logits[3, place] = bad
        target = torch.tensor([1, 2, 3, -100])
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        got = cross_entropy(ours, target, reduction="none")
        want = torch.nn.functional.cross_entropy(theirs, target, reduction="none")
        torch.testing.assert_close(got, want, equal_nan=True)
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
        got, want = (torch.autograd.grad(v, x, weights)[0] for v, x in ((got, ours), (want, theirs)))
        torch.testing.assert_close(got, want, equal_nan=True)


class Case(NamedTuple):
    """One drawn loss: sizes, the vocabulary's shards, options, and where targets are ignored."""

    rows: int
    cols: int
    shards: tuple[int, ...]
    options: dict[str, Any]
    ignored: tuple[bool, ...]
    seed: int
    dtype: torch.dtype


def _case(draw: Any) -> Case:
    rows, cols = draw(st.integers(0, 6)), draw(st.integers(1, 5))
    shards = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
    options = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 0.02])),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
    }
    ignored = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    return Case(rows, cols, tuple(shards), options, tuple(ignored), draw(st.integers(0, 99)), dtype)


CASES = st.composite(_case)()


def check_random(case):
    """Shards against the whole by the oracle: losses, dx, dweight; two runs agree in every bit."""
    num_classes = sum(case.shards)
    x, weight = (
        normal(case.rows, case.cols, dtype=case.dtype),
        normal(num_classes, case.cols, dtype=case.dtype, seed=1),
    )
    target = targets(case.rows, classes=num_classes, seed=case.seed)
    target[torch.tensor(case.ignored, dtype=torch.bool)] = -100
    losses, dx, dweight = sharded(x, weight, target, case.shards, **case.options)
    again = sharded(x, weight, target, case.shards, **case.options)
    assert torch.equal(losses[0], again[0][0]) and torch.equal(dx, again[1]) and torch.equal(dweight, again[2])
    a, b = x.double().requires_grad_(), weight.double().requires_grad_()
    want = linear_cross_entropy_ref(a, b, target, reduction="none", **case.options)
    want_dx, want_dweight = torch.autograd.grad(want.sum(), (a, b))
    for value in losses:
        assert torch.equal(value, losses[0])
        close(value, want.detach(), case.dtype, "losses")
    close(dx, want_dx, case.dtype, "dx", accuracy(case.dtype))
    close(dweight, want_dweight, case.dtype, "dweight", accuracy(case.dtype))


def _storages(values):
    for x in tree_leaves(values):
        if isinstance(x, torch.UntypedStorage):
            yield x
        elif isinstance(x, torch.Tensor) and x.device.type != "meta":  # those stand for addresses, and hold nothing
            yield x.untyped_storage()


class LiveBytes(TorchDispatchMode):
    """Within it, `peak` is the most bytes that storages made since its start held at one time."""

    def __init__(self):
        super().__init__()
        self.peak, self.live = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {storage._cdata for storage in _storages((args, kwargs))}
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in known and storage._cdata not in self.live:
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out
