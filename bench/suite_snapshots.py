"""Snapshots beside torch's own ways to save: how long training stands still, until the disk has it, until it is back.

One state of fp32 tensors, one process, one disk. A case looks at one quantity, and its providers take turns:
    stall    from the call until training may go on (and change the tensors)
    durable  from the call until files and folder are synced; "+fsync" is added here where the peer never syncs
    restore  from the call until all bytes are in the state's own tensors; "cold": the page cache dropped the files
Each case has its limit measured in the same rounds: a copy of the state in memory, one direct write, one direct
read (checksums included). Warm: what a provider keeps between saves (staging memory) is kept, as in a long run.
A save is loaded and compared bit for bit before its provider is timed, and again in one round drawn at random.

The full run has two more cases, on this machine's disk and in memory (tmpfs), of 1 GiB: everything at once, beside
other libraries where they are installed (snapshot_whole.py; how to bring them: snapshot_others.py).
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch

from plait import _C
from plait.bench import snapshot_device, snapshot_table, snapshot_whole
from plait.bench.ending import scratch_folder
from plait.bench.providers import not_asked
from plait.bench.snapshot_memory import drop_from_cache
from plait.bench.snapshot_peers import Plait, build
from plait.bench.snapshot_way import State, differing, save
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.stats import paired_ratio

MIB = 1 << 20
BUDGET_S = 15.0  # no new round after that, ...
MIN_ROUNDS = 5  # ... but these are taken
ROOM = 5  # states on the disk at once, at most: plait's newest, one that it will write over, and another's save
LIMITS = {
    "stall": "memcpy of the state into resident memory, two threads",
    "durable": "one write_file of the state into a new file (plait writes over one that its retention gave up)",
    "restore": "one read_ranges of the state, checksums verified",
}
ODD = 1013  # elements by which tensor sizes differ: no multiple of a page, a block or a vector


def cases(full: bool) -> list[Case]:
    """64 MiB in 30 tensors; with `full` also warm restores, and all of it with 1 GiB in 300; 1 GiB from a device,
    where there is one."""
    quantities = ["stall", "durable", "restore cold", *(["restore warm"] if full else [])]
    small = [
        Case(
            f"64 MiB in 30, {quantity}",
            {"mib": 64, "tensors": 30, "quantity": quantity},
            bytes_moved=float(64 * MIB),
        )
        for quantity in quantities
    ]
    return [*small, *(snapshot_whole.cases(1024, 300) if full else []), *snapshot_device.cases(1024, 300)]


def make_state(nbytes: int, count: int, seed: int) -> State:
    """`count` fp32 tensors of random normal numbers, `nbytes` together, of slightly different sizes."""
    generator = torch.Generator().manual_seed(seed)
    even, total = nbytes // 4 // count, nbytes // 4
    sizes = [even + ODD * (index % 3 - 1) for index in range(count - 1)]
    sizes.append(total - sum(sizes))
    if min(sizes) < 1:
        raise ValueError(f"nbytes={nbytes}: too few for {count} tensors; use at least {count * 8 * ODD}")
    return {f"layer.{index}": torch.randn(size, generator=generator) for index, size in enumerate(sizes)}


class Bench:
    """One case under way: the state, where it is loaded to, and what was measured so far."""

    def __init__(self, root: Path, case: Case, options: Options) -> None:
        seed = options.seed
        self.root, self.quantity = root, case.params["quantity"]
        self.kind = self.quantity.split()[0]
        self.state = make_state(case.params["mib"] * MIB, case.params["tensors"], seed)
        self.target = {name: torch.empty_like(value) for name, value in self.state.items()}
        self.providers, self.skipped = build(root / "plait", self.state)
        if self.kind == "restore":  # both ways of DCP leave the same files
            self.providers = {n: p for n, p in self.providers.items() if not n.startswith("dcp async")}
        self.skipped |= not_asked({*self.providers, *self.skipped} - {"limit"}, options.providers)
        for name in self.skipped.keys() & self.providers.keys():
            self.providers.pop(name).close()
        self.samples: dict[str, dict[str, list[float]]] = {name: {} for name in self.providers}
        self.count = 0

    def turn(self, name: str, *, counted: bool, checked: bool) -> None:
        """One provider's turn of a round: new values, save, load where asked, remove."""
        provider = self.providers[name]
        self.count += 1
        for value in self.state.values():
            value[0] = float(self.count)
        saved = save(provider, self.root / f"save-{self.count}", self.state)
        times = {"stall": saved.stall_s, "durable": saved.durable_s}
        if self.kind == "restore" or checked:
            seconds = self.restore(name, saved.path, checked)
            if self.kind == "restore":
                times["restore"] = seconds
        if not isinstance(provider, Plait):  # whose retention removes the one before, as in a run
            shutil.rmtree(saved.path)
        for quantity, seconds in times.items() if counted else ():
            self.samples[name].setdefault(quantity, []).append(seconds)

    def restore(self, name: str, path: Path, checked: bool) -> float:
        """Loads into poisoned tensors and returns the seconds; WrongResultError where the bits differ."""
        for value in self.target.values():
            value.fill_(float("nan"))
        if not self.quantity.endswith("warm"):
            drop_from_cache(path)
        start = time.perf_counter()
        self.providers[name].load(path, self.target)
        seconds = time.perf_counter() - start
        if checked and (key := differing(self.state, self.target)):
            raise WrongResultError(f"{name}: {key} differs from what was saved")
        return seconds


