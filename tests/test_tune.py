"""Rows timed on a card: the files that hold them, the look-ups that find them, and the walk that wins them.

The walk runs here with a compiler and a clock that are made up, so that each rule is broken once: the fastest right
candidate wins, wrong, spilling and oversized ones are refused, noise alone changes nothing.
"""

import ast
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from plait.kernels import cli, matmul_launch, tune_card
from plait.kernels.inspect import Facts, compile_offline, meta
from plait.kernels.matmul_launch import plan
from plait.kernels.measured import Measured, Origin, Row, measured, merged, path_of, read, write
from plait.kernels.tune import Card, Case, Problem, Tools, beats, code_fault, result_fault, tune, tune_case, tune_into
from plait.kernels.tune_cases import cases
from tests.cases import interpret, needs_compiler, needs_interpreter

ROOT = Path(__file__).resolve().parent.parent
ORIGIN = Origin("Card 9000", "570.1", "2.13.0", "3.9.0", "2026-12-01", "abc1234", 8.0, 10.0, {"block": 64})
CARD = Card(
    "Card 9000", torch.device("cpu"), 90, 90, 1000, "570.1", "2.13.0", "3.9.0", "2026-12-01", "abc1234"
)  # fmt: skip


class Tile(NamedTuple):
    """A row of the table of these tests."""

    block: int
    wide: bool = False


# Files and look-ups


def row(table: str = "toy", key: tuple[str | int, ...] = ("op", 90, "large"), **tile: int) -> Row:
    return Row(table, key, tile or {"block": 32, "wide": True}, ORIGIN)


def test_rows_read_back_as_they_were_written(tmp_path):
    path = tmp_path / "new" / "sm_90.json"
    rows = [row(key=("op", 90, 128, "plain")), row(key=("op", 90, "small"), block=64)]
    write(path, rows)
    assert read(path) == rows
    assert json.loads(path.read_text())["rows"][0]["tile"] == {"block": 32, "wide": True}
    assert path.stat().st_mode & 0o777 == 0o644 and list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_rows_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "sm_90.json"
    write(path, [row()])
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        write(path, [row(block=64)])
    assert read(path) == [row()] and list(tmp_path.iterdir()) == [path]


def test_a_new_row_replaces_the_one_of_its_table_and_key():
    old, other = row(block=16), row(table="another", block=16)
    assert merged([old, other], [row(block=64)]) == [row(block=64), other]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2, "rows": []}', '{"format": 1, "rows": [{"table": "toy"}]}', '{"format": 1}'],
)
def test_what_is_no_table_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "sm_90.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"sm_90.json: .*; expected what `plait kernels tune` writes"):
        read(path)
    assert read(tmp_path / "absent.json") == []


def test_a_row_of_other_fields_is_refused_by_table_and_key():
    with pytest.raises(ValueError, match=r"table 'toy', row \('op', 90, 'large'\): .*'warps'; tune it again"):
        Measured("toy", Tile, [row(block=1, warps=2)])
    assert Measured("toy", Tile, [row(block=1), row("other", warps=2)]) == {("op", 90, "large"): Tile(1)}


def test_a_trial_ends_with_its_block_also_where_it_raises():
    table = Measured("toy", Tile, [row()])
    for key, before in ((("op", 90, "large"), Tile(32, True)), (("op", 90, "new"), None)):
        with pytest.raises(KeyError), table.trial(key, Tile(7)):
            assert table[key] == Tile(7)
            raise KeyError
        assert table.get(key) == before


def test_every_shipped_row_is_one_that_a_case_asks_for():
    """Without a file, as now, the tables are the derived ones."""
    known = {(case.table.name, case.key(arch)) for case in cases() for arch in (80, 90, 100)}
    for arch in (80, 90, 100):
        rows = read(path_of(arch))
        assert [r for r in rows if (r.table, r.key) not in known or r.key[1] != arch] == []
    assert measured("no such table", Tile) == {}


