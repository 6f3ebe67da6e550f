"""What this machine reaches at best: copy and read bandwidth of its memory, and matrix products per dtype.

The ceilings that `roofline` and `report` hold every other number against, beside the data sheet's (peaks.py). On a
card the device's memory and matrix units; without one the host's (memcpy by torch, fp32 products by its BLAS), named
"host" so that nobody takes them for a card's. Buffers are many times the cache; results are checked before and after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from plait.bench.spec import Case, CaseResult, Measured, Options, Suite, WrongResultError
from plait.bench.timer import interleave

CHECKED_ROWS = 8  # of a product, against fp64
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "tfloat32": 2e-3, "float16": 2e-3, "bfloat16": 1e-2}
# device -> (MiB of a buffer, edge of a product), and with `full`. A card's buffers are 10 times its L2 and more.
SIZES = {"cpu": ((128, 1536), (512, 3072)), "cuda": ((1024, 8192), (4096, 16384))}
DTYPES = {
    "cpu": (("float32",), ("float32", "float64")),
    "cuda": (("bfloat16", "float32"), ("bfloat16", "float16", "tfloat32", "float32")),
}


class Job(NamedTuple):
    """What is timed, and what says how far its result is off, as a share of the largest entry."""

    call: Callable[[], object]
    error: Callable[[], float]


def cases(full: bool) -> list[Case]:
    """Copy, read and a product of this machine's device; `full` adds the larger size and further dtypes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    label, result = "host" if device == "cpu" else "card", []
    for mib, edge in SIZES[device] if full else SIZES[device][:1]:
        for quantity, passes in (("copy", 2), ("read", 1)):
            params = {"quantity": quantity, "device": device, "dtype": "float32", "mib": mib}
            result.append(Case(f"{label} {quantity} {mib} MiB", params, bytes_moved=float(passes * (mib << 20))))
        for dtype in DTYPES[device][full]:
            params = {"quantity": "matmul", "device": device, "dtype": dtype, "edge": edge}
            nbytes = 3.0 * edge * edge * (4 if dtype == "tfloat32" else getattr(torch, dtype).itemsize)
            result.append(Case(f"{label} matmul {dtype} {edge}", params, flop=2.0 * edge**3, bytes_moved=nbytes))
    return result


def stream(params: dict[str, Any], generator: torch.Generator) -> Job:
    """A copy of a buffer, or its sum."""
    device, count = params["device"], (params["mib"] << 20) // 4
    source = torch.randn(count, generator=generator, device=device)
    if params["quantity"] == "copy":
        target = torch.full_like(source, float("nan"))
        return Job(lambda: target.copy_(source), lambda: 0.0 if torch.equal(source, target) else float("inf"))
    total = torch.full((), float("nan"), device=device)
    wanted, scale = (
        source.sum(dtype=torch.float64).item(),
        float(count) ** 0.5,
    )  # deviation of a sum of normal numbers
    return Job(lambda: torch.sum(source, dim=0, out=total), lambda: abs(total.item() - wanted) / scale)


def product(params: dict[str, Any], generator: torch.Generator) -> Job:
    """[edge, edge] x [edge, edge]^T; some rows are held against fp64."""
    edge, name = params["edge"], params["dtype"]
    dtype = torch.float32 if name == "tfloat32" else getattr(torch, name)
    a, b = (torch.randn(edge, edge, generator=generator, device=params["device"], dtype=dtype) for _ in "ab")
    out = torch.full((edge, edge), float("nan"), device=params["device"], dtype=dtype)
    rows = torch.linspace(0, edge - 1, CHECKED_ROWS, device=params["device"]).long()

    def error() -> float:
        wanted = a[rows].double() @ b.double().t()
        return ((out[rows].double() - wanted).abs().max() / wanted.abs().max()).item()

    def call() -> None:
        with tf32(name == "tfloat32"):
            torch.mm(a, b.t(), out=out)

    return Job(call, error)


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Within it fp32 products on a card may, or may not, be done in tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def measure(case: Case, options: Options) -> CaseResult:
    """Times torch's own; WrongResultError where its result is not right."""
    p = case.params
    generator = torch.Generator(p["device"]).manual_seed(options.seed)
    sync = torch.cuda.synchronize if p["device"] == "cuda" else lambda: None
    job = product(p, generator) if p["quantity"] == "matmul" else stream(p, generator)
    tolerance = TOLERANCE[p["dtype"]]

    def check() -> float:
        sync()
        error = job.error()
        if not error <= tolerance:
            raise WrongResultError(f"{case.name}: off by {error:.2e} of its scale, not {tolerance:g}")
        return error

    job.call()
    error = check()
    samples = interleave({"torch": job.call}, options, sync=sync)["torch"]
    check()
    how = f"host_wall, {p['device']}, {torch.get_num_threads()} CPU threads; buffers larger than the cache"
    text = f"within {tolerance:g} before and after"
    return CaseResult(case, "torch", {"torch": Measured(samples, text, {"error": error})}, how)


SUITE = Suite("ceilings", "what this machine reaches at best: memory and matrix products", cases, measure)
