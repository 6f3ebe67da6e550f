"""Result files for the tests of the report: timed on the FakeDevice, as if on an H200, with ceilings and history."""

from __future__ import annotations

import dataclasses

from plait.bench.fake_device import NOISE_MODELS, FakeDevice
from plait.bench.kernel_shapes import cases
from plait.bench.peaks import card_named
from plait.bench.result_file import ResultFile
from plait.bench.roofline import datasheet
from plait.bench.spec import Case, CaseResult, Measured, Options
from plait.bench.timer import interleave

MACHINE = {
    "cpu": "a <cpu> & more",
    "cores": 16,
    "memory_gib": 128,
    "python": "3.11.7",
    "torch": "2.13.0",
    "triton": "3.9.0",
}
MACHINE |= {"gpus": [{"name": "NVIDIA H200", "memory_gib": 140}], "cuda": "13.0"}
SOURCE = {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False}
EVIL = "<script>alert('x')</script>"  # what a name, a note and a reason may hold
SHARES = {"plait": 0.76, "torch": 0.66, "compile": 0.71}  # of the data sheet


def timed(case: Case, seed: int, factor: float = 1.0) -> CaseResult:
    """The case on a noisy device; every provider reaches its share of the card."""
    found = datasheet(card_named("h200")).bound(case)
    assert found
    device = FakeDevice(NOISE_MODELS["drift"], seed)
    kernels = {name: device.kernel(factor * found[0] / share) for name, share in SHARES.items()}
    samples = interleave(dict(kernels), Options(rounds=20, seed=seed), sync=device.sync, clock=device.clock)
    figures = {"registers": 96.0, "spills": 0.0, "shared bytes": 49152.0, "warps": 32.0, "clock MHz": 1785.0}
    providers = {name: Measured(values, "within 0.02 of the oracle") for name, values in samples.items()}
    providers["plait"].figures |= {**figures, "error": 0.0031}
    providers["liger"] = Measured(skipped=f"liger_kernel is not installed {EVIL}")
    return CaseResult(case, "plait", providers, f"events behind a spin kernel {EVIL}", cache="cold-rotate")


def kernels_file(date: str, factor: float = 1.0, machine: dict = MACHINE) -> ResultFile:
    """The default cases of the kernels suite on a card; the last but one has failed, the last is impossible."""
    results = [timed(case, index, factor) for index, case in enumerate(cases(False, "cuda"))]
    results[-2] = CaseResult(results[-2].case, "", {}, error=f"OSError: no space {EVIL}")
    results[-1].providers["torch"].invalid = "5100 GB/s, memory gives 4800"
    results[0] = dataclasses.replace(results[0], case=dataclasses.replace(results[0].case, name=f"rms_norm {EVIL}"))
    options = {"rounds": 20, "warmup": 3, "processes": 1, "seed": 0}
    named = {one.case.name: one for one in results}
    return ResultFile(
        f"runs/{date}/kernels.json", "kernels", machine, SOURCE, named, date, f"bench run {EVIL}", options
    )


def ceilings_file(date: str) -> ResultFile:
    """4.3 TB/s by copy, 780 TFLOP/s in bf16, 52 in fp32."""
    results = []
    for name, dtype, flop, nbytes in (
        ("card copy 1024 MiB", "float32", None, 4.3e9),
        ("card matmul bfloat16 8192", "bfloat16", 780e9, 1e9),
        ("card matmul float32 8192", "float32", 52e9, 1e9),
    ):
        params = {"quantity": "matmul" if flop else "copy", "device": "cuda", "dtype": dtype}
        case = Case(name, params, flop=flop, bytes_moved=nbytes)
        results.append(CaseResult(case, "torch", {"torch": Measured([1e-3] * 20, "within 0.01")}))
    named = {one.case.name: one for one in results}
    return ResultFile("runs/ceilings.json", "ceilings", MACHINE, SOURCE, named, date, "plait bench ceilings")


def fake_files() -> list[ResultFile]:
    """Three runs of the kernels suite, the first on another card, and ceilings."""
    other = {**MACHINE, "gpus": [{"name": "NVIDIA H100 80GB HBM3", "memory_gib": 80}]}
    dates = ("2026-11-01T10:00:00+00:00", "2026-11-12T10:00:00+00:00", "2026-11-29T10:00:00+00:00")
    runs = [
        kernels_file(date, factor, machine)
        for date, factor, machine in zip(dates, (1.5, 1.12, 1.0), (other, MACHINE, MACHINE), strict=True)
    ]
    return [*runs, ceilings_file(dates[-1])]
