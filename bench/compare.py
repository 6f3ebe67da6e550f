"""`plait bench compare BASE HEAD`: two result files of one suite, case by case, as ratios with verdicts. Measures
nothing.

Absolute times are compared only between equal machines (fingerprints). Otherwise, or with `relative`, a case is
compared through a reference: (ours / reference) of head over (ours / reference) of base, with a provider that both
files measured; what the machine does to both cancels out. Providers that are not ours are controls in the absolute
comparison: nothing of ours is in them, so a control that moved means that the machine moved, and a verdict on ours
would blame the wrong one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from plait.bench.result_file import ResultFile
from plait.bench.spec import CaseResult, Measured
from plait.bench.verdict import Decision, Paired, Rule, Verdict, decide, pooled, process_ratio

OK, REGRESSION, USAGE, INCONCLUSIVE, IMPOSSIBLE, INCOMPARABLE = range(6)  # exit codes


class IncomparableError(RuntimeError):
    """Results of machines that differ, without a provider that both measured."""


@dataclass(frozen=True)
class Row:
    """One line: what is said of a case. against: what the times are relative to, '' for seconds; note: the reason."""

    case: str
    provider: str
    against: str
    verdict: Verdict
    note: str = ""
    decision: Decision | None = None
    failed: bool = False

    def cells(self) -> list[str]:
        """Returns the line's cells, for a table."""
        ratio = p = processes = "-"
        if self.decision:
            d = self.decision
            reach = f" ({d.low:.3f}-{d.high:.3f})" if math.isfinite(d.high) else ""
            ratio, p, processes = f"{d.ratio:.3f}{reach}", f"{d.p:.2g}", str(d.processes)
        return [
            self.case,
            self.provider,
            self.against or "seconds",
            ratio,
            p,
            processes,
            str(self.verdict),
            self.note,
        ]

    def to_json(self) -> dict[str, Any]:
        """Returns plain data; an interval without ends has nulls."""
        data = asdict(self)
        for name in ("low", "high"):
            if self.decision and (self.decision.low == 0 or math.isinf(self.decision.high)):
                data["decision"][name] = None
        return data


HEADER = ["case", "provider", "relative to", "head / base", "p", "processes", "verdict", "note"]


@dataclass(frozen=True)
class Comparison:
    """All rows of ours, then the controls'; machine: how the two fingerprints differ, '' where they are equal."""

    rows: list[Row]
    controls: list[Row]
    machine: str

    def exit_code(self, strict: bool) -> int:
        """Returns the exit code; the worst of the rows, controls do not count."""
        verdicts = {row.verdict for row in self.rows}
        if Verdict.INVALID in verdicts:
            return IMPOSSIBLE
        if Verdict.SLOWER in verdicts or any(row.failed for row in self.rows):
            return REGRESSION
        return INCONCLUSIVE if strict and Verdict.INCONCLUSIVE in verdicts else OK


def compare(
    base: ResultFile,
    head: ResultFile,
    rule: Rule,
    *,
    relative: bool = False,
    reference: str = "",
    confirm: tuple[ResultFile, ResultFile] | None = None,
) -> Comparison:
    """Returns what head's times say beside base's. confirm: a second (base, head), measured after the first.

    Raises ValueError for files of different suites or without a common case, IncomparableError where the machines
    differ and no case has a provider to compare through.
    """
    for other in (head, *(confirm or ())):
        if other.suite != base.suite:
            raise ValueError(f"{other.path}: is of suite {other.suite!r}, {base.path} of {base.suite!r}")
    machine = next((text for other in (head, *(confirm or ())) if (text := difference(base, other))), "")
    if not set(base.cases) & set(head.cases):
        raise ValueError(f"{head.path}: has no case of {base.path}")
    against = {name: "" for name in base.cases}
    if machine or relative or reference:
        files = [base, head, *(confirm or ())]
        against = {name: reference_of(name, files, reference) for name in base.cases}
        if not any(against.values()):
            what = f"machines differ: {machine}" if machine else "asked for ratios"
            who = f"provider {reference!r}" if reference else "provider beside ours"
            raise IncomparableError(f"{what}; and no case has a {who} measured in all files")
    through = bool(machine or relative or reference)
    rows, found = [], []
    for name, result in base.cases.items():
        row = obstacle(result, head.cases.get(name), against[name], through)
        rows.append(row)
        if row.note == "":
            found.append(paired(result, head.cases[name], result.ours, against[name]))
    second = again(confirm, found, against) if confirm else None
    decisions = {d.name: d for d in (pooled(found, second, rule) if second is not None else decide(found, rule))}
    rows = [decided(row, decisions[row.case]) if row.case in decisions else row for row in rows]
    controls = [] if through else control_rows(base, head, list(decisions), rule)
    moved = {row.case: row for row in controls if row.decision and row.decision.suspect}
    rows = [blame_machine(row, moved[row.case]) if row.case in moved else row for row in rows]
    rows = [throttled(row, base, head) for row in rows]
    rows += [Row(name, "-", "", Verdict.INCONCLUSIVE, "new: not in base") for name in head.cases.keys() - base.cases]
    return Comparison(rows, controls, machine)


def outcome(found: Comparison, strict: bool) -> str:
    """The verdicts counted, the exit code they call for, and what to do where too few processes were measured."""
    counts = [(verdict, sum(row.verdict == verdict for row in found.rows)) for verdict in Verdict]
    text = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
    text = f"{len(found.rows)} cases: {text}; exit {found.exit_code(strict)}"
    if any(row.note.startswith("processes: ") for row in found.rows):
        text += "; too few processes for a verdict: measure both with `plait bench run SUITE --processes 5`, or more"
    return text


