"""Snapshots to and from safetensors, Hugging Face folders and torch.save: bit for bit, and what is refused."""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import zipfile
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from plait.ckpt import PerRank, Snapshots
from plait.ckpt.cli import main
from plait.ckpt.errors import SnapshotError
from plait.ckpt.interop_safetensors import import_safetensors
from plait.ckpt.tier_reader import open_folder
from tests.faults import in_child


def tensors() -> dict[str, torch.Tensor]:
    """One of each kind that a format may get wrong; NaNs with a payload and -0.0 are among the bits."""
    bits = torch.arange(0, 256, dtype=torch.int32).to(torch.uint8)
    tied = torch.arange(12.0).reshape(3, 4)
    return {
        "bf16": bits.view(torch.bfloat16).reshape(8, 16),
        "fp8": bits.view(torch.float8_e4m3fn).reshape(2, 128),
        "fp8_fnuz": bits.view(torch.float8_e4m3fnuz),  # safetensors has no such dtype
        "c128": torch.tensor([1 - 0.0j, complex("nan")], dtype=torch.complex128),
        "int64": torch.tensor([2**62 + 1, -(2**63)]),
        "bool": torch.tensor([[True], [False]]),
        "scalar": torch.tensor(-0.0, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "strided": torch.arange(20.0).reshape(4, 5).t()[1:3],
        "head.weight": tied,
        "embed.weight": tied,
    }


STATE = {"exp_avg": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(7.0)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


@pytest.fixture
def run(tmp_path):
    root = tmp_path / "run"
    values = {"lr": 0.1, "note": b"\0x", "odd": (1, 2.5j), "step": 5, "rng": PerRank([1, 2])}
    with Snapshots(root) as snapshots:
        optimizer = {"state": {0: STATE, 1: STATE["step"].clone()}}
        snapshots.save(5, {"model": tensors(), "optimizer": optimizer, **values}).wait()
    return root


def answer(capsys, *arguments):
    code = main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out or err)


def exported(capsys, run, target, *options):
    code, report = answer(capsys, "export", run, target, *options)
    assert code == 0, report
    return report


def imported(capsys, source, root, *options):
    code, report = answer(capsys, "import", source, root, *options)
    assert code == 0, report
    return report


def assert_same_model(root, prefix="model/"):
    """The snapshot holds `tensors()`, tied as they were."""
    (folder,) = root.glob("step-*")
    reader = open_folder(folder)
    for name, tensor in tensors().items():
        assert same_bits(reader.read_full(prefix + name), tensor), name
    assert reader.table.entry(f"{prefix}head.weight") is reader.table.entry(f"{prefix}embed.weight")
    return reader


@pytest.mark.parametrize("target", ["all.safetensors", "all.pt", "folder"])
def test_the_model_makes_a_round_trip_bit_for_bit(run, tmp_path, capsys, target):
    report = exported(capsys, run, tmp_path / target, "--select", "model", "--strip-prefix")
    assert set(report["tensors"]) == set(tensors()) and report["aliases"] == {"head.weight": "embed.weight"}
    imported(capsys, tmp_path / target, tmp_path / "back", "--prefix", "model", "--step", "9")
    assert_same_model(tmp_path / "back")
    assert [p.name for p in (tmp_path / "back").glob("step-*")] == ["step-000000009"]


def test_shards_have_an_index_as_hugging_face_has_it(run, tmp_path, capsys, monkeypatch):
    from plait.ckpt import cli_convert, interop_safetensors

    monkeypatch.setattr(
        cli_convert, "export_folder", lambda chosen, path, _: interop_safetensors.export_folder(chosen, path, 600)
    )
    exported(capsys, run, tmp_path / "hf", "--format", "hf", "--select", "model", "--strip-prefix")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == set(tensors()) and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors().values())
    imported(capsys, tmp_path / "hf", tmp_path / "back", "--prefix", "model")
    assert_same_model(tmp_path / "back")
    (tmp_path / "hf" / files[0]).unlink()
    code, report = answer(capsys, "import", tmp_path / "hf", tmp_path / "again")
    assert code == 2 and files[0] in report["error"] and not (tmp_path / "again").exists()


