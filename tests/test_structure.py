"""An unchanged state is planned without Python work per tensor, and every change of it is noticed all the same."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from plait.ckpt import PerRank, Replicas, Sharded, Snapshots, optimizer_state, rng_state
from plait.ckpt.capture import Capturer
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.state import flatten
from plait.ckpt.structure import Flattener, Leaves
from tests.ranks import run_ranks


def training(layers: int, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return (
        model,
        optimizer,
        {"model": model, "optimizer": optimizer_state(model, optimizer), "step": 0, "x": [1, 2.0]},
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()


def python_steps(work: Any) -> int:
    """Returns how many bytecodes Python executes in `work`."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # others' callbacks (hypothesis has one) would be counted when a collection happens to come
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def again(state: dict[str, Any]) -> int:
    """Python steps of flattening and planning a state for the second time."""
    flattener, capturer = Flattener(), Capturer(0, 1)
    capturer._planned(flattener.flatten(state))
    steps = python_steps(lambda: capturer._planned(flattener.flatten(state)))
    assert (flattener.walks, capturer.plans_made) == (1, 1)
    capturer.close()
    return steps


def plain(count: int) -> dict[str, Any]:
    return {"weights": {str(i): torch.zeros(4) for i in range(count)}, "step": 3}


def sharded(count: int) -> dict[str, Any]:
    return {"weights": {str(i): Sharded(torch.zeros(4), (8,), (0,)) for i in range(count)}}


def optimized(count: int) -> dict[str, Any]:
    """One module of many parameters, as a container costs Python and a tensor must not."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model:
        p.grad = torch.ones(4)
    optimizer.step()
    return {"model": model, "optimizer": optimizer_state(model, optimizer)}


@pytest.mark.parametrize("make", [plain, sharded, optimized])
def test_the_second_save_does_no_python_work_per_tensor(make):
    few, many = again(make(10)), again(make(400))
    assert few == many, (few, many)


def guarded_steps(count: int) -> int:
    """Python steps of a second capture of many lazily read tensors, and of the fence behind it."""
    parameters = [nn.Parameter(torch.zeros(16384)) for _ in range(count)]
    optimizer, state = torch.optim.SGD(parameters), {str(i): p for i, p in enumerate(parameters)}
    flattener, capturer = Flattener(), Capturer(0, 1)
    capturer.guards.add(optimizer)
    capturer.prepare(flattener.flatten(state))
    kept = []

    def capture() -> None:
        kept.append(capturer.begin(1, flattener.flatten(state)))
        kept[-1].flight.fence()

    steps = python_steps(capture)
    assert kept[0].stage.held_bytes == 0 and len(kept[0].flight._held[0].ranges) == count
    kept[0].release()
    capturer.close()
    return steps


def test_a_guarded_save_and_its_fence_do_no_python_work_per_tensor():
    assert guarded_steps(10) == guarded_steps(40)


def test_modules_are_walked_in_c_too():
    """Submodules without Python steps of their own: a deep model costs what a flat one does."""
    assert again({"model": training(3)[0]}) == again({"model": training(60)[0]})


def is_same(flat: Any, state: dict[str, Any]) -> bool:
    """True when a flat state from memory equals one that was made anew."""
    wanted = flatten(state)
    assert list(flat.tensors) == list(wanted.tensors) and set(flat.per_rank) == set(wanted.per_rank)
    assert set(flat.values) | set(flat.encoded) == set(wanted.values)
    for name, leaf in wanted.tensors.items():
        mine = flat.tensors[name]
        assert (mine.full_shape, mine.box, mine.flat, mine.replica) == (
            leaf.full_shape,
            leaf.box,
            leaf.flat,
            leaf.replica,
        )
        assert mine.tensor.data_ptr() == leaf.tensor.data_ptr() and torch.equal(mine.tensor, leaf.tensor)
    assert all(repr(node.value) == repr(wanted.values[name].value) for name, node in flat.values.items())
    return True


def test_what_is_found_again_is_what_flattening_finds():
    model, optimizer, state = training(3)
    state |= {"rng": PerRank(7), "part": Replicas({"w": torch.ones(3)}, over=(0, 2)), "pair": (torch.ones(2), "a")}
    state["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state["generators"] = rng_state()
    flattener = Flattener()
    for step in range(4):
        state = {**state, "step": step}  # another dict with the same content
        assert is_same(flattener.flatten(state), state)
        train(model, optimizer)
        state["scheduler"].step()
    assert flattener.walks == 1


class Own(nn.Sequential):
    """A module that says itself what its state is."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {"mine": self[0][0].weight}


