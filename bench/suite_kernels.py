"""The ops of plait.kernels beside their peers: torch eager and compiled, its attention backends, Liger, flash-attn.

Host wall clock, with the device synchronised around a block of calls long enough to be timed: launch cost counts, and
inputs stay in whatever cache holds them ("hot"). Every provider is first compared with the oracle on inputs drawn
anew after a first call, whose results were overwritten with NaN: what is cached, skipped or left unwritten is found.
One timed call, drawn at random, is compared again.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from plait.bench.device import gpu_sensor
from plait.bench.kernel_jobs import Contender, Job, Results, adamw_job, problem_job
from plait.bench.kernel_shapes import cases as shaped
from plait.bench.providers import NOT_ASKED, left_out
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.timer import record, sampled, unknown, warm_up

# Largest error, as a share of the largest entry of the oracle's result. fp32: sums of up to 4096 products in another
# order; bf16: 8 bits of mantissa, rounded a few times on the way.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
BLOCK_S = 2e-3  # a sample is at least this long, so that reading the clock and waiting for the device are small in it
MAX_BLOCK = 1000
MIN_ROUNDS = 5  # below them an interval of the median says nothing
BUDGET_S = 540.0  # of a full run: all of it within ten minutes


def cases(full: bool) -> list[Case]:
    """kernel_shapes.py's for this machine."""
    return shaped(full, "cuda" if torch.cuda.is_available() else "cpu")


def rounds_within(budget_s: float, spent_s: float, calls_s: float, options: Options) -> Options:
    """The options with as many rounds as fit into what is left of a case's share; at least MIN_ROUNDS."""
    if not budget_s:
        return options
    fitting = int((budget_s - spent_s) / calls_s) - options.warmup
    return dataclasses.replace(options, rounds=max(min(MIN_ROUNDS, options.rounds), min(options.rounds, fitting)))


def measure(case: Case, options: Options) -> CaseResult:
    """Checks every provider, times those that can run here, checks one timed call of each again."""
    p, begun = case.params, time.monotonic()
    job = adamw_job(p, options.seed) if p["op"] == "adamw_" else problem_job(p, options.seed, options.full)
    for name in [name for name in job.contenders if left_out(name, options.providers)]:
        job.skipped[name] = NOT_ASKED
        del job.contenders[name]
    sync = torch.cuda.synchronize if p["device"] == "cuda" else lambda: None
    first_call_s = rehearse(job, sync)
    job.redraw()
    wanted = job.oracle()
    tolerance, order = TOLERANCE[p["dtype"]], random.Random(options.seed)
    blocks: dict[str, Block] = {}
    providers = {name: Measured(skipped=reason) for name, reason in job.skipped.items()}
    text = f"within {tolerance:g} of the {p.get('oracle', 'float64')} oracle, before and in a random timed call"
    for name, contender in job.contenders.items():
        contender.prepare()
        error = check(name, contender, contender.call(), wanted, tolerance)
        providers[name] = Measured(check=text, figures={"error": error, "first call s": first_call_s[name]})
        blocks[name] = Block(contender, sync)
    turn_s = sum(block.turn_s for block in blocks.values())
    options = rounds_within(options.budget_s, time.monotonic() - begun, turn_s, options)
    for block in blocks.values():
        block.kept_turn = options.warmup + order.randrange(options.rounds)
    sensor = gpu_sensor() if p["device"] == "cuda" else unknown
    for name, block in blocks.items() if p["device"] == "cuda" else ():
        warmth = warm_up(block.contender.call, sync=sync, sensor=sensor)
        providers[name].figures |= {"warm-up s": warmth.seconds, "steady": float(warmth.steady)}
    samples = sampled({name: block.run for name, block in blocks.items()}, options, sync=sync, sensor=sensor)
    for name, block in blocks.items():
        check(name, block.contender, block.kept_results(), wanted, tolerance)
        record(providers[name], samples[name], block.size)
        providers[name].figures["calls/sample"] = block.size
    note = f"host_wall, {p['device']}, {torch.get_num_threads()} CPU threads, cache hot"
    ordered = dict(sorted(providers.items(), key=lambda item: item[0] != "plait"))
    return CaseResult(case, "plait", ordered, note, cache="hot")


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


class Block:
    """A timed thing: as many calls as take BLOCK_S. Keeps the results of the last call of turn `kept_turn`."""

    def __init__(self, contender: Contender, sync: Callable[[], object]) -> None:
        self.contender, self.kept_turn, self.turn = contender, 0, 0
        self.kept: Results | None = None
        times = []
        for _ in range(3):
            sync()
            start = time.perf_counter()
            contender.call()
            sync()
            times.append(time.perf_counter() - start)
        self.size = max(1, min(MAX_BLOCK, round(BLOCK_S / min(times))))
        self.turn_s = self.size * min(times)

    def run(self) -> None:
        for _ in range(self.size):
            results = self.contender.call()
        if self.turn == self.kept_turn and not self.contender.in_place:
            self.kept = results
        self.turn += 1

    def kept_results(self) -> Results:
        """What that call gave; of a provider that works in place, a new call on inputs put back."""
        if not self.contender.in_place:
            assert self.kept is not None
            return self.kept
        self.contender.prepare()
        return self.contender.call()


SUITE = Suite(
    "kernels", "ops with their oracle-checked results, ours and their peers", cases, measure, budget_s=BUDGET_S
)
