"""cross_entropy and linear_cross_entropy: options over every entry point, vocabulary shards, and the known traps."""

import itertools

import pytest
import torch

from plait.kernels import (
    cross_entropy,
    cross_entropy_ref,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_ref,
    linear_cross_entropy_stats,
    loss,
    merge_stats,
    token_loss,
)
from tests.cases import TOLERANCE, compare, normal

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 0.01},
    "softcap": {"softcap": 2.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.02, "softcap": 3.0},
    "ignored": {"ignore_index": 4},
}


def _targets(*shape, classes=11, seed=0):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_every_entry_point(name, reduction):
    options = dict(OPTIONS[name], reduction=reduction)
    target = _targets(3, 5)
    target[0, 1] = options.get("ignore_index", -100)
    compare(
        lambda s: cross_entropy(s, target, **options),
        lambda s: cross_entropy_ref(s, target, **options),
        normal(3, 5, 11),
    )
    x, weight = normal(3, 5, 4), normal(11, 4, seed=1)
    compare(
        lambda x, w: linear_cross_entropy(x, w, target, **options),
        lambda x, w: linear_cross_entropy_ref(x, w, target, **options),
        x,
        weight,
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_torch_agrees(smoothing, reduction):
    logits, target = normal(7, 11), _targets(7)
    target[3] = -100
    want = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
    torch.testing.assert_close(cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction), want)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype):
    target = _targets(6)
    compare(
        lambda s: cross_entropy(s, target).to(dtype),
        lambda s: cross_entropy_ref(s, target),
        normal(6, 11, dtype=dtype),
    )
    compare(
        lambda x, w: linear_cross_entropy(x, w, target).to(dtype),
        lambda x, w: linear_cross_entropy_ref(x, w, target),
        normal(6, 4, dtype=dtype),
        normal(11, 4, dtype=dtype, seed=1),
        factor=2.0,
    )


def test_unreduced_loss_times_a_mask_uses_each_tokens_own_gradient():
    """B 2, T 4, D 10, V 15."""
    target, mask = _targets(2, 4, classes=15), torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 2]]).double()
    compare(
        lambda x, w: (linear_cross_entropy(x, w, target, reduction="none") * mask).sum(),
        lambda x, w: (linear_cross_entropy_ref(x, w, target, reduction="none") * mask).sum(),
        normal(2, 4, 10),
        normal(15, 10, seed=1),
    )


def test_gradient_at_high_confidence_in_bf16_is_within_a_percent():
    logits = torch.zeros(4, 64, dtype=torch.bfloat16)
    logits[:, 3] = 10.0
    target = torch.full((4,), 3)
    exact = logits.double().requires_grad_()
    (want,) = torch.autograd.grad(cross_entropy_ref(exact, target), exact)
    logits.requires_grad_()
    (got,) = torch.autograd.grad(cross_entropy(logits, target), logits)
    assert ((got.double() - want).abs() <= 0.01 * want.abs()).all()


def test_one_finite_logit_far_from_the_first_block():
    logits = torch.full((2, 70_000), float("-inf"))
    logits[:, 50_000] = 1.0
    logits.requires_grad_()
    value = cross_entropy(logits, torch.tensor([50_000, 50_000]))
    (grad,) = torch.autograd.grad(value, logits)
    assert value.item() == 0.0 and not grad.isnan().any()


def test_all_targets_ignored_gives_zero_and_zero_gradients():
    target = torch.full((3,), -100)
    logits = normal(3, 11).requires_grad_()
    x, weight = normal(3, 4).requires_grad_(), normal(11, 4).requires_grad_()
    for value, inputs in (
        (cross_entropy(logits, target), (logits,)),
        (linear_cross_entropy(x, weight, target), (x, weight)),
    ):
        assert value.item() == 0.0
        assert all((g == 0).all() for g in torch.autograd.grad(value, inputs))


def _sharded(x, weight, target, sizes, **options):
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


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (1, 1, 5), (2, 2, 2, 1)])
@pytest.mark.parametrize("name", ["plain", "smoothing", "z", "softcap", "all"])
def test_uneven_vocabulary_shards_equal_the_whole(sizes, name):
    x, weight, target = normal(6, 4), normal(7, 4, seed=1), _targets(6, classes=7)
    target[2] = -100
    losses, dx, dweight = _sharded(x, weight, target, sizes, **OPTIONS[name])
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    want = linear_cross_entropy_ref(a, b, target, reduction="none", **OPTIONS[name])
    want_dx, want_dweight = torch.autograd.grad(want.sum(), (a, b))
    for value in losses:
        torch.testing.assert_close(value, want.detach())
        assert torch.equal(value, losses[0])
    torch.testing.assert_close(dx, want_dx)
    torch.testing.assert_close(dweight, want_dweight)


