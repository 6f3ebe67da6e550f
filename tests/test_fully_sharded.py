"""ZeRO-3 on nodes: sharded in one, replicated over all; and what gradients travel in. Parity is test_parity.py's.

The model is test_data.py's small one, each linear layer a unit of its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from plait.parallel.fully_sharded import FullySharded
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.schedules import interleaved
from plait.parallel.sharded_adamw import ShardedAdamW
from tests.ranks import run_ranks
from tests.test_data import WIDTHS, batch_of, close, loss_of, model_of, train_alone, train_parallel
from tests.test_pipeline import LinearStage, batch, unsplit

pytestmark = pytest.mark.ranks

NUM_UNITS = len(WIDTHS) - 1
_COLLECTIVES = (
    "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce", "all_gather_into_tensor", "all_gather_single",
)  # fmt: skip
Sent = list[tuple[str, tuple[int, ...], torch.dtype]]


def linears(stage: nn.Module) -> list[nn.Module]:
    return [module for module in stage.modules() if isinstance(module, nn.Linear)]


def watched() -> Sent:
    """What FSDP2 sums from here on in this process: (collective, ranks, dtype)."""
    sent: Sent = []
    for name in _COLLECTIVES:
        real = getattr(dist, name, None)
        if real is None:  # of another version of torch
            continue

        def noting(*args, _name=name, _real=real, **options):
            tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
            sent.append((_name, tuple(dist.get_process_group_ranks(options["group"])), tensors[-1].dtype))
            return _real(*args, **options)

        setattr(dist, name, noting)
    return sent


def body_nodes(rank: int, in_node: bool) -> tuple:
    """Two steps of three micro-batches; what one more step sends, the weights, norms and owned parts."""
    mesh, model = Mesh.create(dp=4, node_size=2), model_of()
    dp = FullySharded({0: model}, mesh, in_node=in_node, units=linears)
    optimizer = ShardedAdamW(dp)
    norms = train_parallel(dp, optimizer, model, 2, 2)
    sent = watched()
    norms += train_parallel(dp, optimizer, model, 1, 2, first=2)
    dp.zero_grad()
    parts = {shard.name: (shard.placement.offset, shard.placement.shape, shard.replica) for shard in dp.shards()}
    return [event[:2] for event in sent], norms, [p.full_tensor() for p in model.parameters()], parts


def test_sharded_in_a_node_only_sums_cross_nodes_and_once_a_step():
    weights, norms = train_alone(3)
    results = run_ranks(4, body_nodes, True)
    for rank, (sent, got_norms, got, parts) in enumerate(results):
        close(got, weights)
        assert got_norms == pytest.approx(norms, rel=1e-12) and got_norms == results[0][1]
        node, peers = (0, 1) if rank < 2 else (2, 3), (rank % 2, rank % 2 + 2)
        crossing = [kind for kind, ranks in sent if ranks == peers]
        inside = [kind for kind, ranks in sent if ranks == node and "reduce_scatter" in kind]
        assert crossing == ["all_reduce"] * NUM_UNITS, "one sum a unit, though there were two micro-batches"
        assert len(inside) == 2 * NUM_UNITS
        assert not [kind for kind, ranks in sent if "gather" in kind and ranks != node]
        assert {replica for *_, replica in parts.values()} == {(rank // 2, 2)}
    for name, parts in {name: [r[3].get(name) for r in results] for name in results[0][3]}.items():
        assert parts[0] == (*parts[2][:2], (0, 2)) if parts[2] else not parts[0], name
    flat = run_ranks(4, body_nodes, False)
    assert {ranks for sent, *_ in flat for kind, ranks in sent if "scatter" in kind} == {(0, 1, 2, 3)}
    close(flat[0][2], weights)


def body_unreached(rank: int) -> str:
    mesh, model = Mesh.create(dp=4, node_size=2), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    dp = FullySharded({0: model}, mesh, in_node=True, units=linears)
    dp.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    dp.open(0)
    model[1](torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        dp.reduce(0)
    return str(caught.value)


def test_a_sum_that_would_not_cross_nodes_is_an_error():
    """A layer that the last micro-batch does not reach would keep its node's sum, differently on each node."""
    for text in run_ranks(4, body_unreached):
        assert text.startswith("0.weight got no gradient in the last micro-batch")


