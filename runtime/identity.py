"""What makes two starts the same run, and whether the snapshot that a start takes up is of that run.

Not the restore itself, which checks every tensor. The one idea: rows and numbers of a step follow from these values
alone, so that a start which would go on from a snapshot with others is refused before any rank exists.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.folders import step_folders
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.state import flatten
from plait.ckpt.values import decode
from plait.config import ConfigError, RunConfig, flag_of, is_step, split_source
from plait.model_config import ModelConfig

PREFIX = "progress/run/"  # of its names in a snapshot (plait.state)
DATA = ("global_batch", "seq", "text")  # which rows a step reads: --from may change them, a resume may not


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The same for every start of one run. `text`: digest of the corpus."""

    model: ModelConfig
    dtype: str
    seed: int
    global_batch: int
    seq: int
    text: str

    def state_dict(self) -> dict[str, Any]:
        """Plain data, stored in every snapshot."""
        return asdict(self)


def check_source(config: RunConfig, identity: Identity) -> None:
    """Raises ConfigError unless the snapshot that this start takes up is there and of this run.

    One that is damaged is left to the restore, which passes over it and says why. Reads two small files.
    """
    own = step_folders(config.out)
    if config.resume == "none" and own:  # nothing is overwritten and the newest one wins
        raise ConfigError(f"--resume none: {str(config.out)!r} holds {own[0].path.name}; name another --out")
    flag, root, step = "--resume", config.out, int(config.resume) if is_step(config.resume) else None
    foreign = config.from_ is not None and not own and step is None
    if foreign:
        assert config.from_ is not None
        flag, (root, step) = "--from", split_source(config.from_)
    there = step_folders(root)
    wanted = [folder for folder in there if step in (None, folder.step)]
    if not wanted and (foreign or step is not None):
        names = ", ".join(folder.path.name for folder in there) or "no snapshot"
        raise ConfigError(f"{flag} {config.from_ if foreign else step}: {str(root)!r} holds {names}")
    for folder in wanted:
        try:
            stored = SnapshotReader(folder.path).values
            there_run = {name: decode(value, name) for name, value in stored.items() if name.startswith(PREFIX)}
        except SnapshotDamaged:
            continue
        here_run = flatten({"progress": {"run": identity.state_dict()}}).values
        pairs = {name.removeprefix(PREFIX): (node.value, there_run.get(name)) for name, node in here_run.items()}
        _refuse({key: pair for key, pair in pairs.items() if pair[0] != pair[1]}, f"'{folder.path}'", foreign)
        return


def _refuse(other: dict[str, tuple[Any, Any]], folder: str, foreign: bool) -> None:
    """Raises ConfigError for the first of the values that differ (here, there), the model's as one."""
    model = [f"{k[6:]} is {here}, not {there}" for k, (here, there) in other.items() if k.startswith("model/")]
    if model:
        raise ConfigError(f"--preset: {folder} holds another model ({'; '.join(model)}); use the preset that made it")
    for key, (here, there) in other.items():
        if key in DATA and foreign:
            continue
        if key == "text":
            raise ConfigError(
                f"--data: {folder} was made on another text; name that one, or start in another --out with --from"
            )
        raise ConfigError(f"{flag_of(key)} is {here}, but {folder} was made with {there}; name another --out")
