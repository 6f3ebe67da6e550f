"""Snapshots to and from those who do not run plait: a reader over plain `safetensors`, export and import.

Not a restore: nothing here verifies checksums on the foreign path. The one idea: data files say in their own metadata
where each piece lies, so that a few lines over any safetensors reader put the full tensors together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from plait.ckpt.box import Box, parts_of
from plait.ckpt.crypt import load_key
from plait.ckpt.errors import SnapshotError
from plait.ckpt.interop_dcp import import_dcp
from plait.ckpt.interop_deepspeed import import_deepspeed
from plait.ckpt.interop_megatron import Rule, import_megatron
from plait.ckpt.interop_rename import Rename, renamed
from plait.ckpt.interop_safetensors import INDEX, import_safetensors, write_file
from plait.ckpt.interop_torch import import_torch
from plait.ckpt.interop_tree import Imported, save_imported
from plait.ckpt.manifest import MANIFEST, RUN
from plait.ckpt.tier_reader import open_folder

FORMATS = ("torch", "safetensors", "dcp", "megatron", "deepspeed")


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


def import_checkpoint(
    source: str | Path,
    root: str | Path,
    *,
    format: str | None = None,
    step: int | None = None,
    prefix: str = "",
    skip: Sequence[str] = (),
    rename: Sequence[Rename] = (),
    key: bytes | str | None = None,
) -> Path:
    """Saves a foreign checkpoint as a snapshot under `root`; returns its folder. As `plait snapshot import`.

    format: one of FORMATS; default: by what is there. step: default: what the checkpoint says, else 0. prefix: put
    everything below this name. skip: patterns of names to leave out. rename: (OLD, NEW) as in interop_rename.py.
    SnapshotDamaged and SnapshotError name file, tensor and reason; SnapshotLocked when a job writes there.
    """
    path = Path(source)
    found = read_foreign(path, format or kind_of(path), skip, rename)
    return save_imported(Path(root), found, step, prefix, load_key(key))


def read_foreign(
    source: Path,
    kind: str,
    skip: Sequence[str] = (),
    rename: Sequence[Rename] = (),
    rules: Sequence[Rule] = (),
    gated: bool | None = None,
) -> Imported:
    """Reads a foreign checkpoint. skip has its own names, `rename` gives others. rules, gated: of Megatron."""
    if kind == "megatron":
        found = import_megatron(source, skip, rules, gated)
    else:
        readers = {
            "torch": import_torch,
            "safetensors": import_safetensors,
            "dcp": import_dcp,
            "deepspeed": import_deepspeed,
        }
        if kind not in readers:
            raise ValueError(f"format {kind!r}: must be one of {', '.join(FORMATS)}")
        found = readers[kind](source, skip)
    found.state = renamed(found.state, rename)
    return found


def kind_of(source: Path) -> str:
    """Tells the format by what is there. SnapshotError for what is ours already: its files hold pieces."""
    own = (source.parent / MANIFEST,) if source.is_file() else (source / MANIFEST, source / RUN)
    if any(path.is_file() for path in own):
        raise SnapshotError(f"'{source}' is of a snapshot already: `plait snapshot copy` copies it")
    if source.is_file():
        return "safetensors" if source.suffix == ".safetensors" else "torch"
    if (source / ".metadata").is_file():
        return "dcp"
    if (source / "zero").is_dir():
        return "deepspeed"
    if any(source.glob("mp_rank_*")) or (source / "latest_checkpointed_iteration.txt").is_file():
        return "megatron"
    if (source / INDEX).is_file() or any(source.glob("*.safetensors")):
        return "safetensors"
    looked = f".metadata (DCP), zero/ (DeepSpeed universal), mp_rank_* (Megatron), {INDEX} or *.safetensors"
    raise SnapshotError(f"'{source}' is none of the known formats; looked for {looked}")
