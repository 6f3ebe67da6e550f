"""Parallel = serial: loss, norm and full gradients of a grid equal those of one process in fp64; 20 fp32 steps too.

The cases cover the axes of the grid, ZeRO stages, schedules, recompute policies, sequence parallelism, tied and
untied heads, dropout, a vocabulary and a number of layers that divide by nothing, fewer kv heads than tp ranks,
and masked tokens that are spread unevenly over rows.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from plait.data import IGNORE_INDEX
from plait.model import build_stages, full_state
from plait.model_config import ModelConfig
from plait.parallel.collectives import all_gather
from plait.parallel.data import DataParallel, ShardedAdamW, clip_factor
from plait.parallel.fully_sharded import FullySharded
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.schedules import NAMES, Schedule, build
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

MODEL = ModelConfig(
    dim=32, num_layers=5, num_heads=8, num_kv_heads=2, ffn_dim=48, vocab_size=37, max_seq=16, tied=False
)
SEQ, ROWS, MICROBATCHES, SEED = 16, 16, 4, 7
GRAD_TOLERANCE = 1e-10  # relative to the largest entry of each gradient, fp64
LOSS_TOLERANCE = 1e-4  # relative, 20 steps in fp32


@dataclass(frozen=True)
class Grid:
    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = False
    tied: bool = False
    layers: int = MODEL.num_layers
    node_size: int = 0
    microbatches: int = MICROBATCHES

    @property
    def model(self) -> ModelConfig:
        return replace(MODEL, tied=self.tied, num_layers=self.layers)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        extras = [self.schedule, f"zero{self.zero}", self.recompute]
        extras += ["sp"] if self.sequence_parallel else []
        extras += ["tied"] if self.tied else []
        extras += [f"{self.layers}layers"] if self.layers != MODEL.num_layers else []
        extras += [f"nodes{self.node_size}"] if self.node_size else []
        return f"{self.dp}x{self.pp}x{self.tp}-" + "-".join(extras)

    def pipeline_schedule(self) -> Schedule:
        schedule = build(self.schedule, self.pp, self.microbatches)
        return schedule.with_tied() if self.tied else schedule

    def shortest(self) -> Grid:
        """The grid with as few layers and micro-batches as it takes, for many steps: layers that the stages do not
        divide and more micro-batches are held by one backward."""
        few = 2 if self.pp == 1 else MICROBATCHES
        return replace(self, layers=max(2, self.pipeline_schedule().num_stages), microbatches=few)


GRIDS = [
    Grid(dp=2),
    Grid(dp=4, zero=1, tied=True),
    Grid(pp=2, schedule="gpipe", tied=True),
    Grid(pp=2, schedule="interleaved", recompute="full"),
    Grid(pp=4, recompute="selective", tied=True),
    Grid(tp=2, sequence_parallel=True),
    Grid(tp=2, recompute="full", tied=True),
    Grid(tp=4, sequence_parallel=True, recompute="selective"),
    Grid(tp=4, zero=1, tied=True),
    Grid(dp=2, pp=2, zero=1, tied=True),
    Grid(dp=2, tp=2, zero=1, sequence_parallel=True, recompute="full"),
    Grid(dp=2, pp=2, zero=2, schedule="zb_h1", tied=True),
    Grid(dp=4, zero=3, tied=True),
    Grid(dp=4, zero=3, tied=True, node_size=2),
    Grid(dp=2, tp=2, zero=3, sequence_parallel=True, recompute="selective"),
    Grid(dp=2, pp=2, zero=3, schedule="interleaved", recompute="full", tied=True),
    Grid(pp=2, tp=2, schedule="interleaved", sequence_parallel=True, tied=True),
    Grid(dp=2, pp=2, tp=2, zero=1, sequence_parallel=True, recompute="selective", tied=True),
    Grid(dp=2, pp=2, tp=2, schedule="gpipe"),
    Grid(dp=2, pp=4, zero=1, recompute="full", tied=True),
    Grid(dp=4, pp=2, zero=3, tied=True, node_size=4),
    Grid(pp=4, tp=2, sequence_parallel=True),
    Grid(pp=2, tp=4, schedule="interleaved", zero=1, tied=True),
    Grid(dp=2, tp=4, zero=1, sequence_parallel=True, recompute="selective"),
    Grid(dp=4, tp=2, zero=0, recompute="full"),
]


class Run:
    """The model on one grid, or on one process, with everything that a step needs."""

    def __init__(self, grid: Grid, dtype: torch.dtype) -> None:
        self.grid = grid
        sizes = {"dp": grid.dp, "pp": grid.pp, "tp": grid.tp}
        self.mesh = Mesh.single() if grid.world_size == 1 else Mesh.create(node_size=grid.node_size, **sizes)
        schedule = grid.pipeline_schedule()
        self.stages = build_stages(
            grid.model,
            self.mesh,
            schedule,
            seed=SEED,
            dtype=dtype,
            sequence_parallel=grid.sequence_parallel,
            recompute=grid.recompute,
            dropout=0.1,
        )
        ends = {0, schedule.num_stages - 1} & set(self.stages) if grid.tied else set()
        tied = {index: self.stages[index].embed.weight for index in ends}
        self.data_parallel: DataParallel | FullySharded
        if grid.zero == 3:
            nodes = grid.node_size > 0
            self.data_parallel = FullySharded(self.stages, self.mesh, schedule, in_node=nodes, tied=tied)
        else:
            self.data_parallel = DataParallel(self.stages, self.mesh, zero=grid.zero, tied=tied, bucket_bytes=20_000)
        self.pipeline = Pipeline(self.stages, schedule, self.mesh, data_parallel=self.data_parallel)

    def backward(self, step: int) -> tuple[float, float]:
        """One forward and backward of all micro-batches; returns the mean loss and the norm of all gradients."""
        tokens, targets = batch(step)
        axis = self.mesh.axis("dp")
        start, size = axis.split(ROWS)
        inputs = {
            "tokens": tokens[start : start + size],
            "shared_positions": torch.arange(SEQ),
            "sample_offset": step * ROWS + start,
            "seed": SEED,
            "step": step,
        }
        self.data_parallel.zero_grad()
        counted = int((targets != IGNORE_INDEX).sum())
        result = self.pipeline.step(inputs, targets[start : start + size], counted)
        self.data_parallel.finish()
        return float(result.loss), float(self.data_parallel.grad_norm())

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Every full gradient, gathered over dp (ZeRO leaves each rank its shard), tp and pp."""
        if self.grid.zero == 3:
            return full_state(self.stages, self.mesh, lambda param: param.grad.full_tensor())
        if self.grid.zero:
            for bucket in self.data_parallel.buckets:
                full = all_gather(bucket.grads_in(*bucket.shard).clone(), bucket.axis)
                for slot in bucket.slots:
                    slot.param.main_grad = bucket.view(full, slot)
        return full_state(self.stages, self.mesh, lambda param: param.main_grad)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [ROWS, SEQ] of the global batch; row r counts only its first 1 + 5 r mod SEQ targets."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(MODEL.vocab_size, (ROWS, SEQ + 1), generator=generator)
    targets = rows[:, 1:].clone()
    for row in range(ROWS):
        targets[row, 1 + 5 * row % SEQ :] = IGNORE_INDEX
    return rows[:, :-1].contiguous(), targets


