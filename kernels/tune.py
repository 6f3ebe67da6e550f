"""`plait kernels tune`: times candidate tiles on a card and keeps a winner as a row of tuned/sm_NN.json.

Never part of a training step: a launcher reads measured.py's rows and nothing else. Not the cases (tune_cases.py)
nor the clock of a card (tune_card.py): compiler and timer are handed in, so that the whole walk runs without a GPU.

For a case: candidates that fail to compile, spill or do not fit into shared memory are out; then those whose result
is not the reference's; a few interleaved rounds leave FINALISTS; fresh rounds decide. A winner must be faster than
the row in use by MARGIN in the median and in most rounds: noise alone changes no table (tests/test_tune.py).
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from plait.kernels.inspect import Facts
from plait.kernels.launch import Launch, run_launches
from plait.kernels.measured import Key, Measured, Origin, Row, merged, read, write

# Rounds that choose the finalists, and rounds that decide: 30 pairs tell 2 % where a round varies by 3 %.
_FIRST_ROUNDS, _LAST_ROUNDS, FINALISTS = 5, 30, 3
# A winner's median is this much better, and it wins this share of the rounds: 24 of 30 by chance once in 1,400.
MARGIN, _SHARE = 1.02, 0.8
# Largest error by dtype of an output, as a part of the reference's largest value: roundings of one result, and of
# the 16-bit values that go into an fp32 one.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 4e-3}


class Problem(NamedTuple):
    """Work for one case by the tables as they are at the call: launches as data, a run for results, the oracle."""

    launches: Callable[[], Sequence[Launch]]
    run: Callable[[], tuple[torch.Tensor, ...]]
    reference: Callable[[], tuple[torch.Tensor, ...]]


class Case(NamedTuple):
    """One row of a table: how a launcher finds it, what may stand there, and problems that ask for it.

    A problem is of full size to be timed, or small to be checked; either falls into the class of the row.
    """

    name: str
    table: Measured[Any]
    key: Callable[[int], Key]  # by architecture 80, 90 or 100
    present: Callable[[int], Any]  # the tile in use
    candidates: Callable[[int], Iterable[Any]]
    problem: Callable[[torch.device, int, bool], Problem]  # device, architecture, whether small


class Card(NamedTuple):
    """The card and what stands beside it in a row; `arch` is the tables' row, `capability` the card's own."""

    name: str
    device: torch.device
    arch: int
    capability: int
    shared_bytes: int  # at most for one program
    driver: str
    torch: str
    triton: str
    date: str
    commit: str


# (name -> call, rounds) -> microseconds of each round by name, interleaved, caches cold.
Timer = Callable[[Mapping[str, Callable[[], object]], int], Mapping[str, Sequence[float]]]


class Tools(NamedTuple):
    """What the walk needs of the world."""

    facts: Callable[[Launch, str], Facts]
    time_us: Timer
    clock: Callable[[], float]  # seconds
    say: Callable[[str], None]


def text(tile: Any) -> str:
    """A tile's fields in one line."""
    return " ".join(f"{name}={int(value)}" for name, value in tile._asdict().items())


def code_fault(case: Case, card: Card, facts: Callable[[Launch, str], Facts]) -> str:
    """Why the code of the row as it is now cannot be used; empty where it can. Nothing runs."""
    try:
        launches = case.problem(torch.device("meta"), card.arch, False).launches()
        found = [facts(launch, f"sm_{card.capability}") for launch in launches]
    except Exception as error:  # triton's compiler raises of every kind; the caller shows it
        return f"does not compile: {type(error).__name__}"
    spilled = sum(f.spill_loads + f.spill_stores + f.stack_bytes for f in found)
    if spilled:
        return "spills"
    most = max(f.shared_bytes for f in found)
    return f"{most} bytes of shared memory; at most {card.shared_bytes}" if most > card.shared_bytes else ""


def result_fault(problem: Problem, wanted: Sequence[torch.Tensor]) -> str:
    """What is wrong with a run's results, empty where they are right.

    Results are poisoned once they are compared, so that memory that is handed out again holds no right answer.
    """
    fault = ""
    for i, (out, want) in enumerate(zip(problem.run(), wanted, strict=True)):
        error = (out.to(want.dtype) - want).abs().max() / want.abs().max()
        if not error <= _TOLERANCE[out.dtype]:  # NaN is no small error
            fault = fault or f"result {i} is off by {float(error):.2g} of its largest value"
        out.fill_(float("nan"))
    return fault


