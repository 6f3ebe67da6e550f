"""What a benchmark is, as data: suites, cases, and what was measured of each provider. Runs and prints nothing.

A provider is an implementation under test. Its samples are seconds per iteration, all of them, in the order taken;
sample i of every provider of a case belongs to the same round, so that ratios are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1


class WrongResultError(RuntimeError):
    """A provider's result differs from the oracle's: its time means nothing."""


@dataclass(frozen=True)
class Case:
    """One row of a suite: a name, the parameters that define it, and its work by formula.

    flop and bytes_moved are per iteration; None where the quantity says nothing about the case.
    """

    name: str
    params: dict[str, Any]
    flop: float | None = None
    bytes_moved: float | None = None


@dataclass(frozen=True)
class Options:
    """How long to measure: rounds counted after warmup rounds, in each of so many fresh processes; seed orders the
    providers of each round. budget_s: seconds for all cases together, or one case's share of them; 0 for no limit; a
    suite that knows it takes fewer rounds. tutorials: the folder of triton's, for the suite `static`. providers:
    beside ours, () for all; providers.OURS: ours alone. cache: the L2 policy, one of timer.POLICIES, "" for the
    suite's own; the suite `kernels` has a choice."""

    rounds: int = 20
    warmup: int = 3
    seed: int = 0
    full: bool = False
    processes: int = 1
    budget_s: float = 0.0
    tutorials: str = ""
    providers: tuple[str, ...] = ()
    cache: str = ""


@dataclass
class Measured:
    """What one provider did in one case: all samples in seconds, how its result was checked, further figures by name.

    `skipped` is the reason when it could not run; then there are no samples. `invalid` is the reason why its samples
    cannot be true. `processes` names the process of each sample, 0, 1, ...; empty: all are of one. `throttled`: the
    indices of samples taken while the device held its clock down; clocks_mhz, watts: beside the samples, where known.
    """

    samples_s: list[float] = field(default_factory=list)
    check: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    skipped: str = ""
    invalid: str = ""
    processes: list[int] = field(default_factory=list)
    throttled: list[int] = field(default_factory=list)
    clocks_mhz: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)

    def by_process(self) -> list[list[float]]:
        """Returns the samples of each process, in the order taken."""
        groups: dict[int, list[float]] = {}
        for process, seconds in zip(self.processes or [0] * len(self.samples_s), self.samples_s, strict=True):
            groups.setdefault(process, []).append(seconds)
        return [groups[process] for process in sorted(groups)]


@dataclass
class CaseResult:
    """One case with all its providers; `ours` names the provider that ratios are taken against.

    `error` says why the case has no numbers; it then has no providers. `cache` is the L2 policy, one of
    timer.POLICIES ("hot": data of the last call may still sit there), "" where nothing is promised.
    """

    case: Case
    ours: str
    providers: dict[str, Measured]
    note: str = ""
    error: str = ""
    cache: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for the result file."""
        return asdict(self)


@dataclass(frozen=True)
class Suite:
    """A named list of cases and the function that measures one of them.

    cases(full) returns the small default list or the whole one; measure(case, options) returns its result and raises
    on a wrong one: no number without a passed check. text(results) is the suite's own table, where it has one;
    budget_s its limit where the command line gives none, small_s that of the default run, rounds those of the default
    run; caches: whether it has a choice of L2 policies.
    """

    name: str
    about: str
    cases: Callable[[bool], list[Case]]
    measure: Callable[[Case, Options], CaseResult]
    text: Callable[[list[CaseResult]], str] | None = None
    budget_s: float = 0.0
    caches: bool = False
    small_s: float = 0.0
    rounds: int = Options.rounds
