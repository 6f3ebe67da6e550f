"""The commands of `plait snapshot` to and from other formats: export and import.

Each takes the parsed arguments and returns (exit code, report for --json, lines for people).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from plait.ckpt.candidates import find_snapshot, is_url, local_path
from plait.ckpt.cli_progress import bytes_read, progress, size_text
from plait.ckpt.cli_show import OK, Answer, key_of, need_folder
from plait.ckpt.interop import FORMATS, kind_of, read_foreign
from plait.ckpt.interop_dcp import export_dcp
from plait.ckpt.interop_megatron import Rule
from plait.ckpt.interop_rename import Rename, parse_rename, wrapped_names
from plait.ckpt.interop_safetensors import export_file, export_folder
from plait.ckpt.interop_torch import export_torch
from plait.ckpt.interop_tree import choose, save_imported
from plait.ckpt.keep import reading
from plait.ckpt.lock import refuse_if_held
from plait.ckpt.tier_reader import open_folder

Add = Callable[[str, str], argparse.ArgumentParser]
_EXPORTS = ("safetensors", "hf", "torch", "dcp")
_SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", "": "hf"}


def add_commands(add: Add) -> None:
    """Adds the parsers of export and import."""
    out = add("export", "write full tensors for others to read")
    out.add_argument("path", help="a step folder, RUN (its newest valid one) or RUN@STEP")
    out.add_argument("target", type=local, help="a file or folder that is not there yet")
    out.add_argument("--format", choices=_EXPORTS, help="default: .safetensors, .pt, or a Hugging Face folder")
    out.add_argument("--select", default="", metavar="NAME", help='only what is at or below this name ("model")')
    out.add_argument("--strip-prefix", action="store_true", help="cut that name off")
    out.add_argument("--shard-mib", type=int, default=5120, help="largest shard of a Hugging Face folder")
    into = add("import", "make a snapshot of a foreign checkpoint; nothing is unpickled but plain tensors and values")
    into.add_argument("source", type=local)
    into.add_argument("root", type=local, help="a run folder, made if it is not there")
    into.add_argument("--format", choices=FORMATS, help="default: by what is there")
    into.add_argument("--step", type=int, help="default: what the checkpoint says, else 0")
    into.add_argument("--prefix", default="", metavar="NAME", help='put everything below this name ("model")')
    into.add_argument("--skip", action="append", default=[], metavar="PATTERN", help="leave these names out")
    text = "other names: 'module.=' cuts what keys begin with, 'a/b=c' moves what is at or below a path"
    into.add_argument("--rename", action="append", default=[], type=_rename, metavar="OLD=NEW", help=text)
    into.add_argument("--rule", action="append", default=[], type=_rule, help="Megatron: PATTERN=DIM or PATTERN=same")
    into.add_argument("--gated", choices=("yes", "no"), help="Megatron: MLPs hold gate and up; default: its args")


def local(text: str) -> Path:
    """Returns a path that may not be in a store. ArgumentTypeError when it is a URL, which a path would mangle."""
    if is_url(text):
        raise argparse.ArgumentTypeError(
            f"'{text}' is a store; this works on directories: `plait snapshot copy` first"
        )
    return local_path(text)


def _rename(text: str) -> Rename:
    try:
        return parse_rename(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rule(text: str) -> Rule:
    pattern, equals, dim = text.rpartition("=")
    if not equals or not pattern or not (dim == "same" or dim.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be PATTERN=DIM or PATTERN=same")
    return pattern, None if dim == "same" else int(dim)


def export(arguments: argparse.Namespace) -> Answer:
    """Writes a part of a snapshot, verified as it is read, in another format."""
    folder, target = find_snapshot(arguments.path), arguments.target
    need_folder(folder)
    kind = arguments.format or _SUFFIXES.get(target.suffix, "hf")
    if target.exists():
        raise FileExistsError(f"'{target}' is there already")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"'{target.absolute().parent}' is not a folder")
    if arguments.shard_mib < 1:
        raise ValueError(f"--shard-mib {arguments.shard_mib}: must be at least 1")
    with reading(folder):
        reader = open_folder(folder, key=key_of(arguments))
        chosen = choose(reader, arguments.select, arguments.strip_prefix)
        with progress(f"export {folder.name}", chosen.num_bytes, lambda: reader.bytes_read, arguments.json):
            if kind == "hf":
                left = export_folder(chosen, target, arguments.shard_mib << 20)
            elif kind == "dcp":
                left = export_dcp(chosen, target)
            else:
                left = export_file(chosen, target) if kind == "safetensors" else export_torch(chosen, target)
    report = {
        "source": str(folder),
        "target": str(target),
        "format": kind,
        "tensors": sorted(chosen.tensors),
        "num_bytes": chosen.num_bytes,
        "aliases": chosen.aliases,
        "left_out": left,
    }
    text = f"exported {len(chosen.tensors)} tensors, {size_text(chosen.num_bytes)}, to '{target}' ({kind})"
    return OK, report, [text, *(f"left out {line}" for line in left)]


def bring(arguments: argparse.Namespace) -> Answer:
    """Saves a foreign checkpoint as a snapshot."""
    source, root = arguments.source, arguments.root
    if not source.exists():
        raise FileNotFoundError(f"'{source}' is not there")
    if arguments.step is not None and arguments.step < 0:
        raise ValueError(f"--step {arguments.step}: must be an integer >= 0")
    if root.is_dir():
        refuse_if_held(root)  # before much is read; the save itself takes the LOCK
    kind = arguments.format or kind_of(source)
    total = sum(
        path.stat().st_size for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file()
    )
    began = bytes_read()
    with progress(f"import {source.name}", total, lambda: bytes_read() - began, arguments.json):
        gated = None if arguments.gated is None else arguments.gated == "yes"
        found = read_foreign(source, kind, arguments.skip, arguments.rename, arguments.rule, gated)
    folder = save_imported(root, found, arguments.step, arguments.prefix, key_of(arguments))
    manifest, hints = open_folder(folder).manifest, wrapped_names(found.state)
    report = {
        "source": str(source),
        "format": kind,
        "snapshot": str(folder),
        "step": manifest.step,
        "num_tensors": manifest.num_tensors,
        "num_bytes": manifest.num_bytes,
        "left_out": found.left_out,
        "hints": hints,
    }
    size = size_text(manifest.num_bytes)
    text = f"imported {manifest.num_tensors} tensors, {size}, from '{source}' ({kind}) as '{folder}'"
    return OK, report, [text, *(f"left out {line}" for line in found.left_out), *hints]
