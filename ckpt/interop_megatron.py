"""Weights of Megatron-style checkpoints: one torch.save file for each (tensor, pipeline) rank, put together.

    mp_rank_TT/model_optim_rng.pt        tensor parallel only
    mp_rank_TT_PPP/model_optim_rng.pt    and pipeline parallel; layers are numbered from 0 in each stage

Weights only: optimizer state lies in flat buffers whose layout only Megatron knows. The one idea: one table says
along which dim a parameter is cut; a name that it does not have is an error, never a guess.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from plait.ckpt.errors import SnapshotDamaged, SnapshotError
from plait.ckpt.interop_torch import Stranger, load_plain, merge
from plait.ckpt.interop_tree import Imported, skipped

# pattern of a parameter's name -> the dim along which tensor-parallel ranks cut it; None: each has all of it. The
# first that fits counts. Names of Megatron-core, then of the older language model.
RULES: tuple[tuple[str, int | None], ...] = (
    ("*norm.weight", None),
    ("*norm.bias", None),
    ("*layer_norm_weight", None),  # a norm that is fused into the linear behind it
    ("*layer_norm_bias", None),
    ("*position_embeddings.weight", None),
    ("*tokentype_embeddings.weight", None),
    ("*rotary_pos_emb.inv_freq", None),
    ("*router.weight", None),
    ("*router.expert_bias", None),
    ("*word_embeddings.weight", 0),  # vocab
    ("*output_layer.weight", 0),
    ("*lm_head.weight", 0),
    ("*linear_qkv.weight", 0),  # column
    ("*linear_qkv.bias", 0),
    ("*linear_fc1.weight", 0),
    ("*linear_fc1.bias", 0),
    ("*linear_fc1.weight[0-9]*", 0),  # of experts in one grouped product
    ("*query_key_value.weight", 0),
    ("*query_key_value.bias", 0),
    ("*dense_h_to_4h.weight", 0),
    ("*dense_h_to_4h.bias", 0),
    ("*linear_proj.weight", 1),  # row: its bias is added once, after the sum
    ("*linear_proj.bias", None),
    ("*linear_fc2.weight", 1),
    ("*linear_fc2.bias", None),
    ("*linear_fc2.weight[0-9]*", 1),
    ("*attention.dense.weight", 1),
    ("*attention.dense.bias", None),
    ("*dense_4h_to_h.weight", 1),
    ("*dense_4h_to_h.bias", None),
)
GATED = ("*linear_fc1.weight*", "*linear_fc1.bias", "*dense_h_to_4h.weight", "*dense_h_to_4h.bias")
_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")
_LAYER = re.compile(r"((?:^|.*\.)layers\.)(\d+)(\..*)")
_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_optim.pt")
Rule = tuple[str, int | None]


def import_megatron(
    folder: Path, skip: Sequence[str] = (), rules: Sequence[Rule] = (), gated: bool | None = None
) -> Imported:
    """Reads the weights of all ranks into full tensors under "model".

    rules: looked at before RULES. gated: the first linear of an MLP holds gate and up, of which each rank has a part
    of both; None: what the checkpoint's own arguments say (`swiglu`), which must be there then. SnapshotError names
    file, tensor and reason.
    """
    ranks = _ranks(folder)
    num_tp = 1 + max(tp for tp, _ in ranks)
    num_pp = 1 + max(pp for _, pp in ranks)
    if len(ranks) != num_tp * num_pp:
        raise SnapshotError(f"'{folder}' has {len(ranks)} of {num_tp} x {num_pp} tensor x pipeline ranks")
    full: dict[str, torch.Tensor] = {}
    left: list[str] = []
    step, first_layer = None, 0
    for pp in range(num_pp):
        parts = []
        for tp in range(num_tp):
            content = _load(ranks[tp, pp])
            parts.append((f"'{ranks[tp, pp]}'", _weights(content, ranks[tp, pp], skip, left)))
            step = content.get("iteration") if type(content.get("iteration")) is int else step
            if gated is None:
                gated = num_tp > 1 and _gated(content, ranks[tp, pp], parts[-1][1])
            if tp == pp == 0:
                left += [f"{key}: not weights" for key in content if key not in ("model", "iteration")]
        _join(full, _merged(parts, rules, bool(gated)), first_layer, f"pipeline stage {pp} of '{folder}'")
        first_layer += 1 + max((int(m[2]) for m in map(_LAYER.fullmatch, parts[0][1]) if m), default=-1)
    return Imported({"model": full}, sorted(set(left)), step)


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the file of each (tensor, pipeline) rank, in the folder or in the newest `iter_*` of it."""
    latest = folder / "latest_checkpointed_iteration.txt"
    if latest.is_file() and latest.read_text().strip().isdigit():
        folder = folder / f"iter_{int(latest.read_text()):07d}"
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _FOLDER.fullmatch(path.name)
        if match is None:
            raise SnapshotError(f"'{path}' has not the name mp_rank_TT or mp_rank_TT_PPP")
        if match[3]:
            raise SnapshotError(f"'{path}' is of an expert-parallel run: its experts cannot be put together here")
        files = [path / name for name in _FILES if (path / name).is_file()]
        if not files:
            raise SnapshotError(f"'{path}' has none of {', '.join(_FILES)}")
        found[int(match[1]), int(match[2] or 0)] = files[0]
    if not found:
        raise SnapshotError(f"'{folder}' has no mp_rank_* folder")
    return found


