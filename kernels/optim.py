"""adamw_: AdamW over many tensors in place, with optional fp32 master weights and gradient factors on the device.

    g = grad * (grad_scale / loss_scale)
    m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
    w = w * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
w is the master weight where there is one, else the parameter; the parameter is w rounded: to nearest, or with `rng`
stochastically (rounding.py). Moments and masters are fp32 (fp64 for fp64 parameters). Elements are independent, so
any split of the tensors gives the same result. The kernels are in adamw_triton.py.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from plait.kernels.adamw_triton import Ready, Step, ready_launches, shared_arguments
from plait.kernels.dropout_op import check_rng
from plait.kernels.launch import check, compute_dtype
from plait.kernels.registration import all_plain, observed, register
from plait.kernels.rounding import stochastic_round_ref
from plait.kernels.tables import address, elsewhere, remembered, shares_memory, use_tables

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def adamw_ref(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None = None, *, step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, grad_scale: torch.Tensor | float | None = None,
    loss_scale: torch.Tensor | float | None = None, rng: torch.Tensor | None = None, first_index: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The oracle, out of place: (param, exp_avg, exp_avg_sq, weight before rounding)."""
    dtype = exp_avg.dtype
    factor = torch.as_tensor(1.0 if grad_scale is None else grad_scale, dtype=dtype)
    if loss_scale is not None:
        factor = factor / torch.as_tensor(loss_scale, dtype=dtype)
    g = grad.to(dtype) * factor
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * g * g
    weight = param.to(dtype) if master is None else master
    weight = weight * (1.0 - lr * weight_decay)
    denominator = (exp_avg_sq / (1.0 - beta2**step)).sqrt() + eps
    weight = weight - (lr / (1.0 - beta1**step)) * exp_avg / denominator
    rounded = weight.to(param.dtype) if rng is None else stochastic_round_ref(weight, param.dtype, rng, first_index)
    return rounded, exp_avg, exp_avg_sq, weight


def _fused_fits(*lists: list[torch.Tensor]) -> bool:
    """Whether torch's one-pass CPU kernel takes these: it walks memory, so that all must be contiguous."""
    return all(x.device.type == "cpu" and x.is_contiguous() for tensors in lists for x in tensors)


def _step(
    weights: list[torch.Tensor], grads: list[torch.Tensor], exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor], step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float,
) -> None:  # fmt: skip
    """The formula in passes over all tensors at once."""
    torch._foreach_lerp_(exp_avgs, grads, 1.0 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1.0 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_mul_(denominators, (1.0 - beta2**step) ** -0.5)
    torch._foreach_add_(denominators, eps)
    torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
    torch._foreach_addcdiv_(weights, exp_avgs, denominators, -lr / (1.0 - beta1**step))


def _plain(
    params: list[torch.Tensor], grads: list[torch.Tensor], exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor], masters: list[torch.Tensor], factor: torch.Tensor | None,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    rng: torch.Tensor | None, first_indices: list[int],
) -> None:  # fmt: skip
    dtype = exp_avgs[0].dtype
    wide = [g.to(dtype) for g in grads]
    if factor is not None:
        wide = list(torch._foreach_mul(wide, factor))
    weights = list(masters) if masters else [p.to(dtype) for p in params]
    if _fused_fits(weights, wide, exp_avgs, exp_avg_sqs):
        steps = [torch.tensor(float(step))] * len(weights)
        torch._fused_adamw_(
            weights, wide, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    else:
        _step(weights, wide, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay)
    for i, (param, weight) in enumerate(zip(params, weights, strict=True)):
        if rng is not None:
            param.copy_(stochastic_round_ref(weight, param.dtype, rng, first_indices[i]))
        elif param is not weight:
            param.copy_(weight)


def _factor(
    grad_scale: torch.Tensor | None, loss_scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    if loss_scale is None:
        return None if grad_scale is None else grad_scale.to(dtype)
    return (1.0 if grad_scale is None else grad_scale.to(dtype)) / loss_scale.to(dtype)


def _kernel(
    params: list[torch.Tensor], grads: list[torch.Tensor], exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor], masters: list[torch.Tensor], grad_scale: torch.Tensor | None,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    loss_scale: torch.Tensor | None = None, rng: torch.Tensor | None = None, first_indices: Sequence[int] = (),
    schedule: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
) -> None:  # fmt: skip
    if use_tables(params[:1]):
        _by_triton(
            params, grads, exp_avgs, exp_avg_sqs, masters, grad_scale, step, lr, beta1, beta2, eps, weight_decay,
            loss_scale, rng, first_indices, schedule, found_inf,
        )  # fmt: skip
        return
    if found_inf is not None and bool(found_inf):
        return
    factor, starts = _factor(grad_scale, loss_scale, exp_avgs[0].dtype), _starts(params, rng, first_indices)
    _plain(
        params, grads, exp_avgs, exp_avg_sqs, masters, factor, step, lr, beta1, beta2, eps, weight_decay, rng, starts
    )
    # torch's fused step says nothing of what it writes: autograd must be told.
    torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *masters])


