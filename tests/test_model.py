"""plait.model and plait.block: agreement with transformers, and with themselves on every grid of tp and pp.

Oracles: transformers' LlamaForCausalLM for the mathematics, the model on one rank for the grids. Tolerances: fp32
1e-5 and fp64 1e-10, absolute for logits of order one, relative to the largest entry for gradients.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from plait.data import IGNORE_INDEX
from plait.hf import load_weights, read_config, save_weights
from plait.model import build_stages, full_state
from plait.model_config import ModelConfig, RopeScaling, num_parameters
from plait.parallel.collectives import all_gather
from plait.parallel.mesh import Mesh
from plait.parallel.schedules import gpipe, interleaved
from tests.ranks import run_ranks

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
BASE = ModelConfig(
    dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=50, max_seq=64, tied=False
)
LLAMA3_ROPE = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq=16)
# Each row differs from the others in what could go wrong alone.
MODELS = {
    "gqa": BASE,
    "tied": replace(BASE, tied=True, num_layers=2),
    "mha": replace(BASE, num_kv_heads=4, num_layers=1),
    "mqa, head dim of its own": replace(BASE, num_kv_heads=1, head_dim=12, num_layers=1),
    "odd ffn": replace(BASE, ffn_dim=37, num_layers=1),
    "scaled rope": replace(BASE, rope_scaling=LLAMA3_ROPE, rope_theta=500.0, num_layers=2),
}


def make_inputs(config: ModelConfig, rows: int = 2, seq: int = 12) -> dict:
    """A micro-batch with masked targets spread unevenly over its rows."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, config.vocab_size, (rows, seq), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[0, 3:] = IGNORE_INDEX
    return {
        "tokens": tokens,
        "targets": targets,
        "shared_positions": torch.arange(seq),
        "sample_offset": 6,
        "microbatch": 0,
        "seed": 11,
        "step": 3,
    }


def logits_of(stage, tokens: torch.Tensor) -> torch.Tensor:
    inputs = {**make_inputs(stage.config), "tokens": tokens, "shared_positions": torch.arange(tokens.shape[1])}
    return stage.logits(inputs)


def gradients_of(stages, mesh) -> dict[str, torch.Tensor]:
    """Full gradients; partials of replicated weights are summed over the axis as their placement says."""
    sums = {}
    for stage in stages.values():
        for _, parameter in stage.named_parameters():
            placement, grad = parameter.placement, parameter.grad
            assert grad is not None
            if placement.sum_axes:
                parts = all_gather(grad.unsqueeze(0).contiguous(), mesh.axis("tp"))
                grad = sum(parts[mesh.axis("tp").ranks.index(rank)] for rank in placement.replica_ranks)
            sums[id(parameter)] = grad
    return full_state(stages, mesh, lambda parameter: sums[id(parameter)])


def run_model(mesh: Mesh, config: ModelConfig, options: dict, rows: int = 2, seq: int = 12):
    """Loss sum, count and full gradients of one micro-batch through all stages of this rank, in order."""
    schedule = options.pop("schedule", None)
    stages = build_stages(config, mesh, schedule, **{"seed": 7, "dtype": torch.float64, **options})
    inputs = make_inputs(config, rows, seq)
    x: tuple = ()
    for index in sorted(stages):
        specs = stages[index].input_specs(inputs)
        assert [(s.shape, s.dtype) for s in specs] == [(tuple(t.shape), t.dtype) for t in x]
        x = stages[index](x, inputs)
    loss_sum, count, extras = x
    assert extras == {}
    loss_sum.backward()
    return loss_sum.item(), int(count), gradients_of(stages, mesh)


def assert_same(got, wanted, tolerance: float) -> None:
    assert got[1] == wanted[1]
    assert got[0] == pytest.approx(wanted[0], rel=tolerance)
    assert got[2].keys() == wanted[2].keys()
    for name, grad in wanted[2].items():
        error = (got[2][name] - grad).abs().max() / grad.abs().max()
        assert error <= tolerance, f"{name}: {error}"


# --- transformers -----------------------------------------------------------------------------------------------


