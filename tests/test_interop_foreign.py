"""Snapshots to and from torch DCP, Megatron-style and DeepSpeed universal checkpoints; what is refused of them."""

from __future__ import annotations

import argparse
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from plait.ckpt import Snapshots
from plait.ckpt.cli import main
from plait.ckpt.errors import SnapshotError
from plait.ckpt.interop_dcp import import_dcp
from plait.ckpt.tier_reader import open_folder
from tests.ranks import run_ranks
from tests.test_interop import Harmful, answer, exported, imported, same_bits, tensors
from tests.test_interop import run as run  # the fixture


def reader_of(root):
    (folder,) = root.glob("step-*")
    return open_folder(folder)


# torch DCP


def test_dcp_reads_what_was_exported_and_it_comes_back(run, tmp_path, capsys):
    exported(capsys, run, tmp_path / "dcp", "--format", "dcp")
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "dcp").iterdir()} == {0o600}
    want = {"model": {n: torch.zeros_like(t.contiguous()) for n, t in tensors().items()}, "step": 0, "lr": 0.0}
    dcp.load(want, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert (want["step"], want["lr"]) == (5, 0.1)
    assert all(same_bits(want["model"][name], tensor) for name, tensor in tensors().items())
    report = imported(capsys, tmp_path / "dcp", tmp_path / "back")
    assert report["format"] == "dcp" and report["step"] == 5
    reader, original = reader_of(tmp_path / "back"), open_folder(run / "step-000000005")
    assert reader.table.names == original.table.names and reader.values == original.values
    assert all(same_bits(reader.read_full(n), original.read_full(n)) for n in original.table.names)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_optimizer_that_dcp_saved_goes_on(tmp_path, capsys, by_name):
    """Lists came in as dicts, so that `param_groups` was missing for every optimizer."""
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": [3, {"a": torch.ones(2)}]}
    if by_name:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp.save({**state, "step": 4}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    imported(capsys, tmp_path / "dcp", tmp_path / "back")
    other, fresh = trained(lr=0.9)
    into = {"model": other, "optimizer": fresh, "losses": [0, {"a": torch.zeros(2)}], "step": 0}
    if by_name:
        into["model"], into["optimizer"] = get_state_dict(other, fresh)
    found = Snapshots(tmp_path / "back", read_only=True).restore(into)
    if by_name:
        parts = found.values["model"], found.values["optimizer"]
        set_state_dict(other, fresh, model_state_dict=parts[0], optim_state_dict=parts[1])
    assert found.values["losses"][0] == 3 and found.values["losses"][1]["a"].tolist() == [1, 1]
    assert fresh.param_groups[0]["lr"] == 0.25
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(mine, theirs)
        assert same_bits(optimizer.state[mine]["exp_avg"], fresh.state[theirs]["exp_avg"])


def trained(lr: float = 0.25) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_sharded(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": model.state_dict(), "note": "hello"}, checkpoint_id=folder)


def test_a_sharded_dcp_directory_of_fsdp_is_put_together(tmp_path, capsys):
    run_ranks(2, save_sharded, str(tmp_path / "dcp"))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    imported(capsys, tmp_path / "dcp", tmp_path / "back", "--step", "3")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(torch.bfloat16)
    reader = reader_of(tmp_path / "back")
    assert reader.values["note"] == "hello" and len(reader.table.names) == 4
    assert all(same_bits(reader.read_full(f"model/{n}"), t) for n, t in model.state_dict().items())


@pytest.fixture
def directory(tmp_path):
    dcp.save({"m": {"w": torch.arange(6.0).reshape(2, 3)}, "n": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_dcp_metadata_makes_no_foreign_object(directory, tmp_path, capsys):
    (directory / ".metadata").write_bytes(pickle.dumps({"a": Harmful()}))
    code = main(["import", str(directory), str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert code == 2 and "run by" not in out + err and "needs builtins.print" in err


def rewrite(directory: Path, change) -> None:
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def info(metadata, name="m.w"):
    return next(value for index, value in metadata.storage_data.items() if index.fqn == name)


def set_to(**fields):
    return lambda metadata: info(metadata).__dict__.update(fields)


def grow(metadata) -> None:
    entry = metadata.state_dict_metadata["m.w"]
    entry.size = torch.Size([1 << 40, 3])
    entry.chunks[0].sizes = entry.size


def odd(metadata) -> None:
    metadata.state_dict_metadata["m.w"].size = (0, 1 << 62, 2)  # empty, and torch cannot count its strides


def half(metadata) -> None:
    metadata.state_dict_metadata["m.w"].chunks[0].sizes = torch.Size([1, 3])


DAMAGE = {
    "a range past the end": (set_to(length=1 << 50), 1, "ends at byte"),
    "a file elsewhere": (set_to(relative_path="../../etc/passwd"), 1, "not the name of a file in this directory"),
    "a file that is gone": (set_to(relative_path="__9_9.distcp"), 1, "__9_9.distcp' is missing"),
    "a negative offset": (set_to(offset=-1), 1, "offset -1"),
    "an extension": (set_to(transform_descriptors=["zstd"]), 2, "['zstd'], a DCP extension"),
    "a huge shape": (grow, 1, "fewer bytes in its file than it needs"),
    "an empty shape that cannot be": (odd, 1, "are none"),
    "a hole": (half, 1, "3 of 6 elements are in no piece"),
    "no place": (lambda m: m.storage_data.clear(), 1, "does not say where"),
    "other data": (lambda m: info(m).__dict__.update(info(m, "n").__dict__), 1, "chunk (0, 0) is int, not"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_wrong_dcp_directory_is_refused_by_tensor_and_reason(directory, tmp_path, capsys, case):
    change, code, message = DAMAGE[case]
    rewrite(directory, change)
    found, report = answer(capsys, "import", directory, tmp_path / "run")
    assert found == code and message in report["error"] and str(directory) in report["error"]
    assert not (tmp_path / "run").exists()


def test_truncated_dcp_metadata_is_damage(directory, tmp_path, capsys):
    data = (directory / ".metadata").read_bytes()
    for size in range(0, len(data), 97):
        (directory / ".metadata").write_bytes(data[:size])
        assert answer(capsys, "import", directory, tmp_path / "run")[0] == 1


def leaves_of(tree) -> list:
    return [leaf for part in tree.values() for leaf in leaves_of(part)] if isinstance(tree, dict) else [tree]


def test_a_flipped_byte_of_dcp_metadata_is_an_error_or_harmless(directory):
    """Nothing but the two errors comes out, whatever the byte was; what is read all the same is whole."""
    data = (directory / ".metadata").read_bytes()
    refused = 0
    for at in range(len(data)):
        for bit in (0, 5):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            (directory / ".metadata").write_bytes(flipped)
            try:
                found = import_dcp(directory)
            except (SnapshotError, OSError):
                refused += 1
                continue
            whole = [leaf for leaf in leaves_of(found.state) if isinstance(leaf, torch.Tensor)]
            assert len(whole) == 1 and same_bits(whole[0], torch.arange(6.0).reshape(2, 3)), (at, bit)
    assert refused > len(data)


def test_a_value_that_dcp_pickled_can_be_left_out_by_name(tmp_path, capsys):
    dcp.save({"w": torch.ones(2), "args": Harmful()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    code, report = answer(capsys, "import", tmp_path / "dcp", tmp_path / "run")
    assert code == 2 and "value 'args' (--skip leaves it out) needs print" in report["error"]
    report = imported(capsys, tmp_path / "dcp", tmp_path / "run", "--skip", "args")
    assert report["left_out"] == ["args: left out by --skip"] and report["num_tensors"] == 1


# Megatron

FULL = {
    "embedding.word_embeddings.weight": torch.randn(8, 4),
    "decoder.layers.{}.self_attention.linear_qkv.weight": torch.randn(12, 4),
    "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight": torch.randn(4),
    "decoder.layers.{}.self_attention.linear_proj.weight": torch.randn(4, 4),
    "decoder.layers.{}.self_attention.linear_proj.bias": torch.randn(4),
    "decoder.layers.{}.mlp.linear_fc1.weight": torch.randn(16, 4),
    "decoder.layers.{}.mlp.linear_fc2.weight": torch.randn(4, 8),
    "decoder.final_layernorm.weight": torch.randn(4),
    "output_layer.weight": torch.randn(8, 4),
}
CUTS = {"word_embeddings.weight": 0, "linear_qkv.weight": 0, "linear_proj.weight": 1, "linear_fc1.weight": 0}
CUTS |= {"linear_fc2.weight": 1, "output_layer.weight": 0}


def full_model() -> dict[str, torch.Tensor]:
    """Three layers, which differ."""
    model = {}
    for name, tensor in FULL.items():
        for layer in range(3) if "{}" in name else [0]:
            model[name.format(layer)] = (tensor + layer).to(torch.bfloat16)
    return model


def shard(name: str, tensor: torch.Tensor, tp: int, num_tp: int, gated: bool) -> torch.Tensor:
    dim = next((dim for suffix, dim in CUTS.items() if name.endswith(suffix)), None)
    if dim is None:
        return tensor
    if gated and "fc1" in name:
        return torch.cat([half.chunk(num_tp)[tp] for half in tensor.chunk(2)])
    return tensor.chunk(num_tp, dim)[tp].clone()


def write_megatron(root: Path, num_tp: int, stages: list[list[int]], gated: bool, **more) -> Path:
    folder = root / "iter_0000012"
    (root / "latest_checkpointed_iteration.txt").parent.mkdir(exist_ok=True)
    (root / "latest_checkpointed_iteration.txt").write_text("12")
    for pp, layers in enumerate(stages):
        mine = {}
        for name, tensor in full_model().items():
            parts = name.split(".")
            if "layers" in parts:
                layer = int(parts[2])
                if layer in layers:
                    mine[name.replace(f"layers.{layer}.", f"layers.{layer - layers[0]}.")] = tensor
            elif (pp == 0) if name.startswith("embedding") else (pp == len(stages) - 1):
                mine[name] = tensor
        for tp in range(num_tp):
            place = folder / (f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if len(stages) > 1 else ""))
            place.mkdir(parents=True)
            model = {n: shard(n, t, tp, num_tp, gated) for n, t in mine.items()}
            model["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
            args = argparse.Namespace(swiglu=gated, tensor_model_parallel_size=num_tp, kind=Path("as an enum"))
            model["decoder.layers.0.mlp.linear_fc2._extra_state"] = io.BytesIO(b"of TransformerEngine")
            rng = [{"np_rng_state": np.random.default_rng(0).random(2)}]
            content = {"model": model, "iteration": 12, "args": args, "optimizer": {"x": 1}, "rng_state": rng, **more}
            torch.save(content, place / "model_optim_rng.pt")
    return root


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_tp", "stages"), [(2, [[0, 1], [2]]), (1, [[0, 1, 2]]), (4, [[0, 1, 2]])])
def test_megatron_shards_are_put_together(tmp_path, capsys, num_tp, stages, gated):
    root = write_megatron(tmp_path / "megatron", num_tp, stages, gated)
    report = imported(capsys, root, tmp_path / "run")
    assert (report["format"], report["step"]) == ("megatron", 12) and "optimizer: not weights" in report["left_out"]
    reader = reader_of(tmp_path / "run")
    assert reader.table.names == {f"model/{name}" for name in full_model()}
    assert all(same_bits(reader.read_full(f"model/{n}"), t) for n, t in full_model().items())


def change_rank(root: Path, rank: str, change) -> None:
    path = root / "iter_0000012" / rank / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)  # our own, with argparse.Namespace
    change(content)
    torch.save(content, path)


def test_megatron_names_without_a_rule_are_an_error_not_a_guess(tmp_path, capsys):
    root = write_megatron(tmp_path / "megatron", 2, [[0, 1, 2]], False)
    for tp in range(2):
        change_rank(root, f"mp_rank_{tp:02d}", lambda c: c["model"].update({"new.w": torch.full((2, 1), 1.0)}))
    code, report = answer(capsys, "import", root, tmp_path / "run")
    assert code == 2 and "no rule says how tensor 'new.w' (2, 1) is cut over 2" in report["error"]
    imported(capsys, root, tmp_path / "run", "--rule", "new.*=1")
    assert reader_of(tmp_path / "run").read_full("model/new.w").shape == (2, 2)
    imported(capsys, root, tmp_path / "same", "--rule", "new.*=same")
    assert reader_of(tmp_path / "same").read_full("model/new.w").shape == (2, 1)


def double_norm(content) -> None:
    content["model"]["decoder.final_layernorm.weight"] *= 2


def narrow(content) -> None:
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    content["model"][name] = content["model"][name][:, :3].clone()


MEGATRON_DAMAGE = {
    "a replica with other bits": (double_norm, "'decoder.final_layernorm.weight' should be the same in"),
    "a shard of another width": (narrow, "linear_fc1.weight' is torch.bfloat16 (8, 3) in"),
    "a tensor on one rank only": (lambda c: c["model"].pop("output_layer.weight"), "'output_layer.weight' is in one"),
    "interleaved stages": (lambda c: c.update(model0=c.pop("model")), "interleaved pipeline stages"),
    "no model": (lambda c: c.pop("model"), "has no 'model'"),
    "an object": (lambda c: c.update(model=Harmful()), "holds print, no weights"),
}


@pytest.mark.parametrize("case", MEGATRON_DAMAGE)
def test_megatron_shards_that_do_not_fit_are_refused(tmp_path, capsys, case):
    change, message = MEGATRON_DAMAGE[case]
    root = write_megatron(tmp_path / "megatron", 2, [[0, 1, 2]], False)
    change_rank(root, "mp_rank_01", change)
    code, report = answer(capsys, "import", root, tmp_path / "run")
    assert code == 2 and message in report["error"] and "mp_rank_01" in report["error"]


def test_megatron_folders_that_are_not_whole_are_refused(tmp_path, capsys):
    root = write_megatron(tmp_path / "megatron", 2, [[0, 1], [2]], False)
    path = root / "iter_0000012" / "mp_rank_01_001"
    path.rename(root / "iter_0000012" / "mp_rank_01_001_000")
    assert "expert-parallel" in answer(capsys, "import", root, tmp_path / "run")[1]["error"]
    path.with_name("mp_rank_01_001_000").rename(tmp_path / "away")
    code, report = answer(capsys, "import", root, tmp_path / "run")
    assert code == 2 and "has 3 of 2 x 2 tensor x pipeline ranks" in report["error"]


def test_megatron_without_its_arguments_must_be_told_about_gates(tmp_path, capsys):
    root = write_megatron(tmp_path / "megatron", 2, [[0, 1, 2]], True, args=None)
    code, report = answer(capsys, "import", root, tmp_path / "run")
    assert code == 2 and "--gated yes or no" in report["error"]
    imported(capsys, root, tmp_path / "run", "--gated", "yes")
    name = "decoder.layers.2.mlp.linear_fc1.weight"
    assert same_bits(reader_of(tmp_path / "run").read_full(f"model/{name}"), full_model()[name])


# DeepSpeed


def write_universal(root: Path) -> dict[str, torch.Tensor]:
    parameters = {"layers.0.weight": torch.randn(3, 4), "norm.bias": torch.randn(4)}
    for name, tensor in parameters.items():
        place = root / "zero" / name
        place.mkdir(parents=True)
        torch.save({"param": tensor, "cat_dim": 0}, place / "fp32.pt")
        torch.save({"param": tensor * 2}, place / "exp_avg.pt")
        torch.save(tensor * tensor, place / "exp_avg_sq.pt")
        torch.save(torch.tensor(7.0), place / "step.pt")
    (root / "notes.txt").write_bytes(b"not read")
    return parameters


def test_a_universal_checkpoint_of_deepspeed_is_imported(tmp_path, capsys):
    parameters = write_universal(tmp_path / "ds")
    report = imported(capsys, tmp_path / "ds", tmp_path / "run", "--step", "7")
    assert report["format"] == "deepspeed" and report["left_out"] == [
        "notes.txt: not a parameter",
        "zero/optimizer_state.pt is not there: no learning rate, no weight decay",
    ]
    reader = reader_of(tmp_path / "run")
    for name, tensor in parameters.items():
        assert same_bits(reader.read_full(f"model/{name}"), tensor)
        assert same_bits(reader.read_full(f"optimizer/state/{name}/exp_avg"), tensor * 2)
        assert same_bits(reader.read_full(f"optimizer/state/{name}/exp_avg_sq"), tensor * tensor)
        assert same_bits(reader.read_full(f"optimizer/state/{name}/step"), torch.tensor(7.0))


def test_a_universal_checkpoint_that_is_not_whole_is_refused(tmp_path, capsys):
    write_universal(tmp_path / "ds")
    place = tmp_path / "ds" / "zero" / "norm.bias"
    torch.save(torch.ones(5), place / "exp_avg.pt")
    code, report = answer(capsys, "import", tmp_path / "ds", tmp_path / "run")
    assert code == 1 and f"'{place / 'exp_avg'}.pt' has shape (5,), the parameter (4,)" in report["error"]
    torch.save({"param": torch.ones(4), "sub_param_shapes": 1}, place / "exp_avg.pt")
    assert "['sub_param_shapes']" in answer(capsys, "import", tmp_path / "ds", tmp_path / "run")[1]["error"]
    (place / "fp32.pt").unlink()
    assert "has no fp32.pt" in answer(capsys, "import", tmp_path / "ds", tmp_path / "run")[1]["error"]
    zero = tmp_path / "zero1"
    zero.mkdir()
    (zero / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    code, report = answer(capsys, "import", zero, tmp_path / "run", "--format", "deepspeed")
    assert code == 2 and "run ds_to_universal" in report["error"]
