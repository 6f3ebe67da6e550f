"""Snapshots for those who do not run plait: a reader over plain `safetensors`, and an export of full tensors.

Not a restore: nothing here verifies checksums on the foreign path. The one idea: data files say in their own metadata
where each piece lies, so that a few lines over any safetensors reader put the full tensors together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from plait.ckpt.box import Box, parts_of
from plait.ckpt.interop_safetensors import write_file
from plait.ckpt.tier_reader import open_folder


def assemble(folder: str | Path) -> dict[str, torch.Tensor]:
    """Returns all full tensors of a step folder by name, read with `safetensors` alone (extra `hf`).

    Uses neither fragments nor manifest, so it sees no aliases and verifies nothing. A dtype that safetensors lacks
    comes as U8 with the bytes of an element as last dim.
    """
    from safetensors import safe_open

    full: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("r*.safetensors")):
        with safe_open(path, framework="pt") as file:
            pieces = json.loads(file.metadata()["pieces"])
            for key, (full_shape, offset, shape, flat) in pieces.items():
                name = key if flat is None and shape == full_shape else key.rpartition("@")[0]
                _place(full, name, file.get_tensor(key), full_shape, offset, shape, flat)
    return full


def _place(
    full: dict[str, torch.Tensor],
    name: str,
    data: torch.Tensor,
    full_shape: list[int],
    offset: list[int],
    shape: list[int],
    flat: list[int] | None,
) -> None:
    """Copies one piece into its full tensor, which the first piece makes."""
    dims = len(full_shape) if flat is None else 1
    extra = tuple(data.shape[dims:])  # the bytes of an element, where safetensors has no dtype for it
    target = full.setdefault(name, torch.zeros((*full_shape, *extra), dtype=data.dtype))
    for box, start in parts_of(Box(tuple(offset), tuple(shape)), None if flat is None else (flat[0], flat[1])):
        view = target[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        part = data.reshape(-1, *extra)[start : start + box.numel]
        view.copy_(part.reshape(view.shape))


def export(folder: str | Path, path: str | Path, names: Iterable[str] | None = None, prefix: str = "") -> list[str]:
    """Writes full tensors of a snapshot, verified, into one safetensors file; returns their names in it.

    names: of the snapshot; default all below `prefix` ("model/"), which is cut off. Aliases are written as copies.
    `plait snapshot export` has more formats (interop_safetensors.py, interop_torch.py, interop_dcp.py).
    """
    reader = open_folder(Path(folder))
    chosen = sorted(n for n in reader.table.names if n.startswith(prefix)) if names is None else list(names)
    tensors = {name.removeprefix(prefix): name for name in chosen}
    write_file(Path(path), reader, tensors, {})
    return list(tensors)
