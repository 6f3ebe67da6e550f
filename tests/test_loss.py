"""cross_entropy and linear_cross_entropy: options over every entry point, vocabulary shards, and the known traps."""

import itertools

import pytest
import torch
from hypothesis import given, settings

from plait.kernels import (
    cross_entropy,
    cross_entropy_ref,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_ref,
    linear_cross_entropy_stats,
    loss_chunks,
    merge_stats,
)
from plait.kernels.loss import as_told
from tests.cases import TOLERANCE, close, compare, needs_plain, normal
from tests.loss_cases import (
    CASES,
    OPTIONS,
    LiveBytes,
    check_bad_logits,
    check_into,
    check_random,
    check_shards_once,
    check_slices,
    check_weights,
    run_once,
    sharded,
    targets,
)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_every_entry_point(name, reduction):
    options = dict(OPTIONS[name], reduction=reduction)
    target = targets(3, 5)
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
    logits, target = normal(7, 11), targets(7)
    target[3] = -100
    want = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction)
    torch.testing.assert_close(cross_entropy(logits, target, label_smoothing=smoothing, reduction=reduction), want)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_dtypes(dtype):
    target = targets(6)
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
    target, mask = targets(2, 4, classes=15), torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 2]]).double()
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


@pytest.mark.parametrize("once", [False, True])
def test_gradient_of_the_head_at_high_confidence_in_bf16_is_within_a_percent(once):
    """The weight is the identity, so that dx is the gradient of the logits."""
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[:, 3] = 10.0
    target, eye = torch.full((4,), 3), torch.eye(64, dtype=torch.bfloat16)
    want = run_once(linear_cross_entropy_ref, target, x.double(), eye.double())
    got = run_once(linear_cross_entropy, target, x, eye, grad_in_forward=once)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert ((a.double() - b).abs() <= 0.01 * b.abs()).all()


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


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (1, 1, 5), (2, 2, 2, 1), (0, 7), (4, 0, 3)])
@pytest.mark.parametrize("name", ["plain", "smoothing", "z", "softcap", "all"])
def test_uneven_vocabulary_shards_equal_the_whole(sizes, name):
    x, weight, target = normal(6, 4), normal(7, 4, seed=1), targets(6, classes=7)
    target[2] = -100
    losses, dx, dweight = sharded(x, weight, target, sizes, **OPTIONS[name])
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
    losses, _, _ = sharded(x, weight, torch.tensor([1]), (2, 2))
    torch.testing.assert_close(losses[0], cross_entropy_ref((x @ weight.t()), torch.tensor([1]), reduction="none"))


