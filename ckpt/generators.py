"""The random generators of a rank as a part of a state: python, numpy, torch on the CPU and on every CUDA device.

Not a seed: the states themselves, each rank its own, never shared or taken from another rank. The one idea: a restore
draws nothing, and this part comes last in a state, so that the first number drawn afterwards is the one that the
saved run would have drawn. plait's own dropout needs none of this: it is a function of seed, step and place.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from plait.ckpt.errors import StateError
from plait.ckpt.state import PerRank


class RandomState:
    """An object with state_dict() and load_state_dict() for a snapshot's state; see `rng_state`."""

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._own = dict(own)
        for name, generator in self._own.items():
            if not (_is_numpy(generator) or isinstance(generator, (torch.Generator, random.Random))):
                raise StateError(f"rng_state: {name!r} is {type(generator).__name__}, not a random generator")

    def state_dict(self) -> dict[str, Any]:
        """Returns {"rank": PerRank(states)}: plain data and small tensors."""
        states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, words, *rest = numpy.random.get_state()
            states["numpy"] = (str(kind), [int(word) for word in words], *(_plain(value) for value in rest))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
        states["own"] = {name: _state_of(generator) for name, generator in self._own.items()}
        return {"rank": PerRank(states)}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """Sets all generators. A rank that the snapshot has not gets its own current states, and a CUDA device that
        the snapshot has not, or that is not here, is left alone."""
        states = content["rank"]
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if "numpy" in states:
            import numpy

            kind, words, *rest = states["numpy"]
            numpy.random.set_state((kind, numpy.array(words, dtype=numpy.uint32), *rest))
        if states.get("cuda") and torch.cuda.is_available():
            for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
        unknown = sorted(self._own.keys() ^ states["own"].keys())
        if unknown:
            raise StateError(f"rng_state: generators {unknown} are only in the state, or only in the snapshot")
        for name, state in states["own"].items():
            _set_state(self._own[name], state)


def rng_state(**own: Any) -> RandomState:
    """Returns this rank's generators for a state, as its last part: {"model": model, ..., "rng": rng_state()}.

    own: further ones by name: torch.Generator (of a data loader), random.Random, numpy.random.Generator.
    """
    return RandomState(own)


def _is_numpy(generator: Any) -> bool:
    return hasattr(generator, "bit_generator")


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return _plain(generator.bit_generator.state) if _is_numpy(generator) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif _is_numpy(generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _plain(value: Any) -> Any:
    """Returns numpy's numbers and arrays as Python's own."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