def body_wire(rank: int, wire_dtype: torch.dtype | None) -> tuple:
    mesh, model = Mesh.create(dp=4, node_size=2), model_of(torch.float32)
    dp = FullySharded({0: model}, mesh, in_node=True, wire_dtype=wire_dtype, units=linears)
    x, weight = batch_of(0, dtype=torch.float32)
    sent = watched()
    dp.zero_grad()
    dp.open(0)
    loss_of(model, x[rank::4], weight[rank::4], 1.0).backward()
    dp.reduce(0)
    dp.finish()
    grads = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    return {dtype for kind, _, dtype in sent if "reduce" in kind}, grads


def test_gradients_travel_in_fp32_or_in_bf16():
    """The rest of a step is in fp32 either way."""
    wide, narrow = (run_ranks(4, body_wire, dtype) for dtype in (None, torch.bfloat16))
    for (wide_dtypes, wide_grads), (narrow_dtypes, narrow_grads) in zip(wide, narrow, strict=True):
        assert wide_dtypes == {torch.float32} and narrow_dtypes == {torch.bfloat16}
        assert narrow_grads.dtype == torch.float32 and torch.equal(narrow_grads, narrow[0][1])
        error = float((narrow_grads - wide_grads).abs().max() / wide_grads.abs().max())
        assert 0.0 < error < 4 * 2**-8


def body_refused(rank: int) -> str:
    with pytest.raises(ValueError) as caught:
        FullySharded({0: nn.Linear(4, 4)}, Mesh.create(dp=2, tp=2, node_size=2), in_node=True)
    with pytest.raises(ValueError, match="wire_dtype=torch.int8"):
        FullySharded({0: nn.Linear(4, 4)}, Mesh.create(dp=2, tp=2), wire_dtype=torch.int8)
    return str(caught.value)


def test_nodes_with_one_rank_of_dp_each_are_refused():
    for rank, text in enumerate(run_ranks(4, body_refused)):
        assert text.startswith("zero=3 in nodes of 2 ranks needs several nodes") and "ranks (0, 2)" in text, rank


def body_whole(rank: int) -> tuple:
    """One step over three stages a rank: the stages whose weights are gathered at each forward, and the gradients."""
    mesh, schedule = Mesh.create(dp=2, pp=2), interleaved(2, 3, 4)
    coord, half = mesh.axis("pp").coord, mesh.coords()["dp"]
    stages = {s: LinearStage(s, schedule.num_stages) for s in schedule.stages_of(coord)}
    whole: list[list[int]] = []

    def look(*_: object) -> None:
        whole.append([s for s, stage in stages.items() if not isinstance(stage.weight, DTensor)])

    dp = FullySharded(stages, mesh, schedule)
    for stage in stages.values():
        stage.register_forward_hook(look)
    pipeline = Pipeline(stages, schedule, mesh, data_parallel=dp)
    x, targets = batch(16)
    for _ in range(2):
        dp.zero_grad()
        loss = pipeline.step({"x": x.chunk(2)[half]}, targets.chunk(2)[half], 16).loss.item()
    left = [s for s, stage in stages.items() if not isinstance(stage.weight, DTensor)]
    grads = {s: [p.grad.full_tensor() for p in stage.parameters()] for s, stage in stages.items()}
    return whole, left, loss, grads


def test_a_rank_holds_the_weights_of_the_stages_that_come_next():
    """UNSHARD and RESHARD of the lane are carried out: two of three stages are whole, and none after the step."""
    loss, want = unsplit(LinearStage, 6, 8, 16)
    for whole, left, got_loss, grads in run_ranks(4, body_whole):
        assert got_loss == pytest.approx(loss, rel=1e-12)
        assert max(len(stages) for stages in whole) == 2 and left == []  # fewer where a gather is under way
        assert {stage for stages in whole for stage in stages} == set(grads)
        for stage, got in grads.items():
            close(got, [p.grad for p in want[stage].parameters()])