def test_a_shard_without_rows_has_no_maximum():
    """A maximum of 0 would take logits of -200 for nothing in fp32."""
    x, weight, target = torch.ones(1, 1), torch.tensor([[-200.0], [-201.0]]), torch.tensor([1])
    losses, _, _ = sharded(x, weight, target, (0, 2))
    torch.testing.assert_close(losses[0], cross_entropy_ref(x @ weight.t(), target, reduction="none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_without_smoothing_is_never_negative(dtype):
    x = 30 * torch.eye(8, dtype=dtype)
    assert (linear_cross_entropy(x, torch.eye(8, dtype=dtype) * 30, torch.arange(8), reduction="none") >= 0).all()


@pytest.mark.parametrize("vocab", [102_400, 151_936, 262_144])
def test_vocabularies_beyond_16_bits(vocab):
    x, weight = normal(2, 2, dtype=torch.float32), normal(vocab, 2, dtype=torch.float32, seed=1)
    target = torch.tensor([vocab - 1, 65_537])
    got = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(got, torch.nn.functional.cross_entropy(x @ weight.t(), target))


@pytest.mark.parametrize("once", [False, True])
def test_chunks_of_tokens_change_nothing_and_bound_the_logits(monkeypatch, once):
    x, weight, target = normal(9, 4), normal(11, 4, seed=1), targets(9)
    whole = run_once(linear_cross_entropy, target, x, weight, grad_in_forward=once)
    widest = []
    stats = loss_chunks.plain_stats
    monkeypatch.setattr(loss_chunks, "plain_stats", lambda s, *rest: widest.append(s.numel()) or stats(s, *rest))
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 25)
    for a, b in zip(whole, run_once(linear_cross_entropy, target, x, weight, grad_in_forward=once), strict=True):
        torch.testing.assert_close(a, b)
    assert max(widest) <= 25 and len(widest) == 5


# ---- both gradients in the forward ----


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_made_in_the_forward_have_the_bits_of_those_made_in_the_backward(
    monkeypatch, name, reduction, dtype
):
    """Over chunks of five rows, and blocks of two within them, for a gradient of the loss of 1."""
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 5 * 11)
    monkeypatch.setattr(loss_chunks, "_CACHED_ELEMENTS", 2 * 11)
    target, options = targets(13), dict(OPTIONS[name], reduction=reduction)
    target[4] = options.get("ignore_index", -100)
    x, weight, weights = normal(13, 4, dtype=dtype), normal(11, 4, dtype=dtype, seed=1), normal(13, seed=2).to(dtype)
    for more in (None, weights):
        late, early = (
            run_once(linear_cross_entropy, target, x, weight, more, grad_in_forward=form, **options)
            for form in (False, True)
        )
        for what, a, b in zip(("value", "dx", "dweight"), late, early, strict=False):
            assert a.dtype == b.dtype and torch.equal(a, b), what
        if more is not None:
            close(early[3], late[3], dtype, "dweights")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0 / 3.0, -2.0, 0.0, 1e4])
def test_gradients_made_in_the_forward_are_scaled_by_that_of_the_loss(factor, dtype):
    """dweight is scaled before it is rounded; dx of 16 bits after it, within twice the error of one rounding."""
    x, weight, target = normal(9, 4, dtype=dtype), normal(11, 4, dtype=dtype, seed=1), targets(9)
    got = run_once(linear_cross_entropy, target, x, weight, factor=factor, grad_in_forward=True)
    want = run_once(linear_cross_entropy_ref, target, x.double(), weight.double(), factor=factor)
    plain = run_once(linear_cross_entropy, target, x, weight, factor=factor, grad_in_forward=False)
    for a, b, c in zip(got[1:], plain[1:], want[1:], strict=True):
        size = float(c.abs().max()) * torch.finfo(dtype).eps
        assert float((a.double() - c).abs().max()) <= 2.0 * float((b.double() - c).abs().max()) + size


