"""One secret key: signatures of manifests (HMAC-SHA256) and sealed blocks of copies (AES-256-GCM).

Not a key store: the caller hands over the bytes, or a file that holds them. The one idea: everything else in a
snapshot hangs on its manifest by digests, so one signature covers it all; a sealed block is bound to its place
(attempt, file, block), so that none can be swapped or replayed. Sealing needs `cryptography` (extra `remote`).
"""

from __future__ import annotations

import hmac
import os
import re
import stat
import warnings
from pathlib import Path
from typing import Any

from plait.ckpt.errors import SnapshotDamaged, SnapshotSealed

KEY_BYTES = 32
_NONCE_BYTES = 12  # random: below 2^32 blocks a key (16 EiB of 4 MiB blocks) the chance of a repeat is below 2^-32
_TAG_BYTES = 16
_ID_BYTES = 4
SIGNATURE = re.compile(rb"hmac-sha256:[0-9a-f]{8}:[0-9a-f]{64}\n")  # last line of a signed manifest
SEALED = b"plait-sealed-1\n"  # what an encrypted small file begins with
SEAL_BYTES = _ID_BYTES + _NONCE_BYTES + _TAG_BYTES  # what a sealed block is longer than its content


def load_key(key: bytes | str | Key | None = None, key_file: str | Path | None = None) -> Key | None:
    """Returns the key that a caller gave: 32 bytes or their 64 hex digits (as an environment variable has them), or a
    file with either; None for none.

    ValueError when it is neither (the text never holds the key), OSError when the file cannot be read. Warns of a
    file that others than its owner may read.
    """
    if key is None and key_file is None:
        return None
    if key is not None and key_file is not None:
        raise ValueError("key and key_file: give one of them")
    if isinstance(key, Key):
        return key
    source = "key" if key_file is None else f"key_file '{key_file}'"
    text = key.encode() if isinstance(key, str) else key
    if key_file is not None:
        mode = Path(key_file).stat().st_mode
        if stat.S_ISREG(mode) and mode & 0o077:  # not a pipe, as in --key-file <(command)
            said = f"{source} is open to others than its owner (mode {stat.S_IMODE(mode):04o}): chmod 600 it"
            warnings.warn(said, UserWarning, stacklevel=3)
    data = Path(key_file).read_bytes() if key_file is not None else text
    assert data is not None
    if len(data) != KEY_BYTES:
        try:
            data = bytes.fromhex(data.decode("ascii").strip())
        except ValueError:
            data = b""
    if len(data) != KEY_BYTES:
        raise ValueError(f"{source}: must be {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits")
    return Key(data)


def signing_key(data: bytes) -> str | None:
    """Returns the id of the key that a manifest's bytes say they are signed with, unchecked; None when unsigned."""
    last = data.rstrip(b"\n").rpartition(b"\n")[2] + b"\n"
    return last.decode().split(":")[1] if SIGNATURE.fullmatch(last) else None


class Key:
    """32 secret bytes, from which those for signing, sealing and naming are derived. Its repr shows its id only."""

    def __init__(self, secret: bytes) -> None:
        self._sign = _derive(secret, b"plait sign")
        self._seal = _derive(secret, b"plait seal")
        self.id = _derive(secret, b"plait id")[:_ID_BYTES].hex()  # names the key, tells nothing about it

    def __repr__(self) -> str:
        return f"Key(id={self.id})"

    def sign(self, line: bytes) -> str:
        """Returns "hmac-sha256:KEY_ID:HEX" of a manifest's first line."""
        return f"hmac-sha256:{self.id}:{hmac.digest(self._sign, line, 'sha256').hex()}"

    def check(self, line: bytes, signature: str, where: str) -> None:
        """Raises SnapshotDamaged naming `where`: signed with another key, or changed since."""
        name, _, rest = signature.partition(":")
        key_id, _, _ = rest.partition(":")
        if name == "hmac-sha256" and key_id != self.id:
            raise SnapshotDamaged(f"{where}: is signed with the key {key_id[:16]!r}, not with this key ({self.id!r})")
        if not hmac.compare_digest(signature.encode(), self.sign(line).encode()):
            raise SnapshotDamaged(f"{where}: its signature does not match: it was changed by one without the key")

    def cipher(self, attempt: str) -> Cipher:
        """Returns what seals and opens the files of one attempt."""
        return Cipher(_derive(self._seal, attempt.encode()), bytes.fromhex(self.id), attempt)


class Cipher:
    """AES-256-GCM with the key of one attempt. Thread rule: any thread at any time."""

    def __init__(self, secret: bytes, key_id: bytes, attempt: str) -> None:
        self._gcm: Any = _aesgcm()(secret)
        self._id, self._attempt = key_id, attempt

    def seal(self, place: str, data: bytes) -> bytes:
        """Returns key id, nonce and ciphertext with its tag, SEAL_BYTES longer than `data`; bound to `place`."""
        nonce = os.urandom(_NONCE_BYTES)
        return self._id + nonce + self._gcm.encrypt(nonce, data, self._bound(place))

    def open(self, place: str, sealed: bytes, where: str) -> bytes:
        """Returns the content. SnapshotDamaged naming `where`: another key, or other bytes than were sealed there."""
        if len(sealed) < SEAL_BYTES:
            raise SnapshotDamaged(f"{where}: {len(sealed)} bytes are no sealed block")
        if sealed[:_ID_BYTES] != self._id:
            theirs = sealed[:_ID_BYTES].hex()
            raise SnapshotDamaged(
                f"{where}: is encrypted with the key {theirs!r}, not with this key ({self._id.hex()!r})"
            )
        nonce = sealed[_ID_BYTES : _ID_BYTES + _NONCE_BYTES]
        try:
            return self._gcm.decrypt(nonce, sealed[_ID_BYTES + _NONCE_BYTES :], self._bound(place))
        except _invalid_tag() as error:
            raise SnapshotDamaged(f"{where}: cannot be decrypted: changed, or moved from another place") from error

    def _bound(self, place: str) -> bytes:
        return f"{self._attempt}/{place}".encode()


def opened(name: str, stored: bytes, cipher: Cipher | None, where: str) -> bytes:
    """Returns what a small file of a copy says. SnapshotDamaged when it is encrypted and no key was given."""
    if not stored.startswith(SEALED):
        return stored
    if cipher is None:
        raise SnapshotSealed(f"{where}: is encrypted, and no key was given")
    return cipher.open(name, stored[len(SEALED) :], where)


def sealed(name: str, data: bytes, cipher: Cipher | None) -> bytes:
    return data if cipher is None else SEALED + cipher.seal(name, data)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    """Returns 32 bytes for one purpose (HKDF-Expand of RFC 5869 with one block)."""
    return hmac.digest(secret, purpose + b"\x01", "sha256")


def _aesgcm() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ImportError("encryption needs `cryptography`: pip install 'plait[remote]'") from error
    return AESGCM


def _invalid_tag() -> Any:
    from cryptography.exceptions import InvalidTag

    return InvalidTag