def numbers_of(launches: Any) -> list[tuple[Any, ...]]:
    """All of each launch that a tile decides."""
    return [(x.constants.get("BLOCK_ROW"), x.constants.get("BLOCK_COL"), x.num_warps, x.num_stages) for x in launches]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("name", [case.name for case in cases()])
def test_the_problem_of_a_case_asks_for_its_row(name, arch, small):
    """Both sizes fall into the class of the row: what is tuned is what a launcher would find."""
    (case,) = [case for case in cases() if case.name == name]
    problem = case.problem(torch.device("meta"), arch, small)
    present = case.present(arch)
    before = numbers_of(problem.launches())
    assert before[0] == (present.block_row, present.block_col, present.num_warps, present.num_stages)
    tile = present._replace(block_row=present.block_row * 2, num_stages=1)
    with case.table.trial(case.key(arch), tile):
        assert case.present(arch) == tile
        assert numbers_of(problem.launches())[0] == (tile.block_row, tile.block_col, tile.num_warps, 1)
    assert numbers_of(problem.launches()) == before


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_candidates_are_tiles_of_their_table_and_few(arch):
    for case in cases():
        tiles = set(case.candidates(arch))
        assert 4 <= len(tiles) <= 40, case.name
        assert {type(tile) for tile in tiles} == {type(case.present(arch))}