def _starts(params: list[torch.Tensor], rng: torch.Tensor | None, first_indices: Sequence[int]) -> list[int]:
    if rng is not None and not first_indices:
        return [0, *itertools.accumulate(-(-p.numel() // 4) * 4 for p in params)]
    return list(first_indices)


def _by_triton(
    params: list[torch.Tensor], grads: list[torch.Tensor], exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor], masters: list[torch.Tensor], grad_scale: torch.Tensor | None,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    loss_scale: torch.Tensor | None, rng: torch.Tensor | None, first_indices: Sequence[int],
    schedule: torch.Tensor | None, found_inf: torch.Tensor | None,
) -> None:  # fmt: skip
    """`_kernel` of tensors that tables may name."""
    decay, rate, correction = (
        (1.0, 1.0, 1.0) if schedule is not None else _numbers(step, lr, beta1, beta2, weight_decay)
    )
    numbers = (decay, rate, correction, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps)
    lists = [params, grads, exp_avgs, exp_avg_sqs] + ([masters] if masters else [])
    starts = tuple(_starts(params, rng, first_indices)) if rng is not None or first_indices else ()
    _launch(lists, Step(numbers, schedule, grad_scale, loss_scale, rng, found_inf), starts)
    # The kernels write by address: autograd must be told.
    torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *masters])


def _ready(
    device: int, lists: Sequence[Sequence[torch.Tensor]], step: Step, starts: tuple[int, ...]
) -> list[Ready]:  # fmt: skip
    _check_lists(*lists)
    return ready_launches(device, lists, step, starts)


def _launch(lists: Sequence[Sequence[torch.Tensor]], step: Step, starts: tuple[int, ...]) -> None:
    """The step by Triton, on the card of the tensors."""
    like = lists[0][0]
    if elsewhere(like):
        with torch.cuda.device(like.device):
            _launch(lists, step, starts)
        return
    optional = (step.schedule, step.grad_scale, step.loss_scale, step.rng, step.found_inf)
    key = (starts, *[None if x is None else (x.dtype, x.data_ptr() & 15) for x in optional])
    arguments = shared_arguments(step, address(lists[2][0]))
    for run, first, constants in remembered(_ready, lists, key, step, starts):
        run(*first, *arguments, *constants)


def _numbers(step: int, lr: float, beta1: float, beta2: float, weight_decay: float) -> tuple[float, float, float]:
    """The factor of decay, the rate of the first moment, the correction of the second."""
    return 1.0 - lr * weight_decay, lr / (1.0 - beta1**step), 1.0 - beta2**step


def _schedule(
    step: torch.Tensor | int, lr: torch.Tensor | float, beta1: float, beta2: float, weight_decay: float,
    like: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """`_numbers` on like's device, in fp64 until the end: 1 - beta2^step loses most digits of fp32."""

    def wide(x: torch.Tensor | float) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x.to(torch.float64)
        return torch.full((), x, dtype=torch.float64, device=like.device)

    step, lr = wide(step), wide(lr)
    numbers = (1.0 - lr * weight_decay, lr / (1.0 - beta1**step), 1.0 - beta2**step)
    return torch.stack(numbers).to(compute_dtype(like.dtype))


_adamw = register(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] masters, Tensor? grad_scale, int step, float lr, float beta1, float beta2, float eps,"
    " float weight_decay, Tensor? loss_scale=None, Tensor? rng=None, int[] first_indices=[],"
    " Tensor? schedule=None, Tensor? found_inf=None) -> ()",
    _kernel,
    lambda *args: None,
)


