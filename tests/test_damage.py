"""Every byte flipped and every truncation of a snapshot's files: found out, the file named, the older snapshot taken.

The long test walks all bytes of what is small (manifest, fragments, values, headers) and every truncation of it, and
samples the data densely; the short one takes a few of each. Kinds of snapshots are those of cycles.py.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from plait import _C
from plait.ckpt import Snapshots
from tests.cycles import CYCLES, Cycle, Ios, bits, blank, same
from tests.faults import flip

GOOD, DAMAGED = 1, 2
KINDS = ["eager", "delta", "two ranks", "signed"]


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    """A root with a good snapshot, and a newer one that will be damaged; each file has only one name."""
    cycle = CYCLES[request.param]
    for place, steps in (("good", (GOOD,)), ("new", cycle.steps)):
        cycle.run(tmp_path / place, Ios(_C.PosixIo() for _ in range(cycle.ranks)), steps)
    newest = max((tmp_path / "new").glob("step-*"))
    folder = tmp_path / "good" / newest.name
    shutil.copytree(newest, folder)
    return cycle, tmp_path / "good", folder


def header_bytes(path: Path) -> int:
    """Where the data of a file begins; all of a small file is header."""
    if path.suffix == ".json":
        return path.stat().st_size
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def fall_back(cycle: Cycle, root: Path, folder: Path, name: str, where: object) -> None:
    """The older snapshot is restored whole, and the report says which file of the newer one is damaged."""
    wanted = cycle.state(GOOD, 0)
    if cycle.ranks > 1:  # one process reads what two wrote
        wanted["w"] = bits(GOOD, 4_000).reshape(4, 1_000)
    found = Snapshots(root, read_only=True, key=cycle.key).restore(blank(wanted))
    assert found.step == GOOD, where
    assert same(found.values, wanted), where
    ((skipped, reason),) = found.report.skipped
    assert skipped == folder.name and name in reason, (where, reason)


def every_damage(path: Path, sparse: int) -> list[tuple[str, int]]:
    """(kind, position): all bytes of headers and small files, some of the data; `sparse` takes every so many."""
    size, header = path.stat().st_size, header_bytes(path)
    data = max(1, (size - header) // 500)
    at = [*range(0, header, sparse), *range(header, size, data * sparse), size - 1]
    cuts = [*range(0, header, sparse), *range(header, size, data * sparse), size - 1]
    return [("flip", i) for i in at] + [("cut", i) for i in cuts]


def walk_damage(pair: tuple[Cycle, Path, Path], sparse: int) -> int:
    cycle, root, folder = pair
    count = 0
    for path in sorted(folder.iterdir()):
        original = path.read_bytes()
        for kind, at in every_damage(path, sparse):
            where = (path.name, kind, at)
            if kind == "flip":
                flip(path, at, (at * 5 + 3) % 8)
            else:
                path.write_bytes(original[:at])
            fall_back(cycle, root, folder, path.name, where)
            path.write_bytes(original)
            count += 1
    return count


def test_a_few_damaged_bytes_and_cut_files_are_found_out(pair):
    assert walk_damage(pair, 397) >= 15


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_damaged_byte_and_cut_file_is_found_out(pair, record_property):
    count = walk_damage(pair, 1)
    assert count > 3_000
    record_property("damages", count)