def test_a_kept_graph_gives_the_same_gradients_again():
    x, weight, target = normal(9, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_(), targets(9)
    value = 3.0 * linear_cross_entropy(x, weight, target, grad_in_forward=True)
    first, second, third = (torch.autograd.grad(value, (x, weight), retain_graph=True) for _ in range(3))
    for a, b, c in zip(first, second, third, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-16)
        assert torch.equal(b, c)


@needs_plain
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_in_the_forward_compile_to_one_graph(reduction):
    x, weight, weights, target = normal(9, 4), normal(11, 4, seed=1), normal(9, seed=2).abs(), targets(9)
    target[2] = -100
    op = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    how = dict(factor=3.0, reduction=reduction, label_smoothing=0.1, grad_in_forward=True)
    got, want = (run_once(f, target, x, weight, weights, **how) for f in (op, linear_cross_entropy))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_each_input_alone_gets_its_gradient():
    """Also one after the other out of a kept graph, as a split backward asks for them."""
    x, weight, target = normal(9, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_(), targets(9)
    want = run_once(linear_cross_entropy, target, x, weight, factor=2.0)
    value = 2.0 * linear_cross_entropy(x, weight, target)
    (dx,) = torch.autograd.grad(value, x, retain_graph=True)
    (dweight,) = torch.autograd.grad(value, weight)
    torch.testing.assert_close((dx, dweight), (want[1], want[2]))
    for a, b, place in ((x, weight.detach(), 1), (x.detach(), weight, 2)):
        (got,) = torch.autograd.grad(2.0 * linear_cross_entropy(a, b, target), (a, b)[place - 1])
        assert torch.equal(got, want[place])


def counted_products(monkeypatch):
    """A list that gets the multiplications of each matrix product of the plain path."""
    counts, mm, addmm_ = [], torch.mm, torch.Tensor.addmm_

    def count(a, b):
        counts.append(a.shape[0] * a.shape[1] * b.shape[1])

    monkeypatch.setattr(torch, "mm", lambda a, b, **more: count(a, b) or mm(a, b, **more))
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, a, b, **more: count(a, b) or addmm_(self, a, b, **more))
    return counts


@pytest.mark.parametrize("once,products", [(None, 3), (True, 3), (False, 4)])
def test_the_number_of_products(monkeypatch, once, products):
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 25)
    counts, one = counted_products(monkeypatch), 9 * 4 * 11
    x, weight = normal(9, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_()
    linear_cross_entropy(x, weight, targets(9), grad_in_forward=once).backward()
    assert sum(counts) == products * one
    counts.clear()
    with torch.no_grad():
        linear_cross_entropy(x, weight, targets(9), grad_in_forward=once)
    assert sum(counts) == one
    counts.clear()
    linear_cross_entropy(x, weight.detach(), targets(9), grad_in_forward=once).backward()
    assert sum(counts) == (products - 1) * one


def test_the_memory_of_gradients_in_the_forward(monkeypatch):
    """One chunk of logits, a few blocks of it, dx and dweight: a tenth of the 12 bytes per logit of plain torch."""
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 8 * 256)
    monkeypatch.setattr(loss_chunks, "_CACHED_ELEMENTS", 2 * 256)
    x, weight = normal(512, 4, dtype=torch.float32), normal(256, 4, dtype=torch.float32, seed=1)
    with LiveBytes() as live:
        results = loss_chunks.head_once(
            x, weight, targets(512, classes=256), torch.ones(512), 0, 256, 0.1, 0.01, 0.0, True, True
        )
    results_bytes = sum(t.nbytes for t in results)
    assert results_bytes + 4 * 8 * 256 < live.peak <= results_bytes + 4 * 8 * 256 + 5 * 4 * 2 * 256
    assert live.peak * 10 <= 12 * 512 * 256


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("sizes", [(7,), (4, 3), (0, 7), (4, 0, 3)])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_shards_make_both_gradients_in_the_forward(monkeypatch, sizes, name, told):
    """All ranks exchange twice per chunk of the whole vocabulary, however many rows their shards have."""
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 4 * 7)
    check_shards_once(sizes, OPTIONS[name], told)


# ---- the weight's gradient added where it lives, and new ones by slices of the vocabulary ----


@pytest.mark.parametrize(
    "form", [{}, {"loss_grad": 0.25}, {"loss_grad": torch.tensor(0.25)}], ids=["late", "told", "tensor"]
)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_buffer_gets_the_bits_of_the_new_gradient(monkeypatch, name, reduction, dtype, form):
    check_into(monkeypatch, dict(OPTIONS[name], reduction=reduction), dtype, form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIONS)
def test_slices_of_the_vocabulary_are_at_most_twice_as_far_off_as_plain_torch(monkeypatch, name, dtype):
    check_slices(monkeypatch, OPTIONS[name], dtype)


