"""What one training run is asked to do: flags, a TOML file with the same keys, and the defaults of a preset.

Not the model's dimensions (`plait.model`) and nothing that needs torch: a wrong flag is answered in milliseconds.
The one idea: a value comes from the first of (flag, TOML file, preset, field default) that names it, and every key
that nobody knows is an error.
"""

from __future__ import annotations

import argparse
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from plait.parallel.schedules.names import NAMES

RECOMPUTE = ("none", "full", "selective")
DTYPES = ("float32", "bfloat16", "float64")
WIRE_DTYPES = ("float32", "bfloat16")
SAVE = ("steps", "auto")
MEASURED = "measured"  # the size of buckets that the links of this start ask for
MOST_BUCKET_MIB = 4096
BALANCED = "balanced"
SEARCH = "search"  # the schedule that is cheapest for the model by the planner's costs

# What a preset sets beside the model of the same name. `tiny` is sized for 8 ranks on 2 cores in one to two
# minutes; the learning rates are the usual ones for their widths, not tuned here.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(steps=300, global_batch=16, micro_batch=2, seq=128, lr=3e-3, lr_decay_steps=300, save_every=50),
    "small": dict(steps=1000, global_batch=32, micro_batch=2, seq=256, lr=1e-3, lr_decay_steps=1000, save_every=50),
    "125m": dict(
        steps=10000, global_batch=64, micro_batch=4, seq=1024, lr=6e-4, lr_decay_steps=10000, save_every=200
    ),
    "1b": dict(steps=50000, global_batch=256, micro_batch=2, seq=2048, lr=3e-4, lr_decay_steps=50000, save_every=250),
    "llama3-8b": dict(
        steps=100000, global_batch=1024, micro_batch=1, seq=8192, lr=3e-4, lr_decay_steps=100000, save_every=250
    ),
    "llama3-70b": dict(
        steps=100000, global_batch=1024, micro_batch=1, seq=8192, lr=1.5e-4, lr_decay_steps=100000, save_every=250
    ),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Sizes count rows and tokens; a row is one sequence of `seq` tokens. Checked by `build`."""

    mesh: str = "dp=1"  # axis=size, comma separated
    preset: str = "tiny"
    steps: int  # total optimizer steps of the run, not of this start
    out: Path = Path("runs/default")
    data: Path | None = None  # None: the standard library's source
    schedule: str = "1f1b"
    layers_of: str | None = None  # layers per stage, comma separated, or "balanced"; None: as even as can be
    chunks: int = 2  # stages a rank holds under interleaved and looped_bfs
    recompute: str = "none"
    zero: int = 1
    wire_dtype: str | None = None  # None: as accumulated, float32 (float64 for float64)
    node_size: int | None = None  # ranks of a node; None: as the launcher says
    bucket_mib: str | None = None  # MiB of gradients a message, or "measured"; None: 16
    sequence_parallel: bool = False
    seed: int = 0
    dtype: str = "float32"
    dropout: float = 0.0
    global_batch: int  # rows per optimizer step over the whole grid
    micro_batch: int  # rows per micro-batch of one data-parallel rank
    seq: int
    lr: float
    lr_decay_steps: int
    save_every: int | None  # steps; `build` makes the preset's None beside save_every_minutes or save = auto
    save_every_minutes: float | None = None
    save: str = "steps"
    mtbf_hours: float | None = None
    keep: int = 3
    keep_every: int | None = None
    keep_best: int | None = None
    resume: str = "latest"  # latest | none | a step; `build` makes it none beside from_
    from_: str | None = None  # DIR or DIR@STEP
    json: Path | None = None


HELP = {
    "mesh": "grid, e.g. dp=2,pp=2,tp=2",
    "preset": f"model and defaults: {', '.join(PRESETS)}",
    "steps": "total number of optimizer steps",
    "out": "folder of the run: snapshots, metrics, plot",
    "data": "a text file to train on (default: the standard library's source)",
    "schedule": f"pipeline schedule: {', '.join(NAMES)}; a CSV file of `plait schedule`; or {SEARCH}: the cheapest "
    "by the model's estimated costs, with 1 or 2 stages a rank and at most the activations of 1f1b",
    "layers_of": "layers of each pipeline stage, e.g. 3,4,4,2; or balanced: the busiest rank, embedding and head "
    "counted, has the least work (default: as even as can be)",
    "chunks": "stages a rank holds under interleaved and looped_bfs",
    "recompute": f"activations to recompute: {', '.join(RECOMPUTE)}",
    "zero": "sharded over dp: 0 nothing, 1 the optimizer state, 2 gradients too, 3 weights too (FSDP2)",
    "wire_dtype": f"what gradients travel over dp in: {', '.join(WIRE_DTYPES)} (half the bytes, rounded once on the "
    "way and once as a sum); default: as they are accumulated",
    "node_size": "ranks of a node or of an island of fast links: sums over dp go node by node (default: the ranks "
    "that were started on this machine); with --zero 3 weights are sharded in a node and replicated over nodes, by "
    "default over all of dp",
    "bucket_mib": "MiB of gradients that are summed over dp as one message, or measured: where its fixed cost is "
    "a twentieth of its time on the links of this start, which says the number (default: 16; another one changes "
    "the last bits of the norm)",
    "sequence_parallel": "split norms and dropout over tp along the sequence",
    "seed": "root seed of weights, data order and dropout",
    "dtype": f"dtype of weights and activations: {', '.join(DTYPES)}",
    "dropout": "probability in [0, 1)",
    "global_batch": "rows per optimizer step over the whole grid",
    "micro_batch": "rows per micro-batch of one dp rank",
    "seq": "tokens per row",
    "lr": "peak learning rate",
    "lr_decay_steps": "step at which the learning rate has come down",
    "save_every": "steps between snapshots",
    "save_every_minutes": "minutes between snapshots, instead of the preset's steps",
    "save": "steps: as --save-every says; auto: at the interval of least waste, from what saves are measured to cost "
    "and --mtbf-hours",
    "mtbf_hours": "mean time between failures of the whole run, for --save auto",
    "keep": "newest snapshots to keep",
    "keep_every": "also keep every snapshot whose step is a multiple of this",
    "keep_best": "also keep this many snapshots of the lowest training loss of a step",
    "resume": "latest, none or a step of --out (default: latest; beside --from: none)",
    "from_": "start from a snapshot of another run: DIR or DIR@STEP; refused when --out has snapshots, "
    "unless --resume latest or a step says to go on from those",
    "json": "write the final metrics to this file",
}


class ConfigError(ValueError):
    """A flag or a key that cannot be: names it, its value and what would be right."""


def flag_of(name: str) -> str:
    """Field name -> flag, `keep_every` -> `--keep-every`."""
    return "--" + name.rstrip("_").replace("_", "-")


def _kind(hint: Any) -> type:
    """The type behind `T` or `T | None`."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    return kinds[0]