def beats(samples: Sequence[float], present: Sequence[float]) -> bool:
    """Whether a candidate is faster than the present row beyond noise; samples are paired by round."""
    ratios = [old / new for new, old in zip(samples, present, strict=True)]
    return statistics.median(ratios) >= MARGIN and sum(r > 1.0 for r in ratios) >= _SHARE * len(ratios)


def _sound(case: Case, card: Card, tools: Tools) -> dict[str, tuple[Any, Callable[[], object]]]:
    """Name -> (tile, call) of the present row, first, and of every candidate whose code and results are right."""
    key, present = case.key(card.arch), case.present(card.arch)
    small, full = (case.problem(card.device, card.arch, size) for size in (True, False))
    wanted = small.reference()
    fault = result_fault(small, wanted)
    if fault:
        raise RuntimeError(f"{case.name}: the row in use ({text(present)}) is wrong: {fault}")
    found: dict[str, tuple[Any, Callable[[], object]]] = {
        "present": (present, partial(run_launches, full.launches()))
    }
    for tile in dict.fromkeys(case.candidates(card.arch)):
        if tile == present:
            continue
        with case.table.trial(key, tile):
            fault = code_fault(case, card, tools.facts)
            try:
                fault = fault or result_fault(small, wanted)
            except Exception as error:  # the driver's refusal; a card that is lost fails in the next call as well
                fault = f"does not run: {type(error).__name__}: {error}"
            if not fault:
                found[text(tile)] = (tile, partial(run_launches, full.launches()))
        if fault:
            tools.say(f"  {text(tile)}: {fault}")
    return found


def tune_case(case: Case, card: Card, tools: Tools) -> Row | None:
    """The row of the winner, None where the present row stays. RuntimeError where the present row is wrong."""
    found = _sound(case, card, tools)
    others = [name for name in found if name != "present"]
    if not others:
        tools.say("  no candidate is left; the row in use stays")
        return None
    first = tools.time_us({name: call for name, (_, call) in found.items()}, _FIRST_ROUNDS)
    medians = {name: statistics.median(samples) for name, samples in first.items()}
    for name, median in sorted(medians.items(), key=lambda item: item[1]):
        tools.say(f"  {median:9.1f} us  {name}")
    best = sorted(others, key=medians.__getitem__)[:FINALISTS]
    last = tools.time_us({name: found[name][1] for name in ("present", *best)}, _LAST_ROUNDS)
    winner = min(best, key=lambda name: statistics.median(last[name]))
    old, new = (round(statistics.median(last[name]), 2) for name in ("present", winner))
    if not beats(last[winner], last["present"]):
        tools.say(f"  the row in use stays: {old:.1f} us, best other {new:.1f} us")
        return None
    tools.say(f"  {winner} wins: {new:.1f} us, the row in use {old:.1f} us")
    before, tile = (dict(found[name][0]._asdict()) for name in ("present", winner))
    origin = Origin(card.name, card.driver, card.torch, card.triton, card.date, card.commit, new, old, before)
    return Row(case.table.name, case.key(card.arch), tile, origin)


def tune(cases: Sequence[Case], card: Card, tools: Tools, budget_s: float) -> Iterator[Row]:
    """Rows as they are won, case by case; no case begins once `budget_s` seconds are over."""
    start = tools.clock()
    for number, case in enumerate(cases, 1):
        spent = tools.clock() - start
        if spent >= budget_s:
            tools.say(f"{spent:.0f} s are over; left out: {', '.join(c.name for c in cases[number - 1 :])}")
            return
        tools.say(f"[{number}/{len(cases)}] {case.name}: in use {text(case.present(card.arch))}")
        row = tune_case(case, card, tools)
        if row is not None:
            yield row


def tune_into(path: Path, cases: Sequence[Case], card: Card, tools: Tools, budget_s: float) -> int:
    """`tune`, each row written into `path` as soon as it is won, over the one of its key; returns their number.

    ValueError where `path` holds something else, before anything runs.
    """
    rows, num_rows = read(path), 0
    for row in tune(cases, card, tools, budget_s):
        rows = merged(rows, [row])
        write(path, rows)
        num_rows += 1
    return num_rows
