"""The `snapshots` suite on a state of a real size: everything that a save and a restore cost, on one place.

A round: the limits of the machine first, then every provider once, in random order, each in a fresh process
(snapshot_turn.py), so that first saves are first and no memory of others is counted. Ratios are to the limits of the
same round. Samples of a provider are its warm saves' seconds until durable; all others are figures, each sample too.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from plait import _C
from plait.bench.ending import scratch_folder
from plait.bench.progress import Progress
from plait.bench.providers import left_out, not_asked
from plait.bench.snapshot_training import STEP_S
from plait.bench.snapshot_turn import MIB, WARM, WAYS, Samples, child, missing
from plait.bench.spec import Case, CaseResult, Measured, Options, WrongResultError
from plait.bench.stats import median_interval, paired_ratio

ROUNDS = {"disk": 3, "tmpfs": 2}
TURN_S = 150.0  # a turn that takes longer is ended, and reported as failed
ROOM = 4  # states that lie on the disk at once, at most: two saves, two while one is replaced
MEMORY = (
    7  # states in memory at once: the loop's, the target, staging twice, a load's copy, and what the kernel keeps
)
PLACES = ("disk", "tmpfs")
LIMITS = ("memcpy", "write 2", "write 4", "overwrite 2", "overwrite 4", "read 2", "read 4")


def cases(mib: int, tensors: int) -> list[Case]:
    """One case a place."""
    return [
        Case(
            f"{mib} MiB in {tensors}, all of it, {place}",
            {"mib": mib, "tensors": tensors, "quantity": "all", "place": place, "step_s": STEP_S},
            bytes_moved=float(mib * MIB),
        )
        for place in PLACES
    ]


def folder_of(place: str) -> Path:
    """Returns where to measure: /dev/shm, or the system's temporary folder, or the current one where that is in
    memory too. Raises ValueError where there is none."""
    if place == "tmpfs":
        folders = [Path("/dev/shm")]
    else:
        folders = [Path(tempfile.gettempdir()), Path.cwd()]
    for folder in folders:
        if folder.is_dir() and (_C.io_facts(str(folder))["filesystem"] == "tmpfs") == (place == "tmpfs"):
            return folder
    raise ValueError(f"place {place!r}: none of {', '.join(map(str, folders))} is one")


def check_room(folder: Path, place: str, nbytes: int) -> Any:
    """Returns the facts of a folder; ValueError where disk or memory are too small for states of so many bytes."""
    facts = _C.io_facts(str(folder))
    if facts["free_bytes"] < ROOM * nbytes:
        raise ValueError(f"'{folder}' has {facts['free_bytes']} bytes free; this case needs {ROOM * nbytes}")
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    needed = (MEMORY + (ROOM if place == "tmpfs" else 0)) * nbytes
    if available < needed:
        raise ValueError(f"{available} bytes of memory are available; this case needs {needed}")
    return facts


class Rounds:
    """A case under way: what was measured of whom, and who is out of it, with the reason."""

    def __init__(self, root: Path, params: dict[str, Any], names: list[str]) -> None:
        self.root, self.params = root, params
        self.out = {name: text for name in names if (text := missing(name))}
        self.names = [name for name in names if name not in self.out]
        self.samples: dict[str, Samples] = {name: {} for name in ("", *self.names)}
        self.about: dict[str, str] = {}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["plait.bench.snapshot_turn"])

    def round(self, order: random.Random) -> Iterator[str]:
        """The limits, then everyone once, each said before its turn; who fails takes part no more, but for ours."""
        names = list(self.names)
        order.shuffle(names)
        for name in ["", *names]:
            yield name or "limits"
            answer = self.turn(name)
            if "samples" not in answer and (not name or name.startswith("plait")):
                kind = WrongResultError if "wrong" in answer else RuntimeError
                raise kind(f"{name or 'limits'}: {answer.get('error') or answer['wrong']}")
            if "samples" not in answer:
                self.out[name] = f"failed: {answer.get('error') or answer['wrong']}"
                self.names.remove(name)
                continue
            self.about[name] = answer.get("about", "")
            for quantity, values in answer["samples"].items():
                self.samples[name].setdefault(quantity, []).extend(values)

    def turn(self, name: str) -> dict[str, Any]:
        """One turn in a process of its own; returns its answer, or what became of it."""
        folder = self.root / "turn"
        folder.mkdir()
        receive, send = self.context.Pipe(False)
        params = json.dumps(self.params)
        process = self.context.Process(target=child, args=(send, name, str(folder), params))
        try:
            process.start()
            send.close()
            if not receive.poll(TURN_S):
                return {"error": f"not done after {TURN_S:g} s"}
            answer: dict[str, Any] = json.loads(receive.recv_bytes())
            return answer
        except EOFError:
            process.join(5.0)
            text = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-1:]
            return {"error": f"its process ended with {process.exitcode}: {''.join(text)}"}
        finally:
            receive.close()
            end(process)
            shutil.rmtree(folder)


def end(process: Any) -> None:
    """Ends a turn's process and all that it started, and returns when they are gone."""
    if process.pid is None:
        return
    process.join(0.0)
    for _ in range(500):  # a process that was killed goes when its last system call ends
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            if not process.is_alive():
                break
            process.kill()  # before it has a group of its own
        except PermissionError:  # only ends that nobody has waited for
            break
        process.join(0.01)


