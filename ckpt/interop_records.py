"""Reads DCP's `.metadata`, which is a pickle, as data: its opcodes build records, tuples and dicts; nothing is run.

Not an unpickler: no class is looked up or made. The one idea: DCP writes few opcodes and few classes; a table says
what each becomes here, and whatever it does not have is refused by name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from plait.ckpt.errors import SnapshotError

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
}
# class or function -> what a call of it with the arguments in the file becomes
_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): lambda numbers=(): tuple(numbers),
    ("torch.serialization", "_get_layout"): str,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): int,
    ("pathlib", "PosixPath"): lambda *parts: "/".join(parts),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),  # as Python 3.13 writes it
}
_PUSH = {  # opcodes with the value in the file
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "BINFLOAT"),
    *("SHORT_BINBYTES", "BINBYTES"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class Record:
    """One of DCP's records: the name of its class and its fields."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Returns a field, or None."""
        return self.fields.get(name)


@dataclass(frozen=True)
class _Global:
    """A class or function that the file names."""

    module: str
    name: str


def read_records(data: bytes) -> Any:
    """Returns what a `.metadata` file says: Records, dicts (a MetadataIndex as a key becomes (name, offset)), tuples.

    SnapshotError naming a class that is none of DCP's; for broken bytes any Exception.
    """
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            return machine.stack.pop()
        machine.step(opcode.name, argument)
    raise ValueError("it ends without STOP")


class _Machine:
    """The stack and the memo of one file."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Does one opcode."""
        stack = self.stack
        if name in _PUSH:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("APPEND", "APPENDS"):
            items = self._marked() if name == "APPENDS" else self._pop(1)
            _is(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._marked() if name == "SETITEMS" else self._pop(2)
            _is(stack[-1], dict).update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif name in ("STACK_GLOBAL", "GLOBAL"):
            module, what = argument.split(" ") if name == "GLOBAL" else self._pop(2)
            stack.append(_global(module, what))
        elif name in ("REDUCE", "NEWOBJ"):
            what, arguments = self._pop(2)
            stack.append(_made(_is(what, _Global), arguments))
        elif name == "BUILD":
            (state,) = self._pop(1)
            named = {"dtype": state[0]} if isinstance(state, tuple) else _is(state, dict)  # TensorProperties: a tuple
            _is(stack[-1], Record).fields.update(named)
        else:
            self._remember(name, argument)

    def _remember(self, name: str, argument: Any) -> None:
        if name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"opcode {name}, which DCP does not write")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("too few values")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items


def _global(module: str, name: str) -> Any:
    """Returns a dtype, or the name of something in the tables. SnapshotError for all else."""
    if (module, name) in _RECORDS or (module, name) in _CALLS:
        return _Global(module, name)
    dtype = getattr(torch, name, None) if module == "torch" and type(name) is str else None
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"it needs {module}.{name}, which is none of DCP's own records: that could run code")
    return dtype


def _made(what: _Global, arguments: Any) -> Any:
    if (what.module, what.name) in _CALLS:
        return _CALLS[what.module, what.name](*arguments)
    if arguments != ():
        raise ValueError(f"{what.name} made from {arguments!r:.60}")
    return Record(what.name)


def _key(key: Any) -> Any:
    if not isinstance(key, Record):
        return key
    return key.get("fqn"), key.get("offset")


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__} belongs")
    return value
