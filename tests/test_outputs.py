"""What CI servers and pyproject.toml say and hear: JUnit, annotations, step summary, settings, the list of suites."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from plait.bench import cli, outputs, providers, runner, settings
from plait.bench.compare import Comparison, Row
from plait.bench.outputs import FAILED, OK, SKIPPED, WARNING, Ci, Entry
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite
from plait.bench.verdict import Verdict

RESULTS = [
    CaseResult(
        Case("c <1>", {}, flop=1e9),
        "plait",
        {
            "plait": Measured([0.25, 0.5, 0.75], "equal"),
            "torch": Measured([1.0, 1.0, 1.0], invalid="5 TB/s, memory gives 4"),
            "liger": Measured(skipped="not installed"),
        },
    ),
    CaseResult(Case("bad", {}), "", {}, error="OSError: full, 100%\nmore"),
]


def test_an_entry_a_provider_and_one_for_a_failed_case():
    assert outputs.entries_of("s", RESULTS) == [
        Entry("s", "c <1> / plait", OK, "", 0.5),
        Entry("s", "c <1> / torch", FAILED, "5 TB/s, memory gives 4", 1.0),
        Entry("s", "c <1> / liger", SKIPPED, "not installed"),
        Entry("s", "bad", FAILED, "OSError: full, 100%\nmore"),
    ]


def test_an_entry_a_verdict():
    rows = [Row("c", "plait", "", verdict, "why", failed=False) for verdict in Verdict]
    found = outputs.verdicts_of("s", Comparison(rows, [Row("c", "torch", "", Verdict.SLOWER)], ""))
    assert [entry.status for entry in found] == [OK, FAILED, OK, WARNING, FAILED]
    assert found[1].text == "SLOWER, why" and not found[0].text
    failed = outputs.verdicts_of(
        "s", Comparison([Row("c", "-", "", Verdict.INCONCLUSIVE, "gone", failed=True)], [], "")
    )
    assert failed[0].status == FAILED


def test_an_entry_a_line_of_the_gate():
    found = outputs.gate_entries([["time", "x", "1.2 x", "FAIL"], ["launches", "y", "2 -> 1", "ok"]])
    assert found == [Entry("gate", "time: x", FAILED, "1.2 x"), Entry("gate", "launches: y", OK)]


def test_junit_counts_and_keeps_every_entry():
    text = outputs.junit([*outputs.entries_of("s", RESULTS), Entry("t", "x\x00y", WARNING, "INCONCLUSIVE")])
    root = ElementTree.fromstring(text)
    counts = [[suite.get(key) for key in ("name", "tests", "failures", "skipped")] for suite in root]
    assert counts == [["s", "4", "2", "1"], ["t", "1", "0", "0"]]
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert float(cases["c <1> / plait"].get("time")) == 0.5 and len(cases["c <1> / plait"]) == 0
    assert cases["bad"][0].get("message") == "OSError: full, 100%" and cases["bad"][0].text.endswith("more")
    assert cases["c <1> / liger"][0].tag == "skipped" and cases["xy"][0].text == "INCONCLUSIVE"


def test_annotations_escape_what_would_end_them():
    assert outputs.workflow_commands([*outputs.entries_of("s", RESULTS), Entry("s", "a: b, c", WARNING, "w")]) == [
        "::error title=s%3A c <1> / torch::5 TB/s, memory gives 4",
        "::error title=s%3A bad::OSError: full, 100%25%0Amore",
        "::warning title=s%3A a%3A b%2C c::w",
    ]


@pytest.fixture
def suite(monkeypatch) -> Suite:
    """A suite of the two cases of RESULTS instead of any other."""
    cases = [result.case for result in RESULTS]

    def measure(case: Case, options: Options) -> CaseResult:
        if case.name == "bad":
            raise OSError("full")
        return RESULTS[0]

    one = Suite("s", "about", lambda full: cases, measure)
    monkeypatch.setattr(cli, "load", lambda name: one)
    return one


@pytest.mark.parametrize("actions", [False, True])
def test_a_run_tells_github_when_it_is_asked_to(suite, tmp_path, monkeypatch, capsys, actions):
    for name in outputs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "summary.md").write_text("before\n")
    if actions:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert cli.main(["run", "train", "--junit", str(tmp_path / "j.xml")]) == 1
    out, summary = capsys.readouterr().out, (tmp_path / "summary.md").read_text()
    assert ("::error title=s%3A bad::OSError: full" in out) is actions
    assert summary.startswith("before\n") and ("| c <1> " in summary) is actions
    assert ElementTree.parse(tmp_path / "j.xml").getroot()[0].get("tests") == "4"


def test_a_child_process_tells_nobody(monkeypatch):
    """Each of five processes once added its own summary."""
    seen = {}

    class Child:
        def __init__(self, command, *, stdout, env):
            seen.update(env)

        def wait(self):
            return 0

        def poll(self):
            return 0

    monkeypatch.setattr(runner.subprocess, "Popen", Child)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/x")
    monkeypatch.setenv("OTHER", "kept")
    assert runner.run_child(["x"]) == 0 and seen["OTHER"] == "kept" and not set(outputs.VARIABLES) & set(seen)


def test_the_environment_is_read_at_the_command_line_alone():
    folder = Path(cli.__file__).parent
    readers = {path.name for path in folder.glob("*.py") if "Ci.of(" in path.read_text()}
    assert readers == {"cli.py"} and (folder / "cli.py").read_text().count("Ci.of(") == 1
    assert Ci.of({}) == Ci() and Ci.of({"GITHUB_ACTIONS": "false"}) == Ci(False, None)


# ---- settings -----------------------------------------------------------------------------------------------------


def table(tmp_path: Path, text: str) -> settings.Settings:
    (tmp_path / "pyproject.toml").write_text(text)
    return settings.load(tmp_path / "pyproject.toml", ["kernels", "train"], ["torch", "liger"])


def test_settings_are_the_table_s(tmp_path):
    found = table(
        tmp_path, '[tool.plait.bench]\nsuites = ["train"]\nbudget = 9\nfloor = 0.5\nproviders = ["torch"]\n'
    )
    assert found == settings.Settings(("train",), 9.0, 0.5, ("torch",))
    assert table(tmp_path, "[tool.other]\nx = 1\n") == settings.Settings() == settings.load(None, [], [])


@pytest.mark.parametrize(
    "text, message",
    [
        ("budgte = 3", "unknown key 'budgte'; valid: suites, budget, floor, providers"),
        ('budget = "3"', "budget is '3'; need a number, 0 or more"),
        ("budget = true", "budget is True"),
        ("floor = -1", "floor is -1"),
        ("budget = inf", "budget is inf"),
        ('suites = "train"', "suites is 'train'; need a list of names"),
        ("suites = []", "suites is .*need a list"),
        ('suites = ["trian"]', "suites: 'trian' is unknown; valid: kernels, train"),
        ('providers = ["triton"]', "providers: 'triton' is unknown; valid: liger, torch"),
    ],
)
def test_a_wrong_setting_names_file_key_and_what_is_valid(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"pyproject.toml: \[tool.plait.bench\]: .*{message}"):
        table(tmp_path, f"[tool.plait.bench]\n{text}\n")


@pytest.mark.parametrize("text, message", [("[tool", "is no TOML"), ("[tool.plait]\nbench = 3", "is no table")])
def test_a_broken_file_is_said(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        table(tmp_path, text)


def test_the_nearest_file_counts(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("")
    assert settings.find(deep) == tmp_path / "pyproject.toml"
    (deep.parent / "pyproject.toml").write_text("")
    assert settings.find(deep) == deep.parent / "pyproject.toml"


def test_settings_choose_the_suites_of_a_bare_run_and_the_command_line_goes_before(tmp_path, monkeypatch, capsys):
    ran: list[tuple[str, float, tuple[str, ...]]] = []

    def here(suite: Suite, options: Options, only: str, roof: Any) -> tuple[list[CaseResult], int]:
        ran.append((suite.name, options.budget_s, options.providers))
        return RESULTS[:1], 0

    monkeypatch.setattr(
        cli, "load", lambda name: Suite(name, "about", lambda full: [], lambda case, options: RESULTS[0])
    )
    monkeypatch.setattr(runner, "run_here", here)
    monkeypatch.chdir(tmp_path)
    text = '[tool.plait.bench]\nsuites = ["launch", "train"]\nbudget = 9\nproviders = ["torch"]\nfloor = 7\n'
    (tmp_path / "pyproject.toml").write_text(text)
    assert cli.main(["run"]) == 0 and [name for name, *_ in ran] == ["launch", "train"]
    assert [row[1:] for row in ran] == [(9.0, ("plait",)), (9.0, ("torch",))], "launch has no peers"
    assert cli.main(["run", "kernels", "--budget", "3", "--providers", "liger,compile"]) == 0
    assert ran[-1] == ("kernels", 3.0, ("liger", "compile"))
    assert cli.main(["run", "kernels", "--providers", "x"]) == 2 and "kernels (torch, " in capsys.readouterr().err
    floors = [
        cli.parser(settings.load(path, cli.SUITES, providers.ALL)) for path in (tmp_path / "pyproject.toml", None)
    ]
    assert [p.parse_args(["compare", "a", "b"]).floor_us for p in floors] == [7.0, pytest.approx(0.2)]
    (tmp_path / "pyproject.toml").write_text("[tool.plait.bench]\nx = 1\n")
    assert cli.main(["run"]) == 2 and "unknown key 'x'" in capsys.readouterr().err


# ---- the list -----------------------------------------------------------------------------------------------------


def test_the_list_names_every_suite_its_providers_and_its_cases(capsys):
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for name in cli.SUITES:
        assert f"\n{name}: " in f"\n{out}" and name in providers.PROVIDERS
        for case in cli.load(name).cases(True):
            assert f"    {case.name}\n" in out or f"  * {case.name}\n" in out
    assert "beside ours: torch (found)" in out and "  * host copy" in out or "  * card copy" in out


@pytest.mark.parametrize(
    "need, gpu, state",
    [
        (providers.Need(), False, "found"),
        (providers.Need(gpu=True), False, "needs a GPU"),
        (providers.Need(gpu=True), True, "found"),
        (providers.Need("no_such_module", True), False, "missing: no_such_module is not installed"),
    ],
)
def test_a_provider_is_found_or_says_what_is_missing(need, gpu, state):
    assert providers.state_of(need, gpu) == state


def test_a_provider_that_was_not_asked_for_is_left_out():
    assert not providers.left_out("torch", ()) and not providers.left_out("plait", ("torch",))
    assert providers.left_out("liger", ("torch",))
