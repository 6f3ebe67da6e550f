"""What a case of the `static` suite is: our points and the calls of both sides at one shape. Runs nothing.

A side is a function of a number of rows that prepares inputs and returns the call whose launches are meant. Ours and
each peer get the same shapes and dtypes; the calls are recorded for the compiler (static_peers.py) and run in the
interpreter to be counted (static_counts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from plait.kernels.launch import Launch
from plait.kernels.points import points

Call = Callable[[], object]
Side = Callable[[int], Call]  # rows -> the call
PeerSide = Callable[[Any, int], Call]  # the peer's module, rows -> the call
BF16, FP16 = torch.bfloat16, torch.float16
COLS, FFN, VOCAB, EMBEDDINGS = 4096, 14336, 128_256, 32_000


class Peer(NamedTuple):
    """Where a peer's code is (a module of Liger's, or a tutorial's file and its definitions), and its call."""

    source: tuple[str, ...]
    call: PeerSide
    note: str = ""
    least: int = 0  # rows under which its bytes do not grow in proportion


class StaticCase(NamedTuple):
    """One op at one shape. `rows` are those of the table; the interpreter counts `counted` rows and twice as many,
    0: formulas alone. bytes_needed: each input and output once. elements: of the output. programs: of ours that
    share the rows, each with a partial sum; peers have one a multiprocessor. 0: rows are not shared.
    """

    name: str
    rows: int
    elements: int
    launches: Callable[[str], list[Launch]]  # of an architecture
    ours: Side | None
    peers: dict[str, Peer]
    counted: int
    bytes_needed: float
    flop: float = 0.0  # of the algorithm that both run
    flop_peer: float = 0.0  # where it differs
    note: str = ""
    programs: int = 0


def named(*names: str) -> Callable[[str], list[Launch]]:
    """Launches of our points."""
    return lambda arch: [points(every=True)[name](arch) for name in names]


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Kernels do not branch on values; zeros are pages that nobody touched."""
    return torch.zeros(shape, dtype=dtype)


class Context:
    """What an autograd.Function's forward and backward need of its ctx."""

    needs_input_grad = (True,) * 8

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors
