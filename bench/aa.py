"""`plait bench aa`: a thing against itself, so that every FASTER and SLOWER is the tool's own mistake. Proves nothing
about the things: it says how far this machine's verdicts can be believed.

On the fake device: many suites under each noise model. On a real one: one suite of matmuls of many sizes, each
against itself, in fresh processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from plait.bench.fake_device import NOISE_MODELS, FakeDevice, Noise
from plait.bench.spec import Options
from plait.bench.stats import log_binomial, rate_bound
from plait.bench.timer import interleave
from plait.bench.verdict import Decision, Paired, Rule, Verdict, confirmed, process_ratio

FALSE = (Verdict.FASTER, Verdict.SLOWER)
KERNEL_S = 1e-3  # of the fake kernel: long beside its launch
MATMUL = 192  # the first matmul's size; each further case is 8 wider
CALLS = 5  # of a matmul per sample


@dataclass
class Tally:
    """What was said of `cases` pairs that do not differ, in `suites` runs; first: by one run without a second."""

    name: str
    suites: int = 0
    cases: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    first_false: int = 0
    false_suites: int = 0

    def add(self, first: Sequence[Decision], final: Sequence[Decision]) -> None:
        """Counts one suite: each case judged alone by its first run, and all of them after the confirming run."""
        self.suites += 1
        self.cases += len(final)
        self.first_false += sum(decision.suspect for decision in first)
        self.verdicts.update(decision.verdict for decision in final)
        self.false_suites += any(decision.verdict in FALSE for decision in final)

    @property
    def false_cases(self) -> int:
        """How many cases were called FASTER or SLOWER in the end."""
        return sum(self.verdicts[verdict] for verdict in FALSE)

    def too_many(self, rule: Rule) -> bool:
        """Whether more suites had a false alarm than alpha in each direction explains: with that rate, so many or
        more would be seen in fewer than one run of aa in 100."""
        rate = 2 * rule.alpha
        fewer = sum(math.exp(log_binomial(self.suites, k, rate)) for k in range(self.false_suites))
        return 1 - fewer < 0.01

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self) | {"verdicts": {str(verdict): self.verdicts[verdict] for verdict in Verdict}}

    def row(self) -> list[str]:
        """Returns its row of the table."""
        counts = [str(self.verdicts[verdict]) for verdict in (Verdict.SAME, Verdict.INCONCLUSIVE, *FALSE)]
        rates = [(self.first_false, self.cases), (self.false_cases, self.cases), (self.false_suites, self.suites)]
        return [
            self.name,
            str(self.suites),
            str(self.cases),
            *counts,
            *(f"{k / n:.3%} (< {rate_bound(k, n):.2%})" for k, n in rates),
        ]


HEADER = ["noise", "suites", "cases", "SAME", "INCONCLUSIVE", "FASTER", "SLOWER"]
HEADER += ["false by one run", "false, confirmed", "suites with a false alarm"]


def fake_process(noise: Noise, seed: int, effect: float = 1.0, rounds: int = 20) -> float:
    """Returns head / base as one process measures it through the timer; head's kernel takes effect times base's."""
    device = FakeDevice(noise, seed)
    kernels: dict[str, Callable[[], object]] = {
        "base": device.kernel(KERNEL_S),
        "head": device.kernel(KERNEL_S * effect),
    }
    options = Options(rounds=rounds, warmup=1, seed=seed)
    samples = interleave(kernels, options, sync=device.sync, clock=device.clock)
    return process_ratio(samples["base"], samples["head"], same_rounds=True)


def fake_suite(
    noise: Noise,
    processes: int,
    draw: random.Random,
    names: Sequence[str],
    effect: float = 1.0,
    rounds: int = 20,
) -> list[Paired]:
    """Returns a suite measured on the fake device, every case in `processes` processes of its own."""
    suite = []
    for name in names:
        ratios = tuple(fake_process(noise, draw.getrandbits(40), effect, rounds) for _ in range(processes))
        suite.append(Paired(name, ratios, base_s=KERNEL_S))
    return suite


def fake_trials(
    rule: Rule,
    *,
    suites: int,
    cases: int,
    processes: int,
    seed: int,
    rounds: int = 20,
    models: Sequence[str] = tuple(NOISE_MODELS),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Tally]:
    """Returns one tally a noise model, of so many suites of so many cases each."""
    names = [f"case {index}" for index in range(cases)]
    tallies = {model: Tally(model) for model in models}
    for place, (model, tally) in enumerate(tallies.items()):
        draw, noise = random.Random(f"{seed} {model}"), NOISE_MODELS[model]
        measure = functools.partial(fake_suite, noise, processes, draw, rounds=rounds)
        for trial in range(suites):
            tally.add(*confirmed(measure, names, rule))
            progress(place * suites + trial + 1, len(tallies) * suites)
    return list(tallies.values())


def matmul_case(name: str, device: str, seed: int, rounds: int) -> tuple[float, float]:
    """Returns head / base and base's seconds of one matmul against itself: separate tensors, the same work."""
    size = MATMUL + 8 * int(name.split()[-1])
    generator = torch.Generator(device).manual_seed(seed)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None

    def build() -> Callable[[], None]:
        a, b = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
        out = torch.empty_like(a)

        def run() -> None:
            for _ in range(CALLS):
                torch.mm(a, b, out=out)

        return run

    samples = interleave({"base": build(), "head": build()}, Options(rounds=rounds, seed=seed), sync=sync)
    ratio = process_ratio(samples["base"], samples["head"], same_rounds=True)
    return ratio, sorted(samples["base"])[rounds // 2] / CALLS


def worker(names: list[str], device: str, seed: int, rounds: int) -> str:
    """Returns what one fresh process has to say, as JSON: case -> [head / base, base's seconds]."""
    torch.set_num_threads(1)  # the process is its own: what others do on this machine shall not be timed
    return json.dumps({name: matmul_case(name, device, seed, rounds) for name in names})


def real_suite(
    device: str, names: list[str], processes: int, draw: random.Random, rounds: int, progress: Callable[[], None]
) -> list[Paired]:
    """Returns the matmuls measured in fresh processes, one after the other; RuntimeError with what a process said."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(processes):
        seed = draw.getrandbits(31)
        code = f"from plait.bench.aa import worker; print(worker({names!r}, {device!r}, {seed}, {rounds}))"
        run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
        if run.returncode != 0:
            last = (run.stderr.strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"aa: a process on {device} ended with {run.returncode}: {last}")
        for name, (ratio, base_s) in json.loads(run.stdout.splitlines()[-1]).items():
            found[name].append((ratio, base_s))
        progress()
    return [
        Paired(name, tuple(ratio for ratio, _ in pairs), math.fsum(s for _, s in pairs) / len(pairs))
        for name, pairs in found.items()
    ]


def real_trial(
    rule: Rule, device: str, cases: int, processes: int, seed: int, rounds: int, progress: Callable[[], None]
) -> Tally:
    """Returns the tally of one suite measured on this machine; progress is called after each process."""
    draw, tally = random.Random(seed), Tally(f"this machine, {device}")
    names = [f"matmul {index}" for index in range(cases)]
    tally.add(*confirmed(lambda asked: real_suite(device, asked, processes, draw, rounds, progress), names, rule))
    return tally


def counted(show: Callable[[int], None]) -> Callable[[], None]:
    """Returns a function that calls show with 1, 2, 3, ..."""
    done = itertools.count(1)
    return lambda: show(next(done))
