"""Triton's cache: what is counted, what `plait kernels warm` fills, and that a second process compiles nothing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from plait.kernels import cli, warm
from plait.kernels.points import points
from plait.kernels.warm import Warmed, chosen, counting
from tests.cases import needs_compiler

ROOT = Path(__file__).resolve().parent.parent
# Quick to compile; hints of every kind: pointers, strides, sizes, floats, numbers that are not specialised.
NAMES = ["swiglu.forward", "rms_norm.forward.4096", "embedding.forward.bf16", "dropout.bf16"]


def test_compiled_and_loaded_kernels_are_counted_and_the_listener_stays(monkeypatch):
    heard = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **event: heard.append(event))
    mine = triton.knobs.compilation.listener
    with pytest.raises(KeyError), counting() as counts:
        for hit in (False, True, True):
            triton.knobs.compilation.listener(src=1, metadata={}, metadata_group={}, times=None, cache_hit=hit)
        raise KeyError
    assert vars(counts) == {"compiled": 1, "loaded": 2}
    assert [event["cache_hit"] for event in heard] == [False, True, True] and heard[0]["src"] == 1
    assert triton.knobs.compilation.listener is mine


def test_counts_of_nested_blocks_are_each_their_own():
    with counting() as outer:
        with counting() as inner:
            triton.knobs.compilation.listener(cache_hit=False)
        triton.knobs.compilation.listener(cache_hit=True)
    assert vars(outer) == {"compiled": 1, "loaded": 1} and vars(inner) == {"compiled": 1, "loaded": 0}


def test_points_are_chosen_by_prefix_for_every_architecture():
    assert chosen(["swiglu"], ["sm_80", "sm_90"], False) == [
        (f"swiglu.{side}", arch) for arch in ("sm_80", "sm_90") for side in ("forward", "backward")
    ]
    assert len(chosen([], ["sm_90"], False)) == len(points())
    assert len(chosen([], ["sm_90"], True)) == len(points(every=True)) > len(points())


def test_a_kernel_that_fails_is_told_and_the_rest_goes_on(monkeypatch, capsys):
    def compile_launch(launch, arch):
        if launch == "swiglu.forward":
            raise ValueError("a long story\nno such layout")
        triton.knobs.compilation.listener(cache_hit=launch == "swiglu.backward")

    names = ("swiglu.forward", "swiglu.backward", "geglu.forward")
    monkeypatch.setattr(warm, "points", lambda every: {name: lambda arch, name=name: name for name in names})
    monkeypatch.setattr(warm, "compile_launch", compile_launch)
    ticks = iter(range(100))
    assert list(warm.warm([(name, "sm_90") for name in names], clock=lambda: float(next(ticks)))) == [
        Warmed("swiglu.forward", "sm_90", 1.0, False, "ValueError: no such layout"),
        Warmed("swiglu.backward", "sm_90", 1.0, False),
        Warmed("geglu.forward", "sm_90", 1.0, True),
    ]
    assert cli.main(["warm", "swiglu", "geglu.forward", "--arch", "sm_90"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("failed: ValueError: no such layout") and lines[1].endswith("  was there")
    assert lines[2].startswith("[  3/3] geglu.forward") and lines[2].endswith("  compiled")
    assert lines[3].endswith("1 compiled, 1 failed")


def test_an_architecture_without_tables_takes_the_tiles_that_its_cards_take(monkeypatch):
    asked, compiled = [], []
    monkeypatch.setattr(warm, "points", lambda every: {"one": lambda arch: asked.append(arch)})
    monkeypatch.setattr(warm, "compile_launch", lambda launch, arch: compiled.append(arch))
    archs = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]
    assert all(not done.error for done in warm.warm([("one", arch) for arch in archs]))
    assert compiled == archs and asked == ["sm_80", "sm_80", "sm_80", "sm_90", "sm_100", "sm_100", "sm_80"]


def test_names_and_architectures_that_do_not_exist_are_refused(capsys):
    assert cli.main(["warm", "swiglu", "no_such_kernel"]) == 2
    assert "no kernel 'no_such_kernel'" in capsys.readouterr().err
    assert cli.main(["warm", "--arch", "volta"]) == 2
    assert "expected a name such as sm_80" in capsys.readouterr().err


def launched_kernels() -> set[str]:
    """The first argument of each Launch(...) in the sources, where it is a name."""
    calls = [n for path in (ROOT / "kernels").glob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    calls = [n for n in calls if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Launch" and n.args]
    return {name for call in calls if (name := getattr(call.args[0], "id", "kernel")) != "kernel"}


@needs_compiler
def test_every_kernel_that_is_launched_is_warmed():
    """The second stage of l2_norm and the writer of tables were compiled in the first step on every machine."""
    warmed = {make("sm_90").kernel.__name__ for make in points().values()}
    assert len(warmed) > 20 and launched_kernels() - warmed == set()


# A card that loads nothing and runs nothing: all of a launch up to the driver, whose calls are counted.
ON_A_CARD = """
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from plait.kernels.points import points
from plait.kernels.warm import counting

ran = []

class Card:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def launcher_cls(self, source, metadata): return lambda *arguments: ran.append(metadata.name)
    class utils:
        def get_device_properties(device): return {{"max_shared_mem": 227 * 1024}}
        def load_binary(name, code, shared, device): return (1, 1, 0, 0, 1024)
        def unload_module(module): pass

driver.set_active(Card())
with counting() as counts:
    for name in 2 * {names!r}:
        points()[name]("sm_90").run()
print(counts.compiled, counts.loaded, len(ran))
"""


@pytest.mark.offline
@needs_compiler
def test_a_second_process_compiles_nothing_also_by_the_jit_of_a_card(tmp_path):
    """Everything was compiled twice: once offline, once more on the card, whose key was another one."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}

    def output(code: str) -> list[str]:
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    fill = f"from plait.kernels import cli; cli.main(['warm', '--arch', 'sm_90', *{NAMES!r}])"
    assert output(fill)[-1].endswith(f"{len(NAMES)} compiled, 0 failed")
    kept = sorted(tmp_path.rglob("*.cubin"))
    assert len(kept) == len(NAMES)
    assert output(fill)[-1].endswith("0 compiled, 0 failed")
    assert output(ON_A_CARD.format(names=NAMES)) == [f"0 {len(NAMES)} {2 * len(NAMES)}"]
    assert sorted(tmp_path.rglob("*.cubin")) == kept
