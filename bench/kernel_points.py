"""Which compiled points are the kernels of a case on a card, and what was written down about them. Compiles nothing.

A case names a point only where the point's own shape decides its code as the case's does: other widths have other
tiles. The facts are those of kernels/pinned.json, the worst of the case's kernels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plait import kernels
from plait.bench.peaks import card_of
from plait.bench.result_file import ResultFile

PINNED = Path(kernels.__file__).parent / "pinned.json"
NORMS = ("rms_norm", "rms_norm_residual", "layer_norm", "layer_norm_residual")


def points_of(p: dict[str, Any]) -> list[str]:
    """Names of `plait kernels list` for a case's params; [] on a CPU, and where no point has its shape."""
    op, backward, cols = p["op"], p["backward"], p.get("cols")
    if p["device"] != "cuda" or p["dtype"] != "bfloat16":
        return []
    sides = ("forward",) * (not p.get("alone")) + ("backward",) * backward
    if op in NORMS and cols in (4096, 8192):
        return [f"{op}.{side}.{cols}" for side in sides]
    if op in ("swiglu", "geglu") and cols == 14336:
        return [f"{'geglu_tanh' if op == 'geglu' else op}.{side}" for side in sides]
    if op == "attention" and p.get("kind", "causal") == "causal" and p["dim"] == 128:
        kernels_of = {"forward": ("forward",), "backward": ("delta", "dq", "dkdv")}
        return [f"attention.{kernel}.128" for side in sides for kernel in kernels_of[side]]
    if op == "linear" and p.get("epilogue") == "bias" and cols == p["width"] == 4096:
        names = {"forward": ["linear.forward"], "backward": ["linear.dgrad", "linear.wgrad"]}
        return [name for side in sides for name in names[side]]
    if op == "linear_swiglu" and (cols, p["width"], backward) == (4096, 14336, False):
        return ["linear.swiglu"]
    if op == "rope" and p["dim"] == 128:
        return ["rope.halves.128"]
    if op == "cross_entropy" and p["vocab"] == 128_256:
        return [f"cross_entropy.{'stats' if side == 'forward' else 'grad'}.bf16" for side in sides]
    if op == "dropout" and cols == 4096:
        return ["dropout.bf16"]
    if op == "embedding" and cols == 4096 and not backward:
        return ["embedding.forward.bf16"]
    return []


def pinned_facts(file: ResultFile, path: Path = PINNED) -> dict[str, dict[str, float]]:
    """Registers, spills, shared bytes and warps by case, of the machine's own architecture; {} where none is known.

    Rows are by toolchain; the last whose name holds the triton that measured counts.
    """
    card = card_of(file.machine)
    if card is None or not card.arch or not path.exists():
        return {}
    known = json.loads(path.read_text())["rows"]
    mine = [rows for name, rows in known.items() if f"triton {file.machine.get('triton')}," in name]
    result = {}
    for name, one in file.cases.items():
        rows = [mine[-1].get(f"{point} {card.arch}") for point in one.case.params.get("points", ())] if mine else []
        if rows and all(rows):
            result[name] = {
                "registers": float(max(row["registers"] for row in rows)),
                "spills": float(sum(row["spills"] for row in rows)),
                "shared bytes": float(max(row["shared_bytes"] for row in rows)),
                "warps": float(min(row["warps"] * row["blocks"] for row in rows)),
            }
    return result
