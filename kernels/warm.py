"""Fills triton's cache ahead of a run, on any machine: every declared launch, under the key that a card looks for.

Not the launches (points.py) nor the rules they keep (gate.py). The one idea: a process that finds all of its kernels
in the cache compiles nothing, and `counting` proves it. docs/kernels.md says what serves which launch.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import triton

from plait.kernels.inspect import compile_launch, parse_arch
from plait.kernels.launch import table_arch
from plait.kernels.points import points


class Counts:
    """What triton did in this process since the count began: kernels compiled, kernels loaded out of the cache."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Counts within its block, whoever compiles: a launch on a card as well as `warm`. A listener stays in place."""
    counts, before = Counts(), triton.knobs.compilation.listener

    def listen(*, cache_hit: bool, **more: Any) -> None:
        if cache_hit:
            counts.loaded += 1
        else:
            counts.compiled += 1
        if before is not None:
            before(cache_hit=cache_hit, **more)

    triton.knobs.compilation.listener = listen
    try:
        yield counts
    finally:
        triton.knobs.compilation.listener = before


class Warmed(NamedTuple):
    """One launch: seconds, whether it was compiled, and what the compiler said where it failed."""

    name: str
    arch: str
    seconds: float
    compiled: bool
    error: str = ""


def chosen(names: Iterable[str], archs: Iterable[str], every: bool) -> list[tuple[str, str]]:
    """(point, architecture) of all points that begin with one of `names` (all where there is none)."""
    prefixes = tuple(names) or ("",)
    return [(name, arch) for arch in archs for name in points(every) if name.startswith(prefixes)]


def warm(todo: Iterable[tuple[str, str]], *, clock: Callable[[], float] = time.perf_counter) -> Iterator[Warmed]:
    """Compiles (point, architecture) one by one, in order; a kernel that fails is told and the rest goes on.

    An architecture without tables of its own, such as sm_86, takes the tiles that a card of it would take.
    """
    known = points(every=True)
    for name, arch in todo:
        start, error = clock(), ""
        with counting() as counts:
            try:
                compile_launch(known[name](f"sm_{table_arch(parse_arch(arch))}"), arch)
            except Exception as failure:  # triton's compiler raises of every kind; the caller shows it
                error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[-1] if str(failure) else ''}"
        yield Warmed(name, arch, clock() - start, counts.compiled > 0, error)
