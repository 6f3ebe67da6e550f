"""Bytes that the `static` cases move, counted in a child process whose kernels are interpreted.

`python -m plait.bench.static_counts [--tutorials DIR] NAME...` prints a JSON object a line, as soon as it has one:
case -> side -> bytes at the case's rows, or why they could not be counted. Rows are counted twice; what grows is
extrapolated to the case's rows, what does not (a weight) stays. Where programs share the rows, each with a partial
gradient, both are counted few: a third counting says what a program adds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import triton.language as tl

from plait.bench.accesses import AccessCounter
from plait.bench.static_case import Call, Peer, StaticCase
from plait.bench.static_cases import all_cases
from plait.bench.static_peers import MULTIPROCESSORS, liger, pretend_card, tutorial
from plait.kernels import norm_rows

# Functions of libdevice, which the interpreter lacks; they touch no memory.
STAND_INS = {"rsqrt": lambda x: tl.rsqrt(x), "tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1}

FEW = 4  # programs that are counted where all are too slow to be


class _Number(float):
    """A float argument in the interpreter, which leaves it a Python one: some kernels convert theirs."""

    def to(self, dtype: Any) -> _Number:
        return self


@contextlib.contextmanager
def lenient_interpreter() -> Iterator[None]:
    """Within it, kernels may convert float arguments, grids may be lists, atomics take any dtype, as when compiled.

    An atomic on numbers other than integers does nothing: it is counted before, and no kernel branches on its result.
    One on integers works: another program may wait for the lock that it opens.
    """
    from triton.runtime import interpreter

    convert, build = interpreter._implicit_cvt, interpreter.GridExecutor.__init__
    update = interpreter.InterpreterBuilder.create_atomic_rmw

    def started(executor: Any, fn: Any, arg_names: Any, grid: Any, *rest: Any) -> None:
        build(executor, fn, arg_names, (lambda meta: tuple(grid(meta))) if callable(grid) else tuple(grid), *rest)

    def converted(value: Any) -> Any:
        return _Number(value) if type(value) is float else convert(value)

    def updated(builder: Any, op: Any, pointers: Any, value: Any, *rest: Any) -> Any:
        return update(builder, op, pointers, value, *rest) if value.dtype.scalar.is_int() else value

    with (
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        mock.patch.object(interpreter.GridExecutor, "__init__", started),
        mock.patch.object(interpreter.InterpreterBuilder, "create_atomic_rmw", updated),
    ):
        yield


def find(peer: Peer, tutorials: Path | None) -> Any:
    """The peer's module, or the reason why it is not there."""
    return tutorial(tutorials, *peer.source) if peer.source[0].endswith(".py") else liger(*peer.source)


def bytes_of(call: Call) -> float:
    """Bytes that the call moves."""
    with AccessCounter() as counter:
        call()
    return counter.nbytes()


def extrapolated(bytes_at: Callable[[int, int], float], case: StaticCase, least: int, programs: int) -> float:
    """Bytes at the case's rows and `programs`, where bytes_at(rows, programs) grows in proportion to each.

    Exact where it does, from `least` rows on: two countings, and a third of more programs where they share rows. The
    few programs counted have equal numbers of rows, as of all those of the case no two differ by more than one.
    """
    rows, few = max(case.counted, least), FEW if programs else 0
    first, longer = bytes_at(rows, few), bytes_at(rows + case.counted, few)
    total = first + (longer - first) / case.counted * (case.rows - rows)
    if programs:
        wider = bytes_at(rows + case.counted, 2 * few)
        total += (wider - longer) / few * (programs - few)
    return total


def our_bytes(case: StaticCase) -> float:
    """Bytes of our side at the case's rows."""
    assert case.ours is not None
    prepare = case.ours

    def bytes_at(rows: int, programs: int) -> float:
        most = mock.patch.object(norm_rows, "_NUM_PARTIALS", programs) if programs else contextlib.nullcontext()
        with most:
            return bytes_of(prepare(rows))

    return extrapolated(bytes_at, case, 0, case.programs)


def peer_bytes(peer: Peer, module: Any, case: StaticCase) -> float:
    """The same for a peer, which is told that it runs on a card."""

    def bytes_at(rows: int, programs: int) -> float:
        with pretend_card(multiprocessors=programs or MULTIPROCESSORS):
            return bytes_of(peer.call(module, rows))

    with contextlib.ExitStack() as stack:
        stack.enter_context(lenient_interpreter())
        for name, stand_in in STAND_INS.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in))
        return extrapolated(bytes_at, case, peer.least, MULTIPROCESSORS if case.programs and not peer.least else 0)


def count(case: StaticCase, tutorials: Path | None) -> dict[str, float | str]:
    """Side -> bytes, or the reason why not."""
    result: dict[str, float | str] = {"plait": our_bytes(case)}
    for name, peer in case.peers.items():
        module = find(peer, tutorials)
        if isinstance(module, str):
            result[name] = module
            continue
        try:
            result[name] = peer_bytes(peer, module, case)
        except Exception as error:  # the interpreter's limits are not ours; the suite says what happened
            result[name] = f"not counted: {type(error).__name__}: {str(error).splitlines()[0]}"
    return result


class Counts:
    """What a fresh process that interprets kernels counts of these cases: it works ahead, in their order, while the
    caller does other things. It ends with the last case, or at the first that nobody is there to read."""

    def __init__(self, names: list[str], tutorials: str) -> None:
        command = [sys.executable, "-P", "-m", "plait.bench.static_counts", "--tutorials", tutorials, *names]
        self.found: dict[str, dict[str, float | str]] = {}
        self.errors = tempfile.TemporaryFile("w+")  # a pipe that nobody reads could stop the child
        self.child = subprocess.Popen(
            command, env=os.environ | {"TRITON_INTERPRET": "1"}, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def of(self, name: str) -> dict[str, float | str]:
        """Side -> bytes, or why they were not counted; waits for it. RuntimeError with the child's last words when it
        ended before."""
        assert self.child.stdout is not None
        while name not in self.found:
            line = self.child.stdout.readline()
            if not line:
                self.child.wait()
                self.errors.seek(0)
                words = self.errors.read().strip().splitlines()[-1:]
                raise RuntimeError(f"counting in the interpreter failed: {words}")
            self.found.update(json.loads(line))
        return self.found[name]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tutorials", default="")
    parser.add_argument("names", nargs="+")
    args = parser.parse_args(argv)
    tutorials = Path(args.tutorials) if args.tutorials else None
    cases = {case.name: case for case in all_cases()}
    for name in args.names:
        print(json.dumps({name: count(cases[name], tutorials)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
