"""How tensors may lie in memory, and plain torch in the same dtype as the yardstick of 16-bit errors.

Nothing here is a test.
"""

from collections.abc import Callable

import pytest
import torch

from plait.kernels import norm_rows, norm_tiles
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
