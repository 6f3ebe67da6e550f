"""Collectives over gloo on local ranks: parallel/collectives.py and p2p.py beside torch.distributed's own.

Ours gives every member the same bits, sums in the order of the coordinates and needs one exchange; gloo's ring does
none of that. Both work on the same tensors; both results are held against the sum or the gathered whole in fp64,
before and after. Bytes are those of nccl-tests' bus bandwidth, per rank. Host wall clock: a barrier before and after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.bench.providers import left_out, not_asked
from plait.bench.spec import Case, CaseResult, Measured, Options, Suite
from plait.bench.suite_train import Collector
from plait.bench.timer import interleave, rounds_within
from plait.launch import launch
from plait.parallel.collectives import all_gather, all_reduce, reduce_scatter
from plait.parallel.mesh import Axis, Mesh
from plait.parallel.p2p import P2P, Channel, Receipt, TensorSpec
from plait.rank import Rank

TOLERANCE = 1e-5  # of the largest entry: fp32 sums of a few terms
# collective -> bytes on the wire per rank over bytes of the whole tensor, of n ranks (nccl-tests, PERFORMANCE.md)
BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "p2p": lambda n: 2.0,  # there and back
}
KIB = (4, 64, 1024, 16384)  # of the whole tensor
CALLS_S = 4e6  # bytes in a sample at least, so that the barrier is small in it
Call = Callable[[], Tensor]


def cases(full: bool) -> list[Case]:
    """1 MiB over two ranks; `full`: 4 KiB to 16 MiB, four ranks too."""
    result = []
    for ranks in (2, 4) if full else (2,):
        for kib in KIB if full else (1024,):
            for name, share in BUS.items():
                if name == "p2p" and ranks > 2:
                    continue
                params = {
                    "collective": name,
                    "ranks": ranks,
                    "kib": kib,
                    "dtype": "float32",
                    "device": "cpu",
                    "bytes": "bus",
                }
                result.append(
                    Case(f"{name} {kib} KiB x {ranks} ranks", params, bytes_moved=share(ranks) * (kib << 10))
                )
    return result


def calls(name: str, mesh: Mesh, x: Tensor) -> dict[str, Call]:
    """One call of each side. x: this rank's tensor; its part, for all_gather. Results are new or the call's own."""
    axis = mesh.axis("pp")
    group, n = axis.group, axis.size
    part = x.view(n, -1)[axis.coord].clone()
    ours, theirs = torch.empty_like(x), torch.empty_like(x)
    piece, piece_too = torch.empty_like(part), torch.empty_like(part)

    def reduced(out: Tensor, by: Callable[[Tensor], object]) -> Tensor:
        by(out.copy_(x))
        return out

    def gathered() -> Tensor:
        dist.all_gather_into_tensor(theirs, part, group=group)
        return theirs

    def scattered() -> Tensor:
        dist.reduce_scatter_tensor(piece_too, x, group=group)
        return piece_too

    match name:
        case "all_reduce":
            return {
                "plait": lambda: reduced(ours, lambda out: all_reduce(out, axis)),
                "torch": lambda: reduced(theirs, lambda out: dist.all_reduce(out, group=group)),
            }
        case "all_gather":
            return {"plait": lambda: all_gather(part, axis, out=ours), "torch": gathered}
        case "reduce_scatter":
            return {"plait": lambda: reduce_scatter(x, axis, out=piece), "torch": scattered}
    return there_and_back(mesh, x)


def there_and_back(mesh: Mesh, x: Tensor) -> dict[str, Call]:
    """Rank 0 sends, rank 1 sends back: by the pipeline's channels, and by torch's send and recv."""
    there, back = Channel(0, "F", 0, 1, 0), Channel(1, "G", 1, 0, 1)
    p2p, specs = P2P(mesh, [there, back], 1), (TensorSpec(tuple(x.shape), x.dtype),)
    first, group, got = mesh.axis("pp").coord == 0, mesh.axis("pp").group, torch.empty_like(x)
    p2p.announce(back if first else there, 0, specs)

    held: list[Receipt] = []  # the last message, which is read until the next one comes

    def receive(channel: Channel) -> Tensor:
        while held:
            held.pop().release()
        held.append(p2p.receive(channel, 0))
        return held[0].wait()[0]

    def ours() -> Tensor:
        if first:
            sent = p2p.send(there, 0, [x], specs)
            result = receive(back)
        else:
            result = receive(there)
            sent = p2p.send(back, 0, [result], specs)
        sent.wait()
        return result

    def theirs() -> Tensor:
        if first:
            dist.send(x, group=group, group_dst=1)
            dist.recv(got, group=group, group_src=1)
        else:
            dist.recv(got, group=group, group_src=0)
            dist.send(got, group=group, group_dst=0)
        return got

    return {"plait": ours, "torch": theirs}


def wanted(name: str, whole: list[Tensor], coord: int) -> Tensor:
    """The result on the rank at coord, in fp64, from everybody's tensors."""
    n = len(whole)
    if name == "all_gather":
        return torch.cat([value.view(n, -1)[index] for index, value in enumerate(whole)]).double()
    if name == "p2p":
        return whole[0].double()
    total = torch.stack(whole).double().sum(0)
    return total if name == "all_reduce" else total.view(n, -1)[coord]