def one_backward(rank: int, grid: Grid) -> tuple[float, float, dict[str, torch.Tensor]]:
    """The body of a rank: loss, norm and, from rank 0, full gradients in fp64."""
    run = Run(grid, torch.float64)
    loss, norm = run.backward(step=3)
    gradients = run.full_gradients()
    return loss, norm, gradients if rank == 0 else {}


def many_backwards(rank: int, grids: list[Grid]) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    """The body of a rank: `one_backward` of grids of one size, one after the other in the same processes."""
    return [one_backward(rank, grid) for grid in grids]


def train_steps(rank: int, grid: Grid, num_steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """The body of a rank: losses of a short training."""
    run = Run(grid, dtype)
    optimizer = ShardedAdamW(run.data_parallel, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(num_steps):
        loss, norm = run.backward(step)
        losses.append(loss)
        optimizer.step(1e-3, 0.1, clip_factor(torch.tensor(norm), 1.0))
    return losses


@functools.cache
def serial_backward(tied: bool, layers: int) -> tuple[float, float, dict[str, torch.Tensor]]:
    return run_ranks(1, one_backward, Grid(tied=tied, layers=layers))[0]


@functools.cache
def serial_losses(tied: bool, layers: int) -> list[float]:
    return run_ranks(1, train_steps, Grid(tied=tied, layers=layers, microbatches=1), 20)[0]


def assert_equals_one_process(grid: Grid, results: list[tuple[float, float, dict[str, torch.Tensor]]]) -> None:
    """Loss and norm of every rank, and the full gradients that rank 0 has gathered."""
    wanted_loss, wanted_norm, wanted = serial_backward(grid.tied, grid.layers)
    for loss, norm, _ in results:  # every rank has the means
        assert abs(loss - wanted_loss) <= 1e-10 * abs(wanted_loss), grid
        assert abs(norm - wanted_norm) <= 1e-10 * wanted_norm, grid
    gradients = results[0][2]
    assert set(gradients) == set(wanted), grid
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0, f"{name}: the reference gradient is zero, so the case proves nothing"
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error <= GRAD_TOLERANCE, f"{grid} {name}: {float(error):.2e} from the gradient of one process"


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_loss_and_full_gradients_equal_one_process(grid):
    """Case 25 among them: tied weights on the two ends of a pipeline."""
    assert_equals_one_process(grid, run_ranks(grid.world_size, one_backward, grid, timeout=60))


@pytest.mark.parametrize(
    "schedule",
    [
        name if name in ("interleaved", "zb_h1", "zb_v") else pytest.param(name, marks=pytest.mark.long)
        for name in NAMES
    ],
)
def test_every_schedule_equals_one_process(schedule):
    """Tied and untied, layers that the stages divide and that they do not, ZeRO 0, 1 and 2: 64 grids in all."""
    for size, grids in itertools.groupby(covering(schedule), key=lambda grid: grid.world_size):
        wanted = list(grids)
        results = run_ranks(size, many_backwards, wanted, timeout=240)
        for index, grid in enumerate(wanted):
            assert_equals_one_process(grid, [of_rank[index] for of_rank in results])


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.parametrize(
    "shape",
    [
        {"pp": 2},
        {"pp": 2, "tied": True},
        pytest.param({"dp": 2, "pp": 2, "zero": 1}, marks=pytest.mark.long),
        pytest.param({"pp": 2, "tp": 2, "sequence_parallel": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_all_schedules_of_one_grid_give_the_same_bits(shape):
    """But of a tied weight with both copies on one rank (the V shapes): its two uses are summed as their actions
    come, the head's with F and the embedding's with B or W."""
    grids = [Grid(schedule=name, layers=8, **shape) for name in NAMES]
    results = run_ranks(grids[0].world_size, many_backwards, grids, timeout=240)[0]
    (loss, _, wanted), *others = results
    for name, (other, _, gradients) in zip(NAMES[1:], others, strict=True):
        if shape.get("tied") and name in ("zb_v", "dual_pipe_v"):
            torch.testing.assert_close(gradients["embed.weight"], wanted["embed.weight"], rtol=1e-12, atol=1e-14)
            gradients["embed.weight"] = wanted["embed.weight"]
        assert loss == other and same_bits(gradients, wanted), name


LENGTHS = (16, 5, 11, 8)  # tokens per row of the four micro-batches


def backward_of_lengths(rank: int, grid: Grid) -> tuple[float, dict[str, torch.Tensor]]:
    """Two steps whose micro-batches have different lengths, the second in another order: loss and gradients."""
    run = Run(grid, torch.float64)
    tokens, targets = batch(3)
    loss = 0.0
    for lengths in (LENGTHS[::-1], LENGTHS):
        inputs, cut = [], []
        for length, some, wanted in zip(lengths, tokens.chunk(4), targets.chunk(4), strict=True):
            cut.append(wanted[:, :length])
            place = {"shared_positions": torch.arange(length), "sample_offset": 0, "seed": SEED, "step": 3}
            inputs.append({"tokens": some[:, :length].contiguous(), **place})
        run.data_parallel.zero_grad()
        counted = sum(int((part != IGNORE_INDEX).sum()) for part in cut)
        loss += float(run.pipeline.step(inputs, cut, counted).loss)
        run.data_parallel.finish()
    gradients = run.full_gradients()
    return loss, gradients if rank == 0 else {}


@pytest.mark.parametrize(
    "grid",
    [
        Grid(pp=2, schedule="zb_v", recompute="full"),
        Grid(pp=4, schedule="1f1b", tied=True),
        pytest.param(Grid(pp=2, tp=2, schedule="interleaved"), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_microbatches_of_different_lengths_equal_one_process(grid):
    wanted_loss, wanted = run_ranks(1, backward_of_lengths, Grid(tied=grid.tied))[0]
    results = run_ranks(grid.world_size, backward_of_lengths, grid, timeout=60)
    for loss, _ in results:
        assert abs(loss - wanted_loss) <= 1e-10 * abs(wanted_loss)
    for name, gradient in wanted.items():
        error = (results[0][1][name] - gradient).abs().max() / gradient.abs().max()
        assert gradient.abs().max() > 0 and error <= GRAD_TOLERANCE, f"{name}: {float(error):.2e}"


def covering(schedule: str) -> list[Grid]:
    """Eight grids of a schedule: every pair of choices of tied, layers, sharded or not, and shape occurs."""
    shapes = {0: ({"pp": 2}, {"pp": 4}), 1: ({"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "tp": 2})}
    grids = []
    for tied, even, zero in itertools.product((False, True), (False, True), (0, 1)):
        shape = shapes[zero][tied ^ even]
        layers = 8 if even else 9 if shape["pp"] == 4 else 5
        recompute = ("none", "full", "selective")[len(grids) % 3]
        stage = 2 if zero and tied == even else zero
        grids.append(Grid(**shape, zero=stage, schedule=schedule, recompute=recompute, tied=tied, layers=layers))
    return sorted(grids, key=lambda grid: grid.world_size)


# Four tensor-parallel ranks, or eight ranks, send many small messages: 20 s to a minute each on two cores.
SLOW = [
    grid
    for grid in GRIDS
    if grid.tp == 4 or (grid.dp, grid.tp) == (4, 2) or (grid.zero == 3 and (grid.pp == 1 or grid.node_size))
]


@pytest.mark.parametrize(
    "grid",
    [pytest.param(grid, marks=pytest.mark.long if grid in SLOW else ()) for grid in GRIDS],
    ids=str,
)
def test_twenty_fp32_steps_stay_with_one_process(grid):
    short = grid.shortest()
    wanted = serial_losses(short.tied, short.layers)
    assert wanted[-1] < wanted[0], "the reference does not learn"
    for losses in run_ranks(grid.world_size, train_steps, short, 20, timeout=240):
        worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
        assert worst <= LOSS_TOLERANCE, f"{worst:.2e} relative from the loss of one process"


def narrow_losses(rank: int, grids: list[Grid]) -> list[list[float]]:
    """The body of a rank: losses of two bf16 steps of grids of one size."""
    return [train_steps(rank, grid, 2, torch.bfloat16) for grid in grids]


def test_bf16_trains_with_every_zero_stage_with_and_without_a_pipeline():
    """Case 36: bf16, ZeRO and pipelines broke in pairs. ZeRO-1 has ZeRO-0's bits; 2 and 3 sum in another order."""
    (wanted,) = run_ranks(1, narrow_losses, [Grid(layers=2)])[0]
    for shape in ({"dp": 2}, {"dp": 2, "pp": 2}):
        grids = [Grid(**shape, zero=zero, layers=2) for zero in range(4)]
        for results in run_ranks(grids[0].world_size, narrow_losses, grids, timeout=120):
            for grid, losses in zip(grids, results, strict=True):
                worst = max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))
                assert worst <= 2**-8, f"{grid}: {worst:.2e} relative from the loss of one process in bf16"
            assert results[0] == results[1]
    assert wanted[-1] != wanted[0]


@pytest.mark.parametrize("grid", [GRIDS[12], GRIDS[17]], ids=str)
def test_two_runs_of_one_grid_are_bit_equal(grid):
    first, second = (run_ranks(grid.world_size, train_steps, grid.shortest(), 5, timeout=120) for _ in range(2))
    assert first == second
