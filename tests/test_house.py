"""Keeps the house: who may import whom, how long a file is, that wheel and README hold what the disk holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# folder -> (ceiling in lines, the plait packages that it may import)
ROOMS = {
    "kernels": (400, {"plait.kernels"}),
    "parallel": (350, {"plait.kernels", "plait.parallel"}),
    "ckpt": (300, {"plait._C", "plait.ckpt"}),
    "runtime": (350, {"plait", "plait._C", "plait.kernels", "plait.parallel", "plait.ckpt"}),
    "bench": (300, {"plait", "plait._C", "plait.kernels", "plait.parallel", "plait.ckpt", "plait.bench"}),
}
PYTHON_FILES = sorted(path for folder in ROOMS for path in (ROOT / folder).rglob("*.py"))
CPP_FILES = sorted((ROOT / "csrc").glob("*.[ch]pp"))


def imported_modules(path: Path) -> set[str]:
    """Returns every module named by an import statement of the file, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import on line {node.lineno}"
            if node.module == "plait":  # `from plait import kernels` names a package or a module of the root
                names.update(f"plait.{alias.name}" for alias in node.names)
            else:
                names.add(node.module or "")
    return names


def package_of(module: str) -> str:
    """Returns the package of the house that a module of plait belongs to: its folder, or `plait` itself."""
    second = module.split(".")[1] if "." in module else ""
    return f"plait.{second}" if second in {"kernels", "parallel", "ckpt", "bench", "_C"} else "plait"


def test_there_are_files_to_check():
    assert len(PYTHON_FILES) > 20 and len(CPP_FILES) > 5


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downwards(path):
    allowed = ROOMS[path.relative_to(ROOT).parts[0]][1]
    wrong = {m for m in imported_modules(path) if m.split(".")[0] == "plait" and package_of(m) not in allowed}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}; its floor allows {sorted(allowed)}"


@pytest.mark.parametrize("path", [p for p in PYTHON_FILES if p.parts[-2] == "kernels"], ids=lambda p: p.name)
def test_kernels_never_import_torch_distributed(path):
    assert not [m for m in imported_modules(path) if m.startswith("torch.distributed")]


@pytest.mark.parametrize("path", [p for p in PYTHON_FILES if "parallel" in p.parts], ids=lambda p: p.name)
def test_raw_distributed_calls_stay_in_their_files(path):
    if path.name in {"collectives.py", "p2p.py", "mesh.py"}:
        return
    calls = re.findall(
        r"\bdist\.(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|send|recv|isend|irecv|barrier)\(",
        path.read_text(),
    )
    assert not calls, f"{path.name} calls torch.distributed itself: {calls}"


def test_no_import_cycles():
    graph = {}
    for path in PYTHON_FILES:
        graph[module_name(path)] = top_level_imports(path)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"import cycle: {' -> '.join(trail[trail.index(module) :] + (module,))}"
        if module in done:
            return
        for child in sorted(graph[module]):
            if child in graph and child != module:
                visit(child, (*trail, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


def module_name(path: Path) -> str:
    """Returns the dotted name under which a file is imported."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "runtime" else parts
    parts = parts[:-1] if parts and parts[-1] == "__init__" else parts
    return ".".join(["plait", *parts])


def top_level_imports(path: Path) -> set[str]:
    """Returns the modules that importing this file imports: statements outside functions, submodules resolved."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            files = {module_name(p) for p in PYTHON_FILES}
            names.update(submodules & files or {node.module})
    return {n for n in names if n.split(".")[0] == "plait"}


@pytest.mark.parametrize("path", PYTHON_FILES + CPP_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_under_their_ceiling(path):
    room = path.relative_to(ROOT).parts[0]
    ceiling = 250 if room == "csrc" else ROOMS[room][0]
    lines = len(path.read_text().splitlines())
    assert lines <= ceiling, (
        f"{path.relative_to(ROOT)} has {lines} lines; the ceiling is {ceiling}: split it by purpose"
    )


@pytest.mark.parametrize("path", PYTHON_FILES + CPP_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_sources_are_ascii_and_say_what_they_are(path):
    text = path.read_bytes()
    assert text.isascii(), f"{path} has non-ASCII bytes"
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text)), f"{path} has no module docstring"
    elif not path.with_suffix(".hpp").exists() or path.suffix == ".hpp":  # a .cpp is told by its header
        assert text.startswith(b"//"), f"{path} does not begin by saying what it is"


def test_nothing_is_pickled_and_no_environment_is_read():
    """torchrun's own protocol is the one environment that is read, in one file; and the variable of --key-env NAME,
    which holds a secret and chooses nothing."""
    for path in PYTHON_FILES:
        modules = imported_modules(path)
        assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
        if path.name != "launch.py" and re.search(r"os\.environ|getenv", path.read_text()):
            assert path.name in {"doctor.py", "cli_show.py"} or path.parts[-2] == "bench", (
                f"{path} reads the environment"
            )


def test_wheel_lists_every_package_on_disk():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = set()
    for path in PYTHON_FILES:
        name = ".".join(["plait", *path.parent.relative_to(ROOT).parts]).replace("plait.runtime", "plait")
        on_disk.add(name)
    assert set(config["packages"]) == on_disk == set(config["package-dir"])


def test_typings_show_every_file_of_the_package_root():
    shown = {p.name for p in (ROOT / "typings" / "plait").iterdir()}
    wanted = {p.name for p in (ROOT / "runtime").glob("*.py")} | {"kernels", "parallel", "ckpt", "bench", "_C.pyi"}
    assert wanted <= shown, f"missing in typings/plait: {sorted(wanted - shown)}"
    broken = [p.name for p in (ROOT / "typings" / "plait").iterdir() if not p.exists()]
    assert not broken, f"links to nothing in typings/plait: {broken}"


def test_importing_the_root_is_light():
    code = "import sys, plait; print('torch' in sys.modules, 'triton' in sys.modules)"
    out = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_readme_map_names_every_file():
    """README's tree lists each source file once, by its name, with its number of lines within 25 % or 20 lines."""
    readme = (ROOT / "README.md").read_text()
    rows = dict(re.findall(r"^\s*((?:kernels|parallel|ckpt|runtime|bench|csrc)/[\w/.]+)\s+(\d+)\s", readme, re.M))
    on_disk = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines())
        for p in PYTHON_FILES + CPP_FILES
        if p.name != "__init__.py" and not (p.suffix == ".hpp" and p.with_suffix(".cpp").exists())
    }
    assert set(rows) == set(on_disk), f"differ: {sorted(set(rows) ^ set(on_disk))}"
    for name, lines in on_disk.items():
        assert abs(int(rows[name]) - lines) <= max(20, lines // 4), (
            f"{name}: README says {rows[name]} lines, it has {lines}"
        )
