"""The loss kernels in the interpreter against the oracle, and what the compiler makes of them.

Options, shards, weights and bad logits are those of test_loss.py; here they meet the kernels, with widths around
their blocks and every layout of logits.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels import (
    cross_entropy,
    cross_entropy_ref,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_ref,
    loss_chunks,
    loss_points,
    loss_triton,
    merge_stats,
)
from plait.kernels.inspect import compile_offline
from plait.kernels.loss_triton import add_launch, grad_launch, stats_launch
from tests.cases import TOLERANCE, close, compare, dtype_support, interpret, needs_compiler, needs_interpreter, normal
from tests.edges import far_rows, no_32_bit_overflow
from tests.loss_cases import (
    CASES,
    OPTIONS,
    LiveBytes,
    accuracy,
    check_bad_logits,
    check_into,
    check_random,
    check_shards_once,
    check_slices,
    check_weights,
    exchange_of,
    run_once,
    sharded,
    targets,
)
from tests.test_matmul_triton import support

BLOCK = loss_triton._STATS_BLOCK
# (rows, classes): nothing, one class, odd, one block of either kernel, one class more, several blocks with a rest.
SHAPES = ((0, 5), (1, 1), (3, 5), (2, 16), (2, BLOCK), (2, BLOCK + 1), (2, 2 * BLOCK + 77))
LAYOUTS = ("plain", "transposed", "stepped", "one row for all", "misaligned", "padded rows")
interpreted = (interpret, needs_interpreter)


def marked(*marks):
    """The marks of one test, innermost last."""

    def mark(function):
        for one in marks:
            function = one(function)
        return function

    return mark


def _logits(rows, cols, dtype, layout="plain", scale=3.0):
    """Logits that lie as `layout` says, with NaN in the memory between them."""
    values = normal(rows, cols, dtype=torch.float64).mul_(scale).to(dtype)
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "one row for all":
        return values[:1].expand(rows, cols)
    if layout == "stepped":
        return torch.full((rows, 2 * cols + 1), float("nan"), dtype=dtype)[:, 1::2].copy_(values)
    if layout == "padded rows":
        return torch.full((rows, cols + 13), float("nan"), dtype=dtype)[:, :cols].copy_(values)
    if layout == "misaligned":
        return torch.full((rows * cols + 1,), float("nan"), dtype=dtype)[1:].view(rows, cols).copy_(values)
    return values


def _check_rows(logits, target, options, start=0):
    """Both kernels on one shard of logits, whose first class is `start`, against fp64 and torch's autograd."""
    smoothing, z, cap = (options.get(k, 0.0) for k in ("label_smoothing", "z_loss", "softcap"))
    rows, cols = logits.shape
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    stats = torch.full((4, rows), float("nan"), dtype=wide)
    s = logits.double()
    s = cap * torch.tanh(s / cap) if cap else s
    inside = (target >= start) & (target < start + cols)
    hit = s.gather(1, (target - start).clamp(0, cols - 1).unsqueeze(1)).squeeze(1) * inside
    lse, dloss = s.logsumexp(1) + 0.5, normal(rows, seed=3)
    s.requires_grad_()
    # The gradient of one shard, with a log-sum-exp that other shards have raised.
    p = torch.exp(s - lse.unsqueeze(1)) * (1.0 + 2.0 * z * lse).unsqueeze(1) - smoothing / 50
    want = p - (1.0 - smoothing) * torch.nn.functional.one_hot(
        torch.where(inside, target - start, cols), cols + 1
    )[:, :cols]  # fmt: skip
    want = want * dloss.unsqueeze(1) * ((1.0 - (s / cap).square()) if cap else 1.0)
    grad = torch.full((rows, cols), float("nan"), dtype=logits.dtype)
    with dtype_support(logits.dtype):
        if rows:
            stats_launch(logits, target, start, cap, stats).run()
            grad_launch(logits, target, lse.to(wide), dloss.to(wide), start, 50, smoothing, z, cap, grad).run()
    narrow = torch.float32 if wide is torch.float32 else wide
    close(stats[0], s.detach().amax(1), narrow, "max")
    close(stats[0].double() + stats[1].double().log(), s.detach().logsumexp(1), narrow, "log-sum-exp")
    close(stats[2], hit, narrow, "target's logit")
    size = max(1.0, cols**0.5)
    close(stats[3] / size, s.detach().sum(1) / size, narrow, "sum")
    close(grad, want.detach(), logits.dtype, "gradient", accuracy(logits.dtype))


