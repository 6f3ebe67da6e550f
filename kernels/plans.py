"""Launches found again: what a call needs beside its tensors is made once for each layout of its arguments.

Not here: which kernel, tile or grid (each kernel file's builder says that). The one idea: a builder is a function of
tensors that allocates outputs and says what to launch. It is run on meta tensors of the same layout (shape, strides,
dtype, whether 16 bytes divide the address), as the points of `plait kernels list` are, and what comes out is a plan:
outputs to allocate, compiled kernels with their grids, numbers, and for each pointer the place of its tensor among
the call's. A call is then a key, one look-up, the allocations and the launches. A plan holds no tensor of a call.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._mode_utils import no_dispatch

from plait.kernels.launch import (
    INTERPRETED,
    Launch,
    Runner,
    card_arch,
    current_stream,
    hooked,
    needs_scratch,
    run_launches,
    with_scratch,
)

# Whether kernels are compiled, whatever the suite `launch` says of the way that CPU tensors go.
_COMPILED = not INTERPRETED
# The address of a stand-in is its number times this: no view of one begins where another does.
_APART_BYTES = 1 << 44

# What a builder may read of a tensor: (shape, strides, dtype, whether 16 bytes divide its address).
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
# An output: a tensor of its shape and dtype that is never read, and what fills it.
_Made = tuple[torch.Tensor, float | None]
_Gather = Callable[[Sequence[Any]], tuple[Any, ...]]
# A launch: what runs it, its arguments up to the last pointer, those behind it.
_Step = tuple[Runner, _Gather, tuple[Any, ...]]


class Site:
    """Where the tensors of a builder are: allocates its outputs, contiguous, and says whose tables serve."""

    def __init__(self, device: torch.device, card: torch.device | None) -> None:
        self.device, self.card = device, card  # card: None for tensors on none

    @property
    def arch(self) -> int:
        """80, 90 or 100; 90 on no card."""
        return 90 if self.card is None else card_arch(self.card)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def full(self, shape: Sequence[int], dtype: torch.dtype, value: float) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)


class Call(NamedTuple):
    """A step between launches that is torch's, such as a product: `function` of `arguments`, the last a tensor.

    Each tensor is a whole argument or output of the builder: the function gets that, not a view made by the builder.
    """

    function: Callable[..., None]
    arguments: tuple[Any, ...]

    @property
    def constants(self) -> dict[str, Any]:
        """None: those are a kernel's."""
        return {}

    def run(self) -> None:
        self.function(*self.arguments)

    def ready(self, device: int) -> tuple[Runner, tuple[Any, ...]]:
        """As Launch.ready."""
        return Runner(device, (), self.function), ()


class Built(NamedTuple):
    """What a builder gives: results (outputs of its site, its arguments, or None), and launches in order."""

    results: tuple[torch.Tensor | None, ...]
    launches: Sequence[Launch | Call] = ()


# Called with a site, then tensors or None, the first a tensor, then options: numbers, strings, named tuples of them.
# Nothing of it depends on an address but for its alignment. None where torch does better than Triton.
Builder = Callable[..., Built | None]


class _Plan(NamedTuple):
    """A pool is a call's tensors, then its outputs, then `values`; each gather picks from it."""

    made: tuple[_Made, ...]
    values: tuple[Any, ...]  # None, and the numbers that stand before a pointer
    launches: tuple[_Step, ...]
    results: _Gather
    scratch: bool


class _StandIns(Site):
    """Meta tensors in place of a call's, each at an address of its own; remembers what the builder allocates."""

    def __init__(self, card: torch.device | None, layouts: Sequence[_Layout | None]) -> None:
        super().__init__(torch.device("meta"), card)
        self.pool: list[torch.Tensor | None] = []
        self.made: list[_Made] = []
        for layout in layouts:
            self._add(layout)

    def _add(self, layout: _Layout | None) -> torch.Tensor | None:
        found = None
        if layout is not None:
            shape, strides, dtype, aligned = layout
            first = (len(self.pool) + 1) * _APART_BYTES // dtype.itemsize + (not aligned)
            extent = 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])
            whole = torch.empty(first + max(0, extent), dtype=dtype, device=self.device)
            found = whole.as_strided(shape, strides, first)
        self.pool.append(found)
        return found

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._output(tuple(shape), dtype, None)

    def full(self, shape: Sequence[int], dtype: torch.dtype, value: float) -> torch.Tensor:
        return self._output(tuple(shape), dtype, value)

    def _output(self, shape: tuple[int, ...], dtype: torch.dtype, value: float | None) -> torch.Tensor:
        self.made.append((_element(self.card, dtype).expand(shape), value))
        found = self._add((shape, torch.empty(shape, device=self.device).stride(), dtype, True))
        assert found is not None
        return found

    def place_of(self, x: torch.Tensor) -> int:
        """Place in the pool of the tensor that `x` is, or whose first element and dtype it has; -1: it is a copy."""
        for place, y in enumerate(self.pool):
            if y is x or (y is not None and y.data_ptr() == x.data_ptr() != 0 and y.dtype == x.dtype):
                return place
        return -1


