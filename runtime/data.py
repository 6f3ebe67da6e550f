"""Text as bytes, and which window of it is row r of step s: a pure function, so that nothing has to be remembered.

Not a tokenizer and not a loader with workers: tokens are bytes (vocabulary 256) in a memory-mapped file. The one
idea: the state of the data is one number. The global sample index `step * global_batch + row` says which window is
read, whatever the grid; each epoch visits every window once, in an order that a small Feistel network makes from
(seed, epoch), so that no shuffled list is stored or saved.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plait.parallel.random import splitmix64

VOCAB_SIZE = 256  # a token is a byte
IGNORE_INDEX = -100  # a target that does not count
HELD_OUT = 0.05  # the part at the end of a corpus that is never trained on
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages", "test", "tests", "idle_test"})
_FEISTEL_ROUNDS = 4  # a Luby-Rackoff permutation is indistinguishable from random with 4


@dataclass(frozen=True)
class Corpus:
    """Bytes of one text, uint8 [num_bytes], memory-mapped: forked ranks share the pages."""

    path: Path
    data: torch.Tensor
    num_train_bytes: int

    @classmethod
    def open(cls, path: Path, held_out: float = HELD_OUT) -> Corpus:
        """Maps a file; raises ValueError when it is empty, OSError when it cannot be read."""
        if not 0.0 <= held_out < 1.0:
            raise ValueError(f"held_out is {held_out}; it must be in [0, 1)")
        num_bytes = path.stat().st_size
        if num_bytes == 0:
            raise ValueError(f"data: {str(path)!r} is empty; it must hold text")
        path.open("rb").close()  # OSError says why it cannot be read
        data = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
        return cls(path, data, num_bytes - int(num_bytes * held_out))

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole text, which is also its number of tokens."""
        return self.data.numel()

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the size and of 64 evenly spaced blocks of 4 KiB: tells texts apart at no cost."""
        result = hashlib.sha256(str(self.num_bytes).encode())
        for index in range(64):
            start = index * max(self.num_bytes - 4096, 0) // 63
            result.update(bytes(self.data[start : start + 4096].tolist()))
        return result.hexdigest()

    def train_windows(self, seq: int) -> torch.Tensor:
        """Windows of seq + 1 bytes, seq apart, of the training part: uint8 [num_windows, seq + 1], a view."""
        return self._windows(self.data[: self.num_train_bytes], seq, "training")

    def held_out_windows(self, seq: int) -> torch.Tensor:
        """The same of the held-out part."""
        return self._windows(self.data[self.num_train_bytes :], seq, "held-out")

    def _windows(self, data: torch.Tensor, seq: int, part: str) -> torch.Tensor:
        if seq < 1:
            raise ValueError(f"seq is {seq}; it must be at least 1")
        if data.numel() < seq + 1:
            raise ValueError(
                f"seq is {seq}; the {part} part of {str(self.path)!r} has {data.numel()} bytes, a row needs {seq + 1}"
            )
        return data.unfold(0, seq + 1, seq)


def open_corpus(path: Path | None, cache: Path) -> Corpus:
    """The text at `path`, or the standard library's source, put together once under the folder `cache`."""
    return Corpus.open(path if path is not None else build_standard_library(cache))