def difference(base: ResultFile, head: ResultFile) -> str:
    """Returns how the machines differ, '' where they do not."""
    keys = [key for key in {**base.machine, **head.machine} if base.machine.get(key) != head.machine.get(key)]
    return ", ".join(f"{key} {base.machine.get(key)!r} and {head.machine.get(key)!r}" for key in keys)


def usable(result: CaseResult | None, name: str) -> bool:
    return result is not None and name in result.providers and bool(result.providers[name].samples_s)


def reference_of(case: str, files: list[ResultFile], asked: str) -> str:
    """Returns the provider to compare through: the one asked for, else the first peer that all files measured."""
    results = [file.cases.get(case) for file in files]
    first = results[0]
    assert first is not None
    names = [asked] if asked else [name for name in first.providers if name != first.ours]
    return next((n for n in names if n != first.ours and all(usable(result, n) for result in results)), "")


def obstacle(base: CaseResult, head: CaseResult | None, against: str, through: bool) -> Row:
    """Returns the case's row before any verdict; its note says what stands in the way of one, '' for nothing."""
    name, ours = base.case.name, base.ours
    row = Row(name, ours or "-", against, Verdict.INCONCLUSIVE)
    if head is None:
        return replace(row, note="not in head")
    if base.error or not usable(base, ours):
        return replace(row, note=f"no numbers in base: {base.error or base.providers[ours].skipped}")
    if head.error or not usable(head, ours):
        text = head.error or (head.providers[ours].skipped if ours in head.providers else f"{ours} is not there")
        return replace(row, note=f"no numbers in head: {text.splitlines()[0]}", failed=True)
    if base.case != head.case:
        return replace(row, note="parameters or formulas differ: not the same work")
    if through and not against:
        return replace(row, note="machines differ, and no provider is measured in both")
    for side, result in (("base", base), ("head", head)):
        for provider in (ours, *([against] if against else [])):
            if text := result.providers[provider].invalid:
                return replace(row, verdict=Verdict.INVALID, note=f"{side}, {provider}: {text}")
    return row


def paired(base: CaseResult, head: CaseResult, provider: str, against: str) -> Paired:
    """Returns the case's ratios by process; process i of base beside process i of head."""
    sides = [process_values(result, provider, against) for result in (base, head)]
    ratios = tuple(h / b for b, h in zip(*sides, strict=False))  # the shorter one says how many
    return Paired(base.case.name, ratios, median(base.providers[provider].samples_s))


def process_values(result: CaseResult, provider: str, against: str) -> list[float]:
    """Returns each process's median seconds, or its ratio to the reference paired by round."""
    mine: Measured = result.providers[provider]
    if not against:
        return [median(samples) for samples in mine.by_process()]
    others = result.providers[against].by_process()
    return [
        process_ratio(other, own, same_rounds=len(own) == len(other))
        for own, other in zip(mine.by_process(), others, strict=False)
    ]


def again(confirm: tuple[ResultFile, ResultFile], found: list[Paired], against: dict[str, str]) -> list[Paired]:
    """Returns the cases of the confirming run that both of its files have numbers for."""
    base, head = confirm
    second = []
    for case in found:
        results = base.cases.get(case.name), head.cases.get(case.name)
        ours = results[0].ours if results[0] else ""
        names = [ours, *([against[case.name]] if against[case.name] else [])]
        if not all(usable(result, name) for result in results for name in names):
            continue
        if results[0] and results[1] and not any(r.providers[n].invalid for r in results if r for n in names):
            second.append(paired(results[0], results[1], ours, against[case.name]))
    return second


def control_rows(base: ResultFile, head: ResultFile, names: list[str], rule: Rule) -> list[Row]:
    """Returns a row for every other provider of these cases that both files measured."""
    keys, found = [], []
    for name in names:
        for provider in base.cases[name].providers:
            if provider != base.cases[name].ours and all(usable(f.cases[name], provider) for f in (base, head)):
                keys.append((name, provider))
                found.append(paired(base.cases[name], head.cases[name], provider, ""))
    return [
        decided(Row(name, provider, "", Verdict.INCONCLUSIVE), decision)
        for (name, provider), decision in zip(keys, decide(found, rule), strict=True)
    ]


def decided(row: Row, decision: Decision) -> Row:
    return replace(row, verdict=decision.verdict, note=decision.reason, decision=decision)


def throttled(row: Row, base: ResultFile, head: ResultFile) -> Row:
    """Returns the row with a note of the samples that a throttled device gave; they count like all others."""
    if row.decision is None:
        return row
    counts = [len(file.cases[row.case].providers[row.provider].throttled) for file in (base, head)]
    if not any(counts):
        return row
    return replace(
        row, note="; ".join(filter(None, [row.note, "THROTTLED samples: {} of base, {} of head".format(*counts)]))
    )


def blame_machine(row: Row, control: Row) -> Row:
    """Returns the row without its alarm: a control of the same case moved too."""
    if row.verdict not in (Verdict.SLOWER, Verdict.FASTER) or control.decision is None:
        return row
    text = f"{row.verdict}, but so moved {control.provider} ({control.decision.ratio:.3f}): try --relative"
    return replace(row, verdict=Verdict.INCONCLUSIVE, note=text)
