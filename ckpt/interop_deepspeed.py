"""Checkpoints of DeepSpeed in its universal form: a folder for each parameter, with full tensors in it.

    FOLDER/zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt       of a buffer fp32.pt alone
    FOLDER/zero/optimizer_state.pt      options of the groups; after ZeRO-3 also the step
    FOLDER/*model_states.pt             shapes by group, buffers, what is shared, the training step

Not ZeRO's own shards (convert them with DeepSpeed's ds_to_universal first). Parameters become "model", what belongs
to the optimizer "optimizer", as `plait.ckpt.optimizer_state` has it. After ZeRO-3 the tensors are flat and without
step.pt: the shapes are in model_states, which also says which parameter is in which group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_torch import load_plain
from plait.ckpt.interop_tree import Imported, skipped
from plait.ckpt.layout import can_exist
from plait.ckpt.optimizer import BY_PLACE

# Of a file's dict: the full tensor, and how DeepSpeed cuts it again.
_PLAIN = ("param", "cat_dim", "vocab_tensor", "param_n_sub_params", "sub_param_shape")
OPTIONS = "optimizer_state.pt"


@dataclass
class _Model:
    """What model_states says. groups: {parameter: shape} of each, of this tensor-parallel rank; None: not said."""

    groups: list[dict[str, tuple[int, ...]]] | None = None
    buffers: dict[str, torch.Tensor | None] = field(default_factory=dict)  # None: in parts
    frozen: dict[str, torch.Tensor | None] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # name: the one that has the data
    step: int | None = None


def import_deepspeed(folder: Path, skip: Sequence[str] = ()) -> Imported:
    """Reads all parameters (fp32), buffers and the optimizer's state. Errors name file and reason."""
    if not (folder / "zero").is_dir():
        hint = "; it holds ZeRO shards: run ds_to_universal on it" if list(folder.glob("*zero_pp_rank*")) else ""
        raise SnapshotError(f"'{folder}' has no folder `zero`, as a universal checkpoint has{hint}")
    left: list[str] = []
    about = _about(folder, left)
    shapes = {name: shape for group in about.groups or () for name, shape in group.items()}
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for place in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        if skipped([place.name], skip):
            left.append(f"{place.name}: left out by --skip")
            continue
        if not (place / "fp32.pt").is_file():
            raise SnapshotDamaged(f"'{place}' has no fp32.pt: parameter {place.name!r} is not whole")
        for path in sorted(place.glob("*.pt")):
            value = _shaped(_value(path), shapes.get(place.name), path)
            if path.stem == "fp32":
                model[place.name] = value
            else:
                states.setdefault(place.name, {})[path.stem] = value
        _check(place, model[place.name], states.get(place.name, {}))
    if not model:
        raise SnapshotError(f"'{folder / 'zero'}' has no parameter")
    optimizer = _optimizer(folder / "zero" / OPTIONS, states, about, left) if states else {}
    _add_others(model, about, skip, left)
    return Imported({"model": model, **({"optimizer": optimizer} if states else {})}, left, about.step)


def _about(folder: Path, left: list[str]) -> _Model:
    """Reads the first model_states file; all ranks of data parallelism say the same. `left` gets what is not read."""
    files = sorted(folder.glob("*model_states.pt"))
    others = [path for path in sorted(folder.iterdir()) if path.name != "zero" and path not in files]
    left += [f"{path.name}: not a parameter" for path in others]
    if not files:
        return _Model()
    content = load_plain(files[0], mmap=True, strangers=True)
    if not isinstance(content, dict):
        raise SnapshotDamaged(f"'{files[0]}' holds {type(content).__name__}, not a dict")
    groups, shared = content.get("param_shapes"), content.get("shared_params")
    step = content.get("global_steps")
    good = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    about = _Model(groups if good else None, shared=shared if isinstance(shared, dict) else {})
    about.step = step if type(step) is int and step >= 0 else None
    weights, names = content.get("module"), content.get("buffer_names")
    weights = weights if isinstance(weights, dict) else {}
    alone = len({path.name.partition("mp_rank_")[2] for path in files}) == 1  # else each has parts of some

    def held(name: str, shape: Any = None) -> torch.Tensor | None:
        tensor = weights.get(name)
        if not alone or not isinstance(tensor, torch.Tensor):
            return None
        return tensor.clone() if shape is None or tuple(tensor.shape) == tuple(shape) else None

    about.buffers = {name: held(name) for name in names if isinstance(name, str)} if isinstance(names, list) else {}
    frozen = content.get("frozen_param_shapes")
    about.frozen = {name: held(name, shape) for name, shape in frozen.items()} if isinstance(frozen, dict) else {}
    return about


