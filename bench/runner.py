"""Runs a suite: its cases one by one in this process, or all of them in several fresh ones. Parses no command line.

A case that fails takes no other with it: its result has no numbers and says why. Exit codes are cli.py's.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

from plait.bench import outputs, report
from plait.bench.ceilings import mark_impossible
from plait.bench.compare import IncomparableError
from plait.bench.device import fingerprint
from plait.bench.ending import scratch_folder
from plait.bench.progress import Progress
from plait.bench.result_file import ResultFile, read, united
from plait.bench.roofline import Roof, measured_roof, same_hardware
from plait.bench.spec import Case, CaseResult, Options, Suite, WrongResultError


def measured(suite: Suite, case: Case, options: Options, roof: Roof | None = None) -> tuple[CaseResult, int]:
    """Returns the case's result and exit code; a failure is a result without numbers that says what went wrong.
    roof: what this machine reached, where that is known."""
    try:
        result = suite.measure(case, options)
        return result, 4 if mark_impossible(result, fingerprint(), roof) else 0
    except WrongResultError as error:
        text, code = f"wrong result: {error}", 4
    except (OSError, RuntimeError, ValueError) as error:
        text, code = f"{type(error).__name__}: {error}", 1
    return CaseResult(case, "", {}, error=text), code


def run_here(suite: Suite, options: Options, only: str, roof: Roof | None = None) -> tuple[list[CaseResult], int]:
    """Measures the suite's cases whose name contains `only`; returns them and the worst of their exit codes.

    Shows on stderr where it is and, of several cases, what each took. ValueError when there is no such case.
    """
    cases = [case for case in suite.cases(options.full) if only in case.name]
    if not cases:
        raise ValueError(f"--only: no case of suite {suite.name} contains {only!r}")
    results, worst, progress = [], 0, Progress(sys.stderr)
    stop = time.monotonic() + options.budget_s
    for index, case in enumerate(cases):
        progress.at(index, len(cases), f"{suite.name}: {case.name}")
        share = (stop - time.monotonic()) / (len(cases) - index) if options.budget_s else 0.0
        if share < 0.0:
            text = f"not measured: the budget of {options.budget_s:g} s is spent"
            result, code = CaseResult(case, "", {}, error=text), 1
        else:
            result, code = measured(suite, case, dataclasses.replace(options, budget_s=share), roof)
        progress.close()
        if code:
            text = result.error or "; ".join(m.invalid for m in result.providers.values() if m.invalid)
            print(f"plait bench: {case.name}: {text}", file=sys.stderr, flush=True)
        elif len(cases) > 1:
            print(f"  {case.name}: {report.line_of(result)}", file=sys.stderr, flush=True)
        results.append(result)
        worst = max(worst, code)
    return results, worst


def run_processes(
    suite: Suite, options: Options, only: str, roof: Roof | None = None
) -> tuple[list[CaseResult], int]:
    """The same in options.processes fresh processes, one after the other, each with a seed of its own."""
    runs, worst = [], 0
    with scratch_folder() as folder:
        for index in range(options.processes):
            print(f"[{suite.name}: process {index + 1}/{options.processes}]", file=sys.stderr, flush=True)
            command = [sys.executable, "-P", "-m", "plait", "bench", "run", suite.name, "--json", folder]
            command += ["--rounds", str(options.rounds), "--seed", str(options.seed + index), f"--only={only}"]
            command += [f"--budget={options.budget_s / options.processes}", f"--tutorials={options.tutorials}"]
            command += [f"--cache={options.cache}"] if options.cache else []
            command += [f"--providers={','.join(options.providers)}"] if options.providers else []
            code = run_child([*command, *(["--full"] if options.full else [])])
            if code == 2:
                raise ValueError(f"process {index} of suite {suite.name} refused its command line (see above)")
            path = Path(folder) / f"{suite.name}.json"
            if not path.exists():
                raise RuntimeError(f"process {index} of suite {suite.name} ended with {code} and wrote no result")
            runs.append(list(read(path).cases.values()))
            path.unlink()
            worst = max(worst, code)
    results = united(runs)
    beyond = [mark_impossible(result, fingerprint(), roof) for result in results] if roof else []
    return results, max(worst, 4 if any(beyond) else 0)


def reached(results: list[CaseResult]) -> Roof | None:
    """The ceilings that this very run measured; None where no bandwidth is among them."""
    cases = {result.case.name: result for result in results}
    streamed = [one for one in results if one.case.params.get("quantity") != "matmul" and one.providers]
    date = datetime.datetime.now(datetime.UTC).isoformat()
    return measured_roof(ResultFile("this run", "ceilings", fingerprint(), {}, cases, date)) if streamed else None


def known_ceilings(named: Path | None, folder: Path | None) -> Roof | None:
    """Those of a file: the named one, which must be of this machine (IncomparableError), else ceilings.json in the
    folder that the run writes to, where it is."""
    beside = folder / "ceilings.json" if folder else None
    path = named or (beside if beside and beside.exists() else None)
    if path is None:
        return None
    file = read(path)
    if same_hardware(file.machine, fingerprint()):
        return measured_roof(file)
    if named:
        raise IncomparableError(f"--ceilings: {path} is of another machine; `plait bench ceilings` measures this one")
    print(f"plait bench: {path} is of another machine, so no number is held against it", file=sys.stderr)
    return None


def run_child(command: list[str]) -> int:
    """Returns the exit code of a child that is asked to end, and waited for, when this process is."""
    # Its parent tells the CI server: not each process again.
    environment = {name: value for name, value in os.environ.items() if name not in outputs.VARIABLES}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        return child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def table_of(suite: Suite, results: list[CaseResult]) -> str:
    """Returns the suite's own table, or the usual one of times."""
    return (suite.text or report.markdown)(results)


def write_files(
    suite: Suite, results: list[CaseResult], options: Options, command: str, folders: dict[str, Path | None]
) -> None:
    """Writes FOLDER/SUITE.json, .csv and .md, each where its folder is given; says so on stderr."""
    for kind, folder in folders.items():
        if folder is None:
            continue
        path = folder / f"{suite.name}.{kind}"
        if kind == "json":
            report.write_json(path, report.document(suite, results, options, command))
        elif kind == "csv":
            report.write_text(path, report.csv_text(report.CSV_HEADER, report.csv_rows(suite.name, results)))
        else:
            report.write_text(path, f"{suite.name}: {suite.about}\n\n{table_of(suite, results)}\n")
        print(f"written: {path}", file=sys.stderr)