KINDS: dict[str, type] = {name: _kind(hint) for name, hint in get_type_hints(RunConfig).items()}


def _path(text: str) -> Path:
    """A path that is somewhere: the empty text of an unset shell variable would mean this folder."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no path")
    return Path(text)


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that a caller decides what an error does."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The parser of `plait train`; every default is None, so that what was said can be told from what was not."""
    result = _Parser(prog="plait train", description="Trains a Llama-style model on a dp x pp x tp grid.")
    result.add_argument("--config", type=_path, metavar="FILE.toml", help="the same keys in a TOML file; flags win")
    for name, kind in KINDS.items():
        if kind is bool:
            result.add_argument(
                flag_of(name), dest=name, default=None, action=argparse.BooleanOptionalAction, help=HELP[name]
            )
        else:
            reader = _path if kind is Path else kind
            result.add_argument(flag_of(name), dest=name, default=None, type=reader, help=HELP[name])
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """Keys of a TOML file as field names with checked types; raises ConfigError naming file and key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {str(path)!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    result = {}
    for key, value in raw.items():
        name = {"from": "from_"}.get(key, key.replace("-", "_"))
        if name not in KINDS or (key.endswith("_")):
            valid = ", ".join(flag_of(field)[2:] for field in KINDS)
            raise ConfigError(f"{path}: unknown key {key!r}; valid: {valid}")
        result[name] = _typed(name, value, f"{path}: {key}")
    return result


_SAID = {int: "an integer", float: "a number", bool: "true or false", str: "a string", Path: "a path"}


def _typed(name: str, value: Any, where: str) -> Any:
    kind = KINDS[name]
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if name in ("resume", "bucket_mib") and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{where} is {value!r}; it takes {_SAID[kind]}")
    return value


def parse(argv: list[str]) -> RunConfig:
    """Flags (and the file that `--config` names) -> a checked RunConfig; raises ConfigError."""
    given = {name: value for name, value in vars(parser().parse_args(argv)).items() if value is not None}
    path = given.pop("config", None)
    return build({**(read_toml(path) if path else {}), **given})


def build(values: Mapping[str, Any]) -> RunConfig:
    """Field values over the preset's over the defaults -> a checked RunConfig; raises ConfigError."""
    preset = values.get("preset", RunConfig.preset)
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset!r} is unknown; valid: {', '.join(PRESETS)}")
    unknown = [name for name in values if name not in KINDS]
    if unknown:
        raise ConfigError(f"unknown key {unknown[0]!r}; valid: {', '.join(KINDS)}")
    alone: dict[str, Any] = {"resume": "none"} if values.get("from_") is not None else {}  # the user says which one
    if values.get("save") == "auto" or values.get("save_every_minutes") is not None:
        alone["save_every"] = None
    config = RunConfig(**{**PRESETS[preset], **alone, **values})
    _check(config)
    return config


