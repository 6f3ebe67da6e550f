"""Keys, signatures, sealed and compressed blocks: wrong key, changed bytes, swapped places and bombs are named.

Also the promise that nothing is pickled: no file of the package unpickles anything.
"""

from __future__ import annotations

import ast
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.ckpt import SnapshotDamaged, SnapshotError, Snapshots
from plait.ckpt.cli import main
from plait.ckpt.codec import HEAD_BYTES, WIDTHS, Coder, compress, decompress, pack, unpack
from plait.ckpt.crypt import SEAL_BYTES, Key, load_key, opened, sealed
from plait.ckpt.layout import SAFETENSORS_NAMES
from plait.ckpt.manifest import MANIFEST
from tests.faults import empty_state, is_small_state, small_state

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("content", [SECRET, SECRET.hex().encode(), SECRET.hex().encode() + b"\n"])
def test_a_key_file_holds_bytes_or_hex(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    key = load_key(key_file=path)
    assert key is not None and key.id == Key(SECRET).id and SECRET.hex() not in repr(key)


def test_a_key_file_that_others_may_read_is_warned_of(tmp_path, capsys):
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    with Snapshots(tmp_path / "run", key=SECRET) as snapshots:
        snapshots.save(1, small_state(1))
    for mode, warned in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load_key(key_file=path)
        assert [f"'{path}' is open to others" in str(w.message) for w in said] == [True] * warned
        assert main(["verify", str(tmp_path / "run"), "--key-file", str(path)]) == 0
        err = capsys.readouterr().err
        assert (f"(mode {mode:04o}): chmod 600 it" in err) == warned and SECRET.hex() not in err


def test_a_key_may_come_through_a_pipe(tmp_path):
    """--key-file <(command)"""
    read, write = os.pipe()
    os.write(write, SECRET.hex().encode())
    os.close(write)
    key = load_key(key_file=f"/dev/fd/{read}")
    os.close(read)
    assert key is not None and key.id == Key(SECRET).id


def test_a_key_is_taken_as_the_environment_has_it():
    key = load_key(SECRET.hex())
    assert key is not None and key.id == Key(SECRET).id and load_key(key) is key
    with pytest.raises(ValueError, match="must be 32 bytes or 64 hex digits"):
        load_key("no key at all")


def test_a_key_that_is_none_is_refused_without_being_told(tmp_path):
    assert load_key() is None
    for data in (b"", b"short", SECRET + b"x", b"zz" * 32):
        with pytest.raises(ValueError, match="must be 32 bytes or 64 hex digits") as caught:
            load_key(data)
        assert not data or repr(data)[2:-1] not in str(caught.value)
    with pytest.raises(ValueError, match="give one of them"):
        load_key(SECRET, tmp_path / "key")
    with pytest.raises(FileNotFoundError):
        load_key(key_file=tmp_path / "absent")


def test_a_signed_snapshot_is_refused_when_changed_or_signed_by_another(tmp_path):
    with Snapshots(tmp_path, key=SECRET) as snapshots:
        snapshots.save(1, small_state(1))
    found = Snapshots(tmp_path, read_only=True, key=SECRET).restore(empty_state())
    assert is_small_state(found.values, 1)
    with pytest.raises(SnapshotError, match="is signed with the key .* not with this key"):
        Snapshots(tmp_path, read_only=True, key=OTHER).restore(empty_state())
    with pytest.raises(SnapshotError, match="and none is good"):
        Snapshots(tmp_path, read_only=True, key=OTHER).latest()
    assert Snapshots(tmp_path, read_only=True).restore(empty_state()).step == 1  # who has no key checks no signature


def test_a_manifest_that_was_changed_with_its_digest_is_found_by_its_signature(tmp_path):
    """Digests find damage; only the signature finds intent."""
    import hashlib

    with Snapshots(tmp_path, key=SECRET) as snapshots:
        snapshots.save(1, small_state(1))
    path = tmp_path / "step-000000001" / MANIFEST
    line, _, signature = path.read_bytes().split(b"\n")[:3]
    changed = line.replace(b'"epoch":1', b'"epoch":2')
    assert changed != line
    digest = b"sha256:" + hashlib.sha256(changed).hexdigest().encode()
    path.write_bytes(b"\n".join([changed, digest, signature, b""]))
    assert Snapshots(tmp_path, read_only=True).latest() == 1
    with pytest.raises(SnapshotError, match="its signature does not match"):
        Snapshots(tmp_path, read_only=True, key=SECRET).restore(empty_state())
    path.write_bytes(b"\n".join([changed, digest, b""]))
    with pytest.raises(SnapshotError, match="is not signed, and a key was given"):
        Snapshots(tmp_path, read_only=True, key=SECRET).restore(empty_state())


def test_a_file_of_another_signed_snapshot_is_refused(tmp_path):
    with Snapshots(tmp_path, key=SECRET) as snapshots:
        for step in (1, 2):
            snapshots.save(step, small_state(step)).wait()
    for name in ("r00000.json", "objects.json"):
        one, two = (tmp_path / f"step-00000000{step}" / name for step in (1, 2))
        kept = two.read_bytes()
        two.write_bytes(one.read_bytes().ljust(len(kept))[: len(kept)])
        with pytest.raises(SnapshotError, match=name):
            Snapshots(tmp_path, read_only=True, key=SECRET).restore(empty_state(), step=2)
        two.write_bytes(kept)
    shutil.copy(tmp_path / "step-000000001" / MANIFEST, tmp_path / "step-000000002" / MANIFEST)
    with pytest.raises(SnapshotError, match="is of step 1"):
        Snapshots(tmp_path, read_only=True, key=SECRET).restore(empty_state(), step=2)


def test_a_sealed_block_opens_at_its_place_alone():
    cipher = Key(SECRET).cipher("1-ab-1")
    block = cipher.seal("r00000.safetensors/0", b"content")
    assert len(block) == 7 + SEAL_BYTES and b"content" not in block
    assert cipher.open("r00000.safetensors/0", block, "here") == b"content"
    for other, place in ((Key(SECRET).cipher("2-ab-2"), "r00000.safetensors/0"), (cipher, "r00000.safetensors/1")):
        with pytest.raises(SnapshotDamaged, match="here: cannot be decrypted"):
            other.open(place, block, "here")
    with pytest.raises(SnapshotDamaged, match="is encrypted with the key"):
        Key(OTHER).cipher("1-ab-1").open("r00000.safetensors/0", block, "here")
    for at in range(len(block)):
        bent = block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]
        with pytest.raises(SnapshotDamaged, match="here"):
            cipher.open("r00000.safetensors/0", bent, "here")
        with pytest.raises(SnapshotDamaged, match="here"):
            cipher.open("r00000.safetensors/0", block[:at], "here")
    assert cipher.seal("x", b"same") != cipher.seal("x", b"same")  # a nonce of its own each time


