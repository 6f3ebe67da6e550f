"""Names at import: wrappers of DDP and torch.compile, nested weights; optimizer states follow; what is refused."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from plait.ckpt import Snapshots, optimizer_state
from plait.ckpt.errors import SnapshotError
from plait.ckpt.interop import import_checkpoint
from plait.ckpt.interop_rename import parse_rename, renamed
from plait.ckpt.tier_reader import open_folder
from tests.test_interop import answer, imported
from tests.test_interop_optimizer import goes_on, made, train

TREE = {"model": {"module.a.w": 1, "module.b": 2}, "step": 3, "of": [{"params": ["module.a.w"], "lr": 1}]}


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        (["module.="], {**TREE, "model": {"a.w": 1, "b": 2}, "of": [{"params": ["a.w"], "lr": 1}]}),
        (["module.=net/"], {**TREE, "model": {"net": {"a.w": 1, "b": 2}}, "of": [{"params": ["net/a.w"], "lr": 1}]}),
        (["model=net"], {"net": TREE["model"], "step": 3, "of": TREE["of"]}),
        (["model/="], {**TREE["model"], "step": 3, "of": TREE["of"]}),
        (["model/module.=m/"], {"m": {"a.w": 1, "b": 2}, "step": 3, "of": TREE["of"]}),
        (["model/module.b=b", "step=at"], {"model": {"module.a.w": 1}, "b": 2, "at": 3, "of": TREE["of"]}),
        ([".a.=."], {**TREE, "model": {"module.w": 1, "module.b": 2}, "of": [{"params": ["module.w"], "lr": 1}]}),
    ],
)
def test_a_rule_renames_what_it_says_and_nothing_else(rules, wanted):
    assert renamed(TREE, [parse_rename(rule) for rule in rules]) == wanted


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("modul.=", "--rename modul.=: nothing is called so; there are 'model/module.a.w', 'model/module.b', 'of'"),
        ("mod=x", "nothing is called so"),  # no whole key
        ("model/module.b=step", "'model/module.b' and 'step' would both be called 'step'"),
        ("step/=", "'step' would have no name"),
        ("step=model/module.b/c", "is a value and has parts"),
    ],
)
def test_a_rule_that_fits_nothing_or_makes_two_names_one_is_refused(rule, said):
    with pytest.raises(SnapshotError) as caught:
        renamed(TREE, [parse_rename(rule)])
    assert said in str(caught.value)


def test_the_command_line_says_what_is_wrong_with_a_rule(tmp_path, capsys):
    from plait.ckpt.cli import main

    torch.save({"module.w": torch.ones(2)}, tmp_path / "a.pt")
    for text in ("module", "=x", "/=x"):
        assert main(["import", str(tmp_path / "a.pt"), str(tmp_path / "run"), "--rename", text]) == 2
        assert f"{text!r} must be OLD=NEW" in capsys.readouterr().err
    code, report = answer(capsys, "import", tmp_path / "a.pt", tmp_path / "run", "--rename", "_orig_mod.=")
    assert code == 2 and "nothing is called so; there are 'module.w'" in report["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_weights_and_moments_of_a_wrapped_model_go_on(tmp_path, capsys, wrapper):
    """Names with DDP's or torch.compile's prefix had to be changed by hand, in the weights and in the optimizer."""
    model, optimizer = made(0)
    train(model, optimizer)
    by_name = get_optimizer_state_dict(model, optimizer)
    by_name = {
        "state": {wrapper + name: part for name, part in by_name["state"].items()},
        "param_groups": [{**g, "params": [wrapper + n for n in g["params"]]} for g in by_name["param_groups"]],
    }
    weights = {wrapper + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": weights, "optim": by_name}, tmp_path / "a.pt")
    report = imported(capsys, tmp_path / "a.pt", tmp_path / "first")
    start = wrapper[: wrapper.index(".") + 1]
    assert f"begin with {start!r}" in report["hints"][0] and f"--rename {start}=" in report["hints"][0]
    parts = [f"{part}." for part in wrapper.split(".")[:-1]]
    rules = [("state_dict", "model"), *((part, "") for part in parts)]
    options = [text for old, new in rules for text in ("--rename", f"{old}={new}")]
    assert imported(capsys, tmp_path / "a.pt", tmp_path / "run", *options)["hints"] == []
    folder = import_checkpoint(tmp_path / "a.pt", tmp_path / "same", rename=rules)
    assert open_folder(folder).table.names == open_folder(tmp_path / "run" / folder.name).table.names
    other, fresh = made(1)
    into = {"model": other, "optim": optimizer_state(other, fresh)}
    Snapshots(tmp_path / "run", read_only=True).restore(into)
    goes_on(model, optimizer, other, fresh)


def test_names_of_one_compiled_layer_are_taken_out(tmp_path, capsys):
    torch.save({"layers.0._orig_mod.w": torch.ones(2), "layers.0.b": torch.ones(1)}, tmp_path / "a.pt")
    report = imported(capsys, tmp_path / "a.pt", tmp_path / "first")
    assert report["hints"] == ["names have '_orig_mod.' inside: --rename ._orig_mod.=. takes it out"]
    imported(capsys, tmp_path / "a.pt", tmp_path / "run", "--rename", "._orig_mod.=.", "--prefix", "model")
    (folder,) = (tmp_path / "run").glob("step-*")
    assert open_folder(folder).table.names == {"model/layers.0.w", "model/layers.0.b"}


def test_the_python_import_refuses_an_unknown_format(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="format 'pt': must be one of torch, "):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "run", format="pt")


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp", "deepspeed"])
def test_a_fifo_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path, capsys, kind):
    """The import waited for a writer, for ever."""
    folder = tmp_path / "there"
    (folder / "zero" / "w").mkdir(parents=True)
    source = folder if kind in ("dcp", "deepspeed") else folder / "file"
    fifo = {"dcp": folder / ".metadata", "deepspeed": folder / "zero" / "w" / "exp_avg.pt"}.get(kind, source)
    if kind == "deepspeed":
        torch.save(torch.ones(2), folder / "zero" / "w" / "fp32.pt")
    os.mkfifo(fifo)
    code, report = answer(capsys, "import", source, tmp_path / "run", "--format", kind)
    assert code == 1 and report["error"] == f"'{fifo}' is no regular file"
