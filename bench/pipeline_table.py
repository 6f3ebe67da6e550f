"""The table of the suite `pipeline`, also of a result file: `python -m plait.bench.pipeline_table RESULT.json`."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from plait.bench.report import table
from plait.bench.result_file import read
from plait.bench.spec import CaseResult

NOTES = {
    "sleep": "plan: simulated makespan of the sleeps, messages free; host: CPU time of the rank's thread outside "
    "of the stages' own F, I and W, per action; CPU: of all its threads; bubble counts all time asleep as busy",
    "idle": "stages that do nothing: a step is host time alone, with all ranks on this machine's cores",
    "model": "plan: simulated with the median times of each stage's actions in our own last step, on as few cores as "
    "this machine has; host and CPU time hold the model's own computing",
}
HEADER = ["case", "plan, ms", "plait / plan", "torch / plan", "torch / plait", "host us/action", "torch's", "ratio"]


def text(results: list[CaseResult]) -> str:
    """One line a case; "host us/action" of ours, torch's, and torch's over ours."""
    rows, notes = [], dict[str, str]()
    for result in results:
        if result.error:
            rows.append([result.case.name, *["-"] * 6, f"failed: {result.error.splitlines()[0]}"])
            continue
        ours, peer = (result.providers[name] for name in ("plait", "torch"))
        plan = [f"{ours.figures['plan_s'] * 1e3:.1f}" if "plan_s" in ours.figures else "-"]
        plan += [f"{m.figures['step / plan']:.3f}" if "step / plan" in m.figures else "-" for m in (ours, peer)]
        host = [m.figures.get("host us/action", 0.0) for m in (ours, peer)]
        cells = ["-", f"{host[0]:.0f}", "-", "-"]  # torch was not asked for
        if peer.samples_s:
            ratio = median(peer.samples_s) / median(ours.samples_s)
            cells = [f"{ratio:.3f}", *(f"{value:.0f}" for value in host), f"{host[1] / host[0]:.2f}"]
        rows.append([result.case.name, *plan, *cells])
        notes[result.case.params["kind"]] = NOTES[result.case.params["kind"]]
    return "\n".join([table(HEADER, rows), *(f"\n{kind}: {note}" for kind, note in notes.items())])


if __name__ == "__main__":
    print(text(list(read(Path(sys.argv[1])).cases.values())))
