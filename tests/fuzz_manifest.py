"""A fuzzer of what reads a snapshot: manifest, fragments, values, data files, coded parts.

`python -m tests.fuzz_manifest --seconds 3600 --seed 1`. Mutations of bytes, of sizes, and of JSON values with all
digests made right again, so that they reach what lies behind the checksums. For each input: only SnapshotErrors, no
crash, no hang (LIMIT_S), no more memory than MEMORY_BYTES above the start; and bytes changed without right digests
are found out, or what is restored has every bit.

`--guided`: libFuzzer (through atheris, where it is installed) chooses the mutations and keeps the choices that reach
new branches of plait.ckpt. Else a seeded generator does.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.util
import inspect
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import FunctionType
from typing import Any, NamedTuple

import torch

from plait import _C
from plait.ckpt import SnapshotError, Snapshots, Tier
from plait.ckpt.crypt import load_key
from plait.ckpt.tier_reader import open_folder
from tests import cycles

LIMIT_S = 20  # of processor time for one input: a process that is stopped for a while is none that hangs
MEMORY_BYTES = 256 << 20  # the inputs have about 50 KB
Files = dict[str, bytes]

_NUMBERS: list[Any] = [0, 1, -1, 2, 7, 511, 4096, 4097, *(1 << n for n in (22, 26, 31, 40, 63, 64)), (1 << 32) - 1]
_NUMBERS += [(1 << 63) - 1, 10**30, 0.5, 1e308, -0.0]
_TEXTS = ["", "../../x", "/etc/passwd", "r00000.json", "r00000.safetensors", "r00001.s000000001.safetensors"]
_TEXTS += [
    "\x00",
    "BF16",
    "U8",
    "F32",
    "F8_E4M3",
    "F4",
    "float32",
    "load",
    "bool",
    "complex128",
    "float4_e2m1fn_x2",
    "zstd",
]
_TEXTS += ["zstd", "float4_e2m1fn_x2"]
_TEXTS += ["$tensor", "$tuple", "$dict", "$counter", "aes-256-gcm", "nan:7ff8000000000000", "0x1p+99999", "a" * 5000]
_TAGS = [
    {"$tensor": {"dtype": "float32", "shape": [1 << 40], "data": ""}},
    {"$tensor": {"dtype": "int64", "shape": [-1, 0], "data": ""}},
    {"$tensor": {"dtype": "float32", "shape": [True], "data": "AAAAAA=="}},
    {"$dict": [[[], 1]]},
    {"$dict": [[{"$tuple": [[]]}, 1]]},
    {"$float": "0x1p+99999"},
    {"$float": 3},
    {"$bytes": "\u00e9"},
    {"$counter": 5},
    {"$complex": ["nan:", "0x0p+0"]},
]


class Seed(NamedTuple):
    """A good snapshot to start from."""

    name: str
    folder: str
    files: Files
    cycle: cycles.Cycle
    key: bytes | None


def make_seeds(root: Path) -> list[Seed]:
    """Snapshots of all kinds: whole, linked to older files, of two ranks, signed, compressed, encrypted."""
    seeds = []
    for name in ("eager", "delta", "two ranks", "signed"):
        cycle = cycles.CYCLES[name]
        cycles.make_old(cycle, root / name)
        cycle.run(root / name, cycles.Ios(_C.PosixIo() for _ in range(cycle.ranks)), cycle.steps)
        newest = max((root / name).glob("step-*"))
        seeds.append(_seed(name, newest, cycle, cycle.key))
    for name, tier in (("zstd", {"compress": True}), ("sealed", {"compress": 3, "encrypt": True})):
        cycle = cycles.CYCLES["signed" if "encrypt" in tier else "eager"]
        tiers = (Tier(root / f"{name}-copies", **tier),)
        with Snapshots(root / name, tiers=tiers, key=cycle.key) as snapshots:
            snapshots.save(2, cycle.state(2, 0)).wait("remote")
        seeds.append(_seed(name, max((root / f"{name}-copies").glob("step-*")), cycle, cycle.key))
    return seeds


def _seed(name: str, folder: Path, cycle: cycles.Cycle, key: bytes | None) -> Seed:
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return Seed(name, folder.name, files, cycle, key)


def mutate(seed: Seed, chance: Random) -> tuple[Files, bool]:
    """Returns changed files, and whether digests were made right again."""
    files = dict(seed.files)
    names = sorted(files)
    if chance.random() < 0.35 or seed.name == "sealed":
        for _ in range(chance.choice([1, 1, 2, 5])):
            name = chance.choice(names)
            files[name] = _bytes_changed(files[name], chance)
        if chance.random() < 0.05:
            del files[chance.choice(names)]
        return files, False
    name = chance.choice([n for n in names if n.endswith(".json")] + ["MANIFEST.json"])
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        line, _, _ = files[name].partition(b"\n")
        try:
            files[name] = _with_digest(_json_changed(line, chance))
        except (ValueError, RecursionError):
            break
    if chance.random() < 0.2:
        other = chance.choice([n for n in names if n.endswith(".safetensors")])
        files[other] = _bytes_changed(files[other], chance)
    return _made_right(files, chance), True


def _bytes_changed(data: bytes, chance: Random) -> bytes:
    out = bytearray(data)
    kind = chance.randrange(6)
    at = chance.randrange(len(out) + 1)
    if kind == 0 and at < len(out):
        out[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        out[at : at + chance.choice([1, 8, 100])] = bytes(chance.randrange(256) for _ in range(chance.choice([1, 8])))
    elif kind == 3:
        out += bytes(chance.choice([1, 4096]))
    elif kind == 4:
        del out[at : at + chance.choice([1, 8, 4096])]
    else:
        at = min(at, max(0, len(out) - 8))
        out[at : at + 8] = struct.pack("<Q", chance.choice([0, 1 << 63, 1 << 40, len(out), (1 << 64) - 1]))
    return bytes(out)


def _json_changed(line: bytes, chance: Random) -> bytes:
    raw = json.loads(line)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
            places.append((value, key))
            visit(value[key])

    visit(raw)
    if not places:
        return b"{}"
    inside, key = chance.choice(places)
    kind = chance.randrange(10)
    if kind == 0:
        del inside[key]
    elif kind == 1:
        other, name = chance.choice(places)
        inside[key] = copy.deepcopy(other[name])
    elif kind == 2 and isinstance(inside, list):
        inside.insert(key, copy.deepcopy(inside[key]))
    elif kind == 3 and isinstance(inside, list):
        other_key = chance.randrange(len(inside))
        inside[key], inside[other_key] = inside[other_key], inside[key]
    elif kind == 4 and isinstance(inside, dict):
        inside[chance.choice(_TEXTS)] = inside.pop(key)
    elif kind in (5, 6) and type(inside[key]) is int:
        value = inside[key]
        inside[key] = chance.choice([value + 1, value - 1, value * 2, -value, value ^ (1 << chance.randrange(64))])
    elif kind == 7:
        inside[key] = chance.choice([None, True, [], {}, [[]], {"": 0}, *copy.deepcopy(_TAGS)])
    elif kind == 8 and chance.random() < 0.1:
        text = json.dumps(raw, separators=(",", ":"))
        deep = chance.choice([50, 900, 5000, 200_000])
        return text.replace(":", ":" + "[" * deep + "]" * deep + ',"x":', 1).encode()
    else:
        texts = type(inside[key]) is str or chance.random() < 0.2
        inside[key] = chance.choice(_TEXTS if texts else _NUMBERS)
    return json.dumps(raw, separators=(",", ":")).encode()


def _with_digest(line: bytes) -> bytes:
    return line + b"\nsha256:" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _made_right(files: Files, chance: Random) -> Files:
    """Sizes and digests in the manifest as the files are now; mostly, so that some checks of sizes are met too."""
    line = files["MANIFEST.json"].partition(b"\n")[0]
    try:
        manifest = json.loads(line)
        for entry in manifest["files"]:
            data = files.get(entry["name"])
            if data is None or chance.random() < 0.02:
                continue
            if entry["name"].endswith(".json") or ".p0" in entry["name"]:
                entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
                continue
            fragment = json.loads(files[entry["name"][:6] + ".json"].partition(b"\n")[0])
            for file in [fragment["file"], *fragment.get("bases", ())]:
                if file["name"] == entry["name"]:
                    crcs = struct.pack(f"<{len(file['crc32c'])}I", *file["crc32c"])
                    entry["sha256"], entry["bytes"] = hashlib.sha256(crcs).hexdigest(), file["bytes"]
        files["MANIFEST.json"] = _with_digest(json.dumps(manifest, separators=(",", ":")).encode())
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error, RecursionError):
        pass  # the structure itself is gone: as it is
    return files


def try_input(seed: Seed, files: Files, is_right: bool, folder: Path) -> str:
    """Writes the files, opens, verifies and restores them; returns what came of it. Raises what is a finding."""
    shutil.rmtree(folder, ignore_errors=True)
    where = folder / seed.folder
    where.mkdir(parents=True)
    for name, data in files.items():
        (where / name).write_bytes(data)
    key = None if is_right else seed.key  # a signature cannot be made right
    outcome = "refused"
    try:
        reader = open_folder(where, key=load_key(key) if key else None)
        for rank in range(min(reader.manifest.world_size, 4)):
            reader.verify(rank)
        for name in sorted(reader.table.names)[:20]:
            reader.read_full(name)
        assert reader.values is not None
        outcome = "read"
    except SnapshotError:
        pass
    state = cycles.blank(seed.cycle.state(0, 0))
    try:
        found = Snapshots(folder, read_only=True, key=key).restore(
            state, allow_missing=("*",), allow_unexpected=("*",), cast=True
        )
    except SnapshotError:
        return outcome
    if not is_right:
        wanted = seed.cycle.state(found.step, 0)
        assert cycles.same(found.values, wanted), "changed bytes were restored in silence"
    return "restored"


def run(seconds: float, seed_number: int, most: int, findings: Path | None) -> Counter[str]:
    """Fuzzes until the time is up or `most` inputs were tried; returns outcomes by count. Raises the first finding,
    or with `findings` keeps all there."""
    outcomes: Counter[str] = Counter()
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="plait-fuzz-", dir=place) as text:
        seeds = make_seeds(Path(text))
        number, end = 0, time.monotonic() + seconds
        while time.monotonic() < end and number < most:
            number += 1
            chance = Random(f"{seed_number} {number}")
            seed = chance.choice(seeds)
            files, is_right = mutate(seed, chance)
            try:
                outcome = _limited(partial(try_input, seed, files, is_right, Path(text) / "input"))
            except Exception as error:
                if findings is None:
                    raise AssertionError(f"input {number} of seed {seed_number} ({seed.name})") from error
                _keep(findings, f"{seed_number}-{number}-{seed.name}", files, error)
                outcome = f"FINDING {type(error).__name__}"
            outcomes[outcome] += 1
    return outcomes


class Choices(Random):
    """Random choices read from bytes, so that who chooses the bytes chooses the mutation; zeros behind their end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int, /) -> int:
        num_bytes = (k + 7) // 8
        taken = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return int.from_bytes(taken, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)


