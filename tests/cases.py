"""What the kernel tests share: shapes that break kernels, tolerances by dtype, comparison with an oracle.

Nothing here is a test. `compare` checks the value and every gradient of an op against its oracle. bf16 in triton's
interpreter is stored as uint16 there, so that its arithmetic is garbage: `bf16_interpreter` makes it ml_dtypes' bf16.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from plait.kernels.launch import INTERPRETED

_Found = TypeVar("_Found")

# Relative and absolute, on values of order 1; the 16-bit ones are twice the rounding of one result.
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (2e-5, 2e-5),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float16: (2e-3, 2e-3),
}
# Widths: one column, odd, a power of two, one more, several blocks of the norm's table, not divisible by anything.
WIDTHS = (1, 3, 64, 65, 1000)

interpret = pytest.mark.interpret
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 in the environment")
needs_compiler = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted: TRITON_INTERPRET is set")
needs_plain = pytest.mark.skipif(INTERPRETED, reason="tests the plain path: TRITON_INTERPRET must be unset")


def slow_interpreted(*values: object) -> object:
    """A row of a parametrized table that takes seconds in the interpreter: there it waits for the long run."""
    return pytest.param(*values, marks=pytest.mark.long if INTERPRETED else ())


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str, factor: float = 1.0) -> None:
    """AssertionError naming `what` unless the two agree within `dtype`'s tolerance times `factor`."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    relative, absolute = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=relative * factor,
        atol=absolute * factor,
        msg=lambda text: f"{what}: {text}",
    )


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Standard normal values, the same on every call with the same arguments."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(shape) * 31 + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def captured(call: Callable[[], _Found]) -> tuple[torch.cuda.CUDAGraph, _Found]:
    """(a graph of `call`, what it gave there), after it ran once on a side stream, as graphs ask for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def _outputs(value: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def compare(
    op: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    oracle: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    *inputs: torch.Tensor,
    factor: float = 1.0,
) -> None:
    """The op's outputs and gradients against the oracle on fp64 copies of the same inputs."""
    dtype = inputs[0].dtype
    ours = [x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    actual, expected = _outputs(op(*ours)), _outputs(oracle(*theirs))
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        close(a, b, dtype, f"output {i}", factor)
    weights = [normal(*a.shape, dtype=a.dtype, seed=7 + i) for i, a in enumerate(actual)]
    got = torch.autograd.grad(actual, ours, weights)
    want = torch.autograd.grad(expected, theirs, [w.double() for w in weights])
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == ours[i].dtype
        size = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        close(a / size, b / size, dtype, f"gradient {i}", factor)


@contextlib.contextmanager
def bf16_interpreter() -> Iterator[None]:
    """Within it, triton's interpreter computes bf16 with ml_dtypes, bit for bit as torch rounds."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    bf16 = np.dtype(ml_dtypes.bfloat16)
    builder = interpreter.InterpreterBuilder
    plain_dtype = interpreter._get_np_dtype

    def numpy_dtype(dtype: object) -> np.dtype:
        scalar = getattr(dtype, "scalar", dtype)
        if scalar == tl.bfloat16 and not isinstance(dtype, tl.pointer_type):
            return bf16
        return plain_dtype(dtype)

    def cast(self: object, source: object, target: object) -> object:
        data = source.data.view(bf16) if source.dtype.scalar == tl.bfloat16 else source.data
        return interpreter.TensorHandle(data.astype(numpy_dtype(target)), target.scalar)

    def load(self: object, pointers: object, mask: object, other: object, *hints: object, **more: object) -> object:
        handle = pointers.get_element_ty()
        is_bf16 = handle == tl.bfloat16
        raw = np.dtype(np.uint16) if is_bf16 else numpy_dtype(handle)
        fill = np.zeros(pointers.data.shape, raw) if other is None else other.data.view(raw)
        data = interpreter._interpreter.load(pointers.data, mask.data, fill, raw)
        return interpreter.TensorHandle(data.view(bf16) if is_bf16 else data, handle)

    def store(self: object, pointers: object, value: object, mask: object, *hints: object, **more: object) -> object:
        data = value.data.view(np.uint16) if value.data.dtype == bf16 else value.data
        return interpreter._interpreter.store(pointers.data, data, mask.data)

    def fp_to_fp(self: object, source: object, target: object, rounding: object) -> object:
        return cast(self, source, target)

    def dot(self: object, a: object, b: object, d: object, *precision: object) -> object:
        wide = [x.data.astype(d.data.dtype) for x in (a, b)]
        return interpreter.TensorHandle(np.matmul(*wide) + d.data, d.dtype.scalar)

    patch = pytest.MonkeyPatch()
    patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
    for name in ("cast_impl", "create_fp_ext", "create_fp_trunc"):
        patch.setattr(builder, name, cast)
    patch.setattr(builder, "create_fp_to_fp", fp_to_fp)
    patch.setattr(builder, "create_dot", dot)
    patch.setattr(builder, "create_masked_load", load)
    patch.setattr(builder, "create_masked_store", store)
    try:
        yield
    finally:
        patch.undo()


@contextlib.contextmanager
def dtype_support(dtype: torch.dtype) -> Iterator[None]:
    """What `dtype` needs to be computed right in this process."""
    with bf16_interpreter() if INTERPRETED and dtype is torch.bfloat16 else contextlib.nullcontext():
        yield