def changes() -> dict[str, Any]:
    """name -> what is done to (model, optimizer, state) between two saves."""

    def group(model, optimizer, state):
        extra = nn.Parameter(torch.zeros(2))
        model.register_parameter("extra", extra)
        optimizer.add_param_group({"params": [extra]})
        state["optimizer"] = optimizer_state(model, optimizer)

    return {
        "storage": lambda m, o, s: setattr(m[0][0].weight, "data", m[0][0].weight.data.clone() + 1),
        "parameter": lambda m, o, s: setattr(m[0][0], "weight", nn.Parameter(torch.ones(4, 4))),
        "dtype": lambda m, o, s: m[0][0].half(),
        "shape": lambda m, o, s: setattr(m[0][0].bias, "data", torch.ones(9)),
        "transposed": lambda m, o, s: setattr(m[0][0].weight, "data", m[0][0].weight.data.t()),
        "buffer": lambda m, o, s: m[1].register_buffer("new", torch.ones(2)),
        "not_saved": lambda m, o, s: m[1][1]._non_persistent_buffers_set.add("running_mean"),
        "module": lambda m, o, s: setattr(m, "1", nn.Linear(4, 4)),
        "swapped": lambda m, o, s: m._modules.update({"0": m[1], "1": m[0]}),
        "renamed": lambda m, o, s: m._modules.update({"z": m._modules.pop("2")}),
        "none": lambda m, o, s: setattr(m[0][0], "bias", None),
        "hook": lambda m, o, s: m.register_state_dict_post_hook(lambda mod, d, *_: d.update(more=m[0][0].weight)),
        "patched": lambda m, o, s: setattr(m, "state_dict", lambda: {"only": m[0][0].weight}),
        "class": lambda m, o, s: setattr(m, "__class__", Own),
        "optimizer_patched": lambda m, o, s: setattr(o, "state_dict", lambda: {"state": {}, "param_groups": []}),
        "moment": lambda m, o, s: o.state[m[0][0].weight].update(exp_avg=torch.ones(4, 4)),
        "no_moment": lambda m, o, s: o.state.pop(m[0][0].weight),
        "group": group,
        "tied": lambda m, o, s: setattr(m[1][0], "weight", m[0][0].weight),
        "key": lambda m, o, s: s.update(extra=torch.ones(1)),
        "value_to_tensor": lambda m, o, s: s.update(step=torch.ones(1)),
        "value_to_dict": lambda m, o, s: s.update(step={"a": torch.ones(1)}),
    }


@pytest.mark.parametrize("name", changes())
def test_every_change_is_noticed_and_saved_right(tmp_path, name):
    """Case 3: a cached plan that goes on writing what was there before."""
    model, optimizer, state = training(3)
    flattener = Flattener()
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state)
        flattener.flatten(state)
        changes()[name](model, optimizer, state)
        flat = flattener.flatten(state)
        assert is_same(flat, state)
        snapshots.save(2, state).wait()
        wanted = {leaf.name: leaf.tensor.clone() for leaf in flatten(state).tensors.values()}
    reader = SnapshotReader(tmp_path / "step-000000002")
    assert reader.table.names == set(wanted)
    assert all(
        torch.equal(reader.read_full(n), t) and reader.read_full(n).dtype == t.dtype for n, t in wanted.items()
    )