def _check_lists(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor], masters: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    try:
        shapes = [p.shape for p in params]
        others = [[t.shape for t in tensors] for tensors in (grads, exp_avgs, exp_avg_sqs, masters)]
    except AttributeError:  # a gradient that is None, mostly
        _refuse_no_tensor(params=params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, master=masters)
        raise
    device, dtype = params[0].device, params[0].dtype
    if dtype not in _FLOATING:
        raise TypeError(f"adamw_: params are {dtype}; expected float32, bfloat16, float16 or float64")
    check(
        all(p.dtype == dtype for p in params),
        lambda: f"adamw_: params of several dtypes {sorted({str(p.dtype) for p in params})}; call once for each",
    )
    wide = (compute_dtype(dtype),)
    lists = [("params", params, (dtype,)), ("grads", grads, _FLOATING), ("exp_avgs", exp_avgs, wide)]
    lists += [("exp_avg_sqs", exp_avg_sqs, wide)] + ([("master", masters, wide)] if masters else [])
    for (name, tensors, dtypes), of_tensors in zip(lists, [shapes, *others], strict=False):
        if len(tensors) != len(params):
            raise ValueError(f"adamw_: {len(tensors)} {name} for {len(params)} params")
        # All at once, since a call may have thousands; the search for the odd one is left to the failure.
        if not (
            of_tensors == shapes
            and all([t.dtype in dtypes and t.device == device for t in tensors])
            and (name == "grads" or not any([shares_memory(t) for t in tensors]))
        ):
            _refuse(name, tensors, params, dtypes)


def _refuse_no_tensor(**lists: Sequence[torch.Tensor]) -> None:
    """TypeError naming the first element that is no tensor."""
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"adamw_: {name}[{i}] is {tensor!r}; expected a tensor")


def _refuse_numbers(step: Any, lr: Any, beta1: float, beta2: float, eps: float, weight_decay: float) -> None:
    """Raises for the first that is out of its range; tensors are not looked at."""
    if not (isinstance(step, torch.Tensor) or hasattr(step, "__index__")):
        raise TypeError(f"adamw_: step is {step!r}; expected an integer from 1 on")
    ranges = {"step": (step, 1, math.inf), "lr": (lr, 0.0, math.inf), "beta1": (beta1, 0.0, 1.0)}
    ranges |= {"beta2": (beta2, 0.0, 1.0), "eps": (eps, 0.0, math.inf), "weight_decay": (weight_decay, 0.0, math.inf)}
    for name, (value, low, high) in ranges.items():
        if not (isinstance(value, torch.Tensor) or low <= value < high):
            raise ValueError(f"adamw_: {name} is {value}; expected {low} <= {name} < {high}")


