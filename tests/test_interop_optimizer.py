"""Imported optimizer states go on by `optimizer_state(model, optimizer)`, from every layout that torch has."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from plait.ckpt import Snapshots, StateError, optimizer_state
from tests.test_interop import answer, imported, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as no_dist says


def made(seed: int = 0, tensor_lr: bool = False, split: bool = True, order: int = 1):
    """A model and an optimizer of two groups (or one); another seed has other weights and another learning rate."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    lr = torch.tensor(0.25 + seed) if tensor_lr else 0.25 + seed
    first, second = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": first[::order], "weight_decay": 0.5}, {"params": second}]
    return model, torch.optim.AdamW(groups if split else model.parameters(), lr=lr)


def train(model, optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def goes_on(model, optimizer, other, fresh) -> None:
    """Both have the same bits now, and after a further step."""
    for steps in (0, 1):
        train(model, optimizer, steps)
        train(other, fresh, steps)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert same_bits(mine, theirs)
            assert fresh.state[theirs].keys() == optimizer.state[mine].keys()
            assert all(same_bits(t, fresh.state[theirs][key]) for key, t in optimizer.state[mine].items())


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("layout", ["torch.save", "dcp", "by name", "flat", "flat, torch.save"])
def test_an_imported_optimizer_goes_on_by_name(tmp_path, capsys, layout, tensor_lr):
    model, optimizer = made(0, tensor_lr)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 4}
    if "name" in layout or "flat" in layout:
        options = StateDictOptions(flatten_optimizer_state_dict="flat" in layout)
        state["optim"] = get_optimizer_state_dict(model, optimizer, options=options)
    source = tmp_path / "there"
    if "torch.save" in layout:
        torch.save(state, source)
    else:
        dcp.save(state, checkpoint_id=source, no_dist=True)
    imported(capsys, source, tmp_path / "run")
    other, fresh = made(1, tensor_lr)
    into = {"model": other, "optim": optimizer_state(other, fresh), "step": 0}
    report = Snapshots(tmp_path / "run", read_only=True).restore(into).report
    assert not report.missing and not report.unexpected
    assert [float(group["lr"]) for group in fresh.param_groups] == [0.25, 0.25]
    goes_on(model, optimizer, other, fresh)


def saved(tmp_path, capsys, content):
    torch.save(content, tmp_path / "a.pt")
    imported(capsys, tmp_path / "a.pt", tmp_path / "run")
    return Snapshots(tmp_path / "run", read_only=True)


def test_numbers_of_another_optimizer_are_refused(tmp_path, capsys):
    model, optimizer = made(0)
    train(model, optimizer)
    run = saved(tmp_path, capsys, {"optim": optimizer.state_dict()})
    with pytest.raises(
        StateError, match=r"numbers its parameters, \[2, 4\] in its groups, and the optimizer has \[6\]"
    ):
        run.restore({"optim": optimizer_state(*made(1, split=False))})
    with pytest.raises(StateError, match="full shape"):  # the same number of them, in another order
        run.restore({"optim": optimizer_state(*made(1, order=-1))})


def test_names_that_an_optimizer_was_given_go_before_numbers(tmp_path, capsys):
    model, _ = made(0)
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1], lr=0.25)
    train(model, optimizer)
    run = saved(tmp_path, capsys, {"model": model.state_dict(), "optim": optimizer.state_dict()})
    other, fresh = made(1, split=False)
    run.restore({"model": other, "optim": optimizer_state(other, fresh)})
    goes_on(model, optimizer, other, fresh)


def test_parameters_in_one_group_need_the_same_options(tmp_path, capsys):
    model, optimizer = made(0)
    train(model, optimizer)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    run = saved(tmp_path, capsys, {"optim": get_optimizer_state_dict(model, optimizer, options=flat)})
    with pytest.raises(StateError, match=r"parameter '0.bias' is in group 0, .* another weight_decay"):
        run.restore({"optim": optimizer_state(*made(1, split=False))})


def test_a_parameter_that_nobody_has_is_unexpected(tmp_path, capsys):
    model, optimizer = made(0)
    train(model, optimizer)
    state = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][1]["params"].append("gone.weight")
    run = saved(tmp_path, capsys, {"optim": state})
    with pytest.raises(StateError, match=r"not in the state of any rank: 'optim/group_of/gone.weight'"):
        run.restore({"optim": optimizer_state(*made(1))})


def test_wrapped_layers_keep_the_names_of_their_parameters(tmp_path):
    """Checkpointed or compiled layers put their wrapper into each name, which tied a snapshot to them."""
    model, optimizer = made(0)
    train(model, optimizer)
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, {"model": model, "optim": optimizer_state(model, optimizer)}).wait()
        other, _ = made(1)
        other[0] = checkpoint_wrapper(other[0])
        fresh = torch.optim.AdamW(
            [{"params": [p for p in other.parameters() if (p.dim() > 1) == wide]} for wide in (1, 0)]
        )
        snapshots.restore({"model": other, "optim": optimizer_state(other, fresh)})
    goes_on(model, optimizer, other, fresh)