def measure(case: Case, options: Options) -> CaseResult:
    """Runs one case; params may name a `folder` instead of the place's own, and the `ways` that take part.

    Takes options.rounds rounds, at most ROUNDS of its place, or fewer where the budget is spent, but one. ValueError
    where there is no room; RuntimeError where the limits or ours cannot be measured, WrongResultError where ours
    loads other bits. What it wrote is gone whichever way it ends.
    """
    place, nbytes = case.params["place"], case.params["mib"] * MIB
    folder = Path(case.params["folder"]) if "folder" in case.params else folder_of(place)
    facts = check_room(folder, place, nbytes)
    cold = place == "disk"
    params = {key: case.params[key] for key in ("mib", "tensors", "step_s")}
    params |= {"seed": options.seed, "cold": cold, "threads": [1, os.cpu_count() or 1] if cold else [1]}
    order, progress, start = random.Random(options.seed), Progress(sys.stderr), time.monotonic()
    count, done = min(options.rounds, ROUNDS[place]), 0
    with scratch_folder(inside=folder) as text:
        ways = list(case.params.get("ways", WAYS))
        rounds = Rounds(Path(text), params, [name for name in ways if not left_out(name, options.providers)])
        steps = count * (1 + len(rounds.names))
        taken = iter(range(steps + 1))
        while done < count:
            began = time.monotonic()
            where = f"{place}, round {done + 1}/{count}"
            for name in rounds.round(order):
                progress.at(next(taken), steps, f"{where}: {name}")
            done, now = done + 1, time.monotonic()
            if options.budget_s and now - start + (now - began) > options.budget_s:
                break
        progress.close()
    how = "direct I/O" if facts["direct_io"] else f"buffered I/O ({facts['direct_io_reason']})"
    note = f"host_wall; {facts['filesystem']} with {how}; {done} rounds of {2 + WARM} saves in fresh processes, "
    note += f"{os.cpu_count()} cores; a training step takes {params['step_s'] * 1e3:g} ms"
    note += "; direct write: into a new file, as all but plait save, which from its third save on writes over a file "
    note += "that retention gave up; direct overwrite: the limit of that"
    if not cold:
        note += "; no cold restore: these files are memory"
    return CaseResult(case, "plait", results_of(rounds) | not_asked(ways, options.providers), note)


def results_of(rounds: Rounds) -> dict[str, Measured]:
    """One entry a provider, ours first, then the limits."""
    limits = rounds.samples[""]
    writes, overwrites, reads = (
        min((limits[f"{kind} {n}"] for n in (2, 4)), key=median) for kind in ("write", "overwrite", "read")
    )
    results = {}
    for name, samples in rounds.samples.items():
        if not name or name in rounds.out:
            continue
        figures: dict[str, float] = {}
        for quantity, values in samples.items():
            unit = "" if "share" in quantity else " bytes" if "memory" in quantity else " s"
            figures |= spread(f"{quantity}{unit}", values)
            figures |= {f"{quantity}{unit} #{index + 1}": value for index, value in enumerate(values)}
        once = {
            kind: [median(values[i : i + WARM]) for i in range(0, len(values), WARM)]
            for kind, values in (("memcpy", limits["memcpy"]), ("read", reads))
        }
        figures |= ratio("stall first / memcpy", once["memcpy"], samples["stall first"])
        figures |= ratio("stall warm / memcpy", limits["memcpy"], samples["stall warm"])
        figures |= ratio("stall first / warm", halves(samples["stall warm"]), samples["stall first"])
        figures |= ratio("direct write / durable", samples["durable warm"], writes)
        figures |= ratio("direct overwrite / durable", samples["durable warm"], overwrites)
        if "restore cold" in samples:
            figures |= ratio("direct read / restore cold", samples["restore cold"], once["read"])
        check = f"{rounds.about[name]}; loaded and compared bit for bit with the state at the call, in every round"
        results[name] = Measured(samples["durable warm"], check, figures)
    for name, text in rounds.out.items():
        results[name] = Measured(skipped=text)
    for kind in LIMITS:
        results[f"limit: {kind}"] = Measured(limits[kind], "system calls alone", spread(f"{kind} s", limits[kind]))
    return results


def halves(warm: list[float]) -> list[float]:
    """Returns the median of each round's warm saves."""
    return [median(warm[i : i + WARM]) for i in range(0, len(warm), WARM)]


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Returns the median of samples and its interval, by name."""
    low, high = median_interval(values)
    return {name: median(values), f"{name} low": low, f"{name} high": high}


def ratio(name: str, base: list[float], other: list[float]) -> dict[str, float]:
    """Returns the median of other / base over paired samples and its interval, by name."""
    value, low, high = paired_ratio(base, other)
    return {name: value, f"{name} low": low, f"{name} high": high}