def measure(case: Case, options: Options) -> CaseResult:
    """Runs one case on forked local ranks; RuntimeError with what they said when one fails."""
    params, view = case.params, Collector()
    code = launch(lambda rank: run_rank(params, options, rank), params["ranks"], view)
    record = view.result(case, code)
    size = record["size"]
    providers = {
        name: Measured([seconds / size for seconds in samples], f"within {TOLERANCE:g} of fp64, before and after")
        for name, samples in record["samples_s"].items()
    } | not_asked(["torch"], options.providers)
    note = (
        f"host_wall over gloo, {params['ranks']} local ranks, blocks of {size} calls; bytes as bus bandwidth counts"
    )
    return CaseResult(case, "plait", providers, note)


def run_rank(params: dict[str, Any], options: Options, rank: Rank) -> None:
    """One rank of a case: checks both sides, times them in turn, checks them again."""
    rank.connect()
    n, name = params["ranks"], params["collective"]
    mesh = Mesh.create(device_type="cpu", pp=n)
    axis = mesh.axis("pp")
    generator = torch.Generator().manual_seed(options.seed)
    whole = [torch.randn((params["kib"] << 10) // 4, generator=generator) for _ in range(n)]
    right = wanted(name, whole, axis.coord)
    sides = calls(name, mesh, whole[axis.coord].clone())
    sides = {side: call for side, call in sides.items() if not left_out(side, options.providers)}
    size = max(1, min(200, int(CALLS_S / (params["kib"] << 10))))
    flag, wrong = torch.zeros(1), check(sides, right, axis)
    samples: dict[str, list[float]] = {}
    if not wrong:
        blocks: dict[str, Callable[[], object]] = {side: block(call, size) for side, call in sides.items()}
        begun = time.monotonic()
        for one in blocks.values():
            one()
        took = torch.tensor([time.monotonic() - begun])
        round_s = all_reduce(took, axis, "max").item()  # of the slowest: all take as many rounds
        options = rounds_within(options.budget_s, 0.0, round_s, options)
        samples = interleave(blocks, options, sync=lambda: all_reduce(flag, axis))
        wrong = check(sides, right, axis)
    if rank.rank == 0:
        rank.emit({"kind": "bench", "wrong": wrong, "samples_s": samples, "size": size})
    rank.disconnect()


def block(call: Call, size: int) -> Callable[[], None]:
    """So many calls in a row."""

    def run() -> None:
        for _ in range(size):
            call()

    return run


def check(sides: dict[str, Call], right: Tensor, axis: Axis) -> str:
    """What is wrong on any rank, '' for nothing; the same on all ranks. Results are overwritten with NaN first."""
    for name, call in sides.items():
        call().fill_(float("nan"))
        error = ((call().double() - right).abs().max() / right.abs().max()).item()
        worst = all_reduce(torch.tensor([error], dtype=torch.float64), axis, "max").item()
        if not worst <= TOLERANCE:
            return f"{name}: off by {worst:.2e} of the largest entry, not {TOLERANCE:g}"
    return ""


ABOUT = "all_reduce, all_gather, reduce_scatter and p2p on gloo, ours and torch's"
SUITE = Suite("collectives", ABOUT, cases, measure, small_s=60.0)
