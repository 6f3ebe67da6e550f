"""Three lines in any PyTorch loop: plain, DDP, FSDP2, tensor and pipeline parallel; killed, then taken up elsewhere.

Every rank computes the same batch, so that the mean over data-parallel ranks is the gradient of one process to the
last bit, and the next steps can be compared bitwise between grids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from plait.ckpt import Replicas, SnapshotError, Snapshots, optimizer_state
from plait.ckpt.reader import SnapshotReader
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

ROWS = 7  # uneven over 2 and over 4


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, ROWS), nn.Tanh(), nn.Linear(ROWS, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=0.05)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    scheduler.step()


def weights(model: nn.Module) -> dict[str, list[float]]:
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in model.state_dict().items()}
    return {name.removeprefix("module."): t.detach().reshape(-1).tolist() for name, t in full.items()}


def run(kind: str, root: Path, first: int, steps: int) -> tuple[Snapshots, dict[str, list[float]]]:
    """One launch of the loop: takes up what is there, makes `steps` steps and saves. Ranks are then killed."""
    model = make_model()
    if kind == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    snapshots = Snapshots.of_process_group(root)
    state = {"model": model, "optimizer": optimizer_state(model, optimizer), "scheduler": scheduler}
    if snapshots.latest() is not None:
        assert snapshots.restore(state).step == first
    for step in range(first, first + steps):
        train_step(model, optimizer, scheduler, step)
    snapshots.save(first + steps, state).wait()
    return snapshots, weights(model)


def on_rank(rank: int, kind: str, root: Path, first: int, steps: int) -> dict[str, list[float]]:
    return run(kind, root, first, steps)[1]


def launch(kind: str, ranks: int, *args: Any) -> dict[str, list[float]]:
    if kind == "plain":
        snapshots, result = run(kind, *args)
        snapshots.close()
        return result
    results = run_ranks(ranks, on_rank, kind, *args, timeout=240)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> dict[str, list[float]]:
    return launch("plain", 1, tmp_path_factory.mktemp("whole"), 0, 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("ddp", 2), ("plain", 1)),
        (("fsdp2", 2), ("plain", 1)),
        (("plain", 1), ("fsdp2", 2)),
        (("fsdp2", 4), ("ddp", 2)),
    ],
)
def test_a_killed_loop_goes_on_elsewhere_bit_for_bit(tmp_path, before, after, four_steps):
    """Case 26: from any of them to any other; 2 steps there and 2 here are 4 of one process."""
    launch(*before, tmp_path, 0, 2)
    assert launch(*after, tmp_path, 2, 2) == four_steps


def hybrid(rank: int, root: Path, dims: tuple[int, int], saving: bool) -> dict[str, list[float]]:
    """FSDP2 over dp of a model that is cut over tp along the same dim: torch's strided shards, uneven."""
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("dp", "tp"))
    model = make_model()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    full = weights(model)
    if not saving:
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().zero_()
    snapshots = Snapshots.of_process_group(root)
    if saving:
        snapshots.save(1, {"model": model}).wait()
    else:
        state = model.state_dict() if dims[0] == 2 else model  # straight from FSDP2, filled in place
        assert snapshots.restore({"model": state}).step == 1
    assert weights(model) == full
    return full


def test_fsdp2_over_tensor_parallelism_goes_from_grid_to_grid(tmp_path):
    run_ranks(4, hybrid, tmp_path, (2, 2), True, timeout=240)
    for dims in ((1, 4), (2, 1)):
        run_ranks(dims[0] * dims[1], hybrid, tmp_path, dims, False, timeout=240)
    model = make_model()
    with torch.no_grad():
        model[0].weight.zero_()
    Snapshots(tmp_path, read_only=True).restore({"model": model})
    assert weights(model) == weights(make_model())


def uneven(rank: int, root: Path) -> list[int]:
    """As `hybrid`, where torch 2.13 is wrong about which rank has row 6 of 7: full_tensor() cannot be asked."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    Snapshots.of_process_group(root).save(1, {"model": model}).wait()
    return list(model[0].weight.to_local().shape)


@pytest.mark.long
def test_rows_that_torch_gives_to_another_rank_are_saved_where_they_are(tmp_path):
    shapes = run_ranks(6, uneven, tmp_path, timeout=240)
    assert shapes == [[2, 6], [1, 6], [2, 6], [1, 6], [0, 6], [1, 6]]
    model = make_model()
    with torch.no_grad():
        model[0].weight.zero_()
    Snapshots(tmp_path, read_only=True).restore({"model": model})
    assert weights(model) == weights(make_model())


def hsdp(rank: int, root: Path) -> list[str]:
    """HSDP: sharded over one mesh dim, repeated over the other; the copies write it together, once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    fully_shard(model, mesh=mesh)
    snapshots = Snapshots.of_process_group(root)
    snapshots.save(1, {"model": model}).wait()
    return sorted(weights(model))


