"""How tensors may lie in memory, and plain torch in the same dtype as the yardstick of 16-bit errors.

Also what ops over rows are checked for in the same way: odd gradients, kept graphs, rows far apart.

Nothing here is a test.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from plait.kernels import norm_rows, norm_tiles
from plait.kernels.launch import INTERPRETED
from tests.cases import dtype_support, normal

# moved: begins off any 16-byte boundary; sliced: rows apart by an odd number; stepped: elements two apart.
LAYOUTS = ("plain", "moved", "sliced", "stepped", "transposed", "broadcast", "flat")


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """`values` in another layout, between NaN that nobody may read; the broadcast ones repeat their first part."""
    shape = values.shape
    if not shape or layout == "plain":
        return values.clone()
    if layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "broadcast":
        return values[:1].clone().expand(shape)
    if layout == "flat":  # every row one number
        return values[..., :1].clone().expand(shape)
    if layout == "moved":
        return values.new_full((values.numel() + 1,), float("nan"))[1:].view(shape).copy_(values)
    wide = values.new_full((*shape[:-1], 2 * shape[-1] + 3), float("nan"))
    home = wide[..., 1 : 1 + shape[-1]] if layout == "sliced" else wide[..., 1 : 1 + 2 * shape[-1] : 2]
    return home.copy_(values)


# kind: limits of norm_rows.py and norm_tiles.py under which rows of 10 columns are walked as its name says.
NORM_LIMITS = {
    "tiles": {"_BACKWARD_TILE": 32, "NUM_TILE_PARTIALS": 3},
    "rows": {"_MAX_NARROW": 0, "_NUM_PARTIALS": 3},
    "blocks": {"_MAX_NARROW": 0, "_NUM_PARTIALS": 3, "_MAX_FORWARD": 4, "_MAX_BACKWARD": 4, "_BLOCK_COL": 4},
}


def limit_norms(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Sets the limits of one kind; a tile is bound where its rows are counted."""
    for name, value in NORM_LIMITS[kind].items():
        if name == "_BACKWARD_TILE":
            patch.setattr(norm_tiles, name, value)
        else:
            patch.setattr(norm_rows, name, value)


FAR = (1 << 30) + 16


def far_rows(values: torch.Tensor) -> torch.Tensor:
    """values[3, C] with rows FAR elements apart, the last one beyond 2^31; the memory between is never touched."""
    rows, cols = values.shape
    assert rows == 3
    storage = torch.empty(2 * FAR + cols, dtype=values.dtype)
    return storage.as_strided((rows, cols), (FAR, 1)).copy_(values)


@contextlib.contextmanager
def no_32_bit_overflow(first_program: int = 0) -> Iterator[None]:
    """Within it, the interpreter stops at any 32-bit overflow; grids count from `first_program` on."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    builder, patch = interpreter.interpreter_builder, pytest.MonkeyPatch()
    patch.setattr(builder, "options", interpreter.InterpreterOptions(debug=True))
    dim, idx = builder.set_grid_dim, builder.set_grid_idx
    patch.setattr(builder, "set_grid_dim", lambda x, y, z: dim(x + first_program, y, z))
    patch.setattr(builder, "set_grid_idx", lambda x, y, z: idx(x + first_program, y, z))
    try:
        yield
    finally:
        patch.undo()


def check_far_rows(op: Callable[..., torch.Tensor], x: torch.Tensor, *parameters: torch.Tensor) -> None:
    """op(x, *parameters) of rows FAR apart has the bits, also of its gradient, of rows side by side."""
    leaf, plain = far_rows(x).requires_grad_(), x.clone().requires_grad_()
    dy = normal(*x.shape, dtype=x.dtype, seed=2)
    with no_32_bit_overflow():
        got = op(leaf, *parameters)
        grads = [
            torch.autograd.grad(y, leaf_of, dy)[0] for y, leaf_of in ((got, leaf), (op(plain, *parameters), plain))
        ]
    assert torch.equal(got, op(plain, *parameters)) and torch.equal(*grads)


def check_odd_gradients(
    op: Callable[..., torch.Tensor], oracle: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> None:
    """`sum().backward()` hands in a gradient of stride 0; a slice of the output [4, 8] one of step 2."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    for pick in (lambda y: y.sum(), lambda y: (y[..., ::2] * normal(4, 4, seed=3)).sum()):
        got = torch.autograd.grad(pick(op(*leaves)), leaves)
        want = torch.autograd.grad(pick(oracle(*leaves)), leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)


def check_kept_graph(
    op: Callable[..., torch.Tensor], oracle: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> None:
    """A producer that saved its output, exp, gets its own gradient, twice the same."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss = op(leaves[0].exp(), *leaves[1:]).square().sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    want = torch.autograd.grad(oracle(leaves[0].exp(), *leaves[1:]).square().sum(), leaves)
    for a, b, c in zip(first, second, want, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


def _run(op: Callable[..., object], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Outputs, then the gradient of each input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = op(*leaves)
    outputs = value if isinstance(value, tuple) else (value,)
    dtype = inputs[0].dtype
    weights = [normal(*y.shape, dtype=torch.bfloat16, seed=7 + i).to(dtype) for i, y in enumerate(outputs)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, weights)]


def no_worse_than_torch(
    op: Callable[..., object], peer: Callable[..., object], oracle: Callable[..., object], *inputs: torch.Tensor
) -> None:
    """Asserts that no output and no gradient of `op` errs more than twice as much as `peer`, plain torch's.

    Errors are against `oracle` in fp64, largest and root mean square. A rounding of the largest value is always
    granted. `inputs` hold bf16 or fp16 values that all three get alike.
    """
    dtype = inputs[0].dtype
    with dtype_support(dtype):
        ours = _run(op, inputs)
    theirs, exact = _run(peer, inputs), _run(oracle, tuple(x.double() for x in inputs))
    for i, (a, b, want) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.dtype == dtype and a.shape == want.shape
        one_rounding = 0.5 * torch.finfo(dtype).eps * float(want.abs().max())
        errors, yardstick = (a.double() - want).abs(), (b.double() - want).abs()
        assert float(errors.max()) <= 2.0 * max(float(yardstick.max()), one_rounding), f"value {i}: largest error"
        mean, twice = float(errors.square().mean().sqrt()), 2.0 * float(yardstick.square().mean().sqrt())
        assert mean <= max(twice, one_rounding), f"value {i}: {mean} is more than {twice}"
