"""l2_norm: the Euclidean norm of many tensors at once, in fp32 (fp64 when any tensor is fp64).

`l2_norm_squared` is the sum that ranks add before the root. The order of the sum is that of the list, so that runs
agree bit for bit. Each element is read once; NaN and inf pass through.
"""

from collections.abc import Sequence

import torch

from plait.kernels.launch import check, check_device, compute_dtype, register


def _dtype_of(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32


def l2_norm_squared_ref(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The oracle: the sum of squares, 0-dim."""
    dtype = _dtype_of(tensors)
    total = torch.zeros((), dtype=dtype, device=tensors[0].device)
    for tensor in tensors:
        total += tensor.to(compute_dtype(tensor.dtype)).square().sum()
    return total


def l2_norm_ref(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The oracle of l2_norm."""
    return l2_norm_squared_ref(tensors).sqrt()


def _kernel(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = _dtype_of(tensors)
    norms = torch._foreach_norm([t.detach() for t in tensors], 2, dtype=dtype)
    return torch.stack(norms).square_().sum()


_l2_norm_squared = register(
    "l2_norm_squared(Tensor[] tensors) -> Tensor",
    _kernel,
    lambda tensors: tensors[0].new_empty((), dtype=_dtype_of(tensors)),
)


@torch.no_grad()
def l2_norm_squared(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of all elements, 0-dim, without a gradient. ValueError on an empty list or mixed devices."""
    tensors = list(tensors)
    check(len(tensors) > 0, lambda: "l2_norm_squared: no tensors; expected at least one")
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise TypeError(f"l2_norm_squared: a tensor is {tensor.dtype}; expected a floating dtype")
        check_device("l2_norm_squared", tensors[0], tensor=tensor)
    return _l2_norm_squared(tensors)


@torch.no_grad()
def l2_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm over all elements of all tensors, 0-dim. Errors as `l2_norm_squared`."""
    return l2_norm_squared(tensors).sqrt()