def wide_norm(self, x: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm.forward without its cast to fp32, which would hide everything below 1e-7."""
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


@pytest.fixture
def llama(monkeypatch):
    """transformers' Llama; skipped where it is not installed."""
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(module.LlamaRMSNorm, "forward", wide_norm)
    return module.LlamaForCausalLM


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_logits_agree_with_transformers_and_weights_go_both_ways(llama, tmp_path, name, dtype):
    config, mesh = MODELS[name], Mesh.single()
    ours = build_stages(config, mesh, seed=3, dtype=dtype)[0]
    with torch.no_grad():
        for parameter in ours.parameters():  # norms away from one, logits of order one
            parameter.mul_(3.0).add_(0.1 * (parameter.ndim == 1))
    save_weights(tmp_path / "ours", {0: ours}, mesh, max_file_bytes=20000)
    theirs, facts = llama.from_pretrained(
        tmp_path / "ours", dtype=dtype, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(facts[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.randint(0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    wanted = theirs(tokens).logits.detach()
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits_of(ours, tokens), wanted, rtol=0, atol=TOLERANCE[dtype])

    theirs.save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == config
    again = build_stages(config, mesh, seed=None, dtype=dtype)[0]
    assert load_weights(tmp_path / "theirs", again.named_parameters()) == len(list(ours.parameters()))
    for (key, left), (_, right) in zip(ours.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(left, right), key


def test_gradients_agree_with_transformers(llama, tmp_path):
    config, mesh = MODELS["tied"], Mesh.single()
    loss_sum, count, grads = run_model(mesh, config, {})
    save_weights(tmp_path, build_stages(config, mesh, seed=7, dtype=torch.float64), mesh)
    theirs = llama.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="sdpa")
    inputs = make_inputs(config)
    logits = theirs(inputs["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["targets"].flatten(), reduction="sum")
    loss.backward()
    assert loss_sum == pytest.approx(loss.item(), rel=1e-12) and count == 12 + 3
    layer = theirs.model.layers[1]
    pairs = {
        "embed.weight": theirs.model.embed_tokens.weight.grad,
        "norm.weight": theirs.model.norm.weight.grad,
        "layers.1.attention.q.weight": layer.self_attn.q_proj.weight.grad,
        "layers.1.ffn.down.weight": layer.mlp.down_proj.weight.grad,
        "layers.1.ffn_norm.weight": layer.post_attention_layernorm.weight.grad,
        "layers.1.attention.kv.weight": torch.stack(
            [layer.self_attn.k_proj.weight.grad, layer.self_attn.v_proj.weight.grad]
        ),
        "layers.1.ffn.gate_up.weight": torch.stack([layer.mlp.gate_proj.weight.grad, layer.mlp.up_proj.weight.grad]),
    }
    for name, wanted in pairs.items():
        torch.testing.assert_close(grads[name], wanted, rtol=0, atol=1e-10 * float(wanted.abs().max()), msg=name)


def test_a_frozen_embedding_takes_no_other_gradient_away():
    """The first block's input needs no gradient then; its weights still do."""
    wanted = run_model(Mesh.single(), BASE, {})[2]
    stage = build_stages(BASE, Mesh.single(), seed=7, dtype=torch.float64)[0]
    stage.embed.weight.requires_grad_(False)
    stage((), make_inputs(BASE))[0].backward()
    for name, parameter in stage.named_parameters():
        if name == "embed.weight":
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, wanted[name]), name


def test_a_block_is_one_node_of_the_graph():
    """A Python function for every op costs more than a small op: docs/log.md has the times."""
    stage = build_stages(BASE, Mesh.single(), seed=7)[0]
    loss_sum = stage((), make_inputs(BASE))[0]  # keeps the graph: torch 2.11's Python nodes do not
    todo, seen = [loss_sum.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    names = [node.name() for node in seen if "AccumulateGrad" not in node.name()]
    assert sorted(names) == ["_BlockBackward"] * BASE.num_layers + [
        "_EmbedBackward",
        "_LossBackward",
        "_NormBackward",
    ]


# --- grids ------------------------------------------------------------------------------------------------------

TP_MODEL = replace(BASE, num_heads=8, num_kv_heads=2, head_dim=4, num_layers=2, vocab_size=51, tied=True)


def tp_body(rank: int, tp: int, config: ModelConfig, options: dict):
    return run_model(Mesh.create(tp=tp), config, options)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "tp, options",
    [
        (2, {}),
        (2, {"sequence_parallel": True}),
        (4, {"sequence_parallel": True}),  # kv heads < tp; a vocabulary that does not divide
        (4, {"dropout": 0.2}),
        (2, {"dropout": 0.2, "sequence_parallel": True}),
        (2, {"recompute": "full", "sequence_parallel": True}),
        (2, {"recompute": "selective", "sequence_parallel": True, "dropout": 0.2}),
    ],
    ids=str,
)
def test_tensor_parallel_is_the_model_on_one_rank(tp, options):
    alone = {key: value for key, value in options.items() if key == "dropout"}
    wanted = run_model(Mesh.single(), TP_MODEL, dict(alone))
    for got in run_ranks(tp, tp_body, tp, TP_MODEL, options):
        assert_same(got, wanted, 1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_16_bit_shards_stay_near_the_wide_model(sequence_parallel):
    """bf16 keeps 8 bits; sums over ranks are rounded once, so that shards err like one rank does, not more."""
    options = {"dtype": torch.bfloat16}
    wanted = run_model(Mesh.single(), TP_MODEL, {})
    alone = run_model(Mesh.single(), TP_MODEL, dict(options))
    (got, other) = run_ranks(2, tp_body, 2, TP_MODEL, {**options, "sequence_parallel": sequence_parallel})
    assert got[0] == other[0] and got[0] == pytest.approx(wanted[0], rel=1e-3)
    for name, grad in wanted[2].items():
        errors = [(run[2][name].double() - grad).norm() / grad.norm() for run in (alone, got)]
        assert errors[1] < 0.03 and errors[1] < 2 * errors[0] + 0.005, f"{name}: {errors}"


@pytest.mark.ranks
def test_an_untied_head_over_tensor_parallel():
    config = replace(TP_MODEL, tied=False)
    wanted = run_model(Mesh.single(), config, {})
    for got in run_ranks(2, tp_body, 2, config, {}):
        assert_same(got, wanted, 1e-12)


def shards_body(rank: int, tp: int, config: ModelConfig, folder: str):
    """Loads from files onto shards, saves from shards to files."""
    mesh = Mesh.create(tp=tp)
    stages = build_stages(config, mesh, seed=None)
    load_weights(folder, stages[0].named_parameters())
    save_weights(folder / "again", stages, mesh)
    return full_state(stages, mesh)


@pytest.mark.ranks
def test_foreign_weights_onto_and_from_shards(tmp_path):
    stages = build_stages(TP_MODEL, Mesh.single(), seed=1)
    save_weights(tmp_path, stages, Mesh.single())
    wanted = full_state(stages, Mesh.single())
    for got in run_ranks(4, shards_body, 4, TP_MODEL, tmp_path):
        assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items()) and got.keys() == wanted.keys()
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_in_a_row_are_the_model(num_stages, tied):
    """30 layers on 4 stages must not lose 2: here 3 layers on 2, and a tied weight whose two ends share a rank."""
    config = replace(BASE, tied=tied)
    schedule = interleaved(num_ranks=1, chunks=num_stages, num_microbatches=1)
    stages = build_stages(config, Mesh.single(), schedule, seed=7)
    assert sorted(name for stage in stages.values() for name in stage.layers) == ["0", "1", "2"]
    if tied:
        assert stages[num_stages - 1].embed.weight is stages[0].embed.weight
    wanted = run_model(Mesh.single(), config, {})
    assert_same(run_model(Mesh.single(), config, {"schedule": schedule}), wanted, 1e-12)


def tie_body(rank: int, config: ModelConfig):
    """Names, bits and replicas of the two copies of a tied weight on a 2 x 2 grid of pp and tp."""
    mesh = Mesh.create(pp=2, tp=2)
    stages = build_stages(config, mesh, gpipe(2, 1), seed=7, sequence_parallel=True)
    ((index, stage),) = stages.items()
    specs = [(spec.shape, spec.dtype, spec.needs_grad) for spec in stage.input_specs(make_inputs(config))]
    assert specs == ([((2, 6, config.dim), torch.float32, True)] if index else [])
    weight = dict(stage.named_parameters())["embed.weight"]
    assert {name: tuple(p.placement.full_shape) for name, p in stage.named_parameters()} == stage.shapes()
    return weight.placement.replica_ranks, weight.detach(), full_state(stages, mesh)


@pytest.mark.ranks
def test_both_ends_hold_the_same_tied_weight_and_know_of_each_other():
    results = run_ranks(4, tie_body, TP_MODEL)
    assert [result[0] for result in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert torch.equal(results[0][1], results[2][1]) and torch.equal(results[1][1], results[3][1])
    wanted = full_state(build_stages(TP_MODEL, Mesh.single(), seed=7), Mesh.single())
    for *_, full in results:
        assert full.keys() == wanted.keys()
        assert all(torch.equal(full[name], tensor) for name, tensor in wanted.items())


# --- randomness, recompute, memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_recompute_changes_no_bit(dtype):
    options = {"dropout": 0.3, "dtype": dtype}
    wanted = run_model(Mesh.single(), BASE, dict(options))
    for policy in ("full", "selective"):
        got = run_model(Mesh.single(), BASE, {**options, "recompute": policy})
        assert got[0] == wanted[0]
        assert all(torch.equal(got[2][name], grad) for name, grad in wanted[2].items())


def test_dropout_depends_on_the_place_in_the_run_only():
    """Rows give the same loss alone and together; another step or seed gives another; eval() gives none."""
    stage = build_stages(BASE, Mesh.single(), seed=7, dtype=torch.float64, dropout=0.3)[0]
    inputs = make_inputs(BASE, rows=4)

    def loss(**change):
        return stage((), {**inputs, **change})[0].item()

    halves = [
        loss(tokens=inputs["tokens"][rows], targets=inputs["targets"][rows], microbatch=number)
        for number, rows in enumerate((slice(0, 2), slice(2, 4)))
    ]
    assert sum(halves) == pytest.approx(loss(), rel=1e-12)
    assert len({loss(), loss(step=4), loss(seed=12), loss(sample_offset=0)}) == 4
    stage.eval()
    assert loss() == loss(step=4)


def test_nothing_of_a_step_stays_alive():
    stage = build_stages(BASE, Mesh.single(), seed=7)[0]
    inputs = make_inputs(BASE)
    seen: list = []
    hooks = [
        block.register_forward_hook(lambda _, args, out: seen.append(weakref.ref(out)))
        for block in stage.layers.values()
    ]
    stage((), inputs)[0].backward()
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert len(seen) == 3 and not any(ref() is not None for ref in seen)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(dropout=1.0), "dropout is 1.0; it must be in [0, 1)"),
        (dict(recompute="some"), "recompute is 'some'; valid: none, full, selective"),
        (dict(dtype=torch.int64), "dtype is torch.int64"),
        (
            dict(schedule=gpipe(2, 1)),
            "schedule places stages on 2 ranks; the mesh has pp = 1",
        ),
        (dict(schedule=interleaved(num_ranks=1, chunks=4, num_microbatches=1)), "num_stages=4"),
    ],
    ids=["dropout", "recompute", "dtype", "pp", "layers"],
)
def test_what_does_not_fit_is_named(change, text):
    with pytest.raises(ValueError) as error:
        build_stages(BASE, Mesh.single(), **{"seed": 0, **change})
    assert text in str(error.value)


def test_layers_that_write_to_the_residual_stream_start_narrow():
    weights = dict(build_stages(replace(BASE, dim=128), Mesh.single(), seed=0)[0].named_parameters())
    for name, std in (
        ("embed.weight", 0.02),
        ("head.weight", 0.02),
        ("layers.1.attention.q.weight", 0.02),
        ("layers.1.attention.kv.weight", 0.02),
        ("layers.2.ffn.gate_up.weight", 0.02),
        ("layers.0.attention.out.weight", 0.02 / 6**0.5),
        ("layers.2.ffn.down.weight", 0.02 / 6**0.5),
    ):
        assert weights[name].std().item() == pytest.approx(std, rel=0.1), name
    assert torch.equal(weights["norm.weight"], torch.ones(128))


def test_parameters_are_counted():
    stage = build_stages(BASE, Mesh.single(), seed=0)[0]
    assert sum(parameter.numel() for parameter in stage.parameters()) == num_parameters(BASE)
