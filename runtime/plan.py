"""Everything about a run that can be known before a rank starts: dimensions, grid, schedule, micro-batches, text.

Not the run. The one idea: what cannot work is refused here, in one process, with the name of the flag and what
would be right; after this, only the machine can fail.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from plait.block import Options
from plait.ckpt.folders import step_folders
from plait.config import BALANCED, SEARCH, ConfigError, RunConfig, flag_of, is_step
from plait.data import Corpus, check_batch, open_corpus
from plait.identity import Identity, check_source
from plait.model import LlamaStage, plan_stages
from plait.model_config import ModelConfig, model_config
from plait.parallel.data import check_zero3
from plait.parallel.gradients import inseparable
from plait.parallel.mesh import Axis, GridShape, check_grid, parse_mesh
from plait.parallel.schedules import (
    ANY_CHUNKS,
    LayerCosts,
    Part,
    Schedule,
    balanced_layers,
    build,
    from_csv,
    layer_costs,
    search,
    split_layers,
)

MOST_MICROBATCHES = 1 << 16  # of a rank in a step: the schedule is built and proved action by action, 1 us each
EVAL_BATCHES = 4  # held-out global batches at the end of a run


@dataclass(frozen=True)
class RunPlan:
    """A checked run: the same on every rank."""

    config: RunConfig
    model: ModelConfig
    sizes: dict[str, int]
    schedule: Schedule
    num_microbatches: int
    corpus: Corpus
    layers_of: tuple[int, ...] | None = None  # layers per stage; None: as even as can be

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes.values())

    @cached_property
    def identity(self) -> Identity:
        """What every start of this run has in common."""
        config = self.config
        return Identity(
            model=self.model,
            dtype=config.dtype,
            seed=config.seed,
            global_batch=config.global_batch,
            seq=config.seq,
            text=self.corpus.digest,
        )

    @property
    def dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[self.config.dtype]


def make_plan(config: RunConfig) -> RunPlan:
    """Checks grid, model, batch, schedule, text and folder; raises ConfigError (or OSError from the disk)."""
    sizes = _sizes(config)
    dp, pp, tp = (sizes.get(name, 1) for name in ("dp", "pp", "tp"))
    model = model_config(config.preset)
    with _flags(config, "mesh", "global_batch", "micro_batch"):
        num_microbatches = check_batch(config.global_batch, dp, config.micro_batch)
        if num_microbatches > MOST_MICROBATCHES:
            raise ValueError(f"{num_microbatches} micro-batches a step; a schedule has at most {MOST_MICROBATCHES}")
    with _flags(config, "mesh", "schedule"):
        schedule = make_schedule(config, pp, num_microbatches, tied=model.tied)
        schedule.check()
    with _flags(config, "mesh", "layers_of"):
        layers_of = _layers_of(config, model, schedule)
    _check_wire(config, math.prod(sizes.values()))
    if config.zero == 3:
        with _flags(config, "zero", *(["node_size"] if config.node_size else [])):
            check_zero3(GridShape.of(sizes), schedule, node_size=config.node_size)
    stages, chunked = schedule.num_stages, config.schedule in ANY_CHUNKS
    beside = (*(["chunks"] if chunked else []), *(["seq"] if config.sequence_parallel else []))
    with _flags(config, "mesh", *beside):
        model.check_grid(tp=tp, num_stages=stages, seq=config.seq, sequence_parallel=config.sequence_parallel)
    with _flags(config, "data"):
        corpus = _open_text(config.data)
    with _flags(config, "seq"):
        corpus.train_windows(config.seq)
        corpus.held_out_windows(config.seq)
    _check_out(config.out)
    _check_json(config.json)
    plan = RunPlan(config, model, sizes, schedule, num_microbatches, corpus, layers_of)
    _check_from(config)
    check_source(config, plan.identity)
    return plan


def elastic_plan(config: RunConfig, world_size: int) -> RunPlan:
    """The plan for as many ranks as a launcher has started, fewer or more than `--mesh` says: pp and tp stay, and dp
    is what is left. ConfigError lists the grids that fit where that one does not."""
    sizes = _sizes(config)
    if math.prod(sizes.values()) == world_size:
        return make_plan(config)
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    if world_size % (pp * tp):
        why = f"--mesh {config.mesh}: pp={pp} x tp={tp} do not make up {world_size} ranks"
    else:
        try:
            return make_plan(_on_grid(config, {"dp": 1} | sizes | {"dp": world_size // (pp * tp)}))
        except ConfigError as error:
            why = str(error)
    fits = "; ".join(_grids_that_fit(config, world_size)) or "none"
    raise ConfigError(f"{why}; torchrun started {world_size} ranks, for which these grids fit: {fits}")


def _on_grid(config: RunConfig, sizes: Mapping[str, int]) -> RunConfig:
    return replace(config, mesh=",".join(f"{name}={size}" for name, size in sizes.items()))


def _grids_that_fit(config: RunConfig, world_size: int) -> list[str]:
    """The grids of so many ranks that the model, the batch and the schedule take; at most 8, least tp first."""
    found: list[str] = []
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tp, pp in ((tp, pp) for tp in divisors for pp in divisors if world_size % (tp * pp) == 0):
        there = _on_grid(config, {"dp": world_size // (tp * pp), "pp": pp, "tp": tp})
        try:
            make_plan(there)
        except ConfigError:
            continue
        found.append(there.mesh)
        if len(found) == 8:
            break
    return found


@contextmanager
def _flags(config: RunConfig, *names: str) -> Iterator[None]:
    """Puts what the user typed before the text of a ValueError, which knows arguments and no flags."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        said = {flag_of(name): getattr(config, name) for name in names}
        typed = ", ".join(f"{flag} {value}" for flag, value in said.items() if value is not None)
        text = str(error).removeprefix(f"mesh {config.mesh!r}: ").removeprefix("data: ")
        raise ConfigError(f"{typed or ', '.join(said)}: {text}") from error