def measure(case: Case, options: Options) -> CaseResult:
    """Runs one case; params may name a `folder` on the disk to measure (default: the system's temporary folder).

    Ends after BUDGET_S, but not before MIN_ROUNDS (or fewer, where fewer are asked for). ValueError where the disk
    lacks room.
    """
    if case.params["quantity"] == "all":
        return snapshot_whole.measure(case, options)
    if case.params["quantity"] == "from device":
        return snapshot_device.measure(case, options)
    nbytes = case.params["mib"] * MIB
    warmup = min(options.warmup, 1)  # one turn faults in the staging memory; the check before it made all folders
    order = random.Random(options.seed)
    with scratch_folder(inside=case.params.get("folder")) as text, quiet():
        facts = _C.io_facts(text)
        if facts["free_bytes"] < ROOM * nbytes:
            raise ValueError(f"folder {text!r} has {facts['free_bytes']} bytes free; this case needs {ROOM * nbytes}")
        bench = Bench(Path(text), case, options)
        try:
            names = list(bench.providers)
            for name in names:
                bench.turn(name, counted=False, checked=True)
            looked_at = warmup + order.randrange(min(MIN_ROUNDS, options.rounds))
            start = time.perf_counter()
            for index in range(warmup + options.rounds):
                if index >= warmup + MIN_ROUNDS and time.perf_counter() - start > BUDGET_S:
                    break
                order.shuffle(names)
                for name in names:
                    bench.turn(name, counted=index >= warmup, checked=index == looked_at)
        finally:
            for provider in bench.providers.values():
                provider.close()
    how = "direct I/O" if facts["direct_io"] else f"buffered I/O ({facts['direct_io_reason']})"
    rounds = len(bench.samples["plait"][bench.kind])
    note = f"host_wall, one process, {facts['filesystem']} with {how}, {rounds} rounds; limit: {LIMITS[bench.kind]}"
    return CaseResult(case, "plait", {**results_of(bench), **bench.skipped}, note)


def results_of(bench: Bench) -> dict[str, Measured]:
    """One entry a provider: samples of the case's quantity, medians of the others, and the distance to the limit."""
    limit = bench.samples["limit"][bench.kind]
    results = {}
    for name, samples in bench.samples.items():
        figures = {f"{kind}_s": median(values) for kind, values in samples.items() if kind != bench.kind}
        figures["x limit"] = paired_ratio(limit, samples[bench.kind])[0]
        results[name] = Measured(samples[bench.kind], "loaded and compared bit for bit, twice", figures)
    return results


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps DCP from saying at every save that there is no process group: this suite has one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
        yield


ABOUT = "saving and restoring a state of fp32 tensors, ours and others' ways"
SUITE = Suite("snapshots", ABOUT, cases, measure, text=snapshot_table.text, rounds=8)
