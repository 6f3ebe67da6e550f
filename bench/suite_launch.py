"""What an op costs on the host: Python, torch's dispatch and triton's launch, forward alone and with backward.

Beside each op the floor that it is measured against: a bare launch of a kernel of one pointer, then an empty op that
is registered the same way (an autograd.Function of its own) and called by torch's dispatcher, once each way: an op
that takes the shorter way (registration.py) may come out below it. Forward alone the empty op has one input; with
backward as many as the op has gradients, and makes as many. "autograd" is the part of it that is torch's own: a
Function that does nothing, and torch.autograd.grad. Tensors are so small that the device waits for the host. A block
of calls is one sample.

Without a card the launch is stubbed at its last step: CPU tensors go through the same Python, triton's own included,
up to the compiled kernel, whose call does nothing (no driver, no scratch for descriptors, nothing compiled). A
product by torch is a bare launch there. That is no time of a card: it compares versions of this code on one machine,
and says so in its note.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from plait import kernels
from plait.bench.launch_floor import Alone, bare_kernel, empty_op
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.timer import interleave
from plait.kernels import launch, loss_chunks, matmul_launch

CALLS = 20  # in a block
TOLERANCE = 4e-2  # bf16 on the card beside bf16 on the CPU, as a share of the largest entry
NO_CARD = 1 << 20  # index of the device that is not there: what triton keeps for it serves no card


Call = tuple[Callable[..., Any], list[Tensor]]  # an op and the tensors it is called with


def _normal(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def ops(device: str) -> dict[str, Call]:
    """Every op of plait.kernels by name, on small tensors; without a gradient where its inputs want none."""
    new = functools.partial(_normal, device)
    x, residual, weight, bias = new(64, 256), new(64, 256), new(256, 256), new(256)
    q, angles = new(1, 64, 4, 64), new(64, 32, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    rng = torch.tensor([3, 5], device=device)
    tokens = torch.arange(64, device=device)
    main = new(256, 256, dtype=torch.float32)
    many = [new(256, dtype=torch.float32) for _ in range(8)]
    adamw = functools.partial(kernels.adamw_, step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    return {
        "linear gelu": (
            lambda x, w, b, r: kernels.linear(x, w, b, activation="gelu", residual=r),
            [x, weight, bias, residual],
        ),
        "linear dropout": (
            lambda x, w, b: kernels.linear(x, w, b, dropout_p=0.1, rng=rng, activation="silu"),
            [x, weight, bias],
        ),
        "linear residual": (lambda x, w, r: kernels.linear(x, w, residual=r), [x, weight, residual]),
        "linear_swiglu": (kernels.linear_swiglu, [x, new(512, 256)]),
        "linear_dgrad slope, no gradient": (
            lambda d, w, p: kernels.linear_dgrad(d, w, pre=p, activation="gelu"),
            [x, weight, residual],
        ),
        "linear_wgrad main, no gradient": (lambda x, d: kernels.linear_wgrad(x, d, main, True), [x, residual]),
        "attention": (kernels.attention, [q, new(1, 64, 2, 64), new(1, 64, 2, 64)]),
        "rms_norm": (kernels.rms_norm, [x, bias]),
        "rms_norm residual": (lambda x, w, r: kernels.rms_norm(x, w, residual=r), [x, bias, residual]),
        "layer_norm": (kernels.layer_norm, [x, bias, new(256)]),
        "rope": (lambda q, k: kernels.rope(q, k, cos, sin), [q, new(1, 64, 2, 64)]),
        "swiglu": (kernels.swiglu, [x]),
        "geglu": (kernels.geglu, [x]),
        "dropout": (lambda x: kernels.dropout(x, 0.1, rng), [new(1, 64, 256)]),
        "cross_entropy": (lambda s: kernels.cross_entropy(s, tokens), [x]),
        "linear_cross_entropy": (lambda x, w: kernels.linear_cross_entropy(x, w, tokens), [x, weight]),
        "embedding": (lambda w: kernels.embedding(tokens, w), [weight]),
        "l2_norm, no gradient": (lambda *tensors: kernels.l2_norm(list(tensors)), many),
        "adamw_, no gradient": (
            lambda *tensors: adamw(*([t] for t in tensors)),
            [new(256, dtype=torch.float32) for _ in range(4)],
        ),
    }


def cases(full: bool) -> list[Case]:
    """linear, attention and a norm, both ways; `full`: every op, the forward alone and with backward."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result = []
    for name in ops("meta") if full else ("linear gelu", "attention", "rms_norm"):
        for backward in (False,) if "no gradient" in name or not full else (False, True):
            params = {"op": name, "backward": backward, "device": device}
            result.append(Case(f"{name}{' fwd+bwd' if backward else ' fwd'}", params))
    return result


class _Unlaunched(CompiledKernel):
    """Triton's compiled kernel without a kernel: everything up to the driver's call, which counts itself instead."""

    def __init__(self) -> None:
        self.name, self.src = "none", None
        self.module = self.function = self.packed_metadata = None

    def __del__(self) -> None:
        pass

    def _init_handles(self) -> None:
        pass

    @property
    def run(self) -> Callable[..., None]:
        return self._nothing

    def _nothing(self, *arguments: Any) -> None:
        triton.runtime.driver.active.launches += 1


