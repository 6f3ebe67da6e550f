"""What a state may hold: names, values as tagged JSON, refusals by path, DTensors as boxes."""

from __future__ import annotations

import json
import math
import struct
import warnings
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.ckpt import PerRank, Sharded, StateError, optimizer_state
from plait.ckpt.aside import BARE
from plait.ckpt.box import Box
from plait.ckpt.errors import SnapshotDamaged
from plait.ckpt.state import flatten, rebuild
from plait.ckpt.values import decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.text(max_size=4) | st.integers() | st.just("$float") | st.tuples(st.integers(), st.text(max_size=2))
VALUES = st.recursive(
    SCALARS,
    lambda v: st.lists(v, max_size=3) | st.lists(v, max_size=3).map(tuple) | st.dictionaries(KEYS, v, max_size=3),
    max_leaves=12,
)


def same(a, b) -> bool:
    """Equality that tells 1 from True and from 1.0, and compares floats by bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    return a == b


@given(VALUES)
def test_values_come_back_exactly_through_json(value):
    text = json.dumps(encode(value, "state"), allow_nan=False)
    assert same(decode(json.loads(text), "here"), value)


def test_bits_of_special_floats_survive():
    payload = struct.unpack(">d", bytes.fromhex("fff8dead0000beef"))[0]
    for value in (math.inf, -math.inf, -0.0, 5e-324, payload, math.nan):
        assert same(decode(json.loads(json.dumps(encode(value, "x"))), "here"), value)


def test_counter_complex_and_small_tensors_of_a_rank():
    assert decode(encode(Counter({3: 2}), "x"), "h") == Counter({3: 2})
    assert decode(encode(complex(1.5, -0.0), "x"), "h") == complex(1.5, -0.0)
    for dtype in (torch.uint8, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.ones(3, 2).to(dtype)
        back = decode(json.loads(json.dumps(encode(tensor, "x", tensors=True))), "h")
        assert back.dtype == dtype and torch.equal(back, tensor)


@pytest.mark.parametrize(
    "bad",
    [{"$float": "x"}, {"$float": 1}, {"$nope": 1}, {"$bytes": "*"}, {"$tuple": 3}, {"$float": "0x1p0", "a": 1}]
    + [{"$dict": [1]}, {"$tensor": {}}, {"$float": "nan:3ff0000000000000"}, {"$dict": [[{"$dict": []}, 1]]}]
    + [{"$tensor": {"dtype": "load", "shape": [1], "data": ""}}, {"$complex": ["0x0p0"]}, {"$float": "nan:"}],
)
def test_wrong_tags_are_damage_not_code(bad):
    with pytest.raises(SnapshotDamaged):
        decode(bad, "here")


class Holder:
    """An object with a state, as samplers and schedulers are."""

    def __init__(self, **content):
        self.content = content

    def state_dict(self):
        return self.content

    def load_state_dict(self, content):
        self.loaded = content


def test_names_are_keys_joined_and_escaped():
    flat = flatten(
        {
            "model": {"a.b": torch.zeros(1), "x/y": torch.zeros(1), "u@v~": torch.zeros(1)},
            "opt": {"state": {0: {"m": torch.zeros(1)}}, "groups": [{"lr": 0.1, "params": [0]}]},
            "pair": (torch.zeros(1), 3),
            "rng": PerRank(5),
            "sampler": Holder(seed=3),
        }
    )
    assert set(flat.tensors) == {"model/a.b", "model/x~1y", "model/u~2v~0", "opt/state/0/m", "pair/0"}
    assert set(flat.values) == {"opt/groups", "pair/1", "sampler/seed", BARE} and set(flat.per_rank) == {"rng"}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"sampler": Holder(fn=print)}, r"state\['sampler'\]\.fn is a builtin_function_or_method"),
        (
            {"a": {"b": [1, {2: {3}}]}},
            r"state\['a'\]\['b'\]\[1\]\[2\] is a set, which cannot be stored; use a sorted",
        ),
        ({"a": object()}, r"state\['a'\] is an object, which cannot be stored; give it state_dict"),
        ({"rng": PerRank(lambda: 1)}, r"state\['rng'\] is a function"),
        ({"a": [torch.float32]}, r"state\['a'\]\[0\] is a torch.dtype"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path(state, text):
    flat = flatten(state)
    with pytest.raises(StateError, match=text):
        for node in (*flat.values.values(), *flat.per_rank.values()):
            encode(node.value, node.path, tensors=True)


def _odd(kind):
    with warnings.catch_warnings():  # that their interfaces may change
        warnings.simplefilter("ignore", UserWarning)
        if kind == "nested":
            return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def _loop(container):
    """A state with a container that holds itself."""
    if isinstance(container, dict):
        container["again"] = container
    else:
        container.append(container)
    return {"a": container}


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"w": torch.zeros(2).to_sparse()}, r"state\['w'\] is a torch.sparse_coo tensor"),
        ({"w": torch.zeros(2, device="meta")}, r"state\['w'\] is a torch.strided tensor on meta"),
        ({"w": _odd("nested")}, r"state\['w'\] is a nested tensor, which cannot be stored; store its unbind"),
        ({"w": _odd("quantized")}, r"\['w'\] is a quantized .* int_repr"),
        (_loop({}), r"state\['a'\]\['again'\] contains itself"),
        (_loop([]), r"state\['a'\]\[0\] contains itself"),
        ({"a/b": 1, "a": {1.5: 2}}, r"state\['a'\] has the key 1.5"),
        ({0: 1, "0": 2}, "same name as another part of the state: '0'"),
        ({"__metadata__": 1}, "two underscores are reserved"),
        ({"a": {"\ud800": 1}}, r"state\['a'\] has the key '\\ud800', which is no text"),
        ([1], "state is a list; it must be a dict"),
        ({"o": Holder(), "p": type("P", (), {"state_dict": lambda self: 3})()}, "it must give a dict"),
        ({"w": Sharded(torch.zeros(2), (4,), (3,))}, "is not inside the full shape"),
        ({"w": Sharded(torch.zeros(2), (4,), (0,), (3,))}, r"has shape \(2,\), its box \(3,\)"),
        ({"w": Sharded(torch.zeros(2), (4,), (0,), flat=(0, 2))}, "needs shape"),
        ({"w": Sharded(torch.zeros(2), (4,), (0,), (4,), (0, 3))}, "does not fit 2 elements"),
        ({"w": Sharded(torch.zeros(2), (4,), (0,), replica=(2, 2))}, "replica="),
    ],
)
def test_what_makes_no_sense_is_refused_by_path(state, text):
    with pytest.raises(StateError, match=text):
        flatten(state)


def test_numpy_values_are_refused_with_the_way_out():
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float32(1), numpy.arange(3), numpy.int64(3)):
        with pytest.raises(StateError, match=r"use .item\(\), .tolist\(\)"):
            encode(value, "state['x']")


def test_rebuild_keeps_containers_and_calls_load_state_dict():
    holder = Holder(seed=1, t=torch.zeros(2))
    state = OrderedDict(a=(torch.zeros(1), 5), h=holder, n={"x": [1, 2]})
    back = rebuild(flatten(state).root, {"a/1": 6, "h/seed": 9, "n/x": [3]})
    assert type(back) is OrderedDict and back["a"][0] is state["a"][0] and back["a"][1] == 6
    assert holder.loaded["seed"] == 9 and back["n"] == {"x": [3]}


def test_optimizer_state_is_named_by_parameter_and_made_for_a_fresh_optimizer():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    assert set(flatten({"o": optimizer_state(model, optimizer)}).tensors) == set()
    flat = flatten({"o": optimizer_state(model, optimizer)}, restoring=True)
    assert "o/state/weight/exp_avg" in flat.tensors and "o/state/bias/step" in flat.tensors
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1 and model.weight.grad is None
    with pytest.raises(StateError, match="not in the model"):
        optimizer_state(torch.nn.Linear(3, 2), optimizer)


def test_dtensor_is_the_box_of_its_shard_without_communication():
    """Every rank of a fake 2 x 2 group describes its shard; together they cover the tensor, replicas numbered."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    boxes = {}
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            local = torch.zeros(3 if rank % 2 == 0 else 2, 4)  # 5 rows over 2 ranks
            tensor = DTensor.from_local(
                local, mesh, [Replicate(), Shard(0)], shape=torch.Size((5, 4)), stride=(4, 1), run_check=False
            )
            leaf = flatten({"w": tensor}).tensors["w"]
            boxes[rank] = (leaf.box, leaf.replica, leaf.full_shape)
        finally:
            dist.destroy_process_group()
    assert boxes[0] == (Box((0, 0), (3, 4)), (0, 2), (5, 4)) and boxes[2] == (Box((0, 0), (3, 4)), (1, 2), (5, 4))
    assert boxes[1] == (Box((3, 0), (2, 4)), (0, 2), (5, 4)) and boxes[3][1] == (1, 2)
