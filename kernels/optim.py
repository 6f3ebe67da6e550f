"""adamw_: AdamW over many tensors in place, with optional fp32 master weights and a gradient factor on the device.

    g = grad * grad_scale;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
    w = w * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
w is the master weight where there is one, else the parameter; the parameter is w rounded. Moments and masters are
fp32 (fp64 for fp64 parameters). Elements are independent, so any split of the tensors gives the same result.
"""

from collections.abc import Sequence

import torch

from plait.kernels.launch import check, check_device, compute_dtype, register


def adamw_ref(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
    master: torch.Tensor | None = None, *, step: int, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, grad_scale: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The oracle, out of place: (param, exp_avg, exp_avg_sq, weight before rounding)."""
    dtype = exp_avg.dtype
    g = grad.to(dtype) * (1.0 if grad_scale is None else grad_scale)
    exp_avg = beta1 * exp_avg + (1.0 - beta1) * g
    exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * g * g
    weight = param.to(dtype) if master is None else master
    weight = weight * (1.0 - lr * weight_decay)
    denominator = (exp_avg_sq / (1.0 - beta2**step)).sqrt() + eps
    weight = weight - (lr / (1.0 - beta1**step)) * exp_avg / denominator
    return weight.to(param.dtype), exp_avg, exp_avg_sq, weight


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


def _kernel(
    params: list[torch.Tensor], grads: list[torch.Tensor], exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor], masters: list[torch.Tensor], grad_scale: torch.Tensor | None,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    dtype = exp_avgs[0].dtype
    wide = [g.to(dtype) for g in grads]
    if grad_scale is not None:
        wide = list(torch._foreach_mul(wide, grad_scale.to(dtype)))
    weights = list(masters) if masters else [p.to(dtype) for p in params]
    if _fused_fits(weights, wide, exp_avgs, exp_avg_sqs):
        steps = [torch.tensor(float(step))] * len(weights)
        torch._fused_adamw_(
            weights, wide, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
    else:
        _step(weights, wide, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay)
    for param, weight in zip(params, weights, strict=True):
        if param is not weight:
            param.copy_(weight)


_adamw = register(
    "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] masters, Tensor? grad_scale, int step, float lr, float beta1, float beta2, float eps,"
    " float weight_decay) -> ()",
    _kernel,
    lambda *args: None,
)


def _check_lists(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor], masters: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    lists = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if masters:
        lists["master"] = masters
    for name, tensors in lists.items():
        if len(tensors) != len(params):
            raise ValueError(f"adamw_: {len(tensors)} {name} for {len(params)} params")
        for i, (param, tensor) in enumerate(zip(params, tensors, strict=True)):
            if tensor.shape != param.shape:
                raise ValueError(f"adamw_: {name}[{i}] has shape {tuple(tensor.shape)}, param {tuple(param.shape)}")
            if name != "grads" and tensor.dtype != compute_dtype(param.dtype):
                raise TypeError(f"adamw_: {name}[{i}] is {tensor.dtype}; expected {compute_dtype(param.dtype)}")
            check_device("adamw_", params[0], param=param, **{name: tensor})


@torch.no_grad()
def adamw_(
    params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor], master: Sequence[torch.Tensor] | None = None, *, step: int, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, grad_scale: torch.Tensor | float | None = None,
) -> None:  # fmt: skip
    """One step, number `step` (from 1), in place on params, both moments and, where given, the masters.

    All params share a dtype; moments and masters are fp32 (fp64 for fp64 params); grads may have another floating
    dtype. `grad_scale` multiplies every gradient; a 0-dim tensor stays on the device (no host sync). Raises
    ValueError on lengths, shapes, devices or step < 1, TypeError on dtypes.
    """
    params, masters = list(params), list(master or ())
    if not params:
        return
    check(step >= 1, lambda: f"adamw_: step is {step}; the first one is 1")
    check(
        all(p.dtype == params[0].dtype for p in params),
        lambda: f"adamw_: params of several dtypes {sorted({str(p.dtype) for p in params})}; call once for each",
    )
    _check_lists(params, grads, exp_avgs, exp_avg_sqs, masters)
    if grad_scale is not None and not isinstance(grad_scale, torch.Tensor):
        grad_scale = torch.tensor(grad_scale, dtype=exp_avgs[0].dtype, device=params[0].device)
    _adamw(
        params, list(grads), list(exp_avgs), list(exp_avg_sqs), masters, grad_scale,
        step, lr, beta1, beta2, eps, weight_decay,
    )  # fmt: skip
