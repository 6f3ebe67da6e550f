"""What a run or a comparison tells other programs: JUnit, GitHub annotations, a step summary. Decides nothing.

The one idea: an entry is one line of a result with its status; every format is made of entries. Who calls says where
they go; the two variables by which GitHub asks for them are read in cli.py and nowhere else.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TextIO

from plait.bench.compare import Comparison
from plait.bench.spec import CaseResult
from plait.bench.verdict import Verdict

OK, FAILED, WARNING, SKIPPED = "ok", "failed", "warning", "skipped"
VARIABLES = ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY")  # of the environment, read in cli.py
LEVELS = {FAILED: "error", WARNING: "warning"}  # of annotations; the others have none


@dataclass(frozen=True)
class Entry:
    """One provider of a case, or one verdict. text: why it is not ok; seconds: its median, 0 where there is none."""

    suite: str
    name: str
    status: str
    text: str = ""
    seconds: float = 0.0


def entries_of(suite: str, results: list[CaseResult]) -> list[Entry]:
    """An entry a provider, and one for a case without numbers."""
    found = []
    for result in results:
        name = result.case.name
        if result.error:
            found.append(Entry(suite, name, FAILED, result.error))
        for provider, measured in result.providers.items():
            title = f"{name} / {provider}"
            if measured.skipped:
                found.append(Entry(suite, title, SKIPPED, measured.skipped))
                continue
            status = FAILED if measured.invalid else OK
            found.append(Entry(suite, title, status, measured.invalid, median(measured.samples_s)))
    return found


def verdicts_of(suite: str, found: Comparison) -> list[Entry]:
    """An entry a row; controls, in which nothing of ours is, are left out."""
    result = []
    for row in found.rows:
        bad = row.failed or row.verdict in (Verdict.SLOWER, Verdict.INVALID)
        status = FAILED if bad else WARNING if row.verdict == Verdict.INCONCLUSIVE else OK
        ratio = f" {row.decision.ratio:.3f} x base" if row.decision else ""
        text = "" if status == OK else f"{row.verdict}{ratio}{f', {row.note}' if row.note else ''}"
        result.append(Entry(suite, f"{row.case} / {row.provider}", status, text))
    return result


def gate_entries(rows: list[list[str]]) -> list[Entry]:
    """An entry a line of the gate: what, name, text, "ok" or "FAIL"."""
    return [
        Entry("gate", f"{what}: {name}", OK if state == "ok" else FAILED, "" if state == "ok" else text)
        for what, name, text, state in rows
    ]


def junit(entries: list[Entry]) -> str:
    """JUnit's XML, as CI servers read it: a test suite a suite, a test case an entry."""
    root = ElementTree.Element("testsuites")
    for suite in dict.fromkeys(entry.suite for entry in entries):
        mine = [entry for entry in entries if entry.suite == suite]
        failures, skipped = (str(sum(e.status == status for e in mine)) for status in (FAILED, SKIPPED))
        node = ElementTree.SubElement(
            root, "testsuite", name=suite, tests=str(len(mine)), errors="0", failures=failures, skipped=skipped
        )
        for entry in mine:
            case = ElementTree.SubElement(
                node,
                "testcase",
                classname=f"plait.bench.{suite}",
                name=clean(entry.name),
                time=f"{entry.seconds:.9f}",
            )
            if entry.status == FAILED:
                failure = ElementTree.SubElement(case, "failure", message=clean(entry.text.splitlines()[0]))
                failure.text = clean(entry.text)
            elif entry.status == SKIPPED:
                ElementTree.SubElement(case, "skipped", message=clean(entry.text))
            elif entry.status == WARNING:
                ElementTree.SubElement(case, "system-out").text = clean(entry.text)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def clean(text: str) -> str:
    """Text without the control characters that XML 1.0 has no way to say."""
    return "".join(one for one in text if one >= " " or one in "\t\n")


def workflow_commands(entries: list[Entry]) -> list[str]:
    """GitHub's workflow commands, a line for each entry that is not well."""
    return [
        f"::{LEVELS[entry.status]} title={escaped(f'{entry.suite}: {entry.name}', ':,')}::{escaped(entry.text)}"
        for entry in entries
        if entry.status in LEVELS
    ]


def escaped(text: str, more: str = "") -> str:
    """Text of a workflow command; `more`: characters that end a property."""
    for one in "%\r\n" + more:  # the per cent sign first
        text = text.replace(one, f"%{ord(one):02X}")
    return text


@dataclass(frozen=True)
class Ci:
    """What the machine's environment asks for: annotations on stdout, a summary appended to a file."""

    annotate: bool = False
    summary: Path | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Ci:
        """What VARIABLES say, nothing else."""
        actions, path = (environment.get(name, "") for name in VARIABLES)
        return cls(actions == "true", Path(path) if path else None)

    def publish(self, entries: list[Entry], markdown: str, stream: TextIO) -> None:
        """Writes annotations and appends the summary, each where it is asked for. Raises OSError."""
        if self.annotate:
            stream.write("".join(f"{line}\n" for line in workflow_commands(entries)))
            stream.flush()
        if self.summary is not None:
            with open(self.summary, "a") as file:
                file.write(markdown + "\n")
