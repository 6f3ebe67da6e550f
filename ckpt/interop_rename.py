"""Other names for what comes in: `plait snapshot import --rename OLD=NEW`, on a tree of dicts before it is saved.

    module.=            what keys begin with, at any depth (DistributedDataParallel)
    ._orig_mod.=.       what stands inside keys (a layer that torch.compile wraps)
    state_dict/model=m  a path from the top: what is at or below it
    model/=             the same: what is below it goes one level up

Not patterns: no name is guessed. The one idea: an optimizer's state by name has the parameters' names as keys, and in
the lists of its groups, so one rule renames weights and moments alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from plait.ckpt.errors import SnapshotError
from plait.ckpt.interop_tree import nest_paths
from plait.ckpt.optimizer import BY_PLACE

Rename = tuple[str, str]
Path = tuple[Any, ...]
_WRAPPERS = (("module.", "DistributedDataParallel"), ("_orig_mod.", "torch.compile"))

_INNER = ("._orig_mod.", "._checkpoint_wrapped_module.")  # of single layers


def parse_rename(text: str) -> Rename:
    """Returns (OLD, NEW) of "OLD=NEW". ValueError when there is no OLD."""
    old, equals, new = text.partition("=")
    if not equals or not old.strip("/"):
        raise ValueError(f"{text!r} must be OLD=NEW")
    return old, new


def renamed(tree: Mapping[Any, Any], renames: Sequence[Rename]) -> dict[Any, Any]:
    """Returns the tree under other names; each rule sees what those before it left.

    SnapshotError for a rule that nothing fits, and for two names that become one.
    """
    found = dict(tree)
    for rule in renames:
        found = _apply(found, rule)
    return found


def wrapped_names(tree: Mapping[Any, Any]) -> list[str]:
    """Returns what a person should know of keys that all begin as a wrapper of torch's begins them."""
    said = []
    for start, who in _WRAPPERS:
        at = sorted({"/".join(map(str, path[:-1])) for path in _wrapped(tree, start)})
        if at:
            where = ", ".join(repr(name) for name in at if name) or "the top"
            said.append(f"all names in {where} begin with {start!r} ({who}): --rename {start}= cuts it off")
    for inner in _INNER:
        if any(isinstance(key, str) and inner in key for path, _ in _leaves(tree) for key in path):
            said.append(f"names have {inner[1:]!r} inside: --rename {inner}=. takes it out")
    return said


def _wrapped(tree: Any, start: str, path: Path = ()) -> Iterator[Path]:
    if isinstance(tree, Mapping) and tree:
        if all(isinstance(key, str) and key.startswith(start) for key in tree):
            yield (*path, start)
            return
        for key, child in tree.items():
            yield from _wrapped(child, start, (*path, key))


def _apply(tree: dict[Any, Any], rule: Rename) -> dict[Any, Any]:
    hits: Counter[str] = Counter()

    def key_of(key: Any) -> list[Any]:
        """A key by the rules for keys, which may make levels of it."""
        new = _key(key, rule)
        hits["keys"] += new != [key]
        return new

    whole = "/" in rule[0] or not (rule[0].startswith(".") or rule[0].endswith("."))
    leaves: dict[Path, Any] = {}
    came_from: dict[Path, Path] = {}
    for path, leaf in _leaves(tree):
        new = _path(path, rule) if whole else tuple(part for key in path for part in key_of(key))
        hits["paths"] += whole and new != path
        if not new:
            raise SnapshotError(f"{_said(rule)}: {_text(path)} would have no name")
        if new in leaves:
            raise SnapshotError(
                f"{_said(rule)}: {_text(came_from[new])} and {_text(path)} would both be called {_text(new)}"
            )
        leaves[new] = leaf if whole else _listed(leaf, key_of, path[-1] in BY_PLACE)
        came_from[new] = path
    if not sum(hits.values()):
        keys = sorted(_text(path) for path in came_from)
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        raise SnapshotError(f"{_said(rule)}: nothing is called so; there are {', '.join(keys[:4])}{more}")
    return nest_paths(leaves)


def _listed(value: Any, key_of: Callable[[Any], list[Any]], named: bool) -> Any:
    """Returns a value with the names in its lists renamed: `params` and `param_names` of an optimizer's groups."""
    if isinstance(value, list):
        return ["/".join(key_of(v)) if named and isinstance(v, str) else _listed(v, key_of, False) for v in value]
    if isinstance(value, dict):
        return {key: _listed(part, key_of, key in BY_PLACE) for key, part in value.items()}
    return value


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Lists are leaves: what is in them is found by its place. So are empty dicts, which are kept."""
    if isinstance(tree, Mapping) and (tree or not path):
        for key, child in tree.items():
            yield from _leaves(child, (*path, key))
    else:
        yield path, tree


def _key(key: Any, rule: Rename) -> list[Any]:
    old, new = rule
    if not isinstance(key, str):
        return [key]
    if old.startswith("."):
        return [key.replace(old, new)] if old in key else [key]
    if not key.startswith(old):
        return [key]
    *above, last = new.split("/")
    return [part for part in (*above, last + key[len(old) :]) if part]


def _path(path: Path, rule: Rename) -> Path:
    *lead, last = rule[0].split("/")
    if last and not last.endswith("."):  # a whole key
        lead, last = [*lead, last], ""
    count = len(lead)
    if [str(key) for key in path[:count]] != lead or len(path) < count + bool(last):
        return path
    if not last:
        return (*(part for part in rule[1].split("/") if part), *path[count:])
    if not str(path[count]).startswith(last):
        return path
    *above, start = rule[1].split("/")
    parts = (*above, start + str(path[count])[len(last) :])
    return (*(part for part in parts if part), *path[count + 1 :])


def _said(rule: Rename) -> str:
    return f"--rename {rule[0]}={rule[1]}"


def _text(path: Path) -> str:
    return repr("/".join(map(str, path)))