def _sizes(config: RunConfig) -> dict[str, int]:
    """The grid's sizes by axis, as `--mesh` gives them."""
    with _flags(config, "mesh"):
        sizes = parse_mesh(config.mesh)
        unknown = [name for name, n in sizes.items() if name not in ("dp", "pp", "tp") and (name, n) != ("cp", 1)]
        if unknown:
            raise ValueError(f"no layer splits along {unknown[0]!r}; valid axes: dp, pp, tp")
        check_grid(sizes, math.prod(sizes.values()))
    return sizes


def _check_wire(config: RunConfig, world_size: int) -> None:
    """How gradients travel: refuses digits that a run keeps and a message has not, nodes that do not make up the
    grid, and buckets where there are none."""
    if config.zero == 3 and config.bucket_mib is not None:
        raise ConfigError(
            f"--bucket-mib {config.bucket_mib}, --zero 3: FSDP2 sums the gradients of each layer as one message; use "
            "--zero 2, or leave it out"
        )
    if config.wire_dtype is not None and config.dtype == "float64":
        raise ConfigError(
            f"--wire-dtype {config.wire_dtype}, --dtype float64: the digits of a float64 run would be lost on the "
            "way; leave it out"
        )
    if config.node_size is not None and world_size % config.node_size and config.node_size < world_size:
        raise ConfigError(
            f"--node-size {config.node_size}, --mesh {config.mesh}: the grid has {world_size} ranks, which nodes of "
            f"{config.node_size} do not make up; use a divisor of {world_size}"
        )


def _check_from(config: RunConfig) -> None:
    """Two sources, and nobody said which: `--from` beside an `--out` that has snapshots of its own."""
    own = step_folders(config.out)
    if config.from_ is not None and own and config.resume == "none":
        raise ConfigError(
            f"--from {config.from_}: --out {config.out} already holds {own[0].path.name}; name another --out, "
            "or go on from that one with --resume latest"
        )


def make_schedule(config: RunConfig, pp: int, num_microbatches: int, *, tied: bool) -> Schedule:
    """The schedule that the flags name or that lies in a file, with the exchange of a tied weight if there is one."""
    if config.schedule.endswith(".csv"):
        try:
            schedule = from_csv(config.schedule)
        except OSError as error:
            raise ConfigError(f"--schedule: cannot read {config.schedule!r}: {error.strerror}") from error
        if (schedule.num_ranks, schedule.num_microbatches) != (pp, num_microbatches):
            raise ValueError(
                f"the file is for {schedule.num_ranks} ranks and {schedule.num_microbatches} micro-batches; the run "
                f"has pp={pp} and {num_microbatches} micro-batches"
            )
    elif config.schedule == SEARCH:
        schedule = _found(config, pp, num_microbatches)
    else:
        chunks = config.chunks if config.schedule in ANY_CHUNKS else None
        schedule = build(config.schedule, pp, num_microbatches, chunks)
    return schedule.with_tied() if tied else schedule


def _found(config: RunConfig, pp: int, num_microbatches: int) -> Schedule:
    """The cheapest schedule for the preset's model; none with I and W where backward cannot be split. A pure function
    of the run, so that every start of it and every rank finds the same one."""
    model = model_config(config.preset)
    costs = replace(_costs(config, model), layers_of=_counts(config))
    products = costs.head.forward + costs.head.input + costs.head.weight  # all in F; the gradient of its input waits
    costs = replace(costs, head=Part(products, activation=costs.embedding.activation))
    return search(pp, num_microbatches, costs, split=config.zero != 3 and not inseparable(one_block_model(model)))


def _costs(config: RunConfig, model: ModelConfig) -> LayerCosts:
    """The model's, by FLOP, for a micro-batch of the run."""
    sizes = {name: getattr(model, name) for name in _SIZES}
    return layer_costs(**sizes, seq=config.seq, rows=config.micro_batch)


def _counts(config: RunConfig) -> tuple[int, ...] | None:
    """The counts that --layers-of lists; None where it lists none."""
    if config.layers_of in (None, BALANCED):
        return None
    parts = str(config.layers_of).split(",")
    if not all(is_step(part.strip()) and len(part) < 9 for part in parts):
        raise ValueError(f"it takes layers per stage, comma separated, or {BALANCED}")
    return tuple(map(int, parts))


def _layers_of(config: RunConfig, model: ModelConfig, schedule: Schedule) -> tuple[int, ...] | None:
    """Layers per stage of the schedule; None: as even as can be."""
    if config.layers_of == BALANCED:
        return balanced_layers(_costs(config, model), schedule.stage_to_rank)
    counts = _counts(config)
    if counts is not None:
        split_layers(model.num_layers, schedule.num_stages, counts)
    return counts


_SIZES = ("dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size")


def one_block_model(model: ModelConfig) -> LlamaStage:
    """The model with one block and without memory: every kind of layer that it has."""
    small = replace(model, num_layers=1)
    return LlamaStage(small, 0, plan_stages(small, None), Axis.single(), Options(device="meta"))


def cache_folder() -> Path:
    """Where the default text is put together once per machine and user."""
    return Path.home() / ".cache" / "plait"


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: cannot make {str(out)!r}: {error.strerror}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(f"--out: {str(out)!r} is not writable")


def _check_json(path: Path | None) -> None:
    """The final metrics are written when everything is trained: too late to learn that they cannot be."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--json: {str(path)!r} is a folder; name a file")
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()  # the permission bits alone do not tell: root, a read-only disk, /proc
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json: cannot make {str(path)!r}: {error.strerror}") from error


def _open_text(path: Path | None) -> Corpus:
    try:
        return open_corpus(path, Path() if path else cache_folder())
    except OSError as error:
        said = f"cannot read {str(path)!r}" if path else f"cannot put the default text together in '{cache_folder()}'"
        hint = "" if path else "; name a text file with --data"
        raise ConfigError(f"--data: {said}: {error.strerror}{hint}") from error
    except RuntimeError as error:  # of Path.home: a user number without a name, and no HOME
        raise ConfigError(f"--data: no place for the default text: {error} Name a text file with --data") from error