@marked(*interpreted)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1]])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_kernels_agree_with_the_formula_at_every_width(shape, name):
    target = targets(shape[0], classes=shape[1])
    _check_rows(_logits(*shape, torch.float32), target, OPTIONS[name])
    if shape[0]:
        target[0] = shape[1] - 1
        _check_rows(_logits(*shape, torch.float32), target + 7, OPTIONS[name], start=7)
        _check_rows(_logits(*shape, torch.float32), target, OPTIONS[name], start=shape[1] + 3)
        # Classes just behind this shard: their columns are in the last block, but not in the row.
        _check_rows(_logits(*shape, torch.float32), shape[1] + torch.arange(shape[0]), OPTIONS[name])


@marked(*interpreted)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_layout_and_dtype(layout, dtype):
    for cols in (5, 16):
        _check_rows(_logits(4, cols, dtype, layout), targets(4, classes=cols), OPTIONS["all"])


@marked(*interpreted)
@given(
    rows=st.integers(1, 4), cols=st.integers(1, 40), dtype=st.sampled_from(list(TOLERANCE)),
    layout=st.sampled_from(LAYOUTS), name=st.sampled_from(list(OPTIONS)), start=st.integers(-50, 50),
    block=st.sampled_from([4, 16, 64]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_kernels_on_any_logits(rows, cols, dtype, layout, name, start, block, seed):
    """Small blocks, so that a row has several; a target may lie in this shard, before it or behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_triton, "_STATS_BLOCK", block)
        patch.setattr(loss_triton, "_GRAD_BLOCK", block)
        target = targets(rows, classes=60, seed=seed)
        _check_rows(_logits(rows, cols, dtype, layout), target, OPTIONS[name], start)


@marked(*interpreted)
@given(case=CASES)
@settings(max_examples=12, deadline=None)
def test_any_shape_options_and_shards(case):
    check_random(case)


@marked(*interpreted)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_every_entry_point(name, reduction):
    options = dict(OPTIONS[name], reduction=reduction)
    target = targets(2, 3)
    target[0, 1] = options.get("ignore_index", -100)
    compare(
        lambda s: cross_entropy(s, target, **options),
        lambda s: cross_entropy_ref(s, target, **options),
        normal(2, 3, 11),
    )
    compare(
        lambda x, w: linear_cross_entropy(x, w, target, **options),
        lambda x, w: linear_cross_entropy_ref(x, w, target, **options),
        normal(2, 3, 4),
        normal(11, 4, seed=1),
    )


@marked(*interpreted)
def test_weights_per_token_scale_losses_and_the_mean_and_have_gradients():
    check_weights()


@marked(*interpreted)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), float("-inf")])
def test_inf_and_nan_logits_as_torch(bad):
    check_bad_logits(bad)


def _errors(run, exact, dtype):
    """The distance of each of a run's results (one element may be right by luck), and what one rounding may add."""
    steps = [torch.finfo(dtype).eps / 2 * float(e.norm()) for e in exact]
    return [float((a.double() - e).norm()) for a, e in zip(run, exact, strict=True)], steps


def _loss_and_gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@marked(*interpreted)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]), rows=st.integers(4, 9), cols=st.integers(4, 9),
    classes=st.integers(8, 40), smoothing=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_half_precision_is_at_most_twice_as_far_off_as_plain_torch(dtype, rows, cols, classes, smoothing, seed):
    target = targets(rows, classes=classes, seed=seed)
    plain = torch.nn.functional.cross_entropy
    options = {"label_smoothing": smoothing}
    x, w = normal(rows, cols, dtype=dtype, seed=seed), normal(classes, cols, dtype=dtype, seed=seed + 1)
    logits = (x.double() @ w.double().t()).to(dtype)
    for ours, theirs, inputs in (
        (lambda s: cross_entropy(s, target, **options), lambda s: plain(s, target, **options), (logits,)),
        (
            lambda x, w: linear_cross_entropy(x, w, target, **options),
            lambda x, w: plain(x @ w.t(), target, **options),
            (x, w),
        ),
    ):
        exact = _loss_and_gradients(theirs, *(x.double() for x in inputs))
        with support(dtype):
            got, steps = _errors(_loss_and_gradients(ours, *inputs), exact, dtype)
        want, _ = _errors(_loss_and_gradients(theirs, *inputs), exact, dtype)
        for mine, other, step in zip(got, want, steps, strict=True):
            assert mine <= 2.0 * other + step