def test_a_written_row_changes_the_look_up_of_the_next_process(tmp_path):
    """In a copy of the package: the file is read at import, and only there."""
    package = tmp_path / "plait"
    shutil.copytree(ROOT / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__", "tuned"))
    (package / "__init__.py").touch()
    ask = (
        "import torch; from plait.kernels.matmul_launch import plan; import plait.kernels as k; print(k.__file__);"
        "x = torch.empty(4096, 4096, device='meta', dtype=torch.bfloat16);"
        "print(*plan('epilogue', x, x, 90).tile); print(*plan('epilogue', x, x, 80).tile)"
    )

    def answer() -> list[str]:
        command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {ask}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    place, before, other = answer()
    assert str(package) in place
    tile = matmul_launch.Tile(64, 128, 64, 4, 4)
    assert before == " ".join(map(str, plan("epilogue", meta(4096, 4096), meta(4096, 4096), 90).tile))
    rows = [Row("linear", ("epilogue", 90, "large"), dict(tile._asdict()), ORIGIN)]
    write(package / "kernels" / "tuned" / "sm_90.json", rows)
    assert answer()[1:] == [" ".join(map(str, tile)), other]


# Origins: a number of a launch that stands in Python is derived and says from what

# Names of tiles, warps, stages, chunks, limits between tiles; data of tests and formats are none of them.
LAUNCH_NUMBER = re.compile(r"BLOCK|WARPS|TILE|STAGES|PASSES|WINDOW|PARTIAL|CHUNK|SPLIT|STEPS|ROWS|UP_TO|FEW|RESIDENT")
ORIGINS = re.compile(r"derived|offline|compile|spill|data sheet", re.IGNORECASE)
RUN = re.compile(r"#|_?[A-Z][A-Z0-9_, ]*(: .*)? = ")
LAUNCHING = sorted(
    path
    for path in (ROOT / "kernels").glob("*.py")
    if not path.name.endswith("_points.py") and path.name not in ("gate.py", "tune.py", "tune_cases.py")
)


def numbers_without_origin(source: str) -> list[str]:
    """Launch numbers of a file that neither the comment above them, nor one beside, nor the first lines explain."""
    lines, tree = source.splitlines(), ast.parse(source)
    if ORIGINS.search(ast.get_docstring(tree) or ""):
        return []
    found = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [
            x.id for target in targets if target is not None for x in ast.walk(target) if isinstance(x, ast.Name)
        ]
        value = getattr(node, "value", None)
        has_number = value is not None and any(type(getattr(x, "value", None)) is int for x in ast.walk(value))
        if not has_number or not names or not all(name.isupper() and LAUNCH_NUMBER.search(name) for name in names):
            continue
        first = node.lineno - 1
        while first and RUN.match(lines[first - 1]):
            first -= 1  # a comment above a run of numbers holds for all of them
        if not ORIGINS.search("\n".join(lines[first : node.end_lineno])):
            found.append(", ".join(names))
    return found


@pytest.mark.parametrize("path", LAUNCHING, ids=lambda path: path.name)
def test_numbers_of_a_launch_say_where_they_come_from(path):
    assert numbers_without_origin(path.read_text()) == []


def test_a_number_without_origin_is_found():
    good = '"""A file."""\n# Eight a thread (derived).\n_BLOCK = 2048\n_WARPS = 4\n'
    assert numbers_without_origin(good) == []
    assert numbers_without_origin(good.replace(" (derived)", "")) == ["_BLOCK", "_WARPS"]
    assert (
        numbers_without_origin(good.replace("A file", "Each tile compiles without spills").replace("(d", "(")) == []
    )
    assert numbers_without_origin('"""A file."""\n_TILES: dict[int, int] = {\n    80: 1,  # registers 255\n}\n') == [
        "_TILES"
    ]


def test_no_comment_claims_a_time_on_a_card():
    """What was timed is a row of tuned/, which says on which card, when and at which commit."""
    claims = re.compile(r"#.*\b(?:measured|timed) on\b(?!.*\d{4}-\d{2}-\d{2})(?! a card)")
    assert [line for path in LAUNCHING for line in path.read_text().splitlines() if claims.search(line)] == []


# The walk, with a compiler and a clock made up


class Fake:
    """A case over a toy table: what each tile compiles to, computes and takes; everything is told by its block."""

    def __init__(self, micros: dict[int, float], noise: float = 0.0, seed: int = 0):
        self.micros, self.noise, self.random = micros, noise, random.Random(seed)
        self.table: Measured[Tile] = Measured("toy", Tile, [])
        self.spilling: set[int] = set()
        self.wrong: set[int] = set()
        self.silent: set[int] = set()  # write nothing
        self.raising: set[int] = set()
        self.uncompiled: set[int] = set()
        self.shared: dict[int, int] = {}
        self.compiled: list[int] = []
        self.timed: list[int] = []
        self.said: list[str] = []
        self.seconds = 0.0
        self.out = torch.full((4,), float("nan"))

    def tile(self) -> Tile:
        return self.table.get(("op", 90, "large"), Tile(64))

    def case(self, name: str = "toy") -> Case:
        def problem(device: torch.device, arch: int, small: bool) -> Problem:
            return Problem(lambda: [FakeLaunch(self, self.tile().block)], self.run, lambda: (torch.arange(4.0),))

        return Case(
            name, self.table, lambda arch: ("op", arch, "large"), lambda arch: self.tile(),
            lambda arch: [Tile(block) for block in self.micros], problem,
        )  # fmt: skip

    def run(self) -> tuple[torch.Tensor, ...]:
        block = self.tile().block
        if block in self.raising:
            raise RuntimeError("out of resource: shared memory")
        if block not in self.silent:
            self.out.copy_(torch.arange(4.0) + (0.1 if block in self.wrong else 0.0))
        return (self.out,)

    def facts(self, launch: Any, arch: str) -> Facts:
        assert arch == "sm_90"
        if launch.block in self.uncompiled:
            raise ValueError("no such layout")
        self.compiled.append(launch.block)
        return Facts("k", arch, 64, 0, launch.block in self.spilling, 0, self.shared.get(launch.block, 0), 4, {})

    def time_us(self, calls: Any, rounds: int) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                call()
                samples[name].append(self.micros[self.timed[-1]] * self.random.lognormvariate(0.0, self.noise))
        return samples

    def clock(self) -> float:
        self.seconds += 100.0
        return self.seconds

    def tools(self) -> Tools:
        return Tools(self.facts, self.time_us, self.clock, self.said.append)  # type: ignore[arg-type]


class FakeLaunch:
    """A launch that tells the clock which tile ran."""

    constants: ClassVar[dict[str, object]] = {}

    def __init__(self, fake: Fake, block: int):
        self.fake, self.block = fake, block

    def run(self) -> None:
        self.fake.timed.append(self.block)


def test_the_fastest_right_candidate_wins_and_the_table_is_left_alone():
    fake = Fake({64: 10.0, 32: 8.0, 128: 9.0, 16: 12.0, 256: 9.5})
    won = tune_case(fake.case(), CARD, fake.tools())
    origin = ORIGIN._replace(time_us=8.0, before_us=10.0, before={"block": 64, "wide": False})
    assert won == Row("toy", ("op", 90, "large"), {"block": 32, "wide": False}, origin)
    assert fake.table == {} and 64 not in fake.compiled
    last = fake.timed[-30:]
    assert set(last) == {64, 32, 128, 256}, "three finalists and the row in use are timed again"


@pytest.mark.parametrize("fault", ["wrong", "silent", "raising", "spilling", "uncompiled", "shared"])
def test_a_faster_candidate_with_a_fault_is_refused(fault):
    fake = Fake({64: 10.0, 32: 5.0, 128: 8.0})
    if fault == "shared":
        fake.shared = {32: 1001, 128: 1000}
    else:
        getattr(fake, fault).add(32)
    won = tune_case(fake.case(), CARD, fake.tools())
    assert won is not None and won.tile["block"] == 128
    assert 32 not in fake.timed, "what is refused is not timed"
    text = {
        "wrong": "result 0 is off by 0.033", "silent": "result 0 is off by nan", "raising": "out of resource",
        "spilling": "spills", "uncompiled": "does not compile: ValueError", "shared": "1001 bytes of shared memory",
    }[fault]  # fmt: skip
    assert [line for line in fake.said if line.startswith("  block=32") and text in line]


def test_a_wrong_row_in_use_is_no_yardstick():
    fake = Fake({64: 10.0, 32: 5.0})
    fake.wrong.add(64)
    with pytest.raises(RuntimeError, match=r"toy: the row in use \(block=64 wide=0\) is wrong: result 0 is off"):
        tune_case(fake.case(), CARD, fake.tools())


def test_the_row_in_use_stays_where_nothing_is_faster_or_nothing_is_left():
    slower = Fake({64: 10.0, 32: 10.0, 128: 9.9})
    assert tune_case(slower.case(), CARD, slower.tools()) is None
    assert "  the row in use stays: 10.0 us, best other 9.9 us" in slower.said
    alone = Fake({64: 10.0, 32: 5.0})
    alone.spilling.add(32)
    assert tune_case(alone.case(), CARD, alone.tools()) is None and alone.timed == []


@pytest.mark.parametrize("noise", [0.003, 0.03])
def test_noise_alone_changes_no_table_and_a_real_gain_is_found(noise):
    """300 walks over eight equal candidates, and over one that is 6 % faster."""
    wins = {same: 0 for same in (True, False)}
    for same, seed in itertools.product(wins, range(300)):
        fake = Fake({64: 10.0, **dict.fromkeys((1, 2, 4, 8, 16, 32, 128), 10.0)}, noise, seed)
        if not same:
            fake.micros[128] = 9.4
        won = tune_case(fake.case(), CARD, fake.tools())
        wins[same] += won is not None and (same or won.tile["block"] == 128)
    assert wins[True] <= 3 and wins[False] >= 285, wins


def test_one_lucky_round_does_not_win():
    assert beats([9.0] * 30, [10.0] * 30)
    assert not beats([9.9] * 30, [10.0] * 30), "1 % is noise"
    assert not beats([9.0] * 20 + [11.0] * 10, [10.0] * 30), "it loses every third round"


def test_no_case_begins_after_the_budget():
    fake = Fake({64: 10.0, 32: 8.0})
    todo = [fake.case(name) for name in ("one", "two", "three", "four")]
    assert len(list(tune(todo, CARD, fake.tools(), 250.0))) == 2
    assert fake.said[-1] == "300 s are over; left out: three, four"


def test_rows_are_written_as_they_are_won_and_an_interrupt_keeps_them(tmp_path):
    path = tmp_path / "sm_90.json"
    write(path, [row(key=("other", 90, "large"), block=1), row(block=2)])
    fake, stopping = Fake({64: 10.0, 32: 8.0}), Fake({64: 10.0, 32: 8.0})
    stopping.time_us = lambda calls, rounds: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]

    def time_us(calls: Any, rounds: int) -> Any:
        return (stopping if fake.said[-1].startswith("[2/2]") else fake).time_us(calls, rounds)

    tools = fake.tools()._replace(time_us=time_us)
    with pytest.raises(KeyboardInterrupt):
        tune_into(path, [fake.case("one"), fake.case("two")], CARD, tools, 1e9)
    assert {r.key[0]: r.tile["block"] for r in read(path)} == {"other": 1, "op": 32}


