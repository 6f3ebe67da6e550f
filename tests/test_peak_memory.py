"""Peak memory, FLOP and roofline of linear_cross_entropy at Llama's size, counted without a GPU.

Vocabulary 128,256, width 4096, bf16. Fake tensors carry shapes through the code that a card would run: every storage
and its end is seen (LiveBytes), and every product and kernel with its FLOP and bytes. Not seen: what a library takes
for itself, such as cuBLAS's workspace (32 MiB on Hopper, for plain torch as well), and what the allocator rounds up.
docs/kernels.md has the table.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from plait.bench.kernel_work import work
from plait.bench.peaks import card_named
from plait.kernels import entropy, linear_cross_entropy, loss, loss_chunks, loss_whole
from plait.kernels.launch import INTERPRETED
from plait.kernels.matmul_launch import triton_multiplies
from plait.kernels.plans import Site
from tests.loss_cases import LiveBytes

pytestmark = pytest.mark.skipif(INTERPRETED, reason="follows the code of a card: TRITON_INTERPRET must be unset")

V, D, TOKENS = 128_256, 4096, (8192, 16_384, 32_768)
CARD = card_named("H200")
TERMS = {"vocab_start": 0, "num_classes": V, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0}
DOCS = (Path(__file__).resolve().parent.parent / "docs" / "kernels.md").read_text()
MODULES = (entropy, loss_chunks, loss_whole)
# Fake tensors would stop at the ops' fake kernels.
OPS = {
    "loss_op": loss_whole.head_loss,
    "once_op": loss_whole.head_loss_once,
    "grad_op": loss_chunks.head_grad,
    "grad_new_op": loss_chunks.head_grad_new,
}
PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2)}  # operator -> places of the matrices


def tensors(*values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Meter(LiveBytes):
    """`peak` in bytes, and `kernels`: (name, FLOP, bytes) of each operator that reads or writes memory."""

    def __init__(self):
        super().__init__()
        self.kernels = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name, kwargs = func._schema.name, kwargs or {}
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        alias = any(a.alias_info is not None for a in func._schema.returns) and not any(written)
        if alias or name.startswith(("aten::empty", "aten::new_empty", "prim::", "aten::_local")):
            return out
        read = sum(x.nbytes for x in tensors(args))
        overwritten = name in ("aten::zero_", "aten::fill_", "aten::copy_") or kwargs.get("beta") == 0.0
        if overwritten and written[0]:
            read -= args[0].nbytes
        places = PRODUCTS.get(name)
        flop = 0
        if places:
            a, b = (args[i] for i in places)
            flop = 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.kernels.append((name, flop, read + sum(x.nbytes for x in tensors(out))))
        return out

    def flop(self):
        return sum(flop for _, flop, _ in self.kernels)

    def seconds(self, overlap):
        """The kernels in turn, each as long as its arithmetic or its traffic, or without overlap as both."""
        peak, rate = CARD.bf16_flop_per_s, CARD.bytes_per_s
        return sum((max if overlap else lambda a, b: a + b)(f / peak, b / rate) for _, f, b in self.kernels)


class Kernel:
    """Stands for the launch of a loss kernel: its last tensor is written, the others are read."""

    def __init__(self, meter, name, *arguments):
        self.meter, self.name, self.arguments = meter, name, arguments

    def run(self):
        self.meter.kernels.append((self.name, 0, sum(x.nbytes for x in tensors(self.arguments))))


def on_a_card(monkeypatch, meter):
    """The head's code takes the way of an sm_90 card; what Triton would run is noted."""

    def layout(x):
        with _disable_current_modes():
            return torch.empty(0, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride())

    def wgrad_into(x, dout, out, accumulate):
        op = "wgrad" if out.dtype == x.dtype else "wgrad_wide"
        with _disable_current_modes():
            by_triton = triton_multiplies(op, layout(dout).t(), layout(x).t(), None, 90)
        if by_triton:
            moved = x.nbytes + dout.nbytes + out.nbytes * (2 if accumulate else 1)
            meter.kernels.append((op, 2 * dout.shape[1] * dout.shape[0] * x.shape[1], moved))
        else:
            assert op == "wgrad", "torch would make an fp32 product of its own"
            out.addmm_(dout.t(), x, beta=1.0 if accumulate else 0.0)

    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(loss_chunks, "wgrad_into", wgrad_into)

    def planned(build, tensors, *options):
        built = build(Site(torch.device("cpu"), None), *tensors, *options)
        for launch in built.launches:
            launch.run()
        return built.results

    launches = {"token_loss_launch": entropy, "stats_launch": loss_chunks}
    for name, module in [*launches.items(), *[(n, m) for n in ("add_launch", "grad_launch") for m in MODULES]]:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda *arguments, name=name: Kernel(meter, name, *arguments))
    for module in MODULES[1:]:
        monkeypatch.setattr(module, "planned", planned)
    for name, kernel in OPS.items():
        monkeypatch.setattr(loss, name, kernel)


