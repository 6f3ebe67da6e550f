"""Full training state: every optimizer at every moment, schedulers, generators, data position, odd tensors."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from plait.ckpt import PerRank, Replicas, Sharded, SnapshotError, Snapshots, StateError, optimizer_state, rng_state
from plait.ckpt.lazy import materialize
from plait.ckpt.state import flatten
from tests.faults import on_ranks

# name -> how to make it; all of torch's that take dense gradients without a closure
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2))


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], number: int, unused: bool = False) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    for optimizer in optimizers:
        optimizer.zero_grad()
    (model[0](x) if unused else model(x)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def bits(model: nn.Module) -> list[Any]:
    return [t.reshape(-1).tolist() for t in model.state_dict().values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 2])
def test_every_optimizer_goes_on_bit_for_bit(tmp_path, name, before):
    """Saved before its first step too, when it has no state yet, and wrapped or bare."""
    for wrap in (optimizer_state, lambda model, optimizer: optimizer):
        root = tmp_path / str(wrap is optimizer_state)
        model = make_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        for number in range(before):
            step(model, [optimizer], number)
        with Snapshots(root) as snapshots:
            snapshots.save(before, {"model": model, "optimizer": wrap(model, optimizer)})
        step(model, [optimizer], 7)
        other = make_model()
        fresh = OPTIMIZERS[name](other.parameters())
        Snapshots(root, read_only=True).restore({"model": other, "optimizer": wrap(other, fresh)})
        step(other, [fresh], 7)
        assert bits(other) == bits(model)


def test_state_that_some_parameters_do_not_have_yet_is_left_out(tmp_path):
    """An expert without tokens so far, or a frozen layer: no moments in the snapshot, none invented on restore."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, [optimizer], 0, unused=True)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"model": model, "optimizer": optimizer_state(model, optimizer)})
    other = make_model()
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    restored = Snapshots(tmp_path, read_only=True).restore(
        {"model": other, "optimizer": optimizer_state(other, fresh)}
    )
    assert restored.report.missing == () and len(fresh.state) == len(optimizer.state) == 2
    for m, o in ((model, optimizer), (other, fresh)):
        step(m, [o], 1)
    assert bits(model) == bits(other)