def _load(path: Path) -> dict[str, Any]:
    """Reads one rank's file. Megatron keeps its arguments in argparse.Namespace; of other classes (enums among them,
    arrays of generators) nothing is needed."""
    content = load_plain(path, more=[argparse.Namespace], strangers=True)
    if not isinstance(content, dict):
        raise SnapshotDamaged(f"'{path}' holds {type(content).__name__}, not a checkpoint")
    chunks = [key for key in content if re.fullmatch(r"model\d+", str(key))]
    if chunks or "model" not in content:
        why = "interleaved pipeline stages (model0, model1, ...) are not put together" if chunks else "has no 'model'"
        raise SnapshotError(f"'{path}': {why}")
    if not isinstance(content["model"], dict):
        held = content["model"]
        what = held.kind if isinstance(held, Stranger) else type(held).__name__
        raise SnapshotError(f"'{path}' holds {what}, no weights")
    return content


def _weights(content: dict[str, Any], path: Path, skip: Sequence[str], left: list[str]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a rank by dotted name; what else is there is left out by name."""
    found: dict[str, torch.Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                walk(f"{name}.{key}" if name else str(key), child)
        elif skipped([name], skip):
            left.append(f"model/{name}: left out by --skip")
        elif name.endswith("_extra_state"):
            left.append(f"model/{name}: state of a library, not a weight")
        elif isinstance(value, torch.Tensor):
            if name in found:
                raise SnapshotError(f"'{path}' has two tensors that are called {name!r}")
            found[name] = value
        else:
            kind = value.kind if isinstance(value, Stranger) else type(value).__name__
            left.append(f"model/{name}: {kind}, not a tensor")

    walk("", content["model"])
    return found


def _gated(content: dict[str, Any], path: Path, weights: dict[str, torch.Tensor]) -> bool:
    """Returns whether MLPs are gated, as the checkpoint's arguments say."""
    arguments = content.get("args")
    said = arguments.get("swiglu") if isinstance(arguments, dict) else getattr(arguments, "swiglu", None)
    if type(said) is bool:
        return said
    if any(fnmatchcase(name, pattern) for name in weights for pattern in GATED):
        raise SnapshotError(f"'{path}' does not say whether its MLPs are gated (args.swiglu): say --gated yes or no")
    return False


def _merged(
    parts: Sequence[tuple[str, dict[str, torch.Tensor]]], rules: Sequence[Rule], gated: bool
) -> dict[str, torch.Tensor]:
    """Puts the tensor-parallel parts of one stage together; gate and up of a gated linear each by itself."""
    if len(parts) == 1:
        return parts[0][1]

    def how(name: str) -> int | None:
        for pattern, dim in (*rules, *RULES):
            if fnmatchcase(name, pattern):
                return dim
        raise SnapshotError(
            f"{parts[0][0]}: no rule says how tensor {name!r} {tuple(parts[0][1][name].shape)} is cut over "
            f"{len(parts)} tensor-parallel ranks; give --rule 'PATTERN=DIM' or 'PATTERN=same'"
        )

    merged = merge(parts, how)
    for name, whole in merged.items() if gated else ():
        if any(fnmatchcase(name, pattern) for pattern in GATED) and how(name) == 0:
            halves = [t[name].chunk(2, 0) for _, t in parts]
            if whole.shape[0] % (2 * len(parts)):
                raise SnapshotError(f"{parts[0][0]}: tensor {name!r} has {whole.shape[0]} rows, no gate and up")
            merged[name] = torch.cat([half[which] for which in (0, 1) for half in halves])
    return merged


def _join(full: dict[str, torch.Tensor], stage: dict[str, torch.Tensor], first_layer: int, where: str) -> None:
    """Adds a stage, its layers renumbered. A tensor that two stages have (tied embeddings) must be the same."""
    for name, tensor in stage.items():
        match = _LAYER.fullmatch(name)
        outer = f"{match[1]}{first_layer + int(match[2])}{match[3]}" if match else name
        if outer in full:
            merge([("an earlier stage", {outer: full[outer]}), (where, {outer: tensor})], lambda _: None)
        full.setdefault(outer, tensor)
