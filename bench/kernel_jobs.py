"""Problems made callable: who is to be timed on which tensors, and what they must give. Times and compares nothing.

A job's inputs can be drawn anew in place, so that a provider that remembers results is found out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait import kernels
from plait.bench.kernel_problems import PROBLEMS
from plait.bench.problem import Maker, Op, Params, Peer, Problem

Results = Sequence[Tensor]
Step = Callable[[], object]


@dataclass(frozen=True)
class Contender:
    """A provider ready to be called. `call` returns results in its own layout, `unite` brings them into the oracle's;
    `prepare` gives it the current inputs; `in_place`: its calls change them, so that only the first is comparable."""

    call: Callable[[], Results]
    prepare: Callable[[], None] = lambda: None
    unite: Callable[[Results], Results] = lambda results: results
    in_place: bool = False


@dataclass
class Job:
    """A case made concrete. `redraw` puts new numbers into the inputs; `oracle` computes the results from them."""

    redraw: Callable[[], None]
    oracle: Callable[[], Results]
    contenders: dict[str, Contender]
    skipped: dict[str, str]


def results_of(op: Op, inputs: Sequence[Tensor], douts: Sequence[Tensor], backward: bool) -> Results:
    """Outputs of op(*inputs) and, with `backward`, the gradients of the inputs for these output gradients."""
    if not backward:
        with torch.no_grad():
            out = op(*inputs)
        return out if isinstance(out, tuple) else (out,)
    out = op(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(outs, inputs, douts)
    return [*(value.detach() for value in outs), *grads]


def outputs_of(provider: Op | Peer | str, inputs: Sequence[Tensor]) -> Results:
    """Outputs of a provider that can run here, of copies where it overwrites its inputs."""
    assert not isinstance(provider, str)
    if isinstance(provider, Peer):
        return results_of(provider.op, [value.detach() for value in provider.adapt(inputs)], (), False)
    return results_of(provider, inputs, (), False)


def problem_job(p: Params, seed: int, full: bool) -> Job:
    """A differentiable op: shared inputs and output gradients, one contender a provider."""
    make = Maker(p, seed)
    problem: Problem = PROBLEMS[p["op"]](p, make)
    backward, wide = p["backward"], getattr(torch, p.get("oracle", "float64"))
    refuse_constant(p["op"], problem.inputs)
    inputs = [value.requires_grad_(backward) for value in problem.inputs]
    stds = problem.stds or (1.0,) * len(inputs)
    ops, eager = dict(problem.ops), problem.ops["torch"]
    if full and p.get("compiled", True) and callable(eager):
        torch.compiler.reset()  # else the shapes of earlier cases make this one dynamic, in the end even eager
        ops["compile"] = torch.compile(eager, fullgraph=True, dynamic=False)
    # A loss has the gradient 1; everything else gets random numbers.
    outs = outputs_of(eager, inputs)
    douts = [make.normal(*out.shape).to(out.dtype) if out.dim() else torch.ones_like(out) for out in outs]
    contenders, skipped = {}, {}
    for name, op in ops.items():
        if isinstance(op, str):
            skipped[name] = op
        elif isinstance(op, Peer):
            contenders[name] = own_inputs(op, inputs, douts, backward)
        else:
            contenders[name] = Contender(functools.partial(results_of, op, inputs, douts, backward))

    def redraw() -> None:
        with torch.no_grad():
            for value, std in zip(inputs, stds, strict=True):
                value.normal_(std=std, generator=make.generator)
            for value in douts:
                if value.dim():
                    value.normal_(generator=make.generator)

    def oracle() -> Results:
        exact = [value.detach().to(wide).requires_grad_(backward) for value in inputs]
        return results_of(problem.oracle, exact, [value.to(wide) for value in douts], backward)

    return Job(redraw, oracle, contenders, skipped)


def refuse_constant(op: str, inputs: Sequence[Tensor]) -> None:
    """ValueError for an input of one number throughout: zeros take less power, so the clock is higher (7 to 13 %)."""
    for index, value in enumerate(inputs):
        if value.numel() > 1 and value.is_floating_point() and bool((value == value.reshape(-1)[0]).all()):
            raise ValueError(f"{op}: input {index} is constant; random numbers are timed, nothing else")


def own_inputs(peer: Peer, inputs: Sequence[Tensor], douts: Sequence[Tensor], backward: bool) -> Contender:
    """A contender whose inputs and output gradients are copies, for the calls to overwrite."""
    with torch.no_grad():
        mine = [value.detach() for value in peer.adapt(inputs)]
        my_douts = [value.clone() for value in douts]
    for value in mine:
        value.requires_grad_(backward)

    def prepare() -> None:
        with torch.no_grad():
            for value, source in zip([*mine, *my_douts], [*peer.adapt(inputs), *douts], strict=True):
                value.copy_(source)

    call = functools.partial(results_of, peer.op, mine, my_douts, backward)
    return Contender(call, prepare, peer.unite, in_place=True)


def adamw_job(p: Params, seed: int) -> Job:
    """Step 10 of AdamW on `tensors` tensors; each provider steps a state of its own, from the same numbers."""
    make = Maker(p, seed)
    count, shape = p["tensors"], (p["elements"],)
    source = [[make.normal(*shape) for _ in range(count)] for _ in range(4)]  # parameters, gradients, both moments
    how: dict[str, Any] = dict(lr=1e-3, eps=1e-8, weight_decay=0.1)
    how_ours = {**how, "step": 10, "beta1": 0.9, "beta2": 0.95}

    def redraw() -> None:
        for tensors in source:
            for value in tensors:
                value.normal_(generator=make.generator)
        for value in source[3]:
            value.square_()

    def oracle() -> Results:
        wide = [[value.double() for value in tensors] for tensors in source]
        results = [kernels.adamw_ref(*state, **how_ours)[:3] for state in zip(*wide, strict=True)]
        return [value for three in zip(*results, strict=True) for value in three]

    def contender(build: Callable[[list[list[Tensor]]], tuple[Step, Step]]) -> Contender:
        mine = [[value.clone() for value in tensors] for tensors in source]
        run, reset = build(mine)
        results = [value for index in (0, 2, 3) for value in mine[index]]

        def prepare() -> None:
            for mine_too, tensors in zip(mine, source, strict=True):
                torch._foreach_copy_(mine_too, tensors)
            reset()

        def call() -> Results:
            run()
            return results

        return Contender(call, prepare, in_place=True)

    def by_torch(mine: list[list[Tensor]], **kind: bool) -> tuple[Step, Step]:
        optimizer = torch.optim.AdamW(mine[0], betas=(0.9, 0.95), **how, **kind)
        for param, grad, exp_avg, exp_avg_sq in zip(*mine, strict=True):
            param.grad = grad
            step = torch.tensor(9.0, device=param.device if kind.get("fused") else "cpu")
            optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

        def reset() -> None:
            for state in optimizer.state.values():
                state["step"].fill_(9.0)

        return optimizer.step, reset

    builds: dict[str, Callable[[list[list[Tensor]]], tuple[Step, Step]]] = {
        "plait": lambda mine: (functools.partial(kernels.adamw_, *mine, **how_ours), lambda: None),
        "torch foreach": lambda mine: by_torch(mine, foreach=True),
        "torch fused": lambda mine: by_torch(mine, fused=True),
    }
    return Job(redraw, oracle, {name: contender(build) for name, build in builds.items()}, {})