def run_guided(seconds: float, seed_number: int, findings: Path) -> None:
    """Fuzzes with libFuzzer; says what came of it and ends the process when the time is up, or at the first finding,
    whose bytes are then a file in `findings`."""
    atheris = importlib.import_module("atheris")
    for function in _functions_of("plait.ckpt"):
        atheris.instrument_func(function)
    findings.mkdir(parents=True, exist_ok=True)
    outcomes: Counter[str] = Counter()
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="plait-fuzz-", dir=place))
    seeds, began = make_seeds(folder), time.monotonic()

    def try_bytes(data: bytes) -> None:
        chance = Choices(data)
        seed = chance.choice(seeds)
        files, is_right = mutate(seed, chance)
        outcomes[_limited(partial(try_input, seed, files, is_right, folder / "input"))] += 1
        if time.monotonic() > began + seconds:
            shutil.rmtree(folder)
            _report(outcomes, began)
            os._exit(0)

    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(400):  # enough bytes for some mutations each
        (corpus / f"{number}").write_bytes(Random(f"{seed_number} {number}").randbytes(256))
    limits = ["-timeout=3600", "-max_len=1024", f"-seed={seed_number}", f"-artifact_prefix={findings}/"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], try_bytes)
    atheris.Fuzz()


def _functions_of(package: str) -> list[FunctionType]:
    """Functions and methods of all loaded modules of a package."""
    found: dict[int, FunctionType] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(package + "."):
            owners = [module, *(value for value in vars(module).values() if inspect.isclass(value))]
            for value in (value for owner in owners for value in vars(owner).values()):
                if isinstance(value, FunctionType) and value.__module__ == name:
                    found[id(value)] = value
    return list(found.values())