def test_a_file_that_is_no_table_is_refused_before_anything_runs(tmp_path):
    fake = Fake({64: 10.0, 32: 8.0})
    (tmp_path / "x.json").write_text("notes")
    with pytest.raises(ValueError, match="x.json"):
        tune_into(tmp_path / "x.json", [fake.case()], CARD, fake.tools(), 1e9)
    assert fake.said == [] and (tmp_path / "x.json").read_text() == "notes"


# Real cases


# 156 tiles at least: a minute each in the interpreter.
SLOW = [pytest.param(case.name, marks=pytest.mark.long) for case in cases() if case.name.endswith(".large")]


@interpret
@needs_interpreter
@pytest.mark.parametrize("name", [case.name for case in cases() if not case.name.endswith(".large")] + SLOW)
def test_a_case_checks_against_the_reference(name):
    """By the row in use and by a candidate, in the interpreter; fp16, which it computes as a card does."""
    (case,) = [case for case in cases([name], torch.float16) if case.name == name]
    problem = case.problem(torch.device("cpu"), 90, True)
    wanted = problem.reference()
    assert result_fault(problem, wanted) == ""
    tile = list(case.candidates(90))[-1]
    with case.table.trial(case.key(90), tile):
        assert result_fault(problem, wanted) == ""
        doubled = problem._replace(run=lambda: tuple(x * 2 for x in problem.run()))
        assert "result 0 is off by 1" in result_fault(doubled, wanted)