def _check(config: RunConfig) -> None:
    for name in (
        "global_batch",
        "micro_batch",
        "seq",
        "lr_decay_steps",
        "save_every",
        "keep",
        "keep_every",
        "keep_best",
        "chunks",
        "node_size",
    ):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_of(name)} is {value}; it must be at least 1")
    if config.steps < 0:
        raise ConfigError(f"--steps is {config.steps}; it must be at least 0")
    for name, valid in (
        ("recompute", RECOMPUTE),
        ("dtype", DTYPES),
        ("zero", (0, 1, 2, 3)),
        ("wire_dtype", (None, *WIRE_DTYPES)),
        ("save", SAVE),
    ):
        if getattr(config, name) not in valid:
            said = ", ".join(str(value) for value in valid if value is not None)
            raise ConfigError(f"{flag_of(name)} {getattr(config, name)!r} is unknown; valid: {said}")
    if config.schedule not in (*NAMES, SEARCH) and not config.schedule.endswith(".csv"):
        said = ", ".join((*NAMES, SEARCH))
        raise ConfigError(f"--schedule {config.schedule!r} is unknown; valid: {said}, or a .csv file")
    if not 0.0 <= config.dropout < 1.0:
        raise ConfigError(f"--dropout is {config.dropout}; it must be in [0, 1)")
    if not 0.0 < config.lr < math.inf:
        raise ConfigError(f"--lr is {config.lr}; it must be above 0 and finite")
    for name in ("save_every_minutes", "mtbf_hours"):
        value = getattr(config, name)
        if value is not None and not 0.0 < value < math.inf:
            raise ConfigError(f"{flag_of(name)} is {value}; it must be above 0 and finite")
    if (config.save == "auto") != (config.mtbf_hours is not None):
        raise ConfigError("--save auto and --mtbf-hours go together: the interval follows from both")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed is {config.seed}; it must be in [0, 2**63)")
    if config.resume not in ("latest", "none") and not is_step(config.resume):
        raise ConfigError(f"--resume {config.resume!r}; it takes latest, none or a step")
    bucket = config.bucket_mib
    if bucket not in (None, MEASURED, *map(str, range(1, MOST_BUCKET_MIB + 1))):
        raise ConfigError(f"--bucket-mib {bucket!r}; it takes 1 to {MOST_BUCKET_MIB}, or {MEASURED}")
    _check_paths(config)
    if config.data is not None and not config.data.is_file():
        raise ConfigError(f"--data: no file {str(config.data)!r}")
    if config.out.exists() and not config.out.is_dir():
        raise ConfigError(f"--out: {str(config.out)!r} is not a folder")
    if config.from_ is not None:
        source, _ = split_source(config.from_)
        if not source.is_dir():
            raise ConfigError(f"--from: no folder {str(source)!r}")


def _check_paths(config: RunConfig) -> None:
    """Refuses paths that lead through a file, are too long, hold a NUL or lie where this user may not look."""
    for name in ("data", "out", "from_", "json"):
        path = getattr(config, name)
        try:
            if path is not None:
                os.stat(path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            raise ConfigError(f"{flag_of(name)}: {str(path)!r} cannot be: {said}") from error


def is_step(text: str) -> bool:
    """Whether a text is a step's number."""
    return text.isascii() and text.isdecimal()


def split_source(text: str) -> tuple[Path, int | None]:
    """`DIR` or `DIR@STEP` -> (folder, step or None for the newest)."""
    folder, mark, step = text.rpartition("@")
    if mark and is_step(step):
        return Path(folder), int(step)
    return Path(text), None


def as_plain(config: RunConfig) -> dict[str, Any]:
    """The run as plain data, for metrics files."""
    return {name.rstrip("_"): str(v) if isinstance(v, Path) else v for name, v in asdict(config).items()}


assert {f.name for f in fields(RunConfig) if f.default is MISSING} == set(PRESETS["tiny"]), "a preset fills all"