def test_an_encrypted_small_file_without_a_key_is_named():
    cipher = Key(SECRET).cipher("1-ab-1")
    data = sealed("objects.json", b"{}", cipher)
    assert (
        opened("objects.json", data, cipher, "here") == b"{}" and opened("objects.json", b"{}", None, "here") == b"{}"
    )
    with pytest.raises(SnapshotDamaged, match="here: is encrypted, and no key was given"):
        opened("objects.json", data, None, "here")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(sorted(WIDTHS)), st.booleans())
def test_any_bytes_of_any_width_come_back(data, width, sealed_too):
    raw = memoryview(bytearray(data))
    coder = Coder(1, Key(SECRET).cipher("a") if sealed_too else None)
    assert bytes(coder.decode("p", coder.encode("p", raw, width), len(data), "here")) == data


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_NAMES, key=str), ids=str)
def test_every_dtype_and_its_odd_values_come_back(dtype):
    """NaN payloads, infinities and subnormals are bytes like any other."""
    raw = torch.randint(0, 256, (4096 * dtype.itemsize,), dtype=torch.uint8)
    data = bytearray(raw.tolist())
    for width in WIDTHS:
        assert decompress(compress(memoryview(data), width), len(data), "here") == data


def test_weights_shrink():
    values = bytearray(4 << 20)
    torch.frombuffer(values, dtype=torch.bfloat16).copy_(torch.randn(2 << 20) * 0.02)
    assert len(compress(memoryview(values), 2)) < 0.8 * len(values)
    assert len(compress(memoryview(bytearray(os.urandom(1 << 20))), 4)) < (1 << 20) + 100


def test_a_bomb_is_refused_before_it_is_expanded():
    """A frame that says another size than the block has, or none, is never expanded."""
    import zstandard

    zeros = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    for frame in (zeros, unsized):
        bomb = bytes([1]) + len(frame).to_bytes(4, "little") + frame
        with pytest.raises(SnapshotDamaged, match="where 1000000 belong"):
            decompress(bomb, 1_000_000, "here")
    with pytest.raises(SnapshotDamaged, match="does not have the sizes"):
        decompress(bytes([8]) + b"\xff" * 32, 4 << 20, "here")


def test_every_change_of_a_coded_block_is_an_error_or_the_same_bytes():
    """Sizes are checked before use; what still passes is caught by the block's CRC32C, which is not here."""
    values = bytearray(8192)
    torch.frombuffer(values, dtype=torch.float32).copy_(torch.randn(2048))
    coded = compress(memoryview(values), 4)
    refused = 0
    for at in range(0, len(coded), 7):
        bent = coded[:at] + bytes([coded[at] ^ 16]) + coded[at + 1 :]
        try:
            assert len(decompress(bent, len(values), "here")) == len(values)
        except SnapshotDamaged:
            refused += 1
    assert refused > 0
    for size in range(0, len(coded), 101):
        with pytest.raises(SnapshotDamaged):
            decompress(coded[:size], len(values), "here")


def test_a_part_whose_header_lies_is_refused():
    part = pack(8, [b"abc", b"", b"defg"])
    assert unpack(part[:HEAD_BYTES], len(part), 8, [3, 1, 4], "here") == [
        (HEAD_BYTES, HEAD_BYTES + 3),
        (HEAD_BYTES + 3, HEAD_BYTES + 3),
        (HEAD_BYTES + 3, HEAD_BYTES + 7),
    ]
    lies = (
        part.replace(b"[0,3]", b"[1,3]"),
        part.replace(b"[3,7]", b"[3,9]"),
        part.replace(b"[3,7]", b"[3,-]"),
        part.replace(b"block.00000009", b"block.00000007"),
        part.replace(b"[0,3]", b"[0,9999999999]"),
        b"\xff" * 8 + part[8:],
        b"\0" * len(part),
        b"{}",
    )
    for lie in lies:
        with pytest.raises(SnapshotDamaged, match="here"):
            unpack(lie[:HEAD_BYTES], len(lie), 8, [3, 1, 4], "here")
    with pytest.raises(SnapshotDamaged, match="here"):
        unpack(part[:HEAD_BYTES], len(part), 9, [3, 1, 4], "here")


def test_nothing_is_pickled():
    """No file of plait imports a module that runs code on loading; torch.load is called with weights_only alone."""
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    files = [p for folder in ("ckpt", "runtime") for p in sorted((ROOT / folder).glob("*.py"))]
    assert len(files) > 30

    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            else:
                names = set()
            assert not names & banned, f"{path}:{node.lineno} imports {names & banned}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert keywords.get("weights_only") == "True", f"{path}:{node.lineno} loads without weights_only"