def _add_others(model: dict[str, torch.Tensor], about: _Model, skip: Sequence[str], left: list[str]) -> None:
    """Adds buffers as the model had them, frozen parameters, and the second names of shared ones."""
    for name, tensor in (about.buffers | about.frozen).items():
        if skipped([name], skip):
            continue
        if tensor is not None and (name in about.buffers or name not in model):
            model[name] = tensor
        elif name not in model:
            left.append(f"{name}: a buffer or frozen parameter, of which each rank may have a part")
    for name, source in about.shared.items():
        if source in model and name not in model and not skipped([name], skip):
            model[name] = model[source]


def _optimizer(
    path: Path,
    states: dict[str, dict[str, Any]],
    about: _Model,
    left: list[str],
) -> dict[str, Any]:
    """Returns the states, and options by group as far as they are known; `left` says what is not."""
    said = f"zero/{path.name}"
    if not path.is_file():
        left.append(f"{said} is not there: no learning rate, no weight decay")
        return {"state": states}
    content = load_plain(path, strangers=True)
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise SnapshotDamaged(f"'{path}' has no param_groups")
    steps = _steps(content, groups)
    lacking = [name for name, state in states.items() if "step" not in state]
    if len(steps) == 1:
        for name in lacking:
            states[name]["step"] = torch.tensor(steps[0])
    elif lacking:
        left.append(f"{said}: the step of {len(lacking)} parameters: it says {steps or 'none'}")
    group_of = dict.fromkeys(states, 0) if len(groups) == 1 else _group_of(groups, states, about)
    if not group_of:
        left.append(f"{said}: options of {len(groups)} groups: which parameter is in which is not said")
        return {"state": states}
    out = {n: [[k, v] for k, v in group.items() if k not in (*BY_PLACE, "step")] for n, group in enumerate(groups)}
    return {"state": states, "groups": out, "group_of": group_of}


def _group_of(groups: list[Any], states: dict[str, Any], about: _Model) -> dict[str, int]:
    """Returns which parameter is in which group; nothing when model_states does not say it of all that have state."""
    if about.groups is None or len(about.groups) != len(groups):  # ZeRO-3 cuts large groups into several
        return {}
    found = {name: number for number, names in enumerate(about.groups) for name in names if name in states}
    return found if found.keys() == states.keys() else {}


def _steps(content: dict[str, Any], groups: list[Any]) -> list[float]:
    """Returns the steps that the optimizer says: of torch's in its state, of DeepSpeed's own in the groups."""
    inner = content.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    parts = [*(states.values() if isinstance(states, dict) else ()), *groups]
    found = (part.get("step") for part in parts if isinstance(part, dict))
    numbers = (step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step for step in found)
    return sorted({float(number) for number in numbers if isinstance(number, (int, float))})


def _shaped(value: Any, shape: tuple[int, ...] | None, path: Path) -> Any:
    """Returns a tensor that ZeRO-3 left flat in the parameter's shape."""
    if shape is None or not isinstance(value, torch.Tensor) or value.dim() != 1 or len(shape) == 1:
        return value
    if path.stem == "step":
        return value
    if not all(type(n) is int for n in shape) or not can_exist(shape) or prod(shape) != value.numel():
        raise SnapshotDamaged(f"'{path}' has {value.numel()} elements, the parameter the shape {tuple(shape)}")
    return value.view(tuple(shape))


def _value(path: Path) -> Any:
    """Returns what a file holds: a tensor, or a dict with it under "param". A step may be a number: torch's
    optimizers have a tensor."""
    content = load_plain(path, strangers=True)
    if isinstance(content, dict):
        odd = sorted(map(str, content.keys() - set(_PLAIN)))
        if odd or "param" not in content:
            raise SnapshotError(f"'{path}' has {odd or 'no param'}, which this reader does not know")
        content = content["param"]
    if path.stem == "step" and type(content) in (int, float):
        return torch.tensor(float(content))
    if not isinstance(content, torch.Tensor):
        raise SnapshotDamaged(f"'{path}' holds {type(content).__name__}, not a tensor")
    return content


def _check(place: Path, parameter: Any, state: dict[str, Any]) -> None:
    """Moments must have the parameter's shape: a converter that was stopped leaves others."""
    for name, value in state.items():
        odd = isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape
        if name.startswith("exp_avg") and odd:
            raise SnapshotDamaged(
                f"'{place / name}.pt' has shape {tuple(value.shape)}, the parameter {tuple(parameter.shape)}"
            )
