"""Randomness that depends on where a number belongs, not on who draws it or when.

Not a set of tracked generators: nothing is forked or advanced. The one idea: a draw is a pure function of a key and
of a global index, so that every grid, every recompute and every resumed run draws the same bits. `rng_key` makes the
key that the dropout and attention kernels take (they add the global index as Philox counter); `init_normal_` draws
the rows of a FULL tensor and keeps the columns of one box. The generators of python, numpy and torch are only
captured and restored, for code that uses them.
"""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import torch
from torch import Tensor

from plait.parallel.placement import Placement

_WORD = (1 << 64) - 1


def splitmix64(value: int) -> int:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): a bijective mix of 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def mix(*parts: int | str) -> int:
    """Folds whole numbers and names, in order, into 64 unsigned bits. Different lists give different words."""
    state = splitmix64(len(parts))
    for part in parts:
        if isinstance(part, str):
            data = part.encode()
            state = splitmix64(state ^ splitmix64(len(data) ^ 0x73747200))  # "str": a name never equals a number
            for begin in range(0, len(data), 8):
                state = splitmix64(state ^ int.from_bytes(data[begin : begin + 8], "little"))
        else:
            state = splitmix64(state ^ (part & _WORD))
    return state


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def rng_key(seed: int, step: int, layer: int, site: int | str, *, device: torch.device | None = None) -> Tensor:
    """Returns the key of one random site of one training step: int64 [2].

    The same on every rank: what differs between ranks is the global index that a kernel counts from.
    """
    words = [_signed(mix(seed, step, layer, site, lane)) for lane in (0, 1)]
    return torch.tensor(words, dtype=torch.int64, device=device)


def init_normal_(local: Tensor, placement: Placement, *, std: float, seed: int, name: str) -> Tensor:
    """Fills a shard with the normal numbers that its box of the full tensor has on every grid.

    Row r of the full tensor (its leading dims flattened) comes from a generator keyed by (seed, name, r), in fp32;
    this rank cuts its columns out of its rows. Rows beyond the box (vocabulary padding) become 0.

    Args:
        local: the parameter of this rank, contiguous; its first elements are the box.
        placement: which box of which full tensor it is.
        std: standard deviation; the mean is 0.
        name: the name of the parameter, equal on all ranks that hold a piece of it.
    """
    if not std >= 0.0 or math.isinf(std):
        raise ValueError(f"std must be a finite number >= 0, got {std} for {name}")
    full, offset, shape = placement.full_shape, placement.offset, placement.shape
    num_columns = full[-1]
    columns = slice(offset[-1], offset[-1] + shape[-1])
    box = torch.empty(math.prod(shape[:-1]), shape[-1], dtype=torch.float32)
    generator = torch.Generator()
    line = torch.empty(num_columns, dtype=torch.float32)
    root = mix(seed, name)
    for index, row in enumerate(_box_rows(full[:-1], offset[:-1], shape[:-1])):
        generator.manual_seed(_signed(splitmix64(root ^ row)))
        line.normal_(0.0, std, generator=generator)
        box[index] = line[columns]
    with torch.no_grad():
        flat = local.detach().view(-1)
        flat[: box.numel()].copy_(box.view(-1))
        flat[box.numel() :].zero_()
    return local


def _box_rows(full: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """The flat indices, in the full leading dims, of the rows of a box, in the box's own order."""
    rows = [0]
    for full_size, start, size in zip(full, offset, shape, strict=True):
        rows = [row * full_size + start + i for row in rows for i in range(size)]
    return rows


def capture_generators() -> dict[str, Any]:
    """Returns the states of the python, numpy (if imported) and torch generators of this process as plain data.

    Whole numbers, floats, None, lists, bytes and dicts with names as keys: nothing that must be pickled. On CUDA only
    the current device's generator is taken: one rank drives one device.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "torch": _to_bytes(torch.get_rng_state()),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, numbers, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = {
            "kind": str(kind),
            "words": [int(n) for n in numbers],
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _to_bytes(torch.cuda.get_rng_state())
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Sets the generators of this process to captured states; those that the state does not name stay as they are."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    torch.set_rng_state(_from_bytes(state["torch"]))
    if "numpy" in state:
        import numpy

        saved = state["numpy"]
        words = numpy.array(saved["words"], dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], words, saved["position"], saved["has_gauss"], saved["cached"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_bytes(state["cuda"]))


def _to_bytes(state: Tensor) -> bytes:
    return bytes(state.tolist())


def _from_bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)