def head(num_tokens):
    """(x, weight, target) of fake tensors."""
    x, weight = (torch.empty(n, D, dtype=torch.bfloat16, requires_grad=True) for n in (num_tokens, V))
    return x, weight, torch.empty(num_tokens, dtype=torch.int64)


def ours(num_tokens, options, buffer, monkeypatch):
    """A mean loss and its backward: a meter of both."""
    with FakeTensorMode():
        x, weight, target = head(num_tokens)
        if buffer:
            options = {"weight_grad_out": torch.empty(V, D), **options}
        with Meter() as meter, monkeypatch.context() as patch:
            on_a_card(patch, meter)
            linear_cross_entropy(x, weight, target, **options).backward()
        assert x.grad.shape == x.shape and x.grad.dtype is torch.bfloat16
        assert (weight.grad is None) if buffer else (weight.grad.shape == weight.shape)
    return meter


def eager(num_tokens):
    """Plain torch, whose logits are widened to fp32 before the loss, as in training."""
    with FakeTensorMode():
        x, weight, target = head(num_tokens)
        with Meter() as meter:
            F.cross_entropy(F.linear(x, weight).float(), target).backward()
    return meter


# form as docs/kernels.md names it -> (options, whether a buffer takes the weight's gradient, products)
FORMS = {
    "default": ({}, False, 3),
    "`grad_in_forward=False`": ({"grad_in_forward": False}, False, 4),
    "`weight_grad_out`": ({}, True, 4),
    "`weight_grad_out`, `loss_grad`": ({"loss_grad": 1.0}, True, 3),
}


def row(name, num_tokens, meter, plain):
    """The row of the table in docs/kernels.md."""
    bound, apart = (meter.seconds(overlap) * 1e3 for overlap in (True, False))
    times = [f"{ms:.1f} ({ms / 1e3 / plain.seconds(overlap):.2f})" for ms, overlap in ((bound, True), (apart, False))]
    product = 2 * num_tokens * V * D
    size = f"{meter.peak / 1e9:.3f} ({meter.peak / plain.peak:.4f})"
    return f"| {num_tokens:,} | {name} | {size} | {meter.flop() / product:.0f} | {times[0]} | {times[1]} |"


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_plain_torch_holds_twelve_bytes_per_logit(num_tokens):
    meter = eager(num_tokens)
    assert 0 <= meter.peak - 12 * num_tokens * V < 1000
    assert meter.flop() == 3 * 2 * num_tokens * V * D
    assert row("plain torch", num_tokens, meter, meter) in DOCS


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("name", FORMS)
def test_peak_memory_and_work_of_each_form(name, num_tokens, monkeypatch):
    options, buffer, products = FORMS[name]
    meter, plain = ours(num_tokens, options, buffer, monkeypatch), eager(num_tokens)
    assert meter.flop() == products * 2 * num_tokens * V * D
    case = {"op": "linear_cross_entropy", "rows": num_tokens, "cols": D, "vocab": V, "backward": True}
    assert plain.flop() == work({**case, "dtype": "bfloat16"})[0]
    # The default keeps an fp32 weight gradient, 2.1 GB, from the forward to the backward.
    if name != "default" or num_tokens > 16_384:
        assert 10 * meter.peak <= plain.peak
    if products == 3:  # products; the 1.1, also if no kernel's traffic hides behind its arithmetic
        assert meter.seconds(True) <= plain.seconds(True) and meter.seconds(False) <= 1.1 * plain.seconds(False)
    print(line := row(name, num_tokens, meter, plain))
    assert line in DOCS


def test_no_second_weight_gradient_in_fp32_is_made(monkeypatch):
    """Neither beside a buffer, nor beside a new one of 16 bits that is made by slices of the vocabulary."""
    for num_tokens in (512, 4096, 8192):
        for options, buffer, _ in list(FORMS.values())[1:]:
            meter = ours(num_tokens, options, buffer, monkeypatch)
            assert meter.peak - (0 if buffer else 2 * V * D) < 1.2e9 < 4 * V * D, (num_tokens, options, buffer)


def test_the_table_of_forms_is_whole():
    rows = re.findall(r"^\| [\d,]+ \| (.*?) \| [\d.]+ \([\d.]+\) \|", DOCS, re.M)
    assert sorted(rows) == sorted(["plain torch", *FORMS] * len(TOKENS))
