"""What the compiler made of the kernels, written down: `plait kernels pin`, `diff`, and the ratchet of `check`.

Not the rules without a baseline (gate.py). The one idea: a row of facts per (point, architecture) in a committed
file, keyed by the toolchain that gave them; what became worse fails, what became better is pinned again, and a worse
row is only written down with a reason. Under a toolchain that the file does not know everything is NEW and nothing
fails.
"""

import functools
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton

from plait.kernels.gate import launch_of, resident_blocks, wide_share
from plait.kernels.inspect import Facts, compile_launch, compile_offline, remembered, tool_path
from plait.kernels.launch import Launch
from plait.kernels.pinned_code import MATRIX
from plait.kernels.pinned_work import work
from plait.kernels.roof import ROOFS, bound, dot_dtypes, least_bytes

PATH = Path(__file__).parent / "pinned.json"
SCHEMA = 1


class PinError(ValueError):
    """A file of pinned rows that cannot be read, or a worse row without a reason."""


class Row(NamedTuple):
    """One point on one architecture. spill_lines: source line -> loads and stores of local memory; matrix: family and
    number of the hot loop's matrix instructions; flop and nbytes: of all programs, -1 where memory decides them, as
    is bound_us, the least time by the roofline (roof.py) on the card of that architecture; bound_by: what binds."""

    registers: int
    stack_bytes: int
    spills: int
    spill_lines: dict[str, int]
    shared_bytes: int
    tensor_columns: int
    warps: int
    blocks: int
    limiter: str
    wide_share: float
    matrix: str
    matrix_in_loop: int
    barriers_in_loop: int
    instructions: int
    programs: int
    flop: float
    nbytes: float
    code: str
    reason: str = ""
    bound_us: float = -1.0
    bound_by: str = ""
    scalar_registers: int = 0  # AMD

    @property
    def resident_warps(self) -> int:
        """Warps on a multiprocessor at once."""
        return self.warps * self.blocks


# Field -> (what a person calls it, whether more is worse). What the ratchet holds; the rest is shown by `diff`.
HELD = {
    "registers": ("registers", True),
    "stack_bytes": ("bytes of stack", True),
    "spills": ("spills", True),
    "shared_bytes": ("bytes of shared memory", True),
    "tensor_columns": ("columns of tensor memory", True),
    "resident_warps": ("resident warps", False),
    "wide_share": ("share of 128-bit accesses", False),
    "flop": ("FLOP", True),
    "nbytes": ("bytes asked for", True),
}
SHOWN = {
    "barriers_in_loop": ("barriers in the loop", True),
    "instructions": ("instructions", True),
    "bound_us": ("us at least by the roofline", True),
}
SLACK = 1e-6  # of a number that is no integer


@functools.cache
def toolchain() -> str:
    """The compilers that decide machine code: triton and both ptxas of its wheel."""
    found = []
    for name in ("ptxas", "ptxas-blackwell"):
        said = subprocess.run([tool_path(name), "--version"], check=True, capture_output=True, text=True).stdout
        match = re.search(r"V(\d+\.\d+\.\d+)", said)
        found.append(f"{name} {match.group(1) if match else 'unknown'}")
    return ", ".join([f"triton {triton.__version__}", *found])


def row_of(facts: Facts, work: dict[str, Any] | None) -> Row:
    """The row of compiled facts and of a launch's work (`work_of`), None where memory decides it."""
    blocks, limiter = resident_blocks(facts)
    in_loop = {kind: sum(n for op, n in facts.loop.items() if op.split(".")[0] == kind) for kind in (*MATRIX, "BAR")}
    family = next((kind for kind in MATRIX if in_loop[kind]), "")
    return Row(
        facts.registers,
        facts.stack_bytes,
        facts.spill_loads + facts.spill_stores,
        facts.spill_lines,
        facts.shared_bytes,
        facts.tensor_columns,
        facts.num_warps,
        blocks,
        limiter,
        round(wide_share(facts), 4),
        family,
        in_loop[family] if family else 0,
        in_loop["BAR"],
        sum(facts.instructions.values()),
        work["programs"] if work else 0,
        work["flop"] if work else -1.0,
        work["nbytes"] if work else -1.0,
        facts.code,
        bound_us=round(work["bound_us"], 4) if work else -1.0,
        bound_by=work["bound_by"] if work else "",
        scalar_registers=facts.scalar_registers,
    )


def work_of(launch: Launch, arch: str) -> dict[str, Any]:
    """programs, flop, nbytes, loads and stores (argument -> bytes), bound_us and bound_by of a launch; empty where
    memory decides them."""
    ttir: str = compile_launch(launch, arch).asm["ttir"]
    arguments = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.keywords()
    numbers = {name: value for name, value in arguments.items() if isinstance(value, int)}

    def make() -> dict[str, Any]:
        done = work(ttir, numbers, launch.grid)
        return {} if done is None else {**done._asdict(), "nbytes": done.bytes_per_program * done.programs}

    found = remembered("work", [ttir.encode(), repr((sorted(numbers.items()), launch.grid)).encode()], make)
    if not found:
        return {}
    least = bound(ROOFS[arch], least_bytes(launch, found), found["flop"], dot_dtypes(ttir))
    return {**found, "bound_us": least.us, "bound_by": least.by}


