"""Which machine a number belongs to: processor, memory, GPU, versions, commit. Facts only; measures nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


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
        "gpus": [],
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            facts["gpus"].append({"name": card.name, "memory_gib": round(card.total_memory / 2**30)})
        facts["cuda"] = torch.version.cuda
    return facts


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
    """Returns the commit of this file's checkout and whether tracked files differ from it; 'unknown' outside git."""
    folder = Path(__file__).resolve().parent
    try:
        head = run_git(folder, "rev-parse", "HEAD")
        changed = run_git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": True}
    return {"commit": head, "dirty": bool(changed)}


def run_git(folder: Path, *args: str) -> str:
    """Returns what git prints for the checkout at folder."""
    out = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=True)
    return out.stdout.strip()