@marked(*interpreted)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradcheck_of_the_interpreted_kernels(name):
    target = targets(3)
    target[1] = -100
    logits = normal(3, 11).requires_grad_()
    x, weight = normal(3, 4).requires_grad_(), normal(11, 4, seed=1).requires_grad_()
    options = OPTIONS[name]
    assert torch.autograd.gradcheck(lambda s: cross_entropy(s, target, **options), (logits,), fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, target, **options), (x, weight), fast_mode=True
    )


@marked(*interpreted)
def test_two_runs_agree_in_every_bit_and_in_place_is_the_same():
    logits, target = _logits(3, BLOCK + 5, torch.float32), targets(3, classes=BLOCK)
    lse, dloss = torch.logsumexp(logits, 1), torch.ones(3)
    runs = []
    for _ in range(2):
        stats, grad = torch.empty(4, 3), torch.empty_like(logits)
        stats_launch(logits, target, 0, 2.0, stats).run()
        grad_launch(logits, target, lse, dloss, 0, BLOCK, 0.1, 0.1, 2.0, grad).run()
        runs.append((stats, grad))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    grad_launch(logits, target, lse, dloss, 0, BLOCK, 0.1, 0.1, 2.0, logits).run()
    assert torch.equal(logits, runs[0][1])


@marked(*interpreted)
def test_the_callers_logits_are_not_written():
    """A producer that saved them gets its own gradient, and a second backward the same as the first."""
    base, target = normal(3, 11).requires_grad_(), targets(3)
    logits = base.exp()
    value = cross_entropy(logits, target)
    first, second = (torch.autograd.grad(value, base, retain_graph=True)[0] for _ in range(2))
    want = torch.autograd.grad(cross_entropy_ref(base.exp(), target), base)[0]
    torch.testing.assert_close(first, want)
    assert torch.equal(first, second)


@marked(*interpreted)
def test_unreduced_loss_times_a_mask_uses_each_tokens_own_gradient():
    """B 2, T 4, D 10, V 15."""
    target, mask = targets(2, 4, classes=15), torch.tensor([[1.0, 0, 1, 0], [0, 0, 1, 2]]).double()
    compare(
        lambda x, w: (linear_cross_entropy(x, w, target, reduction="none") * mask).sum(),
        lambda x, w: (linear_cross_entropy_ref(x, w, target, reduction="none") * mask).sum(),
        normal(2, 4, 10),
        normal(15, 10, seed=1),
    )


@marked(*interpreted)
def test_gradient_at_high_confidence_in_bf16_is_within_a_percent():
    logits = torch.zeros(4, 64, dtype=torch.bfloat16)
    logits[:, 3] = 10.0
    target = torch.full((4,), 3)
    exact = logits.double().requires_grad_()
    (want,) = torch.autograd.grad(cross_entropy_ref(exact, target), exact)
    logits.requires_grad_()
    with dtype_support(torch.bfloat16):
        (got,) = torch.autograd.grad(cross_entropy(logits, target), logits)
    assert ((got.double() - want).abs() <= 0.01 * want.abs()).all()


@marked(*interpreted)
def test_one_finite_logit_far_from_the_first_block():
    logits = torch.full((2, 70_000), float("-inf"))
    logits[:, 50_000] = 1.0
    logits.requires_grad_()
    value = cross_entropy(logits, torch.tensor([50_000, 50_000]))
    (grad,) = torch.autograd.grad(value, logits)
    assert value.item() == 0.0 and not grad.isnan().any()


@marked(*interpreted)
def test_all_targets_ignored_gives_zero_and_zero_gradients():
    target = torch.full((3,), -100)
    logits, x, weight = (normal(3, 11), normal(3, 4), normal(11, 4))
    for function, inputs in ((cross_entropy, (logits,)), (linear_cross_entropy, (x, weight))):
        results = _loss_and_gradients(lambda *a, f=function: f(*a, target), *inputs)
        assert all((r == 0).all() for r in results)