def test_moments_that_are_partly_missing_are_an_error(tmp_path):
    """Case 25: one moment dropped is not the same as a parameter without state."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, [optimizer], 0)
    content = optimizer_state(model, optimizer).state_dict()
    del content["state"]["0.weight"]["exp_avg_sq"]
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"optimizer": content})
        fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
        with pytest.raises(StateError, match="missing in the snapshot: 'optimizer/state/0.weight/exp_avg_sq'"):
            snapshots.restore({"optimizer": optimizer_state(model, fresh)})


def test_making_lazy_state_changes_nothing_else():
    model = make_model()
    before = bits(model)
    optimizer = torch.optim.AdamW([{"params": list(model[0].parameters()), "lr": 0.3}, {"params": model[3].weight}])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    model[0].weight.grad = torch.ones(3, 4)
    generator = torch.get_rng_state()
    materialize(optimizer)
    assert bits(model) == before and calls == [] and [g["lr"] for g in optimizer.param_groups] == [0.3, 1e-3]
    assert torch.equal(model[0].weight.grad, torch.ones(3, 4)) and model[3].weight.grad is None
    assert len(optimizer.state) == 3 and torch.equal(torch.get_rng_state(), generator)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_several_optimizers_and_frozen_parameters(tmp_path):
    def make():
        model = make_model()
        model[3].bias.requires_grad_(False)
        pair = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)]
        pair.append(torch.optim.AdamW([model[3].weight, model[3].bias, *model[1].parameters()], lr=0.01))
        state = {"model": model, **{str(i): optimizer_state(model, o) for i, o in enumerate(pair)}}
        return model, pair, state

    model, pair, state = make()
    step(model, pair, 0)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state)
    step(model, pair, 1)
    other, others, into = make()
    Snapshots(tmp_path, read_only=True).restore(into)
    step(other, others, 1)
    assert bits(other) == bits(model)


def test_a_parameter_that_changed_its_group_is_an_error(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 0.2}], lr=0.1)
    swapped = torch.optim.SGD([{"params": [model[0].bias]}, {"params": [model[0].weight], "lr": 0.2}], lr=0.1)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"o": optimizer_state(model, optimizer)})
        with pytest.raises(StateError, match="parameter '0.bias' is in group 0, in the snapshot in 1"):
            snapshots.restore({"o": optimizer_state(model, swapped)})


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=100),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[30],
        ),
    ],
)
def test_the_learning_rate_goes_on_where_it_was(tmp_path, make):
    """Case 32: 100 steps with a resume at 45 have the learning rates of 100 steps without."""

    def fresh():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        scheduler = make(optimizer)
        return optimizer, scheduler, {"optimizer": optimizer_state(model, optimizer), "scheduler": scheduler}

    def rates(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    optimizer, scheduler, _ = fresh()
    whole = rates(optimizer, scheduler, 100)
    optimizer, scheduler, state = fresh()
    first = rates(optimizer, scheduler, 45)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(45, state)
    optimizer, scheduler, state = fresh()
    Snapshots(tmp_path, read_only=True).restore(state)
    assert first + rates(optimizer, scheduler, 55) == whole


# ---- generators and data


def draws(own: dict[str, Any]) -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.standard_normal()),
        torch.rand(2).tolist(),
        torch.rand(1, generator=own["loader"]).item(),
        own["augment"].random(),
        float(own["noise"].standard_normal()),
    ]


def own_generators(seed: int) -> dict[str, Any]:
    loader = torch.Generator().manual_seed(seed)
    return {"loader": loader, "augment": random.Random(seed), "noise": numpy.random.default_rng(seed)}


def test_every_generator_draws_what_it_would_have_drawn(tmp_path):
    own = own_generators(1)
    random.gauss(0, 1)  # leaves a second number behind
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"w": torch.zeros(3), "rng": rng_state(**own)})
    wanted = draws(own)
    other = own_generators(2)
    Snapshots(tmp_path, read_only=True).restore({"w": torch.zeros(3), "rng": rng_state(**other)})
    assert draws(other) == wanted


def test_generators_of_other_names_and_other_things_are_refused(tmp_path):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"rng": rng_state(a=random.Random(1))})
        with pytest.raises(StateError, match=r"generators \['a', 'b'\] are only in the state, or only"):
            snapshots.restore({"rng": rng_state(b=random.Random(1))})
    with pytest.raises(StateError, match="'seed' is int, not a random generator"):
        rng_state(seed=3)


@pytest.mark.gpu
def test_every_cuda_device_draws_what_it_would_have_drawn(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        torch.rand(3, device=device)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"rng": rng_state()})
    wanted = [torch.rand(3, device=device).tolist() for device in devices]
    torch.cuda.manual_seed_all(9)
    Snapshots(tmp_path, read_only=True).restore({"rng": rng_state()})
    assert [torch.rand(3, device=device).tolist() for device in devices] == wanted


class Sampler:
    """A shuffled position in a data set, with a state as stateful data loaders have it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def batch(self) -> list[int]:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self.rank)).tolist()
        self.at += 4
        return order[self.at - 4 : self.at]

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "at": self.at}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        assert content["rank"] == self.rank
        self.at = content["at"]


def test_each_rank_goes_on_in_its_own_data(tmp_path):
    """Cases 29 to 31: a loader's state is its rank's alone, and the next batches are those that would have come."""

    def save(rank):
        sampler = Sampler(rank)
        for _ in range(rank + 1):
            sampler.batch()
        with Snapshots(tmp_path, rank=rank, world_size=2, session=1) as snapshots:
            snapshots.save(1, {"w": torch.zeros(2), "data": PerRank(sampler)})
        return [sampler.batch() for _ in range(10)]

    def restore(rank):
        sampler = Sampler(rank)
        snapshots = Snapshots(tmp_path, read_only=True, agreement_root=tmp_path, rank=rank, world_size=2, session=2)
        snapshots.restore({"w": torch.zeros(2), "data": PerRank(sampler)})
        return [sampler.batch() for _ in range(10)]

    assert on_ranks(2, save) == on_ranks(2, restore)