def _report(outcomes: Counter[str], began: float) -> None:
    said = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    took = f"{time.monotonic() - began:.0f} s ({time.process_time():.0f} s of processor time)"
    print(f"{sum(outcomes.values())} inputs in {took}: {said}", flush=True)


def _limited(call: Callable[[], str]) -> str:
    """Calls with a limit of processor time."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took longer than {LIMIT_S} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _keep(findings: Path, name: str, files: Files, error: BaseException) -> None:
    folder = findings / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
    (folder / "error.txt").write_text("".join(traceback.format_exception(error)))


def limit_memory() -> None:
    """Lets this process take MEMORY_BYTES more than it has: a larger allocation is a MemoryError, and a finding."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, resource.RLIM_INFINITY))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=1 << 62)
    parser.add_argument("--findings", type=Path, help="folder for inputs that found something; without: stop at one")
    parser.add_argument("--guided", action="store_true", help="by coverage, where atheris is installed")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    run(0.0, 0, 0, None)  # loads all that is loaded late
    limit_memory()
    if options.guided and importlib.util.find_spec("atheris") is not None:
        run_guided(options.seconds, options.seed, options.findings or Path("build/fuzz"))
    began = time.monotonic()
    outcomes = run(options.seconds, options.seed, options.inputs, options.findings)
    _report(outcomes, began)
    return any(name.startswith("FINDING") for name in outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
