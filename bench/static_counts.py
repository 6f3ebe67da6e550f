"""Bytes that the `static` cases move, counted in a child process whose kernels are interpreted.

`python -m plait.bench.static_counts [--tutorials DIR] NAME...` prints one JSON object: case -> side -> bytes at the
case's rows, or why they could not be counted. Rows are counted twice, at `counted` rows and at twice as many; what
grows is extrapolated to the case's rows, what does not (partial gradients, a weight) stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import triton.language as tl

from plait.bench.accesses import AccessCounter
from plait.bench.static_case import Call, Peer, StaticCase
from plait.bench.static_cases import all_cases
from plait.bench.static_peers import liger, pretend_card, tutorial

# Functions of libdevice, which the interpreter lacks; they touch no memory.
STAND_INS = {"rsqrt": lambda x: tl.rsqrt(x), "tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1}


class _Number(float):
    """A float argument in the interpreter, which leaves it a Python one: some kernels convert theirs."""

    def to(self, dtype: Any) -> _Number:
        return self


@contextlib.contextmanager
def lenient_interpreter() -> Iterator[None]:
    """Within it, kernels may convert float arguments, grids may be lists, atomics take any dtype, as when compiled.

    An atomic does nothing: it is counted before, and no kernel here branches on its result.
    """
    from triton.runtime import interpreter

    convert, build = interpreter._implicit_cvt, interpreter.GridExecutor.__init__

    def started(executor: Any, fn: Any, arg_names: Any, grid: Any, *rest: Any) -> None:
        build(executor, fn, arg_names, (lambda meta: tuple(grid(meta))) if callable(grid) else tuple(grid), *rest)

    def converted(value: Any) -> Any:
        return _Number(value) if type(value) is float else convert(value)

    with (
        mock.patch.object(interpreter, "_implicit_cvt", converted),
        mock.patch.object(interpreter.GridExecutor, "__init__", started),
        mock.patch.object(
            interpreter.InterpreterBuilder, "create_atomic_rmw", lambda itself, op, ptr, val, *rest: val
        ),
    ):
        yield


def find(peer: Peer, tutorials: Path | None) -> Any:
    """The peer's module, or the reason why it is not there."""
    return tutorial(tutorials, *peer.source) if peer.source[0].endswith(".py") else liger(*peer.source)


def bytes_at(prepare: Callable[[int], Call], case: StaticCase) -> float:
    """Bytes of the prepared call at the case's rows, from two countings."""
    counted = []
    for rows in (case.counted, 2 * case.counted):
        call = prepare(rows)
        with AccessCounter() as counter:
            call()
        counted.append(counter.nbytes())
    slope = (counted[1] - counted[0]) / case.counted
    return counted[0] + slope * (case.rows - case.counted)


def peer_bytes(peer: Peer, module: Any, case: StaticCase) -> float:
    """The same for a peer, which is told that it runs on a card."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend_card())
        stack.enter_context(lenient_interpreter())
        for name, stand_in in STAND_INS.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, stand_in))
        return bytes_at(lambda rows: peer.call(module, rows), case)


def count(case: StaticCase, tutorials: Path | None) -> dict[str, float | str]:
    """Side -> bytes, or the reason why not."""
    assert case.ours is not None
    result: dict[str, float | str] = {"plait": bytes_at(case.ours, case)}
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


def in_child(names: list[str], tutorials: str) -> dict[str, dict[str, float | str]]:
    """Counts in a fresh process that interprets kernels; RuntimeError with its last words when it fails."""
    command = [sys.executable, "-P", "-m", "plait.bench.static_counts", "--tutorials", tutorials, *names]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"counting in the interpreter failed: {done.stderr.strip().splitlines()[-1:]}")
    counts: dict[str, dict[str, float | str]] = json.loads(done.stdout)
    return counts


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tutorials", default="")
    parser.add_argument("names", nargs="+")
    args = parser.parse_args(argv)
    tutorials = Path(args.tutorials) if args.tutorials else None
    cases = {case.name: case for case in all_cases()}
    print(json.dumps({name: count(cases[name], tutorials) for name in args.names}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