def test_a_shard_whose_logits_are_all_minus_infinity_adds_nothing():
    x = torch.ones(1, 1, dtype=torch.float64)
    weight = torch.tensor([[0.5], [1.0], [float("-inf")], [float("-inf")]], dtype=torch.float64)
    losses, _, _ = _sharded(x, weight, torch.tensor([1]), (2, 2))
    torch.testing.assert_close(losses[0], cross_entropy_ref((x @ weight.t()), torch.tensor([1]), reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_without_smoothing_is_never_negative(dtype):
    x = 30 * torch.eye(8, dtype=dtype)
    assert (linear_cross_entropy(x, torch.eye(8, dtype=dtype) * 30, torch.arange(8), reduction="none") >= 0).all()


@pytest.mark.parametrize("vocab", [102_400, 262_144])
def test_vocabularies_beyond_16_bits(vocab):
    x, weight = normal(2, 2, dtype=torch.float32), normal(vocab, 2, dtype=torch.float32, seed=1)
    target = torch.tensor([vocab - 1, 65_537])
    got = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(x @ weight.t(), target))


def test_chunks_of_tokens_change_nothing_and_bound_the_logits(monkeypatch):
    x, weight, target = normal(9, 4), normal(11, 4, seed=1), _targets(9)

    def run():
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        value = linear_cross_entropy(a, b, target)
        return value, *torch.autograd.grad(value, (a, b))

    whole = run()
    widest = []
    plain = loss._logits
    monkeypatch.setattr(loss, "_logits", lambda x, w: widest.append(x.shape[0] * w.shape[0]) or plain(x, w))
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", 25)
    for a, b in zip(whole, run(), strict=True):
        torch.testing.assert_close(a, b)
    assert max(widest) <= 25 and len(widest) == 10


def test_weight_gradient_over_chunks_is_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", 16)
    x, weight = normal(256, 4, dtype=torch.bfloat16), normal(16, 4, dtype=torch.bfloat16, seed=1)
    target = _targets(256, classes=16)
    out = torch.full((16, 4), 5.0)
    lse = merge_stats(linear_cross_entropy_stats(x, weight, target))[0]
    dx, dweight = linear_cross_entropy_grad(x, weight, target, lse, torch.ones(256), num_classes=16, out=out)
    assert dweight is out and dx.dtype is torch.bfloat16
    wide = weight.double().requires_grad_()
    want = torch.autograd.grad(linear_cross_entropy_ref(x.double(), wide, target, reduction="sum"), wide)[0]
    torch.testing.assert_close(out.double() - 5.0, want, rtol=1e-4, atol=1e-4)


def test_each_gradient_can_be_left_out():
    x, weight, target = normal(3, 4), normal(11, 4, seed=1), _targets(3)
    lse = merge_stats(linear_cross_entropy_stats(x, weight, target))[0]
    arguments = (x, weight, target, lse, torch.ones(3).double())
    both = linear_cross_entropy_grad(*arguments, num_classes=11)
    for need_dx, need_dweight in itertools.product((False, True), repeat=2):
        part = linear_cross_entropy_grad(*arguments, num_classes=11, need_dx=need_dx, need_dweight=need_dweight)
        for needed, got, want in zip((need_dx, need_dweight), part, both, strict=True):
            assert torch.equal(got, want) if needed else got is None


def test_bad_input_is_refused():
    x, weight, target = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    for call, error, text in (
        (lambda: cross_entropy(x, target.int()), TypeError, "target is torch.int32"),
        (lambda: cross_entropy(x, target[:2]), ValueError, "do not fit"),
        (lambda: cross_entropy(x, target, reduction="max"), ValueError, "reduction 'max'"),
        (lambda: cross_entropy(x, target, label_smoothing=2.0), ValueError, "label_smoothing is 2.0"),
        (lambda: linear_cross_entropy(x, weight.t(), target), ValueError, "do not fit"),
        (lambda: linear_cross_entropy(x, weight.half(), target), TypeError, "weight is torch.float16"),
        (lambda: linear_cross_entropy(x, weight, target, softcap=-1.0), ValueError, "softcap is -1.0"),
        (
            lambda: linear_cross_entropy(x, weight, target, label_smoothing=0.1, all_reduce=lambda t, kind: t),
            ValueError,
            "needs num_classes",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
