"""Offline compilation: rms_norm, swiglu and attention fit the registers of sm_90, read wide, use no fp64."""

import pytest

from plait.kernels import cli
from plait.kernels.inspect import compile_offline, parse_arch
from plait.kernels.points import points
from tests.cases import needs_compiler

# Streaming code hardly differs between architectures: sm_90 always, the others in the long run.
ARCHS = ["sm_90", *(pytest.param(arch, marks=pytest.mark.long) for arch in ("sm_80", "sm_100"))]

# Kernels whose name has a matmul in it must use Hopper's warp-group instructions.
MATMULS = ("forward.64", "forward.128", "dq", "dkdv")
NAMES = [
    "rms_norm.forward.4096",
    "rms_norm_residual.backward.8192",
    "swiglu.forward",
    "swiglu.backward",
    "attention.forward.64",
    "attention.dkdv.64",
    "attention.forward.128",
    "attention.delta.128",
    "attention.dq.128",
    "attention.dkdv.128",
]


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_sm_90_without_spills(name):
    facts = compile_offline(points()[name](), "sm_90")
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    assert 0 < facts.registers <= 255 and facts.shared_bytes <= 227 * 1024
    # A number argument typed fp64 by the compiler would show here.
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    # No gradient is added up in memory: bits agree between runs.
    # (A TMA descriptor is published by an exchange, which adds nothing.)
    assert facts.count("RED.") + facts.count("ATOM") - facts.count("ATOMG.E.EXCH") == 0
    if name.startswith("attention") and any(m in name for m in MATMULS):
        assert facts.count("HGMMA") > 0
    elif "attention" not in name:
        loads = facts.count("LDG")
        assert facts.count("LDG.E.128") >= loads - 1  # the norm's one scalar per row is narrow


# Kernels that only read and write, for every architecture.
ELEMENTWISE = [f"rope.{style}.{head_dim}" for style in ("halves", "neighbours", "packed") for head_dim in (64, 128)]
ELEMENTWISE += [f"{op}.{side}" for op in ("swiglu", "geglu", "geglu_tanh") for side in ("forward", "backward")]
ELEMENTWISE += [
    f"{norm}.{side}"
    for norm in ("rms_norm_residual", "layer_norm_residual")
    for side in ("forward.8192", "forward.65536", "backward.8192", "backward.65536")
]


@pytest.mark.offline
@pytest.mark.long  # the declared list of test_gate.py stays in the short run
@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_kernels_read_and_write_16_bytes_without_spills(name, arch):
    facts = compile_offline(points()[name](), arch)
    assert (facts.spill_loads, facts.spill_stores, facts.stack_bytes) == (0, 0, 0)
    # Half of the registers of a thread: two programs share a multiprocessor at least.
    assert 0 < facts.registers <= 128
    assert facts.count("DADD") + facts.count("DMUL") + facts.count("DFMA") == 0
    assert facts.count("RED.") + facts.count("ATOM") == 0
    assert facts.count("LDG.E.128") >= facts.count("LDG") - narrow(name) > 0
    assert facts.count("STG.E.128") >= facts.count("STG") - narrow(name) > 0


def narrow(name: str) -> int:
    """At most so many reads, and writes, of one number per row: mean and rstd."""
    return 2 if "norm" in name else 0


@pytest.mark.offline
@needs_compiler
def test_explain_prints_the_facts_of_one_kernel(capsys):
    assert cli.main(["explain", "swiglu.forward", "--arch", "sm_80"]) == 0
    text = capsys.readouterr().out
    assert "_swiglu_forward for sm_80" in text and "spill loads 0" in text and "EXIT" in text


def test_list_names_every_point_and_bad_names_exit_with_2(capsys):
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.split() == list(points(every=True))
    assert cli.main(["explain", "no_such_kernel"]) == 2
    assert "no kernel 'no_such_kernel'" in capsys.readouterr().err
    assert cli.main(["explain", "swiglu.forward", "--arch", "hopper"]) == 2
    assert "expected a name such as" in capsys.readouterr().err
    assert set(NAMES) <= set(points())


@pytest.mark.parametrize("text,number", [("sm_90", 90), ("90", 90), ("sm_100", 100), ("sm_90a", 90)])
def test_architecture_names(text, number):
    assert parse_arch(text) == number