def test_slices_of_a_shard_and_each_gradient_alone(monkeypatch):
    """Shard of 21 classes from 10 on; no tokens; no dx."""
    x, weight, target = normal(9, 4).bfloat16(), normal(40, 4, seed=1).bfloat16(), targets(9, classes=40)
    shard, lse, dloss = weight[10:31], torch.logsumexp(x.float() @ weight.float().t(), 1), normal(9).float()
    terms = (10, 40, 0.1, 0.01, 3.0)
    dx, dweight = loss_chunks.head_grad_new(x, shard, target, lse, dloss, *terms, True)
    monkeypatch.setattr(loss_chunks, "_slices", lambda rows, num, on_gpu: [slice(0, 8), slice(8, 16), slice(16, num)])
    for need_dx in (True, False):
        got = loss_chunks.head_grad_new(x, shard, target, lse, dloss, *terms, need_dx)
        close(got[1], dweight, torch.bfloat16, "dweight")
        if need_dx:
            close(got[0], dx, torch.bfloat16, "dx")
        else:
            assert got[0].shape == (0,)
    nothing = loss_chunks.head_grad_new(x[:0], shard, target[:0], lse[:0], dloss[:0], *terms, True)
    assert nothing[0].shape == (0, 4) and (nothing[1] == 0).all()


def test_a_loss_scale_told_beforehand_keeps_small_fp16_gradients():
    """A gradient below fp16's smallest number, made in the forward: scaled before it is rounded, not after."""
    x, weight, target = normal(9, 4).half(), normal(11, 4, seed=1).mul_(1e-6).half(), targets(9)
    want = run_once(linear_cross_entropy_ref, target, x.double(), weight.double(), factor=2.0**14)
    got = run_once(linear_cross_entropy, target, x, weight, factor=2.0**14, loss_grad=2.0**14)
    lost = run_once(linear_cross_entropy, target, x, weight, factor=2.0**14, grad_in_forward=True)
    assert (got[1].double() - want[1]).norm() <= 2e-3 * want[1].norm() < (lost[1].double() - want[1]).norm()


def test_micro_batches_add_to_a_main_gradient_as_docs_kernels_shows():
    """Sums over micro-batches of different length, divided by the tokens of all that count; a view of a buffer."""
    weight, buffer = normal(11, 4, seed=1).requires_grad_(), torch.zeros(3, 11, 4, dtype=torch.float64)
    batches = [(normal(n, 4, seed=n).requires_grad_(), targets(n, seed=n)) for n in (9, 5)]
    batches[0][1][2] = -100
    divisor = 13
    for x, target in batches:
        how = {"reduction": "sum", "weight_grad_out": buffer[1], "loss_grad": 1 / divisor}
        (linear_cross_entropy(x, weight, target, **how) / divisor).backward()
    plain = sum(linear_cross_entropy_ref(x, weight, target, reduction="sum") for x, target in batches) / divisor
    want = torch.autograd.grad(plain, [weight, *[x for x, _ in batches]])
    assert weight.grad is None and (buffer[::2] == 0).all()
    for a, b in zip((buffer[1], *[x.grad for x, _ in batches]), want, strict=True):
        torch.testing.assert_close(a, b)


def test_micro_batches_add_to_one_buffer_in_any_order():
    """Both forwards before the first backward, which writes what the other has seen."""
    out, weight = torch.full((11, 4), 5.0, dtype=torch.float64), normal(11, 4, seed=1).requires_grad_()
    parts, target = [normal(9, 4, seed=s).requires_grad_() for s in (2, 3)], targets(9)
    losses = [linear_cross_entropy(x, weight, target, weight_grad_out=out) for x in parts]
    for loss in losses:
        loss.backward()
    plain = sum(linear_cross_entropy_ref(x, weight, target) for x in parts)
    torch.testing.assert_close(out - 5.0, torch.autograd.grad(plain, weight)[0])
    assert weight.grad is None


