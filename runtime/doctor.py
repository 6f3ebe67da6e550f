"""`plait doctor`: what this machine has and what plait will use of it.

It only asks; nothing is installed, written outside a temporary folder, or left behind. A question that cannot be
answered has the reason as its answer. Exit code 0 also without a GPU: "none" is an answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from typing import Any

Facts = dict[str, Any]


def main(argv: list[str]) -> int:
    """Prints the facts, with `--json` as one JSON object; returns 0, or 1 when plait cannot train here."""
    parser = argparse.ArgumentParser(prog="plait doctor", description="What this machine has and plait will use.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", default=".", help="folder whose disk to ask about (default: this one)")
    arguments = parser.parse_args(argv)
    facts = gather(arguments.out)
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        for section, rows in facts.items():
            print(section)
            for name, value in rows.items():
                print(f"  {name:<18}{_say(value)}")
    return 0 if facts["extension"]["plait._C"] == "built" else 1


def gather(folder: str) -> Facts:
    """All facts as plain data: section -> name -> value."""
    gpus = gpu_facts()
    disk = disk_facts(folder)
    return {
        "machine": machine_facts(),
        "software": software_facts(),
        "gpus": gpus,
        "extension": extension_facts(),
        "disk": disk,
        "plait uses": choices(gpus, disk),
    }


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return str(value)


def machine_facts() -> Facts:
    """Cores that this process may use, memory in GiB, kernel."""
    page_bytes, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory": f"{page_bytes * pages / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def software_facts() -> Facts:
    """Versions of what plait runs on and can use; the compiler that would build the extension."""
    facts: Facts = {}
    for name in ("torch", "triton", "numpy", "rich", "matplotlib", "safetensors", "transformers"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    facts["compiler"] = compiler()
    return facts


def compiler() -> str:
    """First line of the C++ compiler's own description."""
    path = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")
    if path is None:
        return "none (needed to build plait._C)"
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    return said.stdout.splitlines()[0] if said.stdout else f"{path} does not run"


def gpu_facts() -> Facts:
    """GPUs as torch sees them, NVLink between them as the driver's tool says, NCCL."""
    import torch

    if not torch.cuda.is_available():
        built = "torch is built without CUDA" if torch.version.cuda is None else "no driver or no GPU"
        return {"devices": [], "reason": built, "nvlink domain": "none"}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        devices.append(f"{properties.name}, sm_{properties.major}{properties.minor}, {memory}")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return {"devices": devices, "cuda": torch.version.cuda, "nccl": nccl, "nvlink domain": nvlink_domain()}


def nvlink_domain() -> str:
    """The pairs of GPUs that NVLink joins, from `nvidia-smi topo -m` (entries `NV<links>`)."""
    if shutil.which("nvidia-smi") is None:
        return "unknown: no nvidia-smi"
    said = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=30)
    if said.returncode != 0:
        return f"unknown: nvidia-smi topo ended with {said.returncode}"
    return parse_topology(said.stdout)


def parse_topology(text: str) -> str:
    """Text of `nvidia-smi topo -m` -> `GPU0 GPU1 GPU2; GPU3`: sets of GPUs joined by NVLink."""
    links: dict[str, set[str]] = {}
    for line in text.splitlines():
        cells = line.split()
        if not cells or not cells[0].startswith("GPU") or "X" not in cells:
            continue
        peers = {f"GPU{i}" for i, cell in enumerate(cells[1:]) if cell.startswith("NV") and cell[2:].isdigit()}
        links[cells[0]] = peers | {cells[0]}
    domains: list[set[str]] = []
    for joined in links.values():
        touching = [domain for domain in domains if domain & joined]
        domains = [domain for domain in domains if not domain & joined] + [joined.union(*touching)]
    if all(len(domain) == 1 for domain in domains):
        return "none"
    return "; ".join(" ".join(sorted(domain)) for domain in domains)


def extension_facts() -> Facts:
    """Whether plait._C is built, and what it finds of the CUDA driver for pinned memory."""
    try:
        from plait import _C
    except ImportError as error:
        return {"plait._C": f"not built: {error}"}
    driver = _C.CudaDriver.probe()
    pinned = "yes, cuMemHostRegister" if driver["host_register"] else f"no: {driver['reason']}"
    return {"plait._C": "built", "cuda driver": driver["available"] or driver["reason"], "pinned memory": pinned}


def disk_facts(folder: str) -> Facts:
    """Direct I/O and io_uring as the folder's file system and the kernel answer; free space."""
    facts: Facts = {"folder": os.path.abspath(folder)}
    try:
        facts["free"] = f"{shutil.disk_usage(folder).free / 2**30:.1f} GiB"
        from plait import _C

        with tempfile.TemporaryDirectory(prefix=".plait-doctor-", dir=folder) as inside:
            asked = _C.io_facts(inside)
        facts |= {name: value for name, value in asked.items() if value != "" and not name.endswith("_bytes")}
    except (ImportError, OSError) as error:
        facts["reason"] = str(error)
    return facts


def choices(gpus: Facts, disk: Facts) -> Facts:
    """What `plait train` and snapshots would take here, in words."""
    devices = len(gpus["devices"])
    direct = disk.get("direct_io", False)
    return {
        "device": f"cuda, up to {devices} local ranks with a GPU each" if devices else "cpu",
        "backend": "nccl on GPUs, gloo beside it" if devices else "gloo",
        "kernels": "Triton" if devices else "plain torch (the reference of each op)",
        "snapshot writes": "pwrite threads, direct I/O" if direct else "pwrite threads, buffered and synced",
    }