@functools.cache
def _element(card: torch.device | None, dtype: torch.dtype) -> torch.Tensor:
    """One element on the card, or on the CPU: torch makes an output like it in half the time that a shape takes."""
    with no_dispatch():
        return torch.empty((), dtype=dtype, device=card or "cpu")


def _gather(places: Sequence[int]) -> _Gather:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda pool: tuple([pool[place] for place in places])


# An entry is one op and one layout of its tensors, about 4 KB. Equal options (1, 1.0, True) are one key: to a kernel
# they are the same number.
@functools.lru_cache(4096)
def _plan(
    build: Builder, card: int, device: int, layouts: tuple[_Layout | None, ...], options: tuple[Any, ...]
) -> _Plan | Site | None:
    """The plan of calls on card `card` (-1: none), compiled for the current `device`. None where torch does better.

    A site where a launch reads a copy (of a tensor that is not contiguous, say): the builder then runs each time.
    """
    site = _StandIns(torch.device("cuda", card) if card >= 0 else None, layouts)
    built = build(site, *site.pool, *options)
    if built is None:
        return None
    values: list[Any] = [None]

    def place(x: Any) -> int:
        if isinstance(x, torch.Tensor):
            return site.place_of(x)
        if x is None:
            return len(site.pool)
        values.append(x)
        return len(site.pool) + len(values) - 1

    launches = []
    for launch in built.launches:
        runner, constants = launch.ready(device)
        num_first = 1 + max([i for i, x in enumerate(launch.arguments) if isinstance(x, torch.Tensor)])
        places = [place(x) for x in launch.arguments[:num_first]]
        if isinstance(launch, Call):  # a view has its first element's place, too
            given = zip(places, launch.arguments, strict=True)
            assert all([x is site.pool[i] for i, x in given if isinstance(x, torch.Tensor)]), "a view in a Call"
        if -1 in places:
            return Site(site.device, site.card)
        launches.append((runner, _gather(places), (*launch.arguments[num_first:], *constants)))
    results = _gather([place(x) for x in built.results])
    return _Plan(tuple(site.made), tuple(values), tuple(launches), results, needs_scratch(built.launches))


def _run(launches: Sequence[_Step], pool: Sequence[Any]) -> None:
    """Launches in order; of each what `Runner` does, with one look at the hooks and the stream for all."""
    if hooked():
        for runner, gather, last in launches:
            runner.slow(*gather(pool), *last)
        return
    stream = None
    for (device, grid, slow, quick, fixed), gather, last in launches:
        if quick is None:
            slow(*gather(pool), *last)
        else:
            if stream is None:
                stream = current_stream(device)
            quick(*grid, stream, *fixed, *gather(pool), *last)


def planned(build: Builder, tensors: tuple[Any, ...], *options: Any) -> Any:
    """The results of `build` on tensors (or None) and options, its launches run; None where it gives None.

    On the card and the current stream of the first tensor, whichever card is current.
    """
    card = tensors[0].get_device()
    device = triton.runtime.driver.active.get_current_device() if _COMPILED else card
    if card != device and card >= 0:
        with torch.cuda.device(card):
            return planned(build, tensors, *options)
    layouts = tuple(
        [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() & 15 == 0) for x in tensors]
    )  # fmt: skip
    # Interpreted, a plan is made each time: tests change tables.
    plan = (_plan if _COMPILED else _plan.__wrapped__)(build, card, device, layouts, options)
    if not isinstance(plan, _Plan):
        return None if plan is None else _each_time(build, plan, tensors, options)
    made, values, launches, results, scratch = plan
    pool = (
        *tensors,
        *[torch.empty_like(x) if value is None else torch.full_like(x, value) for x, value in made],
        *values,
    )
    if scratch:
        with_scratch(_run, launches, pool)
    else:
        _run(launches, pool)
    return results(pool)


def _each_time(build: Builder, site: Site, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> Any:
    built = build(Site(tensors[0].device, site.card), *tensors, *options)
    assert built is not None
    run_launches(built.launches)
    return built.results