@pytest.mark.parametrize("how", [{}, {"loss_grad": 1.0}])
def test_every_backward_over_a_kept_graph_adds_once(how):
    """The first one finds what the forward has added."""
    x, weight, target = normal(9, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_(), targets(9)
    _, dx, dweight = run_once(linear_cross_entropy, target, x, weight)
    out = torch.zeros_like(dweight)
    value = linear_cross_entropy(x, weight, target, weight_grad_out=out, **how)
    for count in (1, 2, 3):
        got = torch.autograd.grad(value, (x, weight), retain_graph=True, allow_unused=True)
        assert torch.equal(got[0], dx) and got[1] is None
        torch.testing.assert_close(out, count * dweight)


def test_what_needs_no_gradient_leaves_the_buffer_alone():
    x, weight, target, out = normal(9, 4), normal(11, 4, seed=1), targets(9), torch.zeros(11, 4, dtype=torch.float64)
    for how in ({}, {"loss_grad": 1.0}):
        leaf = x.clone().requires_grad_()
        linear_cross_entropy(leaf, weight, target, weight_grad_out=out, **how).backward()
        assert leaf.grad is not None
        with torch.no_grad():
            linear_cross_entropy(x, weight.clone().requires_grad_(), target, weight_grad_out=out, **how)
    assert (out == 0).all()


def test_another_gradient_than_was_told_is_an_error_or_nan():
    x, weight, target = normal(9, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_(), targets(9)
    value = linear_cross_entropy(x, weight, target, loss_grad=1.0 / 3.0)
    with pytest.raises(ValueError, match="gradient of the loss is 0.5; expected 0.333"):
        (0.5 * value).backward(retain_graph=True)
    (value / 3.0).backward()
    with LiveBytes():  # where nobody may look at a value, as on a GPU
        factors = [as_told(torch.tensor(g), 0.5) for g in (0.5, 0.25)]
    assert float(factors[0]) == 1.0 and bool(factors[1].isnan())


@needs_plain
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [{}, {"loss_grad": 0.5}])
def test_a_buffer_compiles_to_one_graph(how):
    target = targets(9)

    def run(op):
        out = torch.zeros(11, 4, dtype=torch.float64)
        x, weight = normal(9, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_()
        value = op(x, weight, target, out)
        value.backward()
        return value.detach(), x.grad, out

    def step(x, weight, target, out):
        return 0.5 * linear_cross_entropy(x, weight, target, weight_grad_out=out, **how)

    for a, b in zip(run(torch.compile(step, fullgraph=True, backend="aot_eager")), run(step), strict=True):
        torch.testing.assert_close(a, b)


def test_weight_gradient_over_chunks_is_summed_in_fp32(monkeypatch):
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 16)
    x, weight = normal(256, 4, dtype=torch.bfloat16), normal(16, 4, dtype=torch.bfloat16, seed=1)
    target = targets(256, classes=16)
    out = torch.full((16, 4), 5.0)
    lse = merge_stats(linear_cross_entropy_stats(x, weight, target))[0]
    dx, dweight = linear_cross_entropy_grad(x, weight, target, lse, torch.ones(256), num_classes=16, out=out)
    assert dweight is out and dx.dtype is torch.bfloat16
    wide = weight.double().requires_grad_()
    want = torch.autograd.grad(linear_cross_entropy_ref(x.double(), wide, target, reduction="sum"), wide)[0]
    torch.testing.assert_close(out.double() - 5.0, want, rtol=1e-4, atol=1e-4)


def test_each_gradient_can_be_left_out():
    x, weight, target = normal(3, 4), normal(11, 4, seed=1), targets(3)
    lse = merge_stats(linear_cross_entropy_stats(x, weight, target))[0]
    arguments = (x, weight, target, lse, torch.ones(3).double())
    both = linear_cross_entropy_grad(*arguments, num_classes=11)
    for need_dx, need_dweight in itertools.product((False, True), repeat=2):
        part = linear_cross_entropy_grad(*arguments, num_classes=11, need_dx=need_dx, need_dweight=need_dweight)
        for needed, got, want in zip((need_dx, need_dweight), part, both, strict=True):
            assert torch.equal(got, want) if needed else got is None


@pytest.mark.parametrize("name", OPTIONS)
def test_references_pass_gradcheck(name):
    target = targets(3)
    target[1] = OPTIONS[name].get("ignore_index", -100)
    weights = normal(3, seed=5).requires_grad_()
    x, weight = normal(3, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_()
    logits = normal(3, 11).requires_grad_()
    for reduction in ("mean", "sum", "none"):
        options = dict(OPTIONS[name], reduction=reduction)
        assert torch.autograd.gradcheck(
            lambda s, w, o=options: cross_entropy_ref(s, target, weight_per_token=w, **o), (logits, weights)
        )
        assert torch.autograd.gradcheck(
            lambda x, w, o=options: linear_cross_entropy_ref(x, w, target, **o), (x, weight)
        )


def test_weights_per_token_scale_losses_and_the_mean_and_have_gradients():
    check_weights()


def test_weights_of_one_are_no_weights_and_torchs_class_weights_are_weights_by_target():
    logits, target, by_class = normal(7, 11), targets(7), normal(11, seed=3).abs()
    target[3] = -100
    for reduction in ("mean", "sum", "none"):
        ones = cross_entropy(logits, target, weight_per_token=torch.ones(7), reduction=reduction)
        torch.testing.assert_close(ones, cross_entropy(logits, target, reduction=reduction))
        got = cross_entropy(logits, target, weight_per_token=by_class[target.clamp(min=0)], reduction=reduction)
        want = torch.nn.functional.cross_entropy(logits, target, weight=by_class, reduction=reduction)
        torch.testing.assert_close(got, want)


def test_weights_that_sum_to_zero_give_a_mean_of_zero():
    logits = normal(3, 11).requires_grad_()
    value = cross_entropy(logits, targets(3), weight_per_token=torch.zeros(3))
    assert value.item() == 0.0 and (torch.autograd.grad(value, logits)[0] == 0).all()


def test_a_weight_of_nan_on_an_ignored_token_does_not_count():
    target = torch.tensor([1, -100])
    value = cross_entropy(normal(2, 11), target, weight_per_token=torch.tensor([1.0, float("nan")]))
    torch.testing.assert_close(value, cross_entropy(normal(2, 11)[:1], target[:1]))


def test_debug_names_the_first_target_that_is_no_class():
    x, weight, target = normal(2, 3, 4), normal(11, 4, seed=1), targets(2, 3)
    calls = (
        lambda t, **options: cross_entropy(x @ weight.t(), t, debug=True, **options),
        lambda t, **options: linear_cross_entropy(x, weight, t, debug=True, **options),
        lambda t, **options: linear_cross_entropy(
            x, weight[4:], t, debug=True, vocab_start=4, num_classes=11, all_reduce=lambda s, kind: s, **options
        ),
    )
    for call in calls:
        call(target)
        for value in (11, -1, -100 - 1):
            wrong = target.clone()
            wrong[1, 0], wrong[1, 2] = value, 99
            with pytest.raises(ValueError, match=f"target {value} at token 3 is not a class; expected 0 to 10"):
                call(wrong)
        wrong[1, 0] = wrong[1, 2] = 77
        call(wrong, ignore_index=77)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
def test_inf_and_nan_logits_as_torch(bad):
    check_bad_logits(bad)


def test_rows_with_strides_of_their_own_get_gradients():
    """x transposed and stepped: the gradient is laid out like a fresh tensor."""
    target = targets(6)
    for x in (normal(4, 6).t(), normal(6, 8)[:, ::2], normal(1, 4).expand(6, 4)):
        compare(
            lambda x, w: linear_cross_entropy(x, w, target),
            lambda x, w: linear_cross_entropy_ref(x, w, target),
            x,
            normal(11, 4, seed=1),
        )


@given(case=CASES)
@settings(max_examples=40, deadline=None)
def test_any_shape_options_and_shards(case):
    check_random(case)


def test_the_rows_of_a_gpu_chunk_and_its_bytes():
    """Whole tiles, most of one length, 768 to 1536 tokens by memory, and more for a small vocabulary. Its rows begin
    at multiples of 16 logits."""
    for num_rows, num_local, step in (
        (4096, 128_256, 768), (8192, 128_256, 1408), (16_384, 128_256, 1536), (1024, 128_256, 512),
        (8192, 16_032, 896), (99_999, 300_000, 1536), (8192, 1000, 8192), (5, 1, 5),
    ):  # fmt: skip
        chunks = loss_chunks.chunks_of(num_rows, num_local, 4096, on_gpu=True)
        assert chunks[0].stop == step and chunks[-1].stop == num_rows
        assert sum(c.stop - c.start for c in chunks) == num_rows
        assert all(c.stop - c.start == step for c in chunks[:-1])
    room = loss_chunks._chunk_like(
        torch.empty(4096, 1, device="meta"), loss_chunks.chunks_of(4096, 50_257, 768, True), 50_257, torch.half
    )
    assert room.shape == (768, 50_257) and room.stride() == (50_272, 1)


def test_bad_input_is_refused():
    x, weight, target = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)
    for call, error, text in (
        (lambda: cross_entropy(x, target.int()), TypeError, "target is torch.int32"),
        (lambda: cross_entropy(x, target[:2]), ValueError, "do not fit"),
        (lambda: cross_entropy(x, target, reduction="max"), ValueError, "reduction 'max'"),
        (lambda: cross_entropy(x, target, label_smoothing=2.0), ValueError, "label_smoothing is 2.0"),
        (lambda: cross_entropy(x[:, :0], target), ValueError, "do not fit"),
        (lambda: cross_entropy(x, target, weight_per_token=torch.ones(2)), ValueError, "weight_per_token .2,. must"),
        (lambda: cross_entropy(x, target, weight_per_token=target), TypeError, "weight_per_token is torch.int64"),
        (lambda: linear_cross_entropy(x, weight[:0], target), ValueError, "has no classes"),
        (
            lambda: linear_cross_entropy(x, weight, target, debug=True, all_reduce=lambda t, kind: t),
            ValueError,
            "debug and grad_in_forward over shards need num_classes",
        ),
        (lambda: linear_cross_entropy(x, weight.t(), target), ValueError, "do not fit"),
        (lambda: linear_cross_entropy(x, weight.half(), target), TypeError, "weight is torch.float16"),
        (lambda: linear_cross_entropy(x, weight, target, softcap=-1.0), ValueError, "softcap is -1.0"),
        (
            lambda: linear_cross_entropy(x, weight, target, label_smoothing=0.1, all_reduce=lambda t, kind: t),
            ValueError,
            "need num_classes",
        ),
        (
            lambda: linear_cross_entropy(x, weight, target, reduction="none", grad_in_forward=True),
            ValueError,
            "grad_in_forward and loss_grad need a reduction",
        ),
        (
            lambda: linear_cross_entropy(x, weight, target, weight_grad_out=weight.double()),
            TypeError,
            "weight_grad_out is torch.float64; expected torch.float32",
        ),
        (
            lambda: linear_cross_entropy(x, weight, target, weight_grad_out=x),
            ValueError,
            r"weight_grad_out \(3, 4\) must be \(5, 4\)",
        ),
        (
            lambda: linear_cross_entropy(x, weight, target, weight_grad_out=weight, grad_in_forward=True),
            ValueError,
            "needs loss_grad",
        ),
        (
            lambda: linear_cross_entropy(x, weight, target, loss_grad=1.0, grad_in_forward=False),
            ValueError,
            "loss_grad is for gradients made in the forward",
        ),
    ):
        with pytest.raises(error, match=text):
            call()