def _refuse(
    name: str, tensors: Sequence[torch.Tensor], params: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> None:
    """Raises for the first tensor that does not fit its parameter."""
    device = params[0].device
    for i, (param, tensor) in enumerate(zip(params, tensors, strict=True)):
        if tensor.shape != param.shape:
            raise ValueError(f"adamw_: {name}[{i}] has shape {tuple(tensor.shape)}, param {tuple(param.shape)}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"adamw_: {name}[{i}] is {tensor.dtype}; expected {dtypes[0]}")
        if tensor.device != device:
            raise ValueError(f"adamw_: {name}[{i}] is on {tensor.device}; expected {device}")
        if name != "grads" and shares_memory(tensor):
            raise ValueError(f"adamw_: {name}[{i}] has strides {tensor.stride()}; its elements share memory")


def _scalar(name: str, value: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """`value` as a 0-dim tensor where `like` lives, made there: nothing waits for the device."""
    if not isinstance(value, torch.Tensor):
        if not hasattr(value, "__float__"):
            raise TypeError(f"adamw_: {name} is {value!r}; expected a number or a 0-dim tensor")
        return torch.full((), value, dtype=compute_dtype(like.dtype), device=like.device)
    check(value.dim() == 0, lambda: f"adamw_: {name} has shape {tuple(value.shape)}; expected a 0-dim tensor")
    if value.is_complex():
        raise TypeError(f"adamw_: {name} is {value.dtype}; expected a real dtype")
    check(value.device == like.device, lambda: f"adamw_: {name} is on {value.device}; expected {like.device}")
    return value


def adamw_(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor], master: Sequence[torch.Tensor] | None = None, *, step: torch.Tensor | int,
    lr: torch.Tensor | float, beta1: float, beta2: float, eps: float, weight_decay: float,
    grad_scale: torch.Tensor | float | None = None, loss_scale: torch.Tensor | float | None = None,
    found_inf: torch.Tensor | None = None, rng: torch.Tensor | None = None,
    first_indices: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """One step, number `step` (from 1), in place on params, both moments and, where given, the masters.

    All params share a dtype; moments and masters are fp32 (fp64 for fp64 params); grads may have another floating
    dtype. Every gradient is multiplied by `grad_scale` (clipping) and divided by `loss_scale`. These two, `step` and
    `lr` may be 0-dim tensors, read on the device: no host sync (but for fp64 on CUDA), and a captured CUDA graph
    follows their values. `loss_scale` and `found_inf` are torch's grad_scale and found_inf: where the 0-dim
    `found_inf` is not 0, the call changes nothing (the caller does not count that step). Without it a gradient of NaN
    or infinity spoils its element as in torch. `rng`, int64 [2] = (seed, offset), rounds 16-bit params
    stochastically; `first_indices` has the index of each param's first element, by default one param behind the
    other, each from a multiple of 4. Raises ValueError on lengths, shapes, devices, overlapping memory or
    step < 1, TypeError on dtypes.
    """
    params, masters = list(params), list(master or ())
    if not params:
        return
    timed = isinstance(step, torch.Tensor) or isinstance(lr, torch.Tensor)
    if timed or not (
        isinstance(step, int) and step >= 1 and 0.0 <= lr < math.inf
        and 0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0 and 0.0 <= eps < math.inf and 0.0 <= weight_decay < math.inf
    ):  # fmt: skip
        _refuse_numbers(step, lr, beta1, beta2, eps, weight_decay)
    grads, exp_avgs, exp_avg_sqs = list(grads), list(exp_avgs), list(exp_avg_sqs)
    # A plain call of Triton checks what it has not met, and needs no more of torch.
    direct = (
        not observed()
        and isinstance(params[0], torch.Tensor)
        and use_tables(params[:1])
        and all_plain([*params, *grads, *exp_avgs, *exp_avg_sqs, *masters])
    )  # fmt: skip
    if not direct:
        _check_lists(params, grads, exp_avgs, exp_avg_sqs, masters)
    like = params[0]
    if rng is not None:
        check_rng("adamw_", rng, like)
        check(
            first_indices is None or (len(first_indices) == len(params) and min(first_indices) >= 0),
            lambda: (
                f"adamw_: first_indices are {first_indices}; expected one from 0 for each of {len(params)} params"
            ),
        )
    schedule = None
    if timed:
        step, lr, schedule = _place_schedule(step, lr, beta1, beta2, weight_decay, like, params)
    scales = [
        None if value is None else _scalar(name, value, like)
        for name, value in (("grad_scale", grad_scale), ("loss_scale", loss_scale), ("found_inf", found_inf))
    ]
    arguments: tuple[Any, ...] = (
        params, grads, exp_avgs, exp_avg_sqs, masters, scales[0], step, lr, beta1, beta2, eps, weight_decay,
        scales[1], rng, list(first_indices or ()), schedule, scales[2],
    )  # fmt: skip
    if direct:
        _by_triton(*arguments)
    else:
        with torch.no_grad():
            _adamw(*arguments)


@torch.no_grad()
def _place_schedule(
    step: torch.Tensor | int, lr: torch.Tensor | float, beta1: float, beta2: float, weight_decay: float,
    like: torch.Tensor, params: list[torch.Tensor],
) -> tuple[int, float, torch.Tensor | None]:  # fmt: skip
    """(step, lr, None) as numbers where the plain path runs, else (1, 0, their schedule on the device)."""
    _scalar("step", step, like), _scalar("lr", lr, like)
    if use_tables(params[:1]):
        return 1, 0.0, _schedule(step, lr, beta1, beta2, weight_decay, like)
    number = int(step)
    check(number >= 1, lambda: f"adamw_: step is {number}; the first one is 1")
    return number, float(lr), None
