"""What every op of this package shares: a launch as data, device choice, argument checks, row views.

Not here: tile tables (each kernel file owns its own), which launch and when (plans.py), and what torch knows of an op
(registration.py). The one idea: a launch is a value, so that what runs and what is inspected offline are the same.
"""

import contextvars
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def _probe_kernel(x_ptr):
    tl.store(x_ptr, 0)


# Interpreter mode is fixed when a kernel is decorated, so one decorated kernel tells for the whole process.
INTERPRETED = not isinstance(_probe_kernel, triton.JITFunction)


class Launch(NamedTuple):
    """One kernel launch as data, so that what is launched and what is inspected offline are the same thing.

    `arguments` are positional, `constants` are the kernel's constexpr parameters by name.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3

    def keywords(self) -> dict[str, Any]:
        """What the kernel is called with by name: the compiler's options and the constants."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
            **self.constants,
        }

    def run(self) -> None:
        """On the card and the current stream of the first argument, a tensor, whichever card is current.

        Triton's own way from the arguments to a compiled kernel takes 30 us where a look-up takes 5.
        """
        if not isinstance(self.kernel, triton.JITFunction):  # interpreted
            self.kernel[self.grid](*self.arguments, **self.keywords())
            return
        device, home = triton.runtime.driver.active.get_current_device(), self.arguments[0].get_device()
        if home != device and home >= 0:
            with torch.cuda.device(home):
                self.run()
            return
        run, constants = self.ready(device)
        run(*self.arguments, *constants)

    def ready(self, device: int) -> tuple["Runner", tuple[Any, ...]]:
        """(what is called with the arguments on the current `device`, the constants that follow them there)."""
        if not isinstance(self.kernel, triton.JITFunction):
            slow = functools.partial(self.kernel[self.grid], **self.keywords())
            return Runner(device, self.grid, slow), ()
        names, values = tuple(self.constants), tuple(self.constants.values())
        kernel, constants = _compiled(
            self.kernel, device, signature_of(self.arguments), names, values, self.num_warps, self.num_stages
        )
        return _runner(kernel, self.grid, device), constants


def hooked() -> bool:
    """Whether somebody (a profiler) wants to hear of each launch."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def current_stream(device: int) -> int:
    """The stream on which a launch on `device` goes."""
    stream: int = triton.runtime.driver.active.get_current_stream(device)
    return stream


class Runner(NamedTuple):
    """`kernel[grid]` on the current `device`, called with its arguments; `slow` is triton's own way, with hooks.

    `quick`, where there is one, takes a third of its host time: quick(*grid, stream, *fixed, *arguments).
    """

    device: int
    grid: tuple[int, ...]
    slow: Callable[..., None]
    quick: Callable[..., None] | None = None
    fixed: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        device, grid, slow, quick, fixed = self
        if quick is None or hooked():
            slow(*arguments)
        else:
            quick(*grid, current_stream(device), *fixed, *arguments)


def _runner(kernel: Any, grid: tuple[int, ...], device: int) -> Runner:
    grid = (*grid, 1, 1)[:3]
    slow: Callable[..., None] = kernel[grid]
    if not isinstance(kernel, triton.compiler.CompiledKernel):
        return Runner(device, grid, slow)
    return Runner(
        device, grid, slow, kernel.run, (kernel.function, kernel.packed_metadata, None, None, None)
    )  # fmt: skip


def signature_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a compiled kernel depends on: (dtype, aligned to 16 bytes) of tensors, integers whole, no float."""
    return tuple(
        [
            x if (kind := type(x)) is int else kind if kind is float else (x.dtype, x.data_ptr() & 15 == 0)
            for x in arguments
        ]
    )


