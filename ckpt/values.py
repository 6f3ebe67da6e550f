"""Plain Python values as JSON and back, exactly: what JSON cannot say is tagged, what has no meaning on disk is
refused.

Not a pickle: only the types listed here exist, and reading creates nothing else. The one idea: floats are written in
hex, so that every bit (of NaN too) comes back; the grammar is in docs/format.md.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from plait.ckpt.errors import SnapshotDamaged, StateError

# A tensor inside PerRank lives in JSON; a generator's state has 5 KB (torch's Mersenne Twister).
MAX_TENSOR_BYTES = 1 << 20


def encode(value: Any, path: str, tensors: bool = False) -> Any:
    """Returns the JSON form of a value. `path` is how an error names it; `tensors` admits small tensors.

    Raises StateError for what cannot be stored.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"$float": _float_text(value)}
    if type(value) is complex:
        return {"$complex": [_float_text(value.real), _float_text(value.imag)]}
    if type(value) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [encode(v, f"{path}[{i}]", tensors) for i, v in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [encode(v, f"{path}[{i}]", tensors) for i, v in enumerate(value)]}
    if type(value) is Counter:
        return {"$counter": _pairs(value, path, tensors)}
    if type(value) in (dict, OrderedDict):
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: encode(v, f"{path}[{k!r}]", tensors) for k, v in value.items()}
        return {"$dict": _pairs(value, path, tensors)}
    if tensors and isinstance(value, torch.Tensor):
        return {"$tensor": _encode_tensor(value, path)}
    raise StateError(f"{path} is {describe(value)}, which cannot be stored{_hint(value)}")


def decode(value: Any, where: str) -> Any:
    """Returns the Python value of a JSON form; raises SnapshotDamaged for an unknown tag or a wrong shape of one."""
    if isinstance(value, list):
        return [decode(v, where) for v in value]
    if not isinstance(value, dict):
        return value
    tags = [k for k in value if k.startswith("$")]
    if not tags:
        return {k: decode(v, where) for k, v in value.items()}
    if len(value) != 1:
        raise SnapshotDamaged(f"{where}: tag {tags[0]!r} beside other keys")
    tag, content = tags[0], value[tags[0]]
    try:
        return _decode_tag(tag, content, where)
    except (ArithmeticError, AttributeError, TypeError, KeyError, ValueError, RuntimeError, struct.error) as error:
        if isinstance(error, SnapshotDamaged):
            raise
        raise SnapshotDamaged(f"{where}: {tag} has a wrong content ({error})") from error


def is_float_text(value: Any) -> bool:
    """True for the text that `float.hex()` gives, as metrics in a manifest are."""
    try:
        return type(value) is str and len(value) <= 40 and float.fromhex(value).hex() == value
    except (ValueError, OverflowError):
        return False


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(object_pairs_hook): ValueError for a doubled key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a doubled key")
    return found


def no_constant(text: str) -> None:
    """For json.loads(parse_constant): ValueError for NaN and the infinities."""
    raise ValueError(f"{text} is not allowed")


def describe(value: Any) -> str:
    """Returns what a value is, for people: "a function", "a numpy.ndarray"."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def canonical(value: Any) -> str:
    """Returns one text for equal JSON values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hint(value: Any) -> str:
    module = type(value).__module__.split(".")[0]
    if module == "numpy":
        return "; use .item(), .tolist() or torch.from_numpy"
    if isinstance(value, torch.Tensor):
        return " here; a tensor in PerRank is at most 1 MiB, other tensors have their own name"
    if isinstance(value, (set, frozenset)):
        return "; use a sorted list"
    return "; give it state_dict() and load_state_dict(), or store plain data"


def _float_text(value: float) -> str:
    return value.hex() if value == value else "nan:" + struct.pack(">d", value).hex()


def _float_value(text: str) -> float:
    if text.startswith("nan:"):
        (value,) = struct.unpack(">d", bytes.fromhex(text[4:]))
        if value == value:
            raise ValueError(f"{text!r} is a number")
        return value
    return float.fromhex(text)


def _pairs(value: dict[Any, Any], path: str, tensors: bool) -> list[list[Any]]:
    return [[encode(k, f"{path} key {k!r}"), encode(v, f"{path}[{k!r}]", tensors)] for k, v in value.items()]


def _encode_tensor(value: torch.Tensor, path: str) -> dict[str, Any]:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_meta or value.numel() * value.element_size() > MAX_TENSOR_BYTES:
        raise StateError(f"{path} is {describe(value)} of {tuple(value.shape)}{_hint(value)}")
    data = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach()).reshape(-1).view(torch.uint8)
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "data": base64.b64encode(bytes(data.tolist())).decode(),
    }


def _decode_tensor(content: dict[str, Any]) -> torch.Tensor:
    if set(content) != {"dtype", "shape", "data"}:
        raise ValueError(f"fields {sorted(content)}")
    dtype = getattr(torch, content["dtype"])
    if not isinstance(dtype, torch.dtype) or len(content["data"]) > 2 * MAX_TENSOR_BYTES:
        raise ValueError(f"dtype {content['dtype']!r} or too many bytes")
    data = bytearray(base64.b64decode(content["data"], validate=True))
    flat = torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(content["shape"])


def _decode_tag(tag: str, content: Any, where: str) -> Any:
    if tag == "$float":
        return _float_value(content)
    if tag == "$complex":
        real, imag = content
        return complex(_float_value(real), _float_value(imag))
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$tuple":
        return tuple(decode(v, where) for v in content)
    if tag in ("$dict", "$counter"):
        pairs = [(decode(k, where), decode(v, where)) for k, v in content]
        return Counter(dict(pairs)) if tag == "$counter" else dict(pairs)
    if tag == "$tensor":
        return _decode_tensor(content)
    raise SnapshotDamaged(f"{where}: unknown tag {tag!r}")