def standard_library_files() -> list[Path]:
    """Source files of the standard library that runs this, tests left out, as paths below its folder.

    Ordered by the hash of their names: the end of the text, which is held out, is then a fair sample of it.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        found += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())


def build_standard_library(cache: Path) -> Path:
    """Writes the standard library's source as one file under `cache`, if it is not there; returns its path.

    The name holds a digest of the file names and sizes, so that another Python makes another file. Ranks may do
    this at once: each writes its own temporary file and the rename is atomic.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = standard_library_files()
    if not files:
        raise ValueError(f"data: no Python source below {str(root)!r}; name a text file with --data")
    listing = "".join(f"{path.as_posix()}\0{(root / path).stat().st_size}\n" for path in files)
    target = cache / f"stdlib-{hashlib.sha256(listing.encode()).hexdigest()[:16]}.txt"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache, prefix=".stdlib-", delete=False) as file:
        try:
            for path in files:
                file.write((root / path).read_bytes() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return target


def check_batch(global_batch: int, dp: int, micro_batch: int) -> int:
    """Micro-batches of one dp rank in a step; raises ValueError when the global batch does not divide into them."""
    for name, value in (("global_batch", global_batch), ("dp", dp), ("micro_batch", micro_batch)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if global_batch % (dp * micro_batch):
        raise ValueError(
            f"global_batch is {global_batch}; it must be a multiple of dp x micro_batch = {dp} x {micro_batch}"
        )
    return global_batch // (dp * micro_batch)


@dataclass(frozen=True)
class Batch:
    """Rows of one dp coordinate: tokens and targets int64 [rows, seq]; a target of -100 does not count."""

    tokens: torch.Tensor
    targets: torch.Tensor
    sample_offset: int  # global sample index of row 0
    num_tokens: int  # targets that count in the batch of all dp coordinates

    def inputs(self, *, seed: int, step: int, positions: torch.Tensor) -> dict[str, Any]:
        """What a pipeline step hands to the stages; positions int64 [seq] is shared by all rows."""
        return {
            "tokens": self.tokens,
            "shared_positions": positions,
            "sample_offset": self.sample_offset,
            "seed": seed,
            "step": step,
        }


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Training batches of dp coordinate `coord` of `dp`: a function of the step alone."""

    windows: torch.Tensor  # uint8 [num_windows, seq + 1]
    global_batch: int
    seed: int
    dp: int = 1
    coord: int = 0
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        check_batch(self.global_batch, self.dp, 1)
        if not 0 <= self.coord < self.dp:
            raise ValueError(f"coord is {self.coord}; it must be in [0, {self.dp})")

    def rows(self, step: int) -> list[int]:
        """Window of each of my rows in `step` (from 0)."""
        num_rows, num_windows = self.global_batch // self.dp, len(self.windows)
        first = step * self.global_batch + self.coord * num_rows
        return [
            permute(sample % num_windows, num_windows, self.seed, sample // num_windows)
            for sample in range(first, first + num_rows)
        ]

    def at(self, step: int) -> Batch:
        """The batch of `step` (from 0)."""
        num_rows = self.global_batch // self.dp
        tokens, targets = _rows(self.windows, self.rows(step), self.device)
        first = step * self.global_batch + self.coord * num_rows
        return Batch(tokens, targets, first, self.global_batch * tokens.shape[1])


def held_out_batches(
    windows: torch.Tensor,
    *,
    global_batch: int,
    dp: int = 1,
    coord: int = 0,
    max_rows: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Held-out rows in order, the same whatever the grid; rows beyond the last window have targets that do not count.

    `max_rows` takes that many windows, evenly spaced.
    """
    check_batch(global_batch, dp, 1)
    num_windows = len(windows) if max_rows is None else min(max_rows, len(windows))
    chosen = [index * len(windows) // num_windows for index in range(num_windows)]
    num_rows = global_batch // dp
    for first in range(0, num_windows, global_batch):
        mine = chosen[first + coord * num_rows : first + (coord + 1) * num_rows]
        padded = mine + [chosen[0]] * (num_rows - len(mine))
        tokens, targets = _rows(windows, padded, device)
        targets[len(mine) :] = IGNORE_INDEX
        counted = min(global_batch, num_windows - first) * tokens.shape[1]
        yield Batch(tokens, targets, first + coord * num_rows, counted)


def _rows(windows: torch.Tensor, chosen: list[int], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    picked = windows[torch.tensor(chosen)].to(device, torch.int64)  # [rows, seq + 1]
    return picked[:, :-1].contiguous(), picked[:, 1:].contiguous()


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """The place of `index` in the order of `epoch`: a bijection of range(size).

    A balanced Feistel network over the smallest even number of bits that holds size, walked until it lands inside
    (at most four tries on average, since it covers less than 4 x size).
    """
    if not 0 <= index < size:
        raise ValueError(f"index is {index}; it must be in [0, {size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = splitmix64(splitmix64(seed) ^ epoch)
    while True:
        left, right = index >> half, index & mask
        for number in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (splitmix64(key ^ (number << 60) ^ right) & mask)
        index = left << half | right
        if index < size:
            return index