def test_hsdp_is_written_once(tmp_path):
    run_ranks(4, hsdp, tmp_path, timeout=240)
    model = make_model()
    restored = Snapshots(tmp_path, read_only=True).restore({"model": model})
    assert restored.report.saved_world_size == 4 and weights(model) == weights(make_model())


def tensor_and_data_parallel(rank: int, root: Path, how: str) -> str:
    """tp by DTensor under plain data parallelism: the copies over dp are in no DTensor's mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    if how == "unequal" and rank == 3:
        with torch.no_grad():
            model[0].bias.to_local().add_(1)
    snapshots = Snapshots.of_process_group(root, timeout_s=30)
    value = Replicas(model, over=mesh) if how == "said" else model
    try:
        snapshots.save(1, {"model": value}).wait()
    except SnapshotError as error:
        return str(error)
    return ""


def num_pieces(root: Path, name: str) -> int:
    reader = SnapshotReader(root / "step-000000001")
    return sum(piece.name == name for fragment in reader.fragments for piece in fragment.pieces)


def test_copies_that_no_mesh_knows_count_once_and_replicas_writes_them_once(tmp_path):
    for how, pieces in (("unsaid", 4), ("said", 2)):
        assert run_ranks(4, tensor_and_data_parallel, tmp_path / how, how, timeout=240) == [""] * 4
        model = make_model()
        with torch.no_grad():
            model[0].bias.zero_()
        Snapshots(tmp_path / how, read_only=True).restore({"model": model})
        assert weights(model) == weights(make_model()) and num_pieces(tmp_path / how, "model/0.bias") == pieces


def test_copies_that_are_not_equal_are_refused(tmp_path):
    """Data-parallel ranks that drifted apart are found, and nobody's weights are taken for all."""
    texts = run_ranks(4, tensor_and_data_parallel, tmp_path, "unequal", timeout=240)
    assert "rank 3, tensor 'model/0.bias': other bytes than rank 1 has for box (4,)+(3,) of it" in texts[0]


def pipeline(rank: int, root: Path, first: int, steps: int, how: str) -> str:
    """Two stages under torch's own pipeline runtime; each rank holds its layers and their optimizer state."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole = make_model()
    cut = {0: {"0": whole[0], "1": whole[1]}, 1: {"2": whole[2], "3": whole[3], "4": whole[4]}}
    layers = nn.ModuleDict(cut[rank])
    part = nn.Sequential(*layers.values())
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda y, target: y.square().sum())
    optimizer = make_optimizer(layers)
    snapshots = Snapshots.of_process_group(root, timeout_s=30)
    state: dict[str, Any] = {"model": layers, "optimizer": optimizer_state(layers, optimizer)}
    if how == "said":
        state = {name: Replicas(value, over=(0, 1)) for name, value in state.items()}
    if first:
        snapshots.restore(state)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        schedule.step(x) if rank == 0 else schedule.step(target=torch.zeros(4, 3))
        optimizer.step()
    try:
        snapshots.save(first + steps, state).wait()
    except SnapshotError as error:
        return str(error)
    return ""


def one_process(root: Path, first: int, steps: int) -> dict[str, list[float]]:
    model = make_model()
    optimizer = make_optimizer(model)
    state = {"model": model, "optimizer": optimizer_state(model, optimizer)}
    snapshots = Snapshots(root)
    if first:
        snapshots.restore(state)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(first, first + steps):
        train_step(model, optimizer, scheduler, step)
    snapshots.save(first + steps, state)
    snapshots.close()
    return weights(model)


def test_pipeline_stages_become_one_process_and_stages_again(tmp_path):
    assert run_ranks(2, pipeline, tmp_path / "a", 0, 2, "said", timeout=240) == ["", ""]
    one_process(tmp_path / "a", 2, 1)
    assert run_ranks(2, pipeline, tmp_path / "a", 3, 1, "said", timeout=240) == ["", ""]
    wanted = one_process(tmp_path / "b", 0, 5)
    assert one_process(tmp_path / "a", 4, 1) == wanted


def test_tensors_that_are_not_on_all_ranks_are_refused_not_lost(tmp_path):
    """A bare tensor of one stage would be left to a rank that does not have it, and be in no file."""
    texts = run_ranks(2, pipeline, tmp_path, 0, 1, "unsaid", timeout=240)
    assert "the bare tensors under state['model'] are not the same on all ranks: 2 on rank 0, 3 on rank 1" in texts[0]
    assert "Replicas(value, over=mesh or (index, count))" in texts[0] and all(texts)
