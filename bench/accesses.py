"""Counts what Triton kernels read and write, exactly, by running them in the interpreter. Times nothing.

The one idea: every load and store of the interpreter passes its addresses, so that an element is known by its
address. An element's passes are the most times that any one program touches it: what other programs read again (a
norm's weight, a table of cosines) comes out of a cache and counts once, what a program itself reads again counts
again. Passes that torch makes in between (the sum of partial gradients, a fill, a matmul) are counted by their inputs
and outputs. Needs a process started with TRITON_INTERPRET=1 and tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.kernels.launch import INTERPRETED

Array = np.ndarray[Any, Any]


class Touched(NamedTuple):
    """Elements of one tensor: accesses of all programs, different elements, and passes as the file defines them."""

    accesses: int
    elements: int
    passes: int


class Touches(NamedTuple):
    """Addresses in order, each once, with bytes of the element, accesses of all programs, and passes."""

    address: Array
    nbytes: Array
    accesses: Array
    passes: Array


def merge(programs: list[tuple[Array, Array, Array]]) -> Touches:
    """One launch's touches from those of its programs: (addresses, bytes, times), each address once a program."""
    if not programs:
        empty = np.zeros(0, np.int64)
        return Touches(empty, empty, empty, empty)
    address, nbytes, times = (np.concatenate(parts) for parts in zip(*programs, strict=True))
    order = np.argsort(address, kind="stable")
    address, nbytes, times = address[order], nbytes[order], times[order]
    starts = np.flatnonzero(np.concatenate(([True], address[1:] != address[:-1])))
    return Touches(
        address[starts], nbytes[starts], np.add.reduceat(times, starts), np.maximum.reduceat(times, starts)
    )


class _Side:
    """The loads, or the stores: of the program that runs, of the launch that runs, of all launches."""

    def __init__(self) -> None:
        self.program: list[tuple[Array, int]] = []
        self.programs: list[tuple[Array, Array, Array]] = []
        self.launches: list[Touches] = []

    def add(self, pointers: Any, mask: Any) -> None:
        live = np.broadcast_to(mask.data, pointers.data.shape)
        nbytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        self.program.append((pointers.data[live].astype(np.int64).ravel(), nbytes))

    def end_program(self) -> None:
        if self.program:
            parts, sizes = zip(*self.program, strict=True)
            sized = np.concatenate([np.full(part.size, size) for part, size in zip(parts, sizes, strict=True)])
            address, first, times = np.unique(np.concatenate(parts), return_index=True, return_counts=True)
            self.programs.append((address, sized[first], times))
            self.program = []

    def end_launch(self) -> None:
        self.end_program()
        self.launches.append(merge(self.programs))
        self.programs = []

    def of(self, tensor: torch.Tensor) -> Touched:
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()
        counts = [0, 0, 0]
        for touches in self.launches:
            inside = (touches.address >= start) & (touches.address < stop)
            counts[0] += int(touches.accesses[inside].sum())
            counts[1] += int(inside.sum())
            counts[2] += int(touches.passes[inside].sum())
        return Touched(*counts)

    def nbytes(self) -> int:
        return sum(int((touches.passes * touches.nbytes).sum()) for touches in self.launches)


class _Torch(TorchDispatchMode):
    """Bytes of the inputs and outputs of torch's own ops, and the FLOP of its matmuls."""

    FREE = ("empty", "set_", "detach", "alias", "_unsafe_view", "new_empty", "equal", "_local_scalar_dense")

    def __init__(self, busy: Callable[[], bool]) -> None:
        super().__init__()
        self.nbytes, self.flop, self.busy = 0, 0.0, busy

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if self.busy() or func.is_view or func.namespace != "aten" or name.startswith(self.FREE):
            return out
        given = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        made = [
            value for value in (out if isinstance(out, tuple | list) else (out,)) if isinstance(value, torch.Tensor)
        ]
        read = given[1:] if func._schema.is_mutable and name in ("zero_", "fill_", "copy_") else given
        self.nbytes += sum(value.numel() * value.element_size() for value in (*read, *made))
        if name in ("mm", "addmm", "addmm_"):
            a, b = given[-2:] if name == "mm" or len(given) == 2 else given[-3:][-2:]
            self.flop += 2.0 * a.shape[0] * a.shape[1] * b.shape[1]
        return out


class AccessCounter:
    """A context in which launches and torch's ops are counted; read it afterwards.

    RuntimeError on entry in a process whose kernels are compiled.
    """

    def __init__(self) -> None:
        self.loads, self.stores = _Side(), _Side()
        self.kernels: list[str] = []
        self.dot_flop = 0.0
        self.running = False
        self.torch = _Torch(lambda: self.running)
        self._patches: list[Any] = []

    def __enter__(self) -> AccessCounter:
        if not INTERPRETED:
            raise RuntimeError("AccessCounter: kernels are compiled in this process; set TRITON_INTERPRET=1")
        from triton.runtime import interpreter

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor

        def wrapped(target: Any, name: str, before: Callable[..., None]) -> None:
            original = getattr(target, name)

            def call(itself: Any, *args: Any, **kwargs: Any) -> Any:
                before(*args, **kwargs)
                return original(itself, *args, **kwargs)

            self._patches.append(mock.patch.object(target, name, call))

        wrapped(builder, "create_masked_load", lambda ptrs, mask, *rest, **more: self.loads.add(ptrs, mask))
        wrapped(builder, "create_masked_store", lambda ptrs, value, mask, *rest: self.stores.add(ptrs, mask))
        wrapped(builder, "create_atomic_rmw", lambda op, ptr, val, mask, *rest: self._atomic(ptr, mask))
        wrapped(builder, "create_dot", lambda a, b, *rest: self._dot(a, b))
        wrapped(builder, "set_grid_idx", lambda *place: self._end_program())
        self._patches.append(mock.patch.object(executor, "__call__", self._launch(executor.__call__)))
        self._patches.append(self.torch)
        for patch in self._patches:
            patch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for patch in reversed(self._patches):
            patch.__exit__(*error)
        self._patches = []

    def _launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(itself: Any, *args: Any, **kwargs: Any) -> Any:
            self.running = True
            try:
                return original(itself, *args, **kwargs)
            finally:
                self.running = False
                self.kernels.append(itself.fn.__name__)
                self.loads.end_launch()
                self.stores.end_launch()

        return call

    def _end_program(self) -> None:
        self.loads.end_program()
        self.stores.end_program()

    def _atomic(self, pointers: Any, mask: Any) -> None:
        self.loads.add(pointers, mask)
        self.stores.add(pointers, mask)

    def _dot(self, a: Any, b: Any) -> None:
        self.dot_flop += 2.0 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]

    def nbytes(self) -> int:
        """Bytes that all launches and torch's ops move, by passes."""
        return self.loads.nbytes() + self.stores.nbytes() + self.torch.nbytes

    def flop(self) -> float:
        """FLOP of the matrix products: those of tiles whole, masked elements too."""
        return self.dot_flop + self.torch.flop
