"""Copies in an object store, or whatever else fsspec opens: S3, GCS, Azure, memory. Needs `fsspec` and its driver.

Not a mount: no renames, which object stores do not have. The one idea: each copy has a prefix of its own, named by
step and attempt, and exists when its MANIFEST.json does, which is put last; readers look for nothing else.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from plait import _C
from plait.ckpt.folders import step_name
from plait.ckpt.manifest import MANIFEST, DataFile
from plait.ckpt.store import CHUNK_BYTES, Blocks

T = TypeVar("T")
_FOLDER = re.compile(r"step-(\d{9,})\.([0-9a-f]{16})-(\d+)")


class FsspecStore:
    """Folders below a URL. options: of the fsspec driver (endpoint_url, key, ...). Unknown drivers: ImportError."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec  # torch itself depends on it; the driver (s3fs, gcsfs, adlfs) is the caller's

        self.url = url.rstrip("/")
        self.local: Path | None = None
        fresh = {"use_listings_cache": False, "skip_instance_cache": True}
        self._fs, base = fsspec.core.url_to_fs(self.url, **fresh, **options)
        self._base = base.rstrip("/")

    def steps(self) -> list[tuple[int, int, str]]:
        """By step, and for one step by the time of the manifest: its order is the generation."""
        found: dict[int, list[tuple[str, str]]] = {}
        for path, info in self._found("").items():
            folder, _, name = path.rpartition("/")
            match = _FOLDER.fullmatch(folder)
            if match is not None and name == MANIFEST:
                when = info.get("LastModified") or info.get("mtime") or info.get("created") or ""
                found.setdefault(int(match[1]), []).append((str(when), folder))
        return sorted(
            ((s, g, f) for s, all in found.items() for g, (_, f) in enumerate(sorted(all), 1)), reverse=True
        )

    def unfinished(self) -> list[str]:
        paths = self._found("").keys()
        folders = {path.rpartition("/")[0] for path in paths} - {f.removesuffix(f"/{MANIFEST}") for f in paths}
        matches = [_FOLDER.fullmatch(folder) for folder in sorted(folders)]
        return [f"{int(m[1])}-{m[2]}-{m[3]}" for m in matches if m is not None]

    def begin(self, attempt: str) -> str:
        step, _, rest = attempt.partition("-")
        return f"{step_name(int(step))}.{rest}"

    def finish(self, attempt: str, manifest: bytes) -> str:
        folder = self.begin(attempt)
        self.put(folder, MANIFEST, manifest)
        return folder

    def files(self, folder: str) -> dict[str, int]:
        return {name: int(info["size"]) for name, info in self._found(folder).items()}

    def put(self, folder: str, name: str, data: bytes) -> None:
        self._call("put", f"{folder}/{name}", lambda path: self._fs.pipe_file(path, data))

    def put_stream(self, folder: str, name: str, num_bytes: int, blocks: Blocks) -> None:
        def send(path: str) -> None:
            with self._fs.open(path, "wb", block_size=CHUNK_BYTES) as file:  # becomes visible when it is closed
                for block in blocks():
                    file.write(block)

        self._call("put", f"{folder}/{name}", send)

    def get(self, folder: str, name: str, start: int, stop: int) -> bytes:
        data: bytes = self._call(
            "get", f"{folder}/{name}", lambda path: self._fs.cat_file(path, start=start, end=stop)
        )
        if len(data) != stop - start:
            raise OSError(
                errno.EIO,
                f"get: {len(data)} bytes came where {stop - start} were wanted",
                self._at(f"{folder}/{name}"),
            )
        return data

    def remove(self, folder: str, names: Sequence[str]) -> None:
        for name in names:
            try:
                self._call("remove", f"{folder}/{name}", self._fs.rm_file)
            except FileNotFoundError:  # removed by an earlier try
                continue

    def check(self, folder: str, file: DataFile) -> None:
        """Reads a plain data file back. OSError naming the first block that differs."""
        step = CHUNK_BYTES // file.block_bytes * file.block_bytes or file.block_bytes
        for start in range(0, file.bytes, step):
            data = self.get(folder, file.name, start, min(start + step, file.bytes))
            first = start // file.block_bytes
            for block, crc in enumerate(_C.crc32c_blocks(data, file.block_bytes), first):
                if crc != file.crc32c[block]:
                    where = self._at(f"{folder}/{file.name}")
                    raise OSError(errno.EIO, f"read back: block {block} has other bytes than were sent", where)

    def _found(self, folder: str) -> dict[str, dict[str, Any]]:
        """Returns {path below the folder: info} of all files below it."""
        base = f"{self._base}/{folder}" if folder else self._base
        try:
            infos: dict[str, dict[str, Any]] = self._call(
                "list", folder, lambda path: self._fs.find(path, detail=True)
            )
        except FileNotFoundError:
            return {}
        return {path.removeprefix(base).lstrip("/"): info for path, info in infos.items()}

    def _at(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _call(self, operation: str, name: str, call: Callable[[str], T]) -> T:
        """Whatever a driver raises (its own types, its HTTP client's) becomes an OSError that names the url."""
        try:
            return call(f"{self._base}/{name}".rstrip("/"))
        except Exception as error:
            kinds = ((FileNotFoundError, errno.ENOENT), (PermissionError, errno.EACCES))  # drivers leave errno out
            known = next((number for kind, number in kinds if isinstance(error, kind)), errno.EIO)
            number = getattr(error, "errno", None) or known
            raise OSError(number, f"{operation}: {type(error).__name__}: {error}", self._at(name)) from error