def test_an_iterator_made_after_the_restore_takes_nothing_from_the_generator(tmp_path):
    """Case 30: a loader with a generator of its own, which is in the state."""
    data = torch.arange(40)

    def loader(generator):
        return torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=generator)

    generator = torch.Generator().manual_seed(3)
    list(loader(generator))
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"rng": rng_state(loader=generator)})
    wanted = [batch.tolist() for batch in loader(generator)], torch.rand(3).tolist()
    other = torch.Generator()
    Snapshots(tmp_path, read_only=True).restore({"rng": rng_state(loader=other)})
    assert ([batch.tolist() for batch in loader(other)], torch.rand(3).tolist()) == wanted


# ---- tensors and containers


def test_tied_tensors_across_modules_are_stored_once_and_tied_again(tmp_path):
    """Case 33: tied by the module, as every transformer is; and another view of the same memory is no tie."""
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    model["head"].weight = model["embed"].weight
    with Snapshots(tmp_path) as snapshots:
        handle = snapshots.save(1, {"model": model, "part": model["embed"].weight[:4]})
    assert handle.nbytes == 16 * 8 * 4 + 4 * 8 * 4
    other = nn.ModuleDict({"embed": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False)})
    other["head"].weight = other["embed"].weight
    Snapshots(tmp_path, read_only=True).restore({"model": other, "part": torch.zeros(4, 8)})
    assert other["head"].weight is other["embed"].weight
    assert torch.equal(other["head"].weight, model["embed"].weight)


def test_a_modules_versions_and_order_survive(tmp_path):
    state = make_model().state_dict()
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"model": state})
        back = snapshots.restore({"model": make_model().state_dict()}).values["model"]
    assert type(back) is OrderedDict and list(back) == list(state) and back._metadata == state._metadata


def test_how_a_model_is_wrapped_is_no_part_of_its_names():
    """torch.compile and DataParallel (DDP in test_loops); a module of that name that is the user's own stays."""
    model = make_model()
    wanted = list(flatten({"m": model}).tensors)
    for wrapped in (torch.compile(model), nn.DataParallel(model), nn.DataParallel(torch.compile(model))):
        assert list(flatten({"m": wrapped}).tensors) == wanted
        assert [*optimizer_state(wrapped, torch.optim.SGD(model.parameters())).names] == [
            name for name, _ in model.named_parameters()
        ]
    own = nn.Module()
    own._orig_mod = nn.Linear(1, 1)
    assert set(flatten({"m": own}).tensors) == {"m/_orig_mod.weight", "m/_orig_mod.bias"}


def test_replicas_are_said_by_index_and_by_nothing_else(tmp_path):
    for over, text in (((2, 2), r"Replicas over \(2, 2\)"), ((-1, 2), r"Replicas over \(-1, 2\)")):
        with Snapshots(tmp_path) as snapshots, pytest.raises(StateError, match=text):
            snapshots.save(1, {"w": Replicas(torch.zeros(2), over=over)})


def test_a_stage_on_one_rank_and_a_part_on_two(tmp_path):
    """Three ranks: rank 0 has a stage alone, ranks 1 and 2 share another, all have a step tensor."""

    def state_of(rank, fill):
        stage = {f"w{i}": torch.full((300, 1000), float(i)) * fill for i in range(3)}
        over = (0, 1) if rank == 0 else (rank - 1, 2)
        return {"stage": {str(min(rank, 1)): Replicas(stage, over=over)}, "step": torch.tensor(5.0) * fill}

    def save(rank):
        with Snapshots(tmp_path, rank=rank, world_size=3, session=1) as snapshots:
            return snapshots.save(1, state_of(rank, 1)).nbytes

    sizes = on_ranks(3, save)
    assert sizes[0] == 3 * 1_200_000 + 4 and sizes[1] + sizes[2] == 3 * 1_200_000 and min(sizes[1:]) >= 1_200_000
    both = state_of(0, 0)
    both["stage"] |= state_of(1, 0)["stage"]
    Snapshots(tmp_path, read_only=True).restore(both)
    for part in both["stage"].values():
        assert all(torch.equal(part.value[f"w{i}"], torch.full((300, 1000), float(i))) for i in range(3))