@marked(*interpreted)
@pytest.mark.parametrize("sizes", [(7,), (4, 3), (0, 7), (4, 0, 3), (2, 2, 2, 1)])
@pytest.mark.parametrize("name", ["plain", "all"])
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


@marked(*interpreted)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_loss_without_smoothing_is_never_negative(softcap):
    x = 30 * torch.eye(8, dtype=torch.float32)
    value = linear_cross_entropy(x, torch.eye(8) * 30, torch.arange(8), reduction="none", softcap=softcap)
    assert (value >= 0).all()


@marked(*interpreted)
@pytest.mark.parametrize("vocab", [102_400, 151_936, 262_144])
def test_vocabularies_beyond_16_bits(vocab):
    x, weight = normal(2, 2, dtype=torch.float32), normal(vocab, 2, dtype=torch.float32, seed=1)
    target = torch.tensor([vocab - 1, 65_537])
    # Not the gradient of the weight: its product, interpreted, would take minutes.
    got = _loss_and_gradients(lambda x: linear_cross_entropy(x, weight, target), x)
    want = _loss_and_gradients(lambda x: torch.nn.functional.cross_entropy(x @ weight.t(), target), x)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@marked(*interpreted)
def test_rows_more_than_two_billion_elements_apart():
    """Row 2 begins at element 2^31 + 32; the pages between are never touched."""
    logits = far_rows(_logits(3, 5, torch.float16))
    target, stats = torch.tensor([4, 0, 2]), torch.empty(4, 3)
    want = logits.double()
    with no_32_bit_overflow():
        stats_launch(logits, target, 0, 0.0, stats).run()
    close(stats[0] + stats[1].log(), want.logsumexp(1), torch.float32, "log-sum-exp")
    close(stats[2], want.gather(1, target.unsqueeze(1)).squeeze(1), torch.float32, "target's logit")
    with no_32_bit_overflow():
        grad_launch(logits, target, stats[0] + stats[1].log(), torch.ones(3), 0, 5, 0.0, 0.0, 0.0, logits).run()
    close(logits, want.softmax(1) - torch.nn.functional.one_hot(target, 5), torch.float16, "gradient")


@marked(*interpreted)
def test_an_odd_vocabulary_of_50257_over_two_shards():
    """25,129 and 25,128 classes; targets at the borders of both."""
    logits, target = _logits(4, 50_257, torch.float32), torch.tensor([0, 25_128, 25_129, 50_256])
    whole, parts = torch.empty(4, 4), [torch.empty(4, 4) for _ in range(2)]
    shards, starts = logits.split(25_129, 1), (0, 25_129)
    stats_launch(logits, target, 0, 0.0, whole).run()
    for shard, start, stats in zip(shards, starts, parts, strict=True):
        stats_launch(shard, target, start, 0.0, stats).run()
    merged = merge_stats(parts[0], exchange_of(parts, 0, [slice(0, 4)])[0])
    for a, b in zip(merged, merge_stats(whole), strict=True):
        torch.testing.assert_close(a, b)
    grad, pieces = torch.empty_like(logits), [torch.empty_like(shard) for shard in shards]
    options = (50_257, 0.1, 0.01, 0.0)
    grad_launch(logits, target, merged[0], torch.ones(4), 0, *options, grad).run()
    for shard, start, piece in zip(shards, starts, pieces, strict=True):
        grad_launch(shard, target, merged[0], torch.ones(4), start, *options, piece).run()
    assert torch.equal(torch.cat(pieces, 1), grad)


