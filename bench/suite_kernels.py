"""The ops of plait.kernels beside their peers: torch eager and compiled, its attention backends, Liger.

Host wall clock, with the device synchronised around a block of calls long enough to be timed: launch cost counts, and
inputs stay in whatever cache holds them ("hot"). Every provider is first compared with the oracle on inputs drawn
anew after a first call, whose results were overwritten with NaN: what is cached, skipped or left unwritten is found.
One timed call, drawn at random, is compared again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from plait.bench.kernel_jobs import Contender, Job, Results, adamw_job, problem_job
from plait.bench.kernel_problems import Params, work
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.timer import interleave

# Largest error, as a share of the largest entry of the oracle's result. fp32: sums of up to 4096 products in another
# order; bf16: 8 bits of mantissa, rounded a few times on the way.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
BLOCK_S = 2e-3  # a sample is at least this long, so that reading the clock and waiting for the device are small in it
MAX_BLOCK = 1000

HEADS = {"batch": 1, "heads": 8, "kv_heads": 2, "dim": 64}
# op -> shapes for a CPU: the first is the default one; then a larger and an odd one
CPU_SHAPES: dict[str, list[Params]] = {
    "rms_norm": [{"rows": 512, "cols": 1024}, {"rows": 4096, "cols": 4096}, {"rows": 511, "cols": 1000}],
    "swiglu": [{"rows": 512, "cols": 1024}, {"rows": 1024, "cols": 8192}, {"rows": 511, "cols": 1000}],
    "attention": [{**HEADS, "tokens": 256}, {**HEADS, "tokens": 1024}, {**HEADS, "tokens": 255}],
    "linear": [{"rows": 256, "cols": 512, "width": 512}, {"rows": 512, "cols": 2048, "width": 2048}],
    "rope": [{**HEADS, "tokens": 256}, {**HEADS, "tokens": 2048}],
    "linear_cross_entropy": [{"rows": 256, "cols": 256, "vocab": 4096}, {"rows": 512, "cols": 512, "vocab": 32000}],
    "embedding": [{"rows": 512, "cols": 256, "vocab": 4096}, {"rows": 2048, "cols": 1024, "vocab": 32000}],
    "adamw_": [{"tensors": 16, "elements": 1 << 16}, {"tensors": 300, "elements": 1 << 16}],
}
LLAMA = {"batch": 1, "heads": 32, "kv_heads": 8, "dim": 128}
# op -> shapes of Llama-3 8B, then of 70B or longer
CUDA_SHAPES: dict[str, list[Params]] = {
    "rms_norm": [{"rows": 8192, "cols": 4096}, {"rows": 8192, "cols": 8192}, {"rows": 8191, "cols": 4000}],
    "swiglu": [{"rows": 8192, "cols": 14336}, {"rows": 8192, "cols": 28672}],
    "attention": [{**LLAMA, "tokens": 4096}, {**LLAMA, "tokens": 8192, "oracle": "float32"}],
    "linear": [{"rows": 8192, "cols": 4096, "width": 14336}, {"rows": 8192, "cols": 8192, "width": 28672}],
    "rope": [{**LLAMA, "tokens": 8192}, {**LLAMA, "heads": 64, "tokens": 8192}],
    "linear_cross_entropy": [{"rows": 4096, "cols": 4096, "vocab": 128256}],
    "embedding": [{"rows": 8192, "cols": 4096, "vocab": 128256}],
    "adamw_": [{"tensors": 64, "elements": 1 << 22}],
}
FORWARD_TOO = ("attention",)  # in the default list; with `full` all ops have a row for their forward alone


def cases(full: bool) -> list[Case]:
    """One shape an op, forward and backward together; `full`: all shapes, the forward alone, torch.compile."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = CUDA_SHAPES if device == "cuda" else CPU_SHAPES
    result = []
    for op, shapes in table.items():
        # The optimizer works on fp32 masters; torch's has no others.
        dtype = "bfloat16" if device == "cuda" and op != "adamw_" else "float32"
        for shape in shapes if full else shapes[:1]:
            for backward in (False, True) if full or op in FORWARD_TOO else (True,):
                if op == "adamw_" and not backward and full:
                    continue
                result.append(make_case(op, shape, dtype, device, backward))
    return result


def make_case(op: str, shape: Params, dtype: str, device: str, backward: bool) -> Case:
    """The case with its name and its work by formula."""
    params = {"op": op, **shape, "dtype": dtype, "device": device, "backward": backward and op != "adamw_"}
    sizes = " ".join(f"{name}={value}" for name, value in shape.items() if name != "oracle")
    flop, nbytes = work(params)
    part = "" if op == "adamw_" else " fwd+bwd" if backward else " fwd"
    return Case(f"{op}{part} {sizes} {dtype}", params, flop=flop, bytes_moved=nbytes)


def measure(case: Case, options: Options) -> CaseResult:
    """Checks every provider, times those that can run here, checks one timed call of each again."""
    p = case.params
    job = adamw_job(p, options.seed) if p["op"] == "adamw_" else problem_job(p, options.seed, options.full)
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
        blocks[name] = Block(contender, sync, options.warmup + order.randrange(options.rounds))
    samples = interleave({name: block.run for name, block in blocks.items()}, options, sync=sync)
    for name, block in blocks.items():
        check(name, block.contender, block.kept_results(), wanted, tolerance)
        providers[name].samples_s = [seconds / block.size for seconds in samples[name]]
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

    def __init__(self, contender: Contender, sync: Callable[[], object], kept_turn: int) -> None:
        self.contender, self.kept_turn, self.turn = contender, kept_turn, 0
        self.kept: Results | None = None
        times = []
        for _ in range(3):
            sync()
            start = time.perf_counter()
            contender.call()
            sync()
            times.append(time.perf_counter() - start)
        self.size = max(1, min(MAX_BLOCK, round(BLOCK_S / min(times))))

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


SUITE = Suite("kernels", "ops with their oracle-checked results, ours and their peers", cases, measure)