def measure(name: str, arch: str, facts: Facts | None = None) -> Row:
    """Compiles a point, where its facts are not given, and reads everything that is pinned of it."""
    launch = launch_of(name, arch)
    return row_of(facts or compile_offline(launch, arch), work_of(launch, arch) or None)


class Pins:
    """A file of rows: toolchain -> "point arch" -> row."""

    def __init__(self, data: dict[str, dict[str, Row]]) -> None:
        self.data = data

    @classmethod
    def parse(cls, text: str, place: str) -> "Pins":
        """Reads what `text` writes; PinError naming the place for anything else."""
        try:
            content = json.loads(text)
            if content["schema"] != SCHEMA:
                raise PinError(f"{place}: schema is {content['schema']!r}; this tool reads {SCHEMA}")
            return cls(
                {tool: {key: Row(**row) for key, row in rows.items()} for tool, rows in content["rows"].items()}
            )
        except PinError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PinError(f"{place}: is no file of pinned rows: {error}") from error

    @classmethod
    def read(cls, path: Path) -> "Pins":
        """The file's rows; none where there is no file."""
        try:
            return cls.parse(path.read_text(), str(path)) if path.exists() else cls({})
        except UnicodeDecodeError as error:
            raise PinError(f"{path}: is no file of pinned rows: {error}") from error

    def text(self) -> str:
        """One row a line, in order, so that a change is one line of a diff."""
        tools = []
        for tool in sorted(self.data):
            rows = [f"  {json.dumps(key)}: {json.dumps(_slim(row))}" for key, row in sorted(self.data[tool].items())]
            tools.append(f" {json.dumps(tool)}: {{\n" + ",\n".join(rows) + "\n }")
        return f'{{"schema": {SCHEMA}, "rows": {{\n' + ",\n".join(tools) + "\n}}\n"

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self.text())
        os.replace(temporary, path)


def _slim(row: Row) -> dict[str, Any]:
    """Without an empty reason, and without what only AMD has elsewhere."""
    return {
        name: value for name, value in row._asdict().items() if value or name not in ("reason", "scalar_registers")
    }


class Change(NamedTuple):
    """A point beside its pinned row. status: NEW, same, code (other machine code, equal facts), better, worse."""

    key: str
    status: str
    said: list[str]
    row: Row | None = None


def compare(key: str, pinned: Row | None, now: Row | None) -> Change:
    """What changed from the pinned row; worse if anything that is held is worse."""
    if now is None:
        return Change(key, "gone", ["is pinned and no point now"])
    if pinned is None:
        return Change(key, "NEW", ["not pinned"], now)
    worse: list[str] = []
    better: list[str] = []
    for name, (what, more_is_worse) in (HELD | SHOWN).items():
        old, new = getattr(pinned, name), getattr(now, name)
        if min(old, new) < 0 or abs(new - old) <= SLACK * abs(old):  # -1: not known on a side
            continue
        text = f"{what} {old:.6g} -> {new:.6g}"
        side = worse if (new > old) == more_is_worse else better
        side.append(text if name in HELD else f"({text})")
    families = ("", *reversed(MATRIX))
    if pinned.matrix != now.matrix:
        side = worse if families.index(now.matrix) < families.index(pinned.matrix) else better
        side.append(f"matrix instructions of the hot loop {pinned.matrix or 'none'} -> {now.matrix or 'none'}")
    if now.spills > pinned.spills and now.spill_lines:
        line = max(now.spill_lines, key=now.spill_lines.__getitem__)
        worse.append(f"(most of them at {line}: {now.spill_lines[line]})")
    said = worse + better
    if any(not text.startswith("(") for text in worse):
        return Change(key, "worse", said, now)
    if any(not text.startswith("(") for text in better):
        return Change(key, "better", said, now)
    return Change(key, "same" if pinned.code == now.code else "code", said, now)


def key_of(name: str, arch: str) -> str:
    return f"{name} {arch}"


def diff(base: dict[str, Row], chosen: Iterable[tuple[str, str]]) -> Iterator[Change]:
    """Every chosen point beside its row in `base`."""
    for name, arch in chosen:
        yield compare(key_of(name, arch), base.get(key_of(name, arch)), measure(name, arch))


def pin(pins: Pins, tool: str, changes: Iterable[Change], reason: str = "") -> list[Change]:
    """Writes the rows of `changes` into `pins`; returns those that it wrote. PinError for a worse row without reason.

    A row keeps the reason that it was given until it changes for the better.
    """
    rows = pins.data.setdefault(tool, {})
    written = []
    for change in changes:
        assert change.row is not None
        old = rows.get(change.key)
        if change.status == "worse" and not reason:
            raise PinError(
                f"{change.key} is worse: {'; '.join(change.said)}; give --reason TEXT to pin it all the same"
            )
        kept = reason if change.status == "worse" else old.reason if old and change.status != "better" else ""
        new = change.row._replace(reason=kept)
        if new != old:
            rows[change.key] = new
            written.append(change)
    return written


def from_git(ref: str) -> Pins:
    """The rows committed at a git ref; PinError where there is no such ref or no such file in it."""
    place = f"{ref}:./{PATH.name}"
    done = subprocess.run(["git", "-C", str(PATH.parent), "show", place], capture_output=True, text=True)
    if done.returncode:
        raise PinError(f"--base: {ref!r} is no file and no git ref with {PATH.name}: {done.stderr.strip()}")
    return Pins.parse(done.stdout, place)