@marked(*interpreted)
def test_chunks_of_tokens_change_nothing(monkeypatch):
    inputs, target = (normal(9, 4), normal(11, 4, seed=1)), targets(9)
    whole = _loss_and_gradients(lambda x, w: linear_cross_entropy(x, w, target), *inputs)
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 25)
    for a, b in zip(
        whole, _loss_and_gradients(lambda x, w: linear_cross_entropy(x, w, target), *inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@marked(*interpreted)
def test_live_memory_is_one_chunk_of_logits(monkeypatch):
    """fp32: 4 bytes per logit of a chunk, its rows padded to 16, beyond what is returned; 16-bit: 6 in backward."""
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 8 * 20)
    target = targets(64, classes=20)
    for dtype, narrow in ((torch.float32, 0), (torch.float16, 2)):
        x, weight = normal(64, 4, dtype=dtype), normal(20, 4, dtype=dtype, seed=1)
        # The interpreter runs on a CPU, whose product of 16-bit inputs copies them to fp32; a GPU's does not.
        copies = 0 if dtype is torch.float32 else 4 * (8 * 4 + 20 * 4)
        with LiveBytes() as forward:
            stats = loss_chunks.head_stats(x, weight, target, 0, 0.0)
        assert stats.nbytes + 4 * 8 * 32 <= forward.peak <= stats.nbytes + 4 * 8 * 32 + copies
        lse, dloss, dweight = merge_stats(stats)[0], torch.ones(64), torch.zeros(20, 4)
        with LiveBytes() as backward:
            dx = loss_chunks.head_grad(x, weight, target, lse, dloss, dweight, 0, 20, 0.0, 0.0, 0.0, True)
        chunk = (4 + narrow) * 8 * 32
        # The weight gradient's product copies a chunk of the gradient and of x to fp32 there.
        copies = 0 if dtype is torch.float32 else 4 * (8 * 20 + 8 * 4 + 20 * 4)
        assert dx.nbytes + chunk <= backward.peak <= dx.nbytes + chunk + copies


@marked(*interpreted)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradients_made_in_the_forward_have_the_bits_of_those_made_in_the_backward(monkeypatch, name, dtype):
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 4 * 11)
    target = targets(6)
    target[4] = -100
    x, weight, weights = normal(6, 4, dtype=dtype), normal(11, 4, dtype=dtype, seed=1), normal(6, seed=2).to(dtype)
    with support(dtype):
        for more in (None, weights):
            late, early = (
                run_once(linear_cross_entropy, target, x, weight, more, grad_in_forward=form, **OPTIONS[name])
                for form in (False, True)
            )
            assert all(torch.equal(a, b) for a, b in zip(late[:3], early[:3], strict=True))


@marked(*interpreted)
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("sizes", [(4, 3), (4, 0, 3)])
def test_shards_make_both_gradients_in_the_forward(monkeypatch, sizes, told):
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 4 * 7)
    check_shards_once(sizes, OPTIONS["all"], told)


@marked(*interpreted)
@pytest.mark.parametrize("form", [{}, {"loss_grad": 0.25}], ids=["late", "told"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_buffer_gets_the_bits_of_the_new_gradient(monkeypatch, dtype, form):
    with support(dtype):
        check_into(monkeypatch, OPTIONS["all"], dtype, form)


@marked(*interpreted)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "all", "ignored"])
def test_slices_of_the_vocabulary_are_at_most_twice_as_far_off_as_plain_torch(monkeypatch, name, dtype):
    with support(dtype):
        check_slices(monkeypatch, OPTIONS[name], dtype)


@marked(*interpreted)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weight_gradient_over_chunks_is_summed_in_fp32(monkeypatch, dtype):
    monkeypatch.setattr(loss_chunks, "_CHUNK_ELEMENTS", 16)
    x, weight, target = normal(96, 4, dtype=dtype), normal(16, 4, dtype=dtype, seed=1), targets(96, classes=16)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    out = torch.full((16, 4), 5.0, dtype=wide)
    exact = weight.double().requires_grad_()
    value = linear_cross_entropy_ref(x.double(), exact, target, reduction="none")
    want = torch.autograd.grad(value.sum(), exact)[0]
    lse = torch.logsumexp(x.double() @ weight.double().t(), 1).to(wide)
    dx, dweight = linear_cross_entropy_grad(
        x, weight, target, lse, torch.ones(96, dtype=wide), num_classes=16, out=out
    )
    assert dweight is out and dx.dtype is dtype
    # 96 roundings of a gradient below 1 to fp16, of random sign; summed in fp16 it would be 20 times as far off.
    bound = {torch.float16: 4e-3, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out.double() - 5.0, want, rtol=0, atol=bound)


