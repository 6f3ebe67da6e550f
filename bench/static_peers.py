"""Other people's Triton kernels, found where they are installed: what they would launch, as our own `Launch` values.

Nothing of theirs is copied: Liger is imported where it is installed, triton's tutorials are read from a folder of the
caller's. The one idea: a peer's own launcher runs on CPU tensors that say they are on an H200, and each launch is
recorded instead of run, so that tiles, warps and specialisation are the peer's choice. Of a peer's autotune list it
is the configuration with the largest tile that fits without spills, among those the one with most resident warps,
then stages: what its tuner would most likely pick; which one it was is said.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

from plait.kernels.gate import resident_warps
from plait.kernels.inspect import Facts, compile_offline
from plait.kernels.launch import Launch

MULTIPROCESSORS = 132  # of the card that the peers are told they run on
_CARD = torch.device("cuda", 0)


class _SayCuda(TorchFunctionMode):
    """CPU tensors whose .device is the card's; what asks for memory there gets it on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return _CARD
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Driver:
    """As much of triton's driver as launchers ask for."""

    def __init__(self, arch: int, multiprocessors: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        limits = {"max_num_regs": 65536, "max_shared_mem": 232448, "warpSize": 32}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: limits | {"multiprocessor_count": multiprocessors}
        )

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return _CARD

    def get_current_device(self) -> int:
        return 0


@contextlib.contextmanager
def pretend_card(arch: int = 90, multiprocessors: int = MULTIPROCESSORS) -> Iterator[None]:
    """Within it, torch and triton answer as on an H200, of so many multiprocessors: for launchers that ask."""
    properties = SimpleNamespace(multi_processor_count=multiprocessors, name="NVIDIA H200", major=arch // 10)
    driver = triton.runtime.driver
    with contextlib.ExitStack() as stack:
        for name, value in (
            ("get_device_properties", lambda *args: properties),
            ("get_device_capability", lambda *args: (arch // 10, 0)),
            ("device", lambda *args: contextlib.nullcontext()),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(driver, "_active", _Driver(arch, multiprocessors)))
        stack.enter_context(_SayCuda())
        yield


class Choices(NamedTuple):
    """One launch of a peer: a list of one, or of all configurations of its autotune list, with their texts."""

    launches: list[Launch]
    texts: list[str]


def as_launch(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """What kernel[grid](*args, **kwargs) would launch."""
    named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    shape = grid(dict(zip(kernel.arg_names, args, strict=False)) | named) if callable(grid) else grid
    # triton's own defaults, where the peer leaves them
    return Launch(kernel, tuple(shape), args, named, kwargs.get("num_warps") or 4, kwargs.get("num_stages") or 3)


def hooked(config: Any, launch: Launch) -> Launch:
    """The launch after the configuration's own hook, which may set the blocks of descriptors: on copies."""
    if config.pre_hook is None:
        return launch
    descriptors = [copy.copy(value) if hasattr(value, "block_shape") else value for value in launch.arguments]
    config.pre_hook(dict(zip(launch.kernel.arg_names, descriptors, strict=False)) | launch.constants)
    return launch._replace(arguments=tuple(descriptors))


def config_text(config: Any) -> str:
    """A configuration of an autotune list for people."""
    sizes = ", ".join(f"{name} {value}" for name, value in config.kwargs.items())
    return f"{sizes}, {config.num_warps} warps, {config.num_stages} stages"


def record(call: Callable[[], object], arch: int = 90) -> list[Choices]:
    """The launches that call() makes, none of which runs; its tensors hold what they held."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    found: list[Choices] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(Choices([as_launch(kernel, grid, args, kwargs)], [""]))

    def tuned(tuner: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches = [
            hooked(config, as_launch(tuner.fn, grid, args, kwargs | config.all_kwargs())) for config in tuner.configs
        ]
        found.append(Choices(launches, [config_text(config) for config in tuner.configs]))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(Autotuner, "run", tuned), pretend_card(arch):
        call()
    return found


def tile_size(launch: Launch) -> int:
    """The product of the launch's block sizes but that of the inner dim."""
    size = 1
    for name, value in launch.constants.items():
        if "BLOCK" in name and not name.endswith("_K") and isinstance(value, int) and not isinstance(value, bool):
            size *= value
    return size


def best(choices: Choices, arch: str) -> tuple[Facts, str]:
    """(facts, which configuration of how many) of the one that the file's first lines describe.

    Smaller tiles are compiled only where no larger one fits a multiprocessor without spills.
    """
    sizes = sorted({tile_size(launch) for launch in choices.launches}, reverse=True)
    ranked: list[tuple[tuple[bool, int, int, int], int, Facts, str]] = []
    for size in sizes:
        for launch, text in zip(choices.launches, choices.texts, strict=True):
            if tile_size(launch) == size:
                facts = compile_offline(launch, arch)
                warps, spills = resident_warps(facts), facts.spill_loads + facts.spill_stores
                ranked.append(((warps == 0, spills, -warps, -launch.num_stages), len(ranked), facts, text))
        too_large, spills, *_ = min(ranked)[0]
        if not too_large and spills == 0:
            break
    _, _, facts, text = min(ranked)
    return facts, f"{text} (of {len(choices.launches)})" if text else ""


def liger(name: str) -> ModuleType | str:
    """Liger's module `name` under liger_kernel.ops, or why there is none."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    return importlib.import_module(f"liger_kernel.ops.{name}")


def _needed(tree: ast.Module, wanted: tuple[str, ...]) -> list[ast.stmt]:
    """Imports, and of the definitions those that `wanted` reach, in order."""
    owners: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        targets: list[str] = []
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            targets = [statement.name]
        elif isinstance(statement, ast.Assign):
            targets = [
                node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)
            ]
        for target in targets:
            owners.setdefault(target, []).append(statement)
    keep: set[int] = set()
    todo = list(wanted)
    while todo:
        for statement in owners.get(todo.pop(), []):
            if id(statement) not in keep:
                keep.add(id(statement))
                todo += [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    imports = (ast.Import, ast.ImportFrom)
    return [node for node in tree.body if isinstance(node, imports) or id(node) in keep]


def tutorial(folder: Path | None, file: str, *wanted: str) -> SimpleNamespace | str:
    """The definitions `wanted` of folder/file and what they need, or why there are none. The rest does not run.

    A tutorial tests and times itself when imported; only imports and the definitions that are needed are executed.
    """
    if folder is None:
        return "triton's tutorials: not found (give --tutorials DIR)"
    path = folder / file
    if not path.is_file():
        return f"{path}: not found"
    tree = ast.parse(path.read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if missing := set(wanted) - defined:
        return f"{path}: has no {', '.join(sorted(missing))}"
    scope: dict[str, Any] = {"__name__": path.stem, "triton": triton, "tl": tl, "torch": torch}
    body = [node for node in _needed(tree, wanted) if _can_import(node)]
    with pretend_card():
        exec(compile(ast.Module(body, []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in wanted})


def _can_import(node: ast.stmt) -> bool:
    """Whether an import's module is there; other statements always."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    return all(importlib.util.find_spec(name.split(".")[0]) is not None for name in names) and not any(
        name == "pytest" or name.startswith(("triton.profiler", "triton.tools.experimental")) for name in names
    )
