"""Problems made callable: who is to be timed on which tensors, and what they must give. Times and compares nothing.

A job's inputs can be drawn anew in place, so that a provider that remembers results is found out. Where data must be
cold there are several copies of them, equal in value; calls take one after the other (kernel_calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait import kernels
from plait.bench.kernel_calls import Data, Results, Rotation, calls_over, results_of
from plait.bench.kernel_problems import PROBLEMS
from plait.bench.kernel_work import work
from plait.bench.problem import Maker, Op, Params, Peer, Problem
from plait.bench.timer import copies_for

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
    """A case made concrete. `redraw` puts new numbers into the inputs; `oracle` computes the results from them.
    nbytes: of one copy of the data that calls go through in turn; given: addresses of that data; no_graph: why its
    calls cannot be captured, "" where they can."""

    redraw: Callable[[], None]
    oracle: Callable[[], Results]
    contenders: dict[str, Contender]
    skipped: dict[str, str]
    nbytes: float = 0.0
    rotation: Rotation = field(default_factory=lambda: Rotation(1))
    given: frozenset[int] = frozenset()
    no_graph: str = ""


def outputs_of(provider: Op | Peer | str, inputs: Sequence[Tensor]) -> Results:
    """Outputs of a provider that can run here, of copies where it overwrites its inputs."""
    assert not isinstance(provider, str)
    if isinstance(provider, Peer):
        return results_of(provider.op, [value.detach() for value in provider.adapt(inputs)], (), False)
    return results_of(provider, inputs, (), False)


def problem_job(p: Params, seed: int, full: bool, l2_bytes: int = 0) -> Job:
    """A differentiable op: shared inputs and output gradients, one contender a provider. l2_bytes: of the cache that
    copies of them must exceed; 0 for one copy."""
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
    first = Data(inputs, douts)
    nbytes = float(sum(value.nbytes for value in (*inputs, *(douts if backward else ()))))
    nbytes = min(nbytes, work(p)[1] or nbytes)  # of an embedding's table a call takes some rows
    rotation = Rotation(copies_for(nbytes, l2_bytes))
    copies = [first, *(first.copied(backward) for _ in range(rotation.copies - 1))]
    contenders, skipped = {}, {}
    for name, op in ops.items():
        if isinstance(op, str):
            skipped[name] = op
        elif p.get("alone") and name in problem.early:
            skipped[name] = "its forward makes the gradients: a backward alone has nothing to do"
        elif isinstance(op, Peer):
            contenders[name] = own_inputs(op, first, rotation, p, outs)
        else:
            calls, before = calls_over(op, copies, p)
            contenders[name] = Contender(rotation.over(calls), before)

    def redraw() -> None:
        with torch.no_grad():
            for value, std in zip(inputs, stds, strict=True):
                value.normal_(std=std, generator=make.generator)
            for value in douts:
                if value.dim():
                    value.normal_(generator=make.generator)
            for data in copies[1:]:
                data.take(first)

    def oracle() -> Results:
        exact = [value.detach().to(wide).requires_grad_(backward) for value in inputs]
        results = results_of(problem.oracle, exact, [value.to(wide) for value in douts], backward)
        return results[len(outs) :] if p.get("alone") else results

    given = frozenset(value.data_ptr() for data in copies for value in (*data.inputs, *data.douts))
    no_graph = "a backward runs on the stream of its forward" if p.get("alone") else ""
    return Job(redraw, oracle, contenders, skipped, nbytes, rotation, given, no_graph)


def refuse_constant(op: str, inputs: Sequence[Tensor]) -> None:
    """ValueError for an input of one number throughout: zeros take less power, so the clock is higher (7 to 13 %)."""
    for index, value in enumerate(inputs):
        if value.numel() > 1 and value.is_floating_point() and bool((value == value.reshape(-1)[0]).all()):
            raise ValueError(f"{op}: input {index} is constant; random numbers are timed, nothing else")


def own_inputs(peer: Peer, shared: Data, rotation: Rotation, p: Params, outs: Results) -> Contender:
    """A contender whose inputs and output gradients are copies, for the calls to overwrite. outs: of the case."""
    with torch.no_grad():
        mine = [
            Data([value.detach() for value in peer.adapt(shared.inputs)], [value.clone() for value in shared.douts])
            for _ in range(rotation.copies)
        ]
    for value in (value for data in mine for value in data.inputs):
        value.requires_grad_(p["backward"])
    calls, before = calls_over(peer.op, mine, p)

    def prepare() -> None:
        with torch.no_grad():
            for data in mine:
                data.take(Data(list(peer.adapt(shared.inputs)), shared.douts))
        before()

    def unite(results: Results) -> Results:
        return peer.unite([*outs, *results])[len(outs) :] if p.get("alone") else peer.unite(results)

    return Contender(rotation.over(calls), prepare, unite, in_place=True)


State = list[list[Tensor]]  # parameters, gradients, both moments


def adamw_job(p: Params, seed: int, l2_bytes: int = 0) -> Job:
    """Step 10 of AdamW on `tensors` tensors; each provider steps a state of its own, from the same numbers, or copies
    of it that exceed a cache of l2_bytes."""
    make = Maker(p, seed)
    count, shape = p["tensors"], (p["elements"],)
    source: State = [[make.normal(*shape) for _ in range(count)] for _ in range(4)]
    nbytes = float(sum(value.nbytes for tensors in source for value in tensors))
    rotation = Rotation(copies_for(nbytes, l2_bytes))
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

    def contender(build: Callable[[State], tuple[Step, Step]]) -> Contender:
        states = [[[value.clone() for value in tensors] for tensors in source] for _ in range(rotation.copies)]
        steps = [build(mine) for mine in states]

        def prepare() -> None:
            for mine, (_, reset) in zip(states, steps, strict=True):
                for mine_too, tensors in zip(mine, source, strict=True):
                    torch._foreach_copy_(mine_too, tensors)
                reset()

        def stepped(mine: State, run: Step) -> Results:
            run()
            return [value for index in (0, 2, 3) for value in mine[index]]

        calls = [functools.partial(stepped, mine, run) for mine, (run, _) in zip(states, steps, strict=True)]
        return Contender(rotation.over(calls), prepare, in_place=True)

    def by_torch(mine: State, **kind: bool) -> tuple[Step, Step]:
        optimizer = torch.optim.AdamW(mine[0], betas=(0.9, 0.95), **how, **kind)
        for param, grad, exp_avg, exp_avg_sq in zip(*mine, strict=True):
            param.grad = grad
            step = torch.tensor(9.0, device=param.device if kind.get("fused") else "cpu")
            optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

        def reset() -> None:
            for state in optimizer.state.values():
                state["step"].fill_(9.0)

        return optimizer.step, reset

    builds: dict[str, Callable[[State], tuple[Step, Step]]] = {
        "plait": lambda mine: (functools.partial(kernels.adamw_, *mine, **how_ours), lambda: None),
        "torch foreach": lambda mine: by_torch(mine, foreach=True),
        "torch fused": lambda mine: by_torch(mine, fused=True),
    }
    contenders = {name: contender(build) for name, build in builds.items()}
    return Job(redraw, oracle, contenders, {}, nbytes, rotation)