def loss_scaler(monkeypatch):
    """An object of DeepSpeed's, pickled as its universal files have it, where DeepSpeed is not installed."""
    path = "deepspeed.runtime.fp16.loss_scaler"
    kind = type("LossScaler", (), {"__module__": path})
    for depth in range(4):
        monkeypatch.setitem(
            sys.modules, ".".join(path.split(".")[: depth + 1]), types.SimpleNamespace(LossScaler=kind)
        )
    scaler = kind()
    scaler.cur_scale = 1.0
    return scaler


def write_universal(root, model, optimizer, stage, monkeypatch, said=True) -> None:
    """Writes what ds_to_universal 0.19.8 made of a real run: stage 3 is flat, and has the step elsewhere."""
    zero = root / "zero"
    for name, parameter in model.named_parameters():
        (zero / name).mkdir(parents=True)
        state = optimizer.state[parameter]
        for key, tensor in {"fp32": parameter.detach(), **{k: state[k] for k in ("exp_avg", "exp_avg_sq")}}.items():
            torch.save(tensor.flatten() if stage == 3 else {"param": tensor, "cat_dim": 0}, zero / name / f"{key}.pt")
        if stage != 3:
            torch.save(2, zero / name / "step.pt")  # a number from its own Adam
    (zero / "count").mkdir()
    torch.save({"param": torch.tensor(5.0), "cat_dim": 0}, zero / "count" / "fp32.pt")  # a buffer, as fp32
    content = {"loss_scaler": loss_scaler(monkeypatch), "param_groups": optimizer.state_dict()["param_groups"]}
    if stage == 3:
        content["optimizer_state_dict"] = {"state": {0: {"step": torch.tensor(2.0)}}}
    torch.save(content, zero / "optimizer_state.pt")
    monkeypatch.undo()
    if said:
        names = {id(p): name for name, p in model.named_parameters()}
        shapes = [{names[id(p)]: p.shape for p in group["params"]} for group in optimizer.param_groups]
        module = {**model.state_dict(), "count": torch.tensor(5)}
        rank = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
        about = {"param_shapes": shapes, "module": module, "buffer_names": ["count"], "global_steps": 2}
        torch.save({**about, "shared_params": {"tied": "0.weight"}}, root / f"{rank}_model_states.pt")


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_universal_optimizer_of_deepspeed_goes_on(tmp_path, capsys, monkeypatch, stage, num_groups):
    """ZeRO-3's came in flat and without step, and the options of several groups stayed out."""
    model, optimizer = made(0, split=num_groups == 2)
    train(model, optimizer)
    write_universal(tmp_path / "ds", model, optimizer, stage, monkeypatch)
    report = imported(capsys, tmp_path / "ds", tmp_path / "run")
    assert report["left_out"] == [] and report["step"] == 2
    other, fresh = made(1, split=num_groups == 2)
    names = {"count": torch.tensor(0), "tied": other[0].weight}
    into = {"model": {**other.state_dict(), **names}, "optimizer": optimizer_state(other, fresh)}
    Snapshots(tmp_path / "run", read_only=True).restore(into)
    assert into["model"]["count"].item() == 5
    goes_on(model, optimizer, other, fresh)


def test_groups_that_deepspeed_does_not_tell_apart_stay_out(tmp_path, capsys, monkeypatch):
    model, optimizer = made(0)
    train(model, optimizer)
    write_universal(tmp_path / "ds", model, optimizer, 1, monkeypatch, said=False)
    report = imported(capsys, tmp_path / "ds", tmp_path / "run", "--skip", "count")
    assert [line.partition(": ")[2] for line in report["left_out"]] == [
        "left out by --skip",
        "options of 2 groups: which parameter is in which is not said",
    ]
    other, fresh = made(1)
    into = {"model": other, "optimizer": optimizer_state(other, fresh)}
    run = Snapshots(tmp_path / "run", read_only=True)
    with pytest.raises(StateError, match="missing in the snapshot: 'optimizer/groups/0'"):
        run.restore(into)
    for group in fresh.param_groups:
        group["lr"] = 0.25
    run.restore(into, allow_missing=["optimizer/group*"])
    goes_on(model, optimizer, other, fresh)


def test_a_flat_parameter_of_another_size_is_damage(tmp_path, capsys, monkeypatch):
    model, optimizer = made(0, split=False)
    train(model, optimizer)
    write_universal(tmp_path / "ds", model, optimizer, 3, monkeypatch)
    torch.save(torch.ones(11), tmp_path / "ds" / "zero" / "0.weight" / "exp_avg.pt")
    code, report = answer(capsys, "import", tmp_path / "ds", tmp_path / "run")
    assert code == 1 and "has 11 elements, the parameter the shape (4, 3)" in report["error"]
