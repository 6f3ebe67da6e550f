"""Checkpoints of DeepSpeed in its universal form: a folder for each parameter, with full tensors in it.

    FOLDER/zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    FOLDER/zero/optimizer_state.pt      options of the groups

Not ZeRO's own shards (convert them with DeepSpeed's ds_to_universal first). Parameters become "model", what belongs
to the optimizer "optimizer", as `plait.ckpt.optimizer_state` has it. Which parameter is in which group is said
nowhere: with more than one group their options stay out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_torch import load_plain
from plait.ckpt.interop_tree import Imported, skipped
from plait.ckpt.optimizer import BY_PLACE

# Of a file's dict: the full tensor, and how DeepSpeed cuts it again.
_PLAIN = ("param", "cat_dim", "vocab_tensor", "param_n_sub_params", "sub_param_shape")
OPTIONS = "optimizer_state.pt"


def import_deepspeed(folder: Path, skip: Sequence[str] = ()) -> Imported:
    """Reads all parameters (fp32) and their optimizer state. Errors name file and reason."""
    if not (folder / "zero").is_dir():
        hint = "; it holds ZeRO shards: run ds_to_universal on it" if list(folder.glob("*zero_pp_rank*")) else ""
        raise SnapshotError(f"'{folder}' has no folder `zero`, as a universal checkpoint has{hint}")
    model: dict[str, torch.Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    left = [f"{path.name}: not a parameter" for path in sorted(folder.iterdir()) if path.name != "zero"]
    for place in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        if skipped([place.name], skip):
            left.append(f"{place.name}: left out by --skip")
            continue
        if not (place / "fp32.pt").is_file():
            raise SnapshotDamaged(f"'{place}' has no fp32.pt: parameter {place.name!r} is not whole")
        for path in sorted(place.glob("*.pt")):
            value = _value(path)
            if path.stem == "fp32":
                model[place.name] = value
            else:
                states.setdefault(place.name, {})[path.stem] = value
        _check(place, model[place.name], states.get(place.name, {}))
    if not model:
        raise SnapshotError(f"'{folder / 'zero'}' has no parameter")
    options = _options(folder / "zero" / OPTIONS, left) if states else {}
    described = {"groups": {0: options}, "group_of": dict.fromkeys(model, 0)} if options else {}
    return Imported({"model": model, **({"optimizer": {"state": states, **described}} if states else {})}, left)


def _options(path: Path, left: list[str]) -> list[list[Any]]:
    """Returns the options of the only group, [] when there is none; `left` then says why."""
    name = f"zero/{path.name}"
    if not path.is_file():
        left.append(f"{name} is not there: no learning rate, no weight decay")
        return []
    content = load_plain(path, strangers=True)
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise SnapshotDamaged(f"'{path}' has no param_groups")
    if len(groups) > 1:
        left.append(f"{name}: options of {len(groups)} groups: which parameter is in which it does not say")
        return []
    return [[option, value] for option, value in groups[0].items() if option not in BY_PLACE]


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