def test_copies_of_other_bytes_are_refused(tmp_path):
    def save(rank):
        shard = Sharded(torch.full((4,), float(rank)), (4,), (0,))  # both say that they alone have it
        snapshots = Snapshots(tmp_path, rank=rank, world_size=2, session=1, timeout_s=30)
        with pytest.raises(SnapshotError, match="other bytes than rank 0 has for box"):
            snapshots.save(1, {"w": shard}).wait()
        snapshots.close()

    on_ranks(2, save)


def blocks(full: torch.Tensor, tp: int, rank: int) -> tuple[torch.Tensor, dict[str, Sharded]]:
    """A fused weight of q, k and v rows (12, 6, 6), of which each tp rank has a part of each; its views by name."""
    rows = {"q": (0, 12), "k": (12, 6), "v": (18, 6)}
    cuts = {name: (n * rank // tp, n * (rank + 1) // tp) for name, (_, n) in rows.items()}
    parts = [full[first + cuts[n][0] : first + cuts[n][1]] for n, (first, _) in rows.items()]
    fused, at, views = torch.cat(parts), 0, {}
    for (name, (_, n)), part in zip(rows.items(), parts, strict=True):
        views[name] = Sharded(fused[at : at + len(part)], (n, 5), (cuts[name][0], 0))
        at += len(part)
    return fused, views


def test_a_fused_weight_with_uneven_blocks_moves_from_tp_3_to_2(tmp_path):
    """Case 27: each block of the fused tensor has its own name and box; the views are filled in place."""
    full = torch.arange(120.0).reshape(24, 5)

    def save(rank):
        with Snapshots(tmp_path, rank=rank, world_size=3, session=1) as snapshots:
            snapshots.save(1, {"qkv": blocks(full, 3, rank)[1]})

    def restore(rank):
        fused, views = blocks(torch.zeros(24, 5), 2, rank)
        snapshots = Snapshots(tmp_path, read_only=True, agreement_root=tmp_path, rank=rank, world_size=2, session=2)
        snapshots.restore({"qkv": views})
        return torch.equal(fused, blocks(full, 2, rank)[0])

    on_ranks(3, save)
    assert on_ranks(2, restore) == [True, True]


def test_five_thousand_tensors_need_no_file_descriptor_each(tmp_path):
    """Case 45, and each is there again."""
    import os

    state = {"w": {str(i): torch.full((3,), float(i)) for i in range(5000)}}
    with Snapshots(tmp_path) as snapshots:
        before = len(os.listdir("/proc/self/fd"))
        handle = snapshots.save(1, state)
        assert len(os.listdir("/proc/self/fd")) < before + 20
        handle.wait()
        for tensor in state["w"].values():
            tensor.zero_()
        snapshots.restore(state)
    assert all(float(tensor[2]) == float(name) for name, tensor in state["w"].items())


def test_an_optimizer_that_steps_by_closure_only_needs_its_own_state_first(tmp_path):
    """LBFGS cannot be made to have its state by a step without gradients: said by name, nothing half restored."""
    model = nn.Linear(3, 1)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.arange(6.0).reshape(2, 3)) - 3).square().sum()
        loss.backward()
        return loss

    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)
    optimizer.step(closure)
    state = {"optimizer": optimizer_state(model, optimizer)}
    wanted = [t.clone() for t in optimizer.state[model.weight]["old_dirs"]]
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state)
        fresh = torch.optim.LBFGS(model.parameters(), max_iter=2)
        with pytest.raises(StateError, match="not in the state of any rank: 'optimizer/state/weight/"):
            snapshots.restore({"optimizer": optimizer_state(model, fresh)})
        for t in optimizer.state[model.weight]["old_dirs"]:
            t.zero_()
        snapshots.restore(state)
    assert all(map(torch.equal, optimizer.state[model.weight]["old_dirs"], wanted)) and wanted