class Accesses:
    """Counts the elements that interpreted kernels load and store."""

    def __init__(self, patch):
        from triton.runtime import interpreter

        self.loads, self.stores = 0, 0
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counting_load(this, pointers, mask, *rest):
            self.loads += int(mask.data.sum())
            return load(this, pointers, mask, *rest)

        def counting_store(this, pointers, value, mask, *rest):
            self.stores += int(mask.data.sum())
            return store(this, pointers, value, mask, *rest)

        patch.setattr(builder, "create_masked_load", counting_load)
        patch.setattr(builder, "create_masked_store", counting_store)


@marked(*interpreted)
@pytest.mark.parametrize("classes", [5, BLOCK, 2 * BLOCK + 77])
def test_each_logit_is_read_once_and_each_gradient_written_once(monkeypatch, classes):
    logits, target, lse = _logits(3, classes, torch.float32), targets(3, classes=classes), torch.zeros(3)
    accesses = Accesses(monkeypatch)
    stats_launch(logits, target, 0, 0.0, torch.empty(4, 3)).run()
    assert (accesses.loads, accesses.stores) == (3 * classes + 3, 4 * 3)
    accesses.loads = accesses.stores = 0
    launch = grad_launch(logits, target, lse, lse, 0, classes, 0.1, 0.1, 0.0, logits)
    launch.run()
    (programs,) = launch.grid
    assert programs == 3 * -(-classes // launch.constants["BLOCK_COL"])
    assert (accesses.loads, accesses.stores) == (3 * classes + 3 * programs, 3 * classes)


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_tokens", [0, 1, 4096, 9000])
def test_the_sum_of_losses_of_any_number_of_tokens(num_tokens):
    """More than one pass of the program that adds; every third token is ignored."""
    loss = normal(num_tokens, dtype=torch.float32).abs()
    target = torch.arange(num_tokens) % 3
    loss[target == 0] = 0.0
    for mean in (False, True):
        value, divisor = torch.full((), float("nan")), torch.full((), float("nan"))
        add_launch(loss, target, 0, mean, value, divisor).run()
        count = max(1, int((target != 0).sum())) if mean else 1
        assert divisor.item() == count
        torch.testing.assert_close(value.double(), loss.double().sum() / count, rtol=1e-6, atol=0)


# point: 16-byte reads and writes of a thread in one block. There is code for whole blocks and for the last one.
WIDE = {
    "stats.128256": (2, 0),
    "stats.softcap": (2, 0),
    "stats.16032": (2, 0),
    "stats.50257": (2, 0),
    "stats.bf16": (1, 0),
    "stats.loss": (1, 0),
    "grad.128256": (4, 2),
    "grad.softcap": (4, 2),
    "grad.16032": (4, 2),
    "grad.50257": (4, 2),
    "grad.in_place": (4, 4),
    "grad.bf16": (2, 2),
    "grad.mean": (2, 2),
}
EVERYWHERE = ("stats.128256", "stats.softcap", "grad.128256", "grad.softcap")


def test_every_point_is_compiled():
    assert {f"cross_entropy.{name}" for name in (*WIDE, "add")} == set(loss_points.points())


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize(
    "name,arch", [(n, "sm_90") for n in WIDE] + [(n, a) for n in EVERYWHERE for a in ("sm_80", "sm_100")]
)
def test_compiles_without_spills_and_reads_wide(name, arch):
    reads, writes = WIDE[name]
    facts = compile_offline(loss_points.points()[f"cross_entropy.{name}"](), arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    assert facts.count("RED.") + facts.count("ATOM") == 0
    # Four programs of the statistics, 256 threads each, share a multiprocessor of 65,536 registers.
    assert facts.registers <= (64 if "stats" in name else 80)
    if name.endswith("50257"):  # only the last block is narrow
        assert facts.count("LDG.E.128") == reads and facts.count("STG.E.128") == writes
    else:
        scalar_loads, scalar_stores = (1, 4) if "stats" in name else (3, 0)
        scalar_loads, scalar_stores = {"stats.loss": (1, 2), "grad.mean": (4, 0)}.get(
            name, (scalar_loads, scalar_stores)
        )
        assert facts.count("LDG.E.128") == 2 * reads == facts.count("LDG") - scalar_loads
        assert facts.count("STG.E.128") == 2 * writes == facts.count("STG") - scalar_stores
