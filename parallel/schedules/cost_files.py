"""Reads costs: numbers typed on a command line, a file of them (JSON, TOML, CSV), or what a run was measured to take.

The forms are in docs/schedules.md, Costs. Whatever is wrong is one ValueError that names file, key and value.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.parallel.schedules.costs import AnyCosts, Costs, LayerCosts, Part, layer_costs
from plait.parallel.schedules.measured import FORMAT, measured_costs, parse_timeline, read_timeline

HELP = (
    "F,I,W or F,I,W,SEND: times of one rank's share of a micro-batch (a whole backward takes I + W); or a .json, "
    ".toml or .csv file with costs per stage, per layer or of a model (docs/schedules.md, Costs); or the folder or "
    "timeline.json of a run, whose measured times are taken (default 1,1,1)"
)
_TIMES = ("forward", "input", "weight")
_STAGES = (*_TIMES, "backward", "send", "send_grad", "activation", "deferred")
_BESIDE = ("send", "deferred", "split", "layers_of")  # what a per-layer or a model file may say as well


def read_costs(text: str | None) -> AnyCosts:
    """Costs from numbers, a file or a run; None: the default ones. ValueError, OSError."""
    if text is None:
        return Costs()
    path = Path(text)
    if text and path.is_dir():
        return measured_costs(*read_timeline(path))
    if path.suffix not in _READERS:
        return _typed(text)
    try:
        data = _READERS[path.suffix](path.read_text(encoding="utf-8"))
        return _costs(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"costs {text!r}: is no text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"costs {text!r}: {error}") from error


def _typed(text: str) -> Costs:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (3, 4) or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(
            f"costs {text!r}: expected F,I,W or F,I,W,SEND, finite numbers >= 0, or a .json, .toml or .csv file, "
            "or a run's folder"
        )
    forward, inputs, weight, *send = numbers
    return Costs(forward, inputs + weight, inputs, weight, send[0] if send else 0.0)


def _table(text: str) -> dict[str, Any]:
    """CSV with a header: one line a stage, in stage order."""
    rows = list(csv.DictReader(text.splitlines(), strict=True))
    if not rows:
        raise ValueError("has no line of costs; the first names the columns: stage,forward,input,weight")
    columns: dict[str, list[Any]] = {}
    for index, row in enumerate(rows):
        if None in row or None in row.values():
            raise ValueError(f"line {index + 2} has not as many cells as the first")
        if row.pop("stage", str(index)).strip() != str(index):
            raise ValueError(f"line {index + 2}: stages must be there in order, each once; expected stage {index}")
        for name, cell in row.items():
            columns.setdefault(name.strip(), []).append(_cell(f"line {index + 2}, {name.strip()}", cell.strip()))
    return columns


def _cell(where: str, cell: str) -> Any:
    if cell in ("true", "false"):
        return cell == "true"
    try:
        return float(cell)
    except ValueError:
        raise ValueError(f"{where}: {cell!r} is no number") from None


_READERS: dict[str, Callable[[str], Any]] = {".json": json.loads, ".toml": tomllib.loads, ".csv": _table}


def _costs(data: Any) -> AnyCosts:
    """One of the four forms."""
    if not isinstance(data, Mapping):
        raise ValueError(f"is a {type(data).__name__}, not a table of costs")
    if data.get("format") == FORMAT:
        return measured_costs(*parse_timeline(data))
    if "model" in data:
        return _model(data)
    if "layer" in data:
        return _layers(data)
    _known(data, (*_STAGES, "split"), needs=_TIMES)
    given = {name: _numbers(name, data[name]) for name in _STAGES if name in data}
    if "backward" not in given:
        given["backward"] = _sum(given["input"], given["weight"])
    costs = Costs(**given, split=_flags(data.get("split", True)))
    costs.num_stages()
    return costs


def _sum(inputs: Any, weight: Any) -> Any:
    """B = I + W, per stage where one of them is."""
    if not isinstance(inputs, list) and not isinstance(weight, list):
        return inputs + weight
    length = len(inputs) if isinstance(inputs, list) else len(weight)
    inputs, weight = (value if isinstance(value, list) else [value] * length for value in (inputs, weight))
    if len(inputs) != len(weight):
        raise ValueError(f"input has {len(inputs)} entries, weight {len(weight)}; they must agree")
    return [i + w for i, w in zip(inputs, weight, strict=True)]


def _layers(data: Mapping[str, Any]) -> LayerCosts:
    _known(data, ("layers", "layer", "embedding", "head", *_BESIDE), needs=("layers", "layer"))
    layer, embedding, head = (_part(name, data.get(name, {})) for name in ("layer", "embedding", "head"))
    return LayerCosts(_count("layers", data["layers"]), layer, embedding, head, **_beside(data))


def _part(name: str, given: Any) -> Part:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: {given!r} is no table with forward, input, weight")
    _known(given, Part._fields, needs=_TIMES if name == "layer" else (), where=f"{name}: ")
    return Part(**{key: _number(f"{name}.{key}", value) for key, value in given.items()})


def _model(data: Mapping[str, Any]) -> LayerCosts:
    _known(data, ("model", *_BESIDE), needs=())
    model = data["model"]
    if not isinstance(model, Mapping):
        raise ValueError(f"model: {model!r} is no table of a model's sizes")
    parameters = inspect.signature(layer_costs).parameters.values()
    needed = tuple(p.name for p in parameters if p.default is inspect.Parameter.empty)
    _known(model, tuple(p.name for p in parameters), needs=needed, where="model: ")
    rates = ("flop_per_s", "link_bytes_per_s")
    sizes = {
        key: _number(f"model.{key}", value) if key in rates else _count(f"model.{key}", value)
        for key, value in model.items()
    }
    if sizes.get("flop_per_s") == 0.0:
        raise ValueError("model.flop_per_s: 0 is no rate; say what a rank reaches, or leave it out")
    made = layer_costs(**sizes)  # type: ignore[arg-type]
    return LayerCosts(made.num_layers, made.layer, made.embedding, made.head, **{"send": made.send, **_beside(data)})


def _beside(data: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {key: _number(key, data[key]) for key in ("send", "deferred") if key in data}
    if "split" in data:
        if not isinstance(data["split"], bool):
            raise ValueError(f"split: {data['split']!r} is neither true nor false")
        result["split"] = data["split"]
    if "layers_of" in data:
        if not isinstance(data["layers_of"], list):
            raise ValueError(f"layers_of: {data['layers_of']!r} is no list of layers per stage")
        result["layers_of"] = tuple(_count("layers_of", value) for value in data["layers_of"])
    return result


def _known(data: Mapping[str, Any], names: tuple[str, ...], *, needs: tuple[str, ...], where: str = "") -> None:
    """Refuses keys that nobody knows and asks for those that must be there."""
    if unknown := sorted(set(data) - set(names)):
        raise ValueError(f"{where}{unknown[0]!r} is unknown; valid: {', '.join(names)}")
    if missing := [name for name in needs if name not in data]:
        raise ValueError(f"{where}needs {', '.join(needs)}; {missing[0]} is missing")


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}: {value!r} is no finite number >= 0")
    return value


def _numbers(where: str, value: Any) -> Any:
    if not isinstance(value, list):
        return _number(where, value)
    return [_number(f"{where}[{index}]", entry) for index, entry in enumerate(value)]


def _count(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {value!r} is no integer >= 1")
    return value


def _flags(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, list) and all(isinstance(entry, bool) for entry in value)):
        return value
    raise ValueError(f"split: {value!r} is neither true, false nor a list of them")