class _NoDriver:
    """What triton asks its driver on the way to a launch; counts the launches."""

    launches = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return NO_CARD

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def stubbed() -> Iterator[_NoDriver]:
    """Within it ops on CPU tensors go the way of CUDA tensors, every product too, and launch nothing."""
    if launch.INTERPRETED:
        raise RuntimeError("launch cost: kernels are interpreted in this process; unset TRITON_INTERPRET")
    driver, threads = _NoDriver(), torch.get_num_threads()
    torch.set_num_threads(1)  # passes of torch are computed here, and must not wait for another thread
    try:
        with (
            mock.patch.object(triton.runtime.driver, "_active", driver),
            mock.patch("triton.compiler.compile", lambda *args, **more: _Unlaunched()),
            mock.patch.object(launch, "INTERPRETED", True),  # what sends CPU tensors to Triton, ...
            mock.patch.object(matmul_launch, "INTERPRETED", True),  # ... and products that torch may do on a card
            mock.patch.object(loss_chunks, "multiply", lambda a, b, out: bare_kernel[(1,)](out)),  # always torch's
        ):
            yield driver
    finally:
        torch.set_num_threads(threads)


def providers(name: str, backward: bool, device: str) -> dict[str, Callable[[], object]]:
    """One call of each: the op, the empty op, with backward torch's own part of that, a bare launch, and floor: empty
    op and bare launch in turn, once each way."""
    op, inputs = ops(device)[name]
    target = torch.empty(16, device=device)
    found: dict[str, Callable[[], object]] = {}
    if backward:
        for value in inputs:
            value.requires_grad_()
        found["plait"] = _both_ways(op, inputs)
        found["empty op"] = _both_ways(empty_op(len(inputs)), inputs)
        found["autograd"] = _both_ways(Alone.apply, inputs)
    else:
        x = _normal(device, 64, 256)
        found["plait"] = functools.partial(op, *inputs)
        found["empty op"] = functools.partial(empty_op(1), x)

    def bare() -> None:
        for _ in range(1 + backward):
            bare_kernel[(1,)](target)

    def floor() -> None:
        bare()
        found["empty op"]()

    return found | {"bare launch": bare, "floor": floor}


def _both_ways(op: Callable[..., Any], inputs: list[Tensor]) -> Callable[[], object]:
    def first(out: Any) -> Tensor:
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result

    dout = torch.ones_like(first(op(*inputs)))

    def call() -> object:
        return torch.autograd.grad(first(op(*inputs)), inputs, dout)

    return call


def measure(case: Case, options: Options) -> CaseResult:
    """Times blocks of calls, interleaved; WrongResultError where an op launches nothing, or on a card gives another
    result than on the CPU."""
    p = case.params
    cuda = p["device"] == "cuda"
    grad = contextlib.nullcontext() if p["backward"] else torch.no_grad()
    with contextlib.nullcontext() if cuda else stubbed() as driver, grad:
        calls = providers(p["op"], p["backward"], p["device"])
        for call in calls.values():
            call()
        launches = 0
        if cuda:
            error = _error_on_card(p["op"])
            if not error <= TOLERANCE:
                raise WrongResultError(f"{p['op']}: off by {error:.2e} of the CPU's largest entry, not {TOLERANCE:g}")
            check = f"within {TOLERANCE:g} of the CPU's result"
        else:
            assert driver is not None
            driver.launches = 0
            calls["plait"]()
            launches = driver.launches
            if not launches:
                raise WrongResultError(f"{p['op']}: launched nothing")
            check = "launches counted; nothing is computed"
        blocks: dict[str, Callable[[], object]] = {
            name: functools.partial(_block, call) for name, call in calls.items()
        }
        if cuda:
            samples = interleave(blocks, options, sync=torch.cuda.synchronize)
        else:  # this thread's own time: others share the cores
            samples = interleave(blocks, options, clock=time.thread_time)
    return _result(case, {name: [s / CALLS for s in times] for name, times in samples.items()}, check, launches)


def _block(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _error_on_card(name: str) -> float:
    results = []
    for device in ("cpu", "cuda"):
        op, inputs = ops(device)[name]
        out = op(*inputs)
        out = out[0] if isinstance(out, tuple) else inputs[0] if out is None else out
        results.append(out.detach().double().cpu())
    want, got = results
    return ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()


def _result(case: Case, samples: dict[str, list[float]], check: str, launches: int) -> CaseResult:
    measured = {name: Measured(times, check) for name, times in samples.items()}
    for name, times in samples.items():
        measured[name].figures = {"median us": median(times) * 1e6, "min us": min(times) * 1e6}
    above = (min(samples["plait"]) - min(samples["floor"])) * 1e6
    measured["plait"].figures |= {"us above the floor (min)": above}
    if launches:
        measured["plait"].figures |= {"launches": launches, "us above the floor, a launch": above / launches}
    how = (
        "host wall clock on a card"
        if case.params["device"] == "cuda"
        else "thread CPU time, launch stubbed: no card, no driver's call, every product by Triton"
    )
    return CaseResult(case, "plait", measured, f"{how}; blocks of {CALLS} calls", cache="hot")


SUITE = Suite("launch", "host time of an op's call beside a bare launch and an empty op", cases, measure)
