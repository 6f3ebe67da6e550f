"""The ops of plait.kernels beside their peers: torch eager and compiled, its attention backends, Liger, flash-attn.

On a card the device's own time, between marks behind a spin or of a graph (windows.py), with cold data unless asked
otherwise; without one the host's wall clock around a block of calls, whose inputs stay in the cache ("hot"). Every
provider is first compared with the oracle on inputs drawn anew after a first call, whose results were overwritten
with NaN: what is cached, skipped or left unwritten is found. One timed call, drawn at random, is compared again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from plait.bench.kernel_blocks import timing_of
from plait.bench.kernel_jobs import Contender, Job, Results, adamw_job, problem_job
from plait.bench.kernel_shapes import cases as shaped
from plait.bench.providers import NOT_ASKED, left_out
from plait.bench.queues import HostQueue, queue_of
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.timer import record, rounds_within, sampled, warm_up

# Largest error, as a share of the largest entry of the oracle's result. fp32: sums of up to 4096 products in another
# order; bf16: 8 bits of mantissa, rounded a few times on the way.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
POLICY = {"cuda": "cold-rotate", "cpu": "hot"}  # of the cache, where nobody asks for another
BUDGET_S = 1200.0  # of a full run: 246 cases on a card, five seconds each; not yet measured on one
# Of the default run. On a card the peers and we compile first, up to 20 s a case (assumed), and it is to end within
# ten minutes together with the other suites, which take two.
SMALL_S = {"cuda": 400.0, "cpu": 120.0}


def here() -> str:
    """The device that is measured."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cases(full: bool) -> list[Case]:
    """kernel_shapes.py's for this machine."""
    return shaped(full, here())


def measure(case: Case, options: Options) -> CaseResult:
    """Checks every provider, times those that can run here, checks one timed call of each again."""
    p, begun = case.params, time.monotonic()
    queue, policy = queue_of(p["device"]), options.cache or POLICY[p["device"]]
    job = job_of(p, options, queue.l2_bytes if policy == "cold-rotate" else 0)
    first_call_s = rehearse(job, queue.sync)
    job.redraw()
    wanted = job.oracle()
    tolerance, order = TOLERANCE[p["dtype"]], random.Random(options.seed)
    providers = {name: Measured(skipped=reason) for name, reason in job.skipped.items()}
    text = f"within {tolerance:g} of the {p.get('oracle', 'float64')} oracle, before and in a random timed call"
    for name, contender in job.contenders.items():
        contender.prepare()
        error = check(name, contender, contender.call(), wanted, tolerance)
        providers[name] = Measured(check=text, figures={"error": error, "first call s": first_call_s[name]})
        job.rotation.held.clear()
        if (peak := queue.peak_bytes(contender.call)) is not None:
            providers[name].figures["peak bytes"] = peak
    timing = timing_of(queue, job, policy)
    blocks = timing.blocks
    turn_s = sum(block.turn_s for block in blocks.values())
    options = rounds_within(options.budget_s, time.monotonic() - begun, turn_s, options)
    for name, block in blocks.items():
        block.kept_turn = options.warmup + order.randrange(options.rounds)
        if not isinstance(queue, HostQueue):
            warmth = warm_up(block.contender.call, sync=queue.sync, clock=queue.clock, sensor=queue.sensor)
            providers[name].figures |= {"warm-up s": warmth.seconds, "steady": float(warmth.steady)}
    samples = sampled(
        {name: block.run for name, block in blocks.items()},
        options,
        sync=queue.sync,
        clock=queue.clock,
        fresh=lambda name: blocks[name].before(),
        flush=timing.flush,
        sensor=queue.sensor,
        window=timing.events,
    )
    for name, block in blocks.items():
        record(providers[name], samples[name], block.size)
        timing.tell(name, providers[name])
        check(name, block.contender, block.kept_results(), wanted, tolerance)
        if (joules := timing.energy(name)) is not None:
            providers[name].figures["energy J"] = joules
    threads = f"{torch.get_num_threads()} CPU threads, " if p["device"] == "cpu" else ""
    note = f"{timing.method}, {p['device']}, {threads}cache {timing.policy}"
    ordered = dict(sorted(providers.items(), key=lambda item: item[0] != "plait"))
    return CaseResult(case, "plait", ordered, note, cache=policy)


def job_of(p: dict[str, Any], options: Options, l2_bytes: int) -> Job:
    """The case's job without those whom nobody asked for."""
    job = (
        adamw_job(p, options.seed, l2_bytes)
        if p["op"] == "adamw_"
        else problem_job(p, options.seed, options.full, l2_bytes)
    )
    for name in [name for name in job.contenders if left_out(name, options.providers)]:
        job.skipped[name] = NOT_ASKED
        del job.contenders[name]
    return job


def rehearse(job: Job, sync: Callable[[], object]) -> dict[str, float]:
    """Calls everybody once and overwrites the results with NaN; returns the seconds that took, compilation included.

    A peer that cannot run here moves to the skipped ones with its reason; ours raises.
    """
    seconds = {}
    for name, contender in list(job.contenders.items()):
        contender.prepare()
        start = time.perf_counter()
        try:
            results = contender.call()
            sync()
        except RuntimeError as error:
            if name == "plait":
                raise
            job.skipped[name] = f"cannot run: {str(error).strip().splitlines()[0]}"
            del job.contenders[name]
            continue
        seconds[name] = time.perf_counter() - start
        with torch.no_grad():
            for value in results:
                value.fill_(float("nan"))
    return seconds


def check(name: str, contender: Contender, results: Results, wanted: Results, tolerance: float) -> float:
    """Returns the largest error as a share of the largest wanted entry; WrongResultError above the tolerance."""
    results = contender.unite(results)
    if len(results) != len(wanted):
        raise WrongResultError(f"{name}: {len(results)} results for {len(wanted)}")
    worst = 0.0
    for index, (got, want) in enumerate(zip(results, wanted, strict=True)):
        error = error_of(got, want)
        if not error <= tolerance:
            raise WrongResultError(
                f"{name}: result {index} is off by {error:.2e} of its largest entry, not {tolerance:g}"
            )
        worst = max(worst, error)
    return worst


def error_of(got: Tensor, want: Tensor) -> float:
    """max |got - want| / max |want|; NaN where a number is missing."""
    if got.shape != want.shape:
        raise WrongResultError(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    scale = want.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((got.detach().to(want.dtype) - want).abs().max() / scale).item()


ABOUT = "ops with their oracle-checked results, ours and their peers"
SUITE = Suite("kernels", ABOUT, cases, measure, budget_s=BUDGET_S, caches=True, small_s=SMALL_S[here()])
