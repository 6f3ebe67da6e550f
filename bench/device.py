"""Which machine a number belongs to: processor, memory, GPU, versions, commit; and how the GPU is while it works.

The machine's facts are stable ones: none is a reading (a clock, a temperature, a load), which would make every run a
machine of its own. What is read beside samples is `gpu_sensor`'s. Measures nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.bench.timer import Condition, unknown

# nvmlClocksEventReasons (nvml.h): power cap, hardware slowdown, thermal in software and hardware, power brake.
THROTTLED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
CARD_FACTS = ("driver_version", "power.limit", "clocks.max.sm", "memory.total")  # as nvidia-smi names them


def fingerprint() -> dict[str, Any]:
    """Returns the stable facts by which results are compared: equal fingerprints, comparable absolute numbers."""
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "ptxas": ptxas_version(),
        "governor": GOVERNOR.read_text().strip() if GOVERNOR.exists() else "unknown",
        "gpus": [],
    }
    if torch.cuda.is_available():
        told = card_facts()
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            gpu = {"name": card.name, "memory_gib": round(card.total_memory / 2**30)}
            facts["gpus"].append(gpu | (told[index] if index < len(told) else {}))
        facts["cuda"] = torch.version.cuda
    return facts


@functools.cache
def card_facts() -> list[dict[str, str]]:
    """Returns driver, power limit, highest SM clock and memory of each card by nvidia-smi; none where it is not."""
    query = ["nvidia-smi", f"--query-gpu={','.join(CARD_FACTS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []  # a container without the tool: the names of torch remain
    return parse_cards(said)


def parse_cards(said: str) -> list[dict[str, str]]:
    """Returns a dict a line of nvidia-smi's answer."""
    names = [name.replace(".", "_") for name in CARD_FACTS]
    lines = [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]
    return [dict(zip(names, cells, strict=True)) for cells in lines]


@functools.cache
def ptxas_version() -> str:
    """Returns the version of the assembler in triton's wheel, 'absent' where there is none."""
    found = importlib.util.find_spec("triton")
    tool = Path(found.origin).parent / "backends/nvidia/bin/ptxas" if found and found.origin else Path()
    if not tool.is_file():
        return "absent"
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.\d+\.\d+)", said)
    return match.group(1) if match else "unknown"


def gpu_sensor(index: int = 0) -> Callable[[], Condition]:
    """Returns a reader of a card's SM clock, power and throttle reasons by NVML; of nothing where pynvml is not."""
    if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
        return unknown
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(index)

    def read() -> Condition:
        clock = float(pynvml.nvmlDeviceGetClockInfo(card, pynvml.NVML_CLOCK_SM))
        watts = pynvml.nvmlDeviceGetPowerUsage(card) / 1e3
        return Condition(clock, watts, bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card) & THROTTLED))

    return read


def gpu_energy(index: int = 0) -> Callable[[], float | None]:
    """Returns a reader of a card's energy counter in joules, by NVML; of None where pynvml or the counter is not."""
    if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
        return lambda: None
    import pynvml

    pynvml.nvmlInit()
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    try:
        pynvml.nvmlDeviceGetTotalEnergyConsumption(card)
    except pynvml.NVMLError:  # cards before Volta, and some virtual ones, count nothing
        return lambda: None
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(card)) / 1e3


def cpu_model() -> str:
    """Returns the processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def package_version(name: str) -> str:
    """Returns an installed package's version, or 'absent'."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def source_commit() -> dict[str, Any]:
    """Returns the commit of this file's checkout, whether tracked files differ from it ('unknown' outside git), and a
    hash of the kernels' source, by which results of a dirty tree are told apart."""
    folder = Path(__file__).resolve().parent
    kernels = kernel_hash(folder.parent / "kernels")
    try:
        head = run_git(folder, "rev-parse", "HEAD")
        changed = run_git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": True, "kernels": kernels}
    return {"commit": head, "dirty": bool(changed), "kernels": kernels}


def kernel_hash(folder: Path) -> str:
    """Returns 16 hex digits of the names and texts of the folder's Python files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def run_git(folder: Path, *args: str) -> str:
    """Returns what git prints for the checkout at folder."""
    out = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=True)
    return out.stdout.strip()