@dataclass(frozen=True)
class _Pointer:
    """Stands for a tensor where a kernel is compiled: all of it that triton looks at."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


def representative(x: int) -> int:
    """One integer for all that triton compiles alike: 1, or by width (32, 64 bits, unsigned) and divisible by 16."""
    if x == 1:
        return 1
    least = 0 if -(1 << 31) <= x < 1 << 31 else 1 << 40 if x < 1 << 63 else 1 << 63
    return least + (2 if x & 15 else 16)


# An entry is one launch site and one shape, about 2 KB; integers are keyed whole, which is quicker than by class.
@functools.lru_cache(4096)
def _compiled(
    kernel: Any, device: int, signature: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...],
    num_warps: int, num_stages: int,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """(the kernel compiled for such arguments on the current device, the constants that follow them)."""
    # Offsets and lengths that go on changing fill the cache; what they share is found again.
    kinds = tuple([representative(x) if type(x) is int else x for x in signature])
    return _compiled_kind(kernel, device, kinds, names, values, num_warps, num_stages)


@functools.lru_cache(4096)
def _compiled_kind(
    kernel: Any, device: int, signature: tuple[Any, ...], names: tuple[str, ...], values: tuple[Any, ...],
    num_warps: int, num_stages: int,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    arguments = tuple(0.0 if x is float else _Pointer(*x) if isinstance(x, tuple) else x for x in signature)
    constants = dict(zip(names, values, strict=True))
    keywords = Launch(kernel, (1,), arguments, constants, num_warps, num_stages).keywords()
    found = kernel.warmup(*arguments, grid=(1,), **keywords)
    return found, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Device memory for descriptors; torch aligns to 512 bytes and frees in stream order."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _scratched(run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    triton.set_allocator(_scratch)
    run(*arguments)


def with_scratch(run: Callable[..., None], *arguments: Any) -> None:
    """`run` with the allocator that descriptors need, set in a copy of the context, not for the caller."""
    contextvars.copy_context().run(_scratched, run, arguments)


def needs_scratch(launches: Sequence[Any]) -> bool:
    """Whether any makes descriptors in device memory."""
    return any(launch.constants.get("DESCRIPTORS") for launch in launches)


def _run_in_order(launches: Sequence[Any]) -> None:
    for launch in launches:
        launch.run()


def run_launches(launches: Sequence[Any]) -> None:
    """Runs in order launches, or what has their `run` and `constants`; with memory for descriptors where needed."""
    if needs_scratch(launches):
        with_scratch(_run_in_order, launches)
    else:
        _run_in_order(launches)


def table_arch(capability: int) -> int:
    """80, 90 or 100: the row of the tables that serves cards of a compute capability such as 86, 90 or 103."""
    # Cards of capability 12 have the shared memory and the matmul instructions of the 8 series.
    return {9: 90, 10: 100}.get(capability // 10, 80)


def arch_of(x: torch.Tensor) -> int:
    """80, 90 or 100: the row of the tables that serves x's card; 90 for tensors on no card."""
    return card_arch(x.device) if x.is_cuda else 90


@functools.cache
def card_arch(device: torch.device) -> int:
    """80, 90 or 100, of a card."""
    major, minor = torch.cuda.get_device_capability(device)
    return table_arch(10 * major + minor)


def use_triton(x: torch.Tensor) -> bool:
    """Whether ops on `x` run Triton: CUDA tensors but fp64 ones, or any tensor in the interpreter."""
    return INTERPRETED or (x.is_cuda and x.dtype is not torch.float64)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: fp64 for fp64, fp32 for fp32 and the 16-bit ones."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` in its compute dtype; `x` itself, without a call into torch, where it has it."""
    return x if x.dtype is torch.float32 or x.dtype is torch.float64 else x.to(torch.float32)


def triton_dtype(dtype: torch.dtype) -> Any:
    """`compute_dtype` as the constexpr that kernels take."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x[..., D]` as `[rows, D]` with unit stride in D; a view where one exists, else a copy."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(math.prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is >= n (1 for n <= 1)."""
    return 1 << max(0, n - 1).bit_length()


def from_table(table: Sequence[tuple[int, Any]], key: int) -> Any:
    """The value of the first row of a (limit, value) table whose limit is >= key; the last row's for larger keys."""
    for limit, value in table:
        if key <= limit:
            return value
    return table[-1][1]


_FLOATING = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def check_floating(op: str, needed: int = 1, /, **tensors: torch.Tensor | None) -> None:
    """All are floating point and agree in dtype and device; TypeError or ValueError naming the odd one.

    Those behind the first `needed` may be None.
    """
    dtype = device = None
    left = needed
    try:
        for tensor in tensors.values():
            if tensor is None:
                if left > 0:
                    break
                continue
            left -= 1
            if dtype is None:
                dtype, device = tensor.dtype, tensor.device
                if dtype not in _FLOATING:
                    break
            elif tensor.dtype is not dtype or tensor.device != device:
                break
        else:
            return
    except AttributeError:  # a list or a number has no dtype: it is named below
        pass
    _refuse_odd(op, needed, tensors)


def _check_tensor(op: str, name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"{op}: {name} is {kind}; expected a tensor")


def _refuse_odd(op: str, needed: int, tensors: dict[str, torch.Tensor | None]) -> None:
    for i, (name, tensor) in enumerate(tensors.items()):
        if i < needed or tensor is not None:
            _check_tensor(op, name, tensor)
    first_name, first = next(iter(tensors.items()))
    assert first is not None
    dtype, device = first.dtype, first.device
    if dtype not in _FLOATING:
        raise TypeError(f"{op}: {first_name} is {dtype}; expected float32, bfloat16, float16 or float64")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {name} is {tensor.dtype} but {first_name} is {dtype}; they must agree")
        if tensor.device != device:
            raise ValueError(f"{op}: {name} is on {tensor.device} but {first_name} is on {device}; they must agree")


def check_device(op: str, first: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Each is a tensor and lives where `first` does."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            _check_tensor(op, name, tensor)
        if tensor.device != first.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}; expected {first.device}")


def check(condition: bool, message: Callable[[], str]) -> None:
    """ValueError with `message()` unless `condition`; the text is only built when it fails."""
    if not condition:
        raise ValueError(message())