@pytest.mark.parametrize(
    "later", [None, 3, [], {}, Sharded(torch.ones(3), (3,), (0,)), [torch.ones(1)], nn.Linear(1, 1)]
)
def test_a_tensor_that_becomes_something_else_is_saved_as_that(tmp_path, later):
    """Every save raised AttributeError from then on: "'NoneType' object has no attribute 'shape'"."""
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"best": torch.ones(3)})
        snapshots.save(2, {"best": later}).wait()
        snapshots.save(3, {"best": torch.zeros(3)}).wait()
        wanted = flatten({"best": later})
        reader = SnapshotReader(tmp_path / "step-000000002")
        assert reader.table.names == set(wanted.tensors) and reader.values.keys() == wanted.values.keys() - {
            "__bare__"
        }


def test_a_learning_rate_that_changes_is_saved_as_it_is_then(tmp_path):
    model, optimizer, state = training(2)
    with Snapshots(tmp_path, keep_last=None) as snapshots:
        for step, lr in enumerate((0.5, 0.25, 0.125)):
            optimizer.param_groups[0]["lr"] = lr
            snapshots.save(step, {**state, "step": step})
        assert snapshots._flattener.walks == 1
        for step, lr in enumerate((0.5, 0.25, 0.125)):
            other, fresh, into = training(2)
            restored = snapshots.restore(into, step=step)
            assert fresh.param_groups[0]["lr"] == lr and restored.values["step"] == step


def test_nothing_is_kept_alive_between_saves(tmp_path):
    """Case 4: parameters that are dropped after a save are gone."""
    model, optimizer, state = training(2)
    refs = [weakref.ref(t) for t in model.state_dict(keep_vars=True).values()]
    refs += [weakref.ref(t) for part in optimizer.state.values() for t in part.values()]
    with Snapshots(tmp_path) as snapshots:
        for step in (1, 2):
            snapshots.save(step, state).wait()
        del model, optimizer, state
        gc.collect()
        assert not [ref for ref in refs if ref() is not None]


def fsdp2_steps(rank: int, layers: int) -> int:
    """Python steps of a later save of an FSDP2 model, its optimizer, and its state_dict as the caller keeps it, while
    the parameters are in shards; after checking that every save gives what a walk does."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.ParameterList([nn.Parameter(torch.randn(4, 3)) for _ in range(layers)]))
    model.forward = lambda x: x * sum(p.sum() for p in model[0].parameters())  # type: ignore[method-assign, assignment]
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer_state(model, optimizer), "kept": None}
    flattener, capturer = Flattener(), Capturer(rank, 2)
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        model(torch.ones(2))  # leaves its parameters whole: they are sharded again for the save
        state["kept"] = state["kept"] or model.state_dict()
        model(torch.ones(2))
        capturer._planned(flattener.flatten(state))
        assert is_same(flattener.flatten(state), state)
    steps = python_steps(lambda: capturer._planned(flattener.flatten(state)))
    capturer.close()
    assert (flattener.walks, capturer.plans_made) == (1, 1)
    name, shard = next(iter(state["kept"].items()))
    for changed in (shard.redistribute(placements=[Replicate()]), shard.to_local(), shard):
        state["kept"][name] = changed
        assert is_same(flattener.flatten(state), state) and type(flattener.flatten(state).tensors) is Leaves
    assert flattener.walks == 4  # the last one: the spec of before, which is not the one known now
    return steps


@pytest.mark.ranks
def test_fsdp2_is_found_again_without_python_work_per_tensor():
    """Its modules have a hook each, which is theirs to call; its DTensors are looked at in C."""
    few, many = (run_ranks(2, fsdp2_steps, layers) for layers in (4, 60))
    assert few == many, (few, many)


def test_a_module_with_a_hook_of_its_own_is_walked_at_every_save():
    """It may change what state_dict() gives, so nothing is known beforehand."""
    for register in ("register_state_dict_pre_hook", "register_state_dict_post_hook"):
        model = training(2)[0]
        getattr(model[0], register)(lambda *_: None)
        flattener = Flattener()
        for _ in range(3):
            flattener.flatten({"model": model})
        assert flattener.walks == 3, register