def test_the_safetensors_library_reads_what_was_exported(run, tmp_path, capsys):
    from safetensors import safe_open

    exported(capsys, run, tmp_path / "a.safetensors", "--select", "model", "--strip-prefix")
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt" and set(file.keys()) == set(tensors())
        for name, tensor in tensors().items():
            if name not in ("c128", "fp8_fnuz"):
                assert same_bits(file.get_tensor(name), tensor), name
        assert file.get_tensor("c128").shape == (2, 16) and file.get_tensor("fp8_fnuz").shape == (256, 1)


def test_what_the_safetensors_library_writes_is_imported(tmp_path, capsys):
    from safetensors.torch import save_file

    plain = {n: t.clone().contiguous() for n, t in tensors().items() if n not in ("c128", "fp8_fnuz", "embed.weight")}
    save_file(plain, tmp_path / "m.safetensors")
    imported(capsys, tmp_path / "m.safetensors", tmp_path / "run", "--skip", "bool")
    (folder,) = (tmp_path / "run").glob("step-*")
    reader = open_folder(folder)
    assert reader.table.names == plain.keys() - {"bool"}
    assert all(same_bits(reader.read_full(name), plain[name]) for name in reader.table.names)


def test_torch_save_holds_the_whole_tree_and_loads_with_weights_only(run, tmp_path, capsys):
    report = exported(capsys, run, tmp_path / "all.pt")
    assert report["left_out"] == ["rng: each rank has a value of its own"]
    tree = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (tree["lr"], tree["note"], tree["odd"], tree["step"]) == (0.1, b"\0x", (1, 2.5j), 5)
    assert same_bits(tree["optimizer"]["state"][0]["exp_avg"], STATE["exp_avg"])
    assert tree["model"]["head.weight"].data_ptr() == tree["model"]["embed.weight"].data_ptr()
    imported(capsys, tmp_path / "all.pt", tmp_path / "back")
    assert (tmp_path / "back" / "step-000000005").is_dir()  # the step that the file names
    reader = assert_same_model(tmp_path / "back")
    assert reader.table.names == open_folder(run / "step-000000005").table.names
    assert same_bits(reader.read_full("optimizer/state/1"), STATE["step"])


class Harmful:
    def __reduce__(self):
        return (print, ("run by the unpickler",))