@pytest.mark.offline
@needs_compiler
def test_the_compiler_refuses_a_tile_that_spills_and_one_that_is_too_big():
    (case,) = cases(["attention.dkdv.128"])
    with case.table.trial(case.key(90), case.present(90)._replace(block_row=64, block_col=128, num_warps=4)):
        assert code_fault(case, CARD._replace(shared_bytes=227 * 1024), compile_offline) == "spills"
    (case,) = cases(["linear.linear.small"])
    with case.table.trial(case.key(90), case.present(90)._replace(num_stages=3)):
        assert code_fault(case, CARD, compile_offline).endswith("bytes of shared memory; at most 1000")
        assert code_fault(case, CARD._replace(shared_bytes=227 * 1024), compile_offline) == ""


# The card, made up


class FakeEvents:
    """torch.cuda's events over a clock that only calls advance."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.order: list[str] = []

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        at: list[float] = []
        return SimpleNamespace(
            at=at, record=lambda: at.append(self.now_us), elapsed_time=lambda end: (end.at[0] - at[0]) / 1000.0
        )

    def call(self, name: str, us: float) -> None:
        self.order.append(name)
        self.now_us += us


def test_the_timer_of_a_card_gives_microseconds_by_round_in_changing_order(monkeypatch):
    fake, device = FakeEvents(), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=64))
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.call("sync", 1000.0))
    monkeypatch.setattr(torch.Tensor, "zero_", lambda room: fake.call("flush", 500.0))
    names = ("a", "b", "c")
    calls = {name: (lambda name=name, i=i: fake.call(name, 10.0 * (i + 1))) for i, name in enumerate(names)}
    samples = tune_card.event_timer(device)(calls, 8)
    assert {name: pytest.approx(10.0 * (i + 1)) for i, name in enumerate(names)} == {
        name: sum(values) / 8 for name, values in samples.items()
    }
    assert fake.order[:3] == list(names), "each is called once before the first round"
    rounds = [r.split() for r in " ".join(fake.order[3:]).split(" sync")[:8]]
    assert all([x for x in r if x != "flush"] != [] and r[0] == "flush" for r in rounds)
    assert all(sorted(x for x in r if x != "flush") == list(names) for r in rounds)
    assert len({tuple(x for x in r if x != "flush") for r in rounds}) > 1


def test_facts_of_a_card(monkeypatch):
    properties = SimpleNamespace(name="Card 9000", major=8, minor=6, shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune_card, "_output", lambda *command: "570.1" if "--id=1" in command else "abc1234")
    card = tune_card.this_card()
    assert (card.name, card.arch, card.capability, card.shared_bytes) == ("Card 9000", 80, 86, 101376)
    assert (card.driver, card.commit, card.device) == ("570.1", "abc1234+", torch.device("cuda", 1))
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", card.date) and card.torch == torch.__version__


def test_what_a_tool_does_not_say_is_unknown(monkeypatch):
    assert tune_card._output("no-such-tool") == tune_card._output("false") == "unknown"
    assert tune_card._output("printf", "one\ntwo\n") == "one"
    monkeypatch.setattr(tune_card, "_output", lambda *command: "unknown")
    assert tune_card.source_commit().startswith("plait ")


# The command


def test_without_a_card_tune_says_so_and_lists_on_request(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "torch finds no CUDA device" in err
    assert cli.main(["tune", "--dry-run", "attention"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(cases(["attention"])) and "candidates, in use block_row=128" in lines[0]
    assert cli.main(["tune", "no_such_case"]) == 2
    assert "no case 'no_such_case'; `plait kernels tune --dry-run` has the names" in capsys.readouterr().err


def test_a_card_that_shares_its_rows_with_others_needs_a_file_of_its_own(capsys, monkeypatch):
    monkeypatch.setattr(tune_card, "this_card", lambda: CARD._replace(capability=86, arch=80))
    assert cli.main(["tune"]) == 2
    assert "Card 9000 (sm_86) takes the rows of sm_80" in capsys.readouterr().err


def test_the_command_writes_what_it_won(capsys, monkeypatch, tmp_path):
    fake = Fake({64: 10.0, 32: 8.0})
    monkeypatch.setattr(tune_card, "this_card", lambda: CARD)
    monkeypatch.setattr(tune_card, "event_timer", lambda device: fake.time_us)
    monkeypatch.setattr(cli, "compile_offline", fake.facts)
    monkeypatch.setattr(cli, "cases", lambda names=(): [fake.case()])
    path = tmp_path / "sm_90.json"
    assert cli.main(["tune", "--out", str(path)]) == 0
    assert "block=32 wide=0 wins: 8.0 us, the row in use 10.0 us" in capsys.readouterr().out
    assert [r.tile for r in read(path)] == [{"block": 32, "wide": False}]
    fake.wrong.add(64)
    assert cli.main(["tune", "--out", str(path)]) == 1
    assert "is wrong" in capsys.readouterr().err and len(read(path)) == 1
    monkeypatch.setattr(cli, "tune_into", lambda *some: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["tune", "--out", str(path)]) == 130
    assert f"stopped; the rows won so far are in {path}" in capsys.readouterr().err
