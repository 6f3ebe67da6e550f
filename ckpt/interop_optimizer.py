"""How torch lays an optimizer's state out, under the names of `optimizer_state`: so a restore reads imported ones.

Not an import: what was imported lies in the snapshot as it was, so that a plain optimizer, or DCP's own functions,
take it too. The one idea: the three layouts differ in names only, and which parameter a number means is known where
the model is, in the restore.

    state/0/exp_avg           param_groups: [{lr, params: [0, ...]}]       optimizer.state_dict()
    state/NAME/exp_avg        param_groups: [{lr, params: [NAME, ...]}]    get_optimizer_state_dict, FSDP's
    state.NAME.exp_avg        param_groups.NAME.lr                         with flatten_optimizer_state_dict=True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from plait.ckpt.errors import SnapshotDamaged, StateError
from plait.ckpt.optimizer import BY_PLACE, OptimizerState
from plait.ckpt.reader import SnapshotReader
from plait.ckpt.state import Flat, Node, has_named, join
from plait.ckpt.tables import Table
from plait.ckpt.values import decode, encode

_STATE, _GROUPS = "state", "param_groups"


def adopt_optimizers(flat: Flat, reader: SnapshotReader) -> None:
    """Lets `reader` answer to the names that the state's OptimizerStates have, where its snapshot has torch's.

    StateError when parameters that the snapshot numbers cannot be those of the optimizer, or when it has other
    options for the parameters of one group.
    """
    for node in _wrappers(flat.root):
        there = _Part(node, reader)
        if there.has_groups():
            there.adopt_lists()
        elif any(name.startswith((f"{_STATE}.", f"{_GROUPS}.")) for name in there.names()):
            there.adopt_flat()


def _wrappers(node: Node) -> Iterator[Node]:
    if node.kind == "object" and isinstance(node.value, OptimizerState):
        yield node
    for _, child in node.children:
        yield from _wrappers(child)


class _Part:
    """The part of a snapshot at the name of one OptimizerState. Names in here begin below it."""

    def __init__(self, node: Node, reader: SnapshotReader) -> None:
        self.at, self.path, self.reader = node.name + "/", node.path, reader
        self.wrapper: OptimizerState = node.value

    def names(self) -> set[str]:
        """Returns the names of its tensors and values."""
        everything = self.reader.table.names | self.reader.values.keys()
        return {name[len(self.at) :] for name in everything if name.startswith(self.at)}

    def value(self, name: str) -> Any:
        """Returns a plain value."""
        return decode(self.reader.values[self.at + name], f"value {self.at + name!r}")

    def option(self, name: str) -> Any:
        """Returns an option: a plain value, or what stands for a tensor."""
        if self.at + name in self.reader.values:
            return self.value(name)
        return _Tensor(
            name, tuple(source.piece.xxh3_128 for source in self.reader.table.entry(self.at + name).sources)
        )

    def has_groups(self) -> bool:
        """Whether torch's list of groups is here: as one value, or in parts where an option is a tensor."""
        return any(name == _GROUPS or name.startswith(f"{_GROUPS}/") for name in self.names())

    def groups(self) -> list[dict[str, Any]]:
        """Returns torch's groups; an option that is a tensor is the _Tensor of its name."""
        found: Any = None
        if self.at + _GROUPS in self.reader.values:
            found = self.value(_GROUPS)
        else:
            parts: dict[int, dict[str, Any]] = {}
            for name in sorted(self.names()):
                head, _, rest = name.partition("/")
                number, _, option = rest.partition("/")
                if head == _GROUPS and number.isdecimal():
                    parts.setdefault(int(number), {})[option] = self.option(name)
            if sorted(parts) == list(range(len(parts))):
                found = [parts[number] for number in sorted(parts)]
        good = isinstance(found, list) and all(
            isinstance(g, dict) and isinstance(g.get("params"), list) for g in found
        )
        if not good:
            raise SnapshotDamaged(f"'{self.reader.place}': {self.at + _GROUPS!r} is no list of an optimizer's groups")
        return found

    def adopt_lists(self) -> None:
        """torch's state_dict(), and the same by name."""
        groups = self.groups()
        of: dict[Any, str] = {}
        for group, names in zip(groups, self._names_by_group(groups), strict=True):
            of |= zip(group["params"], names, strict=True)
        renamed = {join(_STATE, key, ""): join(_STATE, name, "") for key, name in of.items()}
        group_of = {of[key]: number for number, group in enumerate(groups) for key in group["params"]}
        added = self._described(dict(enumerate(groups)), group_of)
        self._rename(lambda name: _with_head(name, renamed), lambda name: name.partition("/")[0] == _GROUPS, added)

    def _names_by_group(self, groups: list[dict[str, Any]]) -> list[list[str]]:
        """Returns the parameters' names by group: as the snapshot has them, else by their place in the optimizer."""
        if all(type(key) is str for group in groups for key in group["params"]):
            return [group["params"] for group in groups]
        named = [group.get("param_names", ()) for group in groups]
        if set(self.wrapper.names) <= {name for names in named for name in names}:
            return named
        sizes = [len(group["params"]) for group in groups]
        mine = [len(group["params"]) for group in self.wrapper.optimizer.param_groups]
        if sizes != mine:
            raise StateError(
                f"{self.path}: the snapshot numbers its parameters, {sizes} in its groups, and the optimizer has "
                f"{mine}: numbers say which is which only to an optimizer with the same parameters in the same order"
            )
        names = iter(self.wrapper.names)
        return [[next(names) for _ in group["params"]] for group in groups]

    def adopt_flat(self) -> None:
        """DCP's flattened form: every parameter has a copy of its group's options."""
        options: dict[str, dict[str, Any]] = {}
        for name in sorted(self.names()):
            if name.startswith(f"{_GROUPS}."):
                parameter, _, option = name[len(_GROUPS) + 1 :].rpartition(".")
                options.setdefault(parameter, {})[option] = self.option(name)
        groups: dict[int, dict[str, Any]] = {}
        group_of = dict.fromkeys(options, 0)
        own = iter(self.wrapper.names)
        for number, group in enumerate(self.wrapper.optimizer.param_groups):
            for name in (join("", next(own), "") for _ in group["params"]):
                first = groups.setdefault(number, options.get(name, {}))
                if options.get(name, {}) != first:
                    odd = sorted(
                        k for k in first.keys() | options.get(name, {}) if first.get(k) != options[name].get(k)
                    )
                    raise StateError(
                        f"{self.path}: parameter {name!r} is in group {number}, whose first one has another {odd[0]} "
                        "in the snapshot"
                    )
                if name in options:
                    group_of[name] = number
        added = self._described(groups, group_of)
        self._rename(_unflat, lambda name: name.startswith(f"{_GROUPS}."), added)

    def _rename(self, new: Callable[[str], str], is_option: Callable[[str], bool], added: dict[str, Any]) -> None:
        """Gives tensors and values their names in `optimizer_state`, and puts `added` in the place of the groups."""
        table, values, at = self.reader.table, self.reader.values, self.at

        def outer(names: Iterable[str]) -> dict[str, str]:
            below = {name: name[len(at) :] for name in names if name.startswith(at)}
            kept = {name: at + new(inner) for name, inner in below.items() if not is_option(inner)}
            return {name: kept.get(name, name) for name in names if name in kept or name not in below}

        tensors = {name: table.entry(inner) for inner, name in outer(table.names).items()}
        plain = {name: values[inner] for inner, name in outer(values).items()}
        for name, value in added.items():
            if isinstance(value, _Tensor):
                tensors[at + name] = table.entry(at + value.name)
            else:
                plain[at + name] = encode(value, self.path)
        self.reader.table, self.reader.values = Table(tensors, {}), plain

    def _described(self, groups: dict[int, dict[str, Any]], group_of: dict[str, int]) -> dict[str, Any]:
        """Returns the groups as `optimizer_state` has them, by name."""
        found: dict[str, Any] = {f"group_of/{join('', name, '')}": number for name, number in group_of.items()}
        own = self.wrapper.options()
        for number, group in groups.items():
            pairs = [[option, value] for option, value in group.items() if option not in BY_PLACE]
            if not has_named(own.get(number, [])):
                found[f"groups/{number}"] = pairs
                continue
            places = {option: place for place, (option, _) in enumerate(own[number])}
            for option, value in pairs:
                place = f"groups/{number}/{places.setdefault(option, len(places))}"
                if isinstance(value, _Tensor):
                    found |= {f"{place}/0": option, f"{place}/1": value}
                else:
                    found[place] = [option, value]
        return found


@dataclass(frozen=True)
class _Tensor:
    """An option that is a tensor: its name, and digests by which copies of it are equal."""

    name: str = field(compare=False)
    digests: tuple[str, ...]


def _with_head(name: str, renamed: dict[str, str]) -> str:
    """Returns state/KEY/... with another key."""
    head = "/".join(name.split("/")[:2])
    return renamed.get(head, head) + name[len(head) :]


def _unflat(name: str) -> str:
    """Returns state/NAME/PART of state.NAME.PART."""
    if not name.startswith(f"{_STATE}."):
        return name
    parameter, _, part = name[len(_STATE) + 1 :].rpartition(".")
    return f"{_STATE}/{parameter}/{part}"