def test_nothing_that_could_run_code_is_unpickled(tmp_path, capsys):
    torch.save({"w": torch.ones(2), "args": Harmful()}, tmp_path / "bad.pt")
    code = main(["import", str(tmp_path / "bad.pt"), str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert code == 2 and "run by" not in out + err and not (tmp_path / "run").exists()
    assert f"'{tmp_path / 'bad.pt'}' has print at 'args', which" in err and "weights_only" in err
    code, report = answer(capsys, "import", tmp_path / "bad.pt", tmp_path / "run", "--skip", "args")
    assert (code, report["left_out"]) == (0, ["args: left out by --skip (print)"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (argparse.Namespace(lr=1), "has argparse.Namespace at 'of/them', which"),
        ([1, (Path("/x"),)], "has pathlib.PosixPath at 'of/them', which"),
        (random.Random(0), "at 'of/them', which"),
    ],
)
def test_an_object_that_is_refused_is_named_by_its_path_and_can_be_left_out(tmp_path, capsys, value, said):
    """One object anywhere kept a whole torch.save file out, whatever --skip said."""
    torch.save({"w": torch.ones(2), "of": {"them": value}}, tmp_path / "a.pt")
    code, report = answer(capsys, "import", tmp_path / "a.pt", tmp_path / "run")
    assert code == 2 and said in report["error"] and "--skip 'of/them'" in report["error"]
    imported(capsys, tmp_path / "a.pt", tmp_path / "run", "--skip", "of/*")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    code, report = answer(capsys, "import", tmp_path / "module.pt", tmp_path / "run")
    assert code == 2 and report["error"].endswith("save its state_dict()")


def test_a_broken_file_of_torch_save_is_damage(run, tmp_path, capsys):
    exported(capsys, run, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for broken in (b"", data[:100], data[: len(data) // 2], b"x" * 1000):
        (tmp_path / "b.pt").write_bytes(broken)
        code, report = answer(capsys, "import", tmp_path / "b.pt", tmp_path / "back")
        assert code == 1 and str(tmp_path / "b.pt") in report["error"]
        assert "Re-running" not in report["error"], "torch's advice to run the code of a file that it refuses"
    assert not (tmp_path / "back").exists()


def test_a_tensor_that_repeats_its_bytes_without_end_is_refused(tmp_path, capsys):
    """A file of 1 KiB made an import take as much memory as it claimed."""
    torch.save({"few": torch.ones(1).expand(9), "of": [torch.ones(1).expand(1 << 40)]}, tmp_path / "a.pt")
    code, report = answer(capsys, "import", tmp_path / "a.pt", tmp_path / "run")
    assert code == 1 and "tensor 'of/0' of shape (1099511627776,) repeats its bytes" in report["error"]
    assert not (tmp_path / "run").exists()
    torch.save({"few": torch.ones(1).expand(9)}, tmp_path / "a.pt")
    imported(capsys, tmp_path / "a.pt", tmp_path / "run")


def test_a_compressed_archive_is_not_expanded(tmp_path, capsys):
    """torch.load makes 1 GiB of 1 MiB."""
    torch.save({"w": torch.zeros(1 << 16)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for record in plain.infolist():
            out.writestr(record.filename, plain.read(record))
    code, report = answer(capsys, "import", tmp_path / "b.pt", tmp_path / "run")
    assert code == 1 and f"'{tmp_path / 'b.pt'}' has records of " in report["error"]


def test_an_import_of_nothing_is_no_snapshot(tmp_path, capsys):
    torch.save({"a": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    code, report = answer(capsys, "import", tmp_path / "a.pt", tmp_path / "back", "--skip", "*")
    assert code == 2 and report["error"] == "nothing is left to import" and not (tmp_path / "back").exists()


def test_what_a_snapshot_cannot_hold_is_refused_by_its_path(tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(2)}, "seen": {1, 2}}, tmp_path / "a.pt")
    code, report = answer(capsys, "import", tmp_path / "a.pt", tmp_path / "run")
    assert code == 2 and "state['seen'] is a set" in report["error"]
    imported(capsys, tmp_path / "a.pt", tmp_path / "run", "--skip", "seen")


def header(entries: dict, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "an empty file": (b"", "header of 0 bytes"),
    "a header longer than the file": (struct.pack("<Q", 1 << 60) + b"{}", "header of"),
    "no JSON": (struct.pack("<Q", 3) + b"{]}", "is not JSON"),
    "a tensor twice": (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "is not JSON"),
    "data that ends early": (header({"w": F32}, b"1234567"), "its header says"),
    "bytes that no tensor has": (header({"w": F32}, b"123456789"), "its header says"),
    "a shape of other bytes": (header({"w": {**F32, "shape": [1 << 40]}}, b"12345678"), "tensor 'w': 8 bytes for"),
    "an empty shape that cannot be": (header({"w": {**F32, "shape": [0, 1 << 62, 2]}}), "no tensor can have"),
    "an empty shape beyond 63 bits": (header({"w": {**F32, "shape": [1 << 63, 0]}}), "no tensor can have"),
    "an unknown dtype": (header({"w": {**F32, "dtype": "F7"}}, b"12345678"), "tensor 'w': dtype 'F7'"),
    "two tensors in one place": (header({"w": F32, "v": F32}, b"12345678"), "begins at byte 0"),
    "a negative size": (header({"w": {**F32, "shape": [-2]}}, b"12345678"), "tensor 'w'"),
    "no numbers": (header({"w": {**F32, "data_offsets": "ab"}}, b"12345678"), "tensor 'w'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_wrong_safetensors_header_is_refused_before_memory_is_taken(tmp_path, capsys, case):
    data, message = BROKEN[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    code, report = answer(capsys, "import", path, tmp_path / "run")
    assert code == 1 and f"'{path}'" in report["error"] and message in report["error"]
    assert not (tmp_path / "run").exists()


def test_an_index_cannot_point_out_of_its_folder(tmp_path, capsys):
    index = {"weight_map": {"w": "../m.safetensors"}}
    (tmp_path / "hf").mkdir()
    (tmp_path / "m.safetensors").write_bytes(header({"w": F32}, b"12345678"))
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    code, report = answer(capsys, "import", tmp_path / "hf", tmp_path / "run")
    assert code == 1 and "not a file name" in report["error"]


def test_a_name_that_is_value_and_folder_is_refused(tmp_path, capsys):
    both = {"a": {**F32, "data_offsets": [0, 8]}, "a/b": {**F32, "data_offsets": [8, 16]}}
    (tmp_path / "m.safetensors").write_bytes(header(both, bytes(16)))
    code, report = answer(capsys, "import", tmp_path / "m.safetensors", tmp_path / "run")
    assert code == 2 and "'a' is a value and has parts" in report["error"]


def test_a_failed_export_leaves_nothing_that_looks_valid(run, tmp_path, capsys):
    path = run / "step-000000005" / "r00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for target in ("a.safetensors", "a.pt", "folder"):
        code, report = answer(capsys, "export", run, tmp_path / target)
        assert code == 1 and "block 0" in report["error"]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_keys_with_slashes_are_no_folders(tmp_path, capsys, kind):
    """Once {"a/b": t} came out of torch.save's file as {"a": {"b": t}}."""
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, {"m": {"a/b@c~": torch.ones(2), "a": torch.zeros(1)}, "~1": {"a/b": 3}})
    report = exported(capsys, tmp_path / "run", tmp_path / "out", "--format", kind)
    assert report["tensors"] == ["m/a", "m/a/b@c~"]
    if kind == "torch":
        tree = torch.load(tmp_path / "out", weights_only=True)
        assert tree["m"].keys() == {"a/b@c~", "a"} and tree["~1"] == {"a/b": 3}
    if kind == "safetensors":  # has names and no keys: what its slashes mean cannot be told
        code, answered = answer(capsys, "import", tmp_path / "out", tmp_path / "back", "--format", kind)
        assert code == 2 and "'a' is a value and has parts" in answered["error"]
        return
    imported(capsys, tmp_path / "out", tmp_path / "back", "--format", kind)
    (folder,) = (tmp_path / "back").glob("step-*")
    assert open_folder(folder).table.names == {"m/a~1b~2c~0", "m/a"} and set(open_folder(folder).values) == {
        "~01/a~1b"
    }


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors", "hf"])
def test_a_full_disk_is_an_error_of_the_machine_that_names_the_target(tmp_path, kind):
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, {"w": torch.ones(100_000)})
    argv = [str(v) for v in ("export", tmp_path / "run", tmp_path / "out", "--format", kind)]

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        with open(tmp_path / "said", "w") as said, redirect_stderr(said):
            code = main(argv)
        (tmp_path / "said").write_text(f"{code} {(tmp_path / 'said').read_text()}")

    assert in_child(work) == 0
    text = (tmp_path / "said").read_text()
    assert text.startswith("1 ") and f"write: File too large: '{tmp_path}/" in text and "out" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "said"]


def test_usage_errors_of_export_and_import_are_2(run, tmp_path, capsys):
    assert answer(capsys, "export", run, tmp_path / "a", "--select", "modle")[1]["error"].endswith(
        "it has ['lr', 'model', 'note', 'odd', 'optimizer', 'step']"
    )
    (tmp_path / "there.pt").write_bytes(b"")
    for arguments in (
        ("export", run, tmp_path / "there.pt"),
        ("export", run, tmp_path / "no" / "a.pt"),
        ("export", run, tmp_path / "a.safetensors", "--select", "lr"),
        ("export", run, tmp_path / "a", "--shard-mib", "0"),
        ("import", tmp_path / "nowhere", tmp_path / "new"),
        ("import", tmp_path, tmp_path / "new"),
        ("import", tmp_path / "there.pt", tmp_path / "new", "--step", "-1"),
    ):
        code, report = answer(capsys, *arguments)
        assert code == 2 and report["error"], arguments
    assert main(["import", "a", "b", "--rule", "w"]) == 2


def test_an_import_needs_the_lock_and_a_free_step(run, tmp_path, capsys):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with Snapshots(run):
        assert answer(capsys, "import", tmp_path / "a.pt", run, "--step", "8")[0] == 3
    code, report = answer(capsys, "import", tmp_path / "a.pt", run, "--step", "5")
    assert code == 2 and "step 5 already" in report["error"]


def test_readinto_of_an_empty_tensor(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(header({"e": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}))
    assert import_safetensors(tmp_path / "m.safetensors").state["e"].shape == (0,)


def test_a_flipped_byte_of_a_safetensors_header_is_damage_or_another_name(tmp_path):
    """The format has no checksum: found is what contradicts itself, and nothing else comes out than damage."""
    path = tmp_path / "m.safetensors"
    entries = {"w": {**F32, "shape": [1, 2]}, "v": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]}}
    data = header(entries, bytes(14))
    refused = 0
    for at in range(len(data) - 14):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = import_safetensors(path).state
            except SnapshotError:
                refused += 1
                continue
            assert sum(t.numel() * t.element_size() for t in found.values()) == 14, (at, bit)
    assert refused > 6 * (len(data) - 14)
