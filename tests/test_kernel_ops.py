"""Every registered op: opcheck, gradcheck, one graph under torch.compile, no torch.distributed in the sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.library import opcheck

import plait.kernels as kernels
from plait.bench import suite_launch
from plait.kernels import layer_norm, rms_norm
from tests.cases import interpret, needs_interpreter, normal

OPS = torch.ops.plait
ROOT = Path(__file__).resolve().parent.parent
RNG = torch.tensor([1, 2])
TOKENS = torch.tensor([[0, 3, 7], [5, 4, 2]])
NUMBER = torch.tensor(3.0, dtype=torch.float64)
CU = torch.tensor([0, 2, 5], dtype=torch.int32)


def _x(*shape, seed=0):
    return normal(*shape, seed=seed).requires_grad_()


def _c(*shape, seed=0):
    return normal(*shape, seed=seed)


def _attention(*extra, causal=True, window=0, softcap=0.0, dropout=0.0):
    sinks, rng, cu_q, cu_k = extra or (None,) * 4
    return (
        _x(1, 5, 4, 16), _x(1, 5, 2, 16, seed=1), _x(1, 5, 2, 16, seed=2),
        sinks, rng, cu_q, cu_k, causal, 0.25, window, softcap, dropout, 0, 0,
    )  # fmt: skip


# Every op that kernels/ registers, by name, with one or more argument lists. Gradients of gradients have no ops.
CASES = {
    "rms_norm": [(_x(2, 3, 8), _x(8), 1e-6), (_x(2, 3, 8), None, 1e-6)],
    "rms_norm_residual": [(_x(2, 3, 8), _x(2, 3, 8, seed=1), w, 1e-6) for w in (_x(8), None)],
    "rms_norm_grad": [(_c(2, 3, 8), _c(2, 3, 8), w, _c(2, 3), None) for w in (_c(8), None)],
    "layer_norm": [(_x(2, 3, 8), _x(8), _x(8, seed=1), 1e-5), (_x(2, 3, 8), None, _x(8), 1e-5)],
    "layer_norm_residual": [
        (_x(2, 3, 8), _x(2, 3, 8, seed=1), w, b, 1e-5)
        for w, b in ((_x(8), _x(8, seed=1)), (_x(8), None), (None, None))
    ],
    "layer_norm_grad": [
        (_c(2, 3, 8), _c(2, 3, 8), _c(8), _c(2, 3), _c(2, 3), _c(2, 3, 8), True),
        (_c(2, 3, 8), _c(2, 3, 8), None, _c(2, 3), _c(2, 3), None, False),
    ],
    "swiglu": [(_x(2, 3, 8),)],
    "swiglu_grad": [(_c(2, 3, 4), _c(2, 3, 8))],
    "geglu": [(_x(2, 3, 8), tanh) for tanh in (False, True)],
    "geglu_grad": [(_c(2, 3, 4), _c(2, 3, 8), tanh) for tanh in (False, True)],
    "linear": [(_x(2, 3, 8), _x(4, 8), _x(4), _x(2, 3, 4)), (_x(3, 8), _x(4, 8), None, None)],
    "linear_act": [
        *((_x(2, 3, 8), _x(4, 8), _x(4), None, code) for code in (1, 2, 3, 4)),
        (_x(2, 3, 8), _x(4, 8), _x(4), _x(2, 3, 4), 1, RNG, 0.25, 1, 2, 4),
        (_x(2, 3, 8), _x(4, 8), None, None, 0, RNG, 0.25, 1, 2, 3),
    ],
    "linear_act_grad": [
        (_c(2, 4), _c(2, 8), _c(4, 8), _c(2, 4, seed=1), 1, True, False, False),
        (_c(2, 3, 4), _c(2, 3, 8), _c(4, 8), _c(2, 3, 4, seed=1), 3, True, True, True, RNG, 0.25, 1, 2, 4),
        (_c(2, 3, 4), _c(2, 3, 8), _c(4, 8), None, 0, False, True, False, RNG, 0.25, 1, 2, 3),
    ],
    "linear_dgrad": [(_x(2, 3, 4), _x(4, 8))],
    "linear_dgrad_act": [(_c(2, 3, 4), _c(4, 8), _c(2, 3, 8, seed=1), 2)],
    "linear_dgrad_gated": [(_c(2, 3, 4), _c(4, 8), _c(2, 3, 16, seed=1), 0), (_c(3, 4), _c(4, 8), _c(3, 16), 2)],
    "linear_wgrad": [(_x(2, 3, 8), _x(2, 3, 4))],
    "linear_wgrad_": [
        (_c(2, 3, 8), _c(2, 3, 4), _c(4, 8), True),
        (_c(2, 3, 8), _c(2, 3, 4), _c(4, 8), True, _c(4, seed=1)),
    ],
    "linear_wgrad_sums": [(_c(2, 3, 8), _c(2, 3, 4))],
    "linear_swiglu": [(_x(2, 3, 8), _x(4, 8))],
    "linear_swiglu_grad": [
        (_c(2, 3, 2), _c(2, 3, 8), _c(4, 8), _c(2, 3, 4, seed=1), *needs) for needs in ((True, True), (True, False))
    ],
    "rope": [(_x(2, 3, 2, 8), _x(2, 3, 1, 8), _c(3, 3), _c(3, 3, seed=1), False, i) for i in (False, True)],
    "rope_": [(_c(2, 3, 2, 8), _c(2, 3, 1, 8), _c(3, 3), _c(3, 3), False, i) for i in (False, True)],
    "embedding": [(TOKENS, _x(5, 4), 2)],
    "embedding_grad": [(_c(2, 3, 4), TOKENS, 5, 2)],
    "embedding_grad_": [(_c(2, 3, 4), TOKENS, _c(5, 4), 2, True)],
    "dropout": [(_x(2, 3, 8), RNG, 0.25, 1, 2, 3)],
    "cross_entropy": [
        (_x(3, 9), TOKENS[0], 1, 0.1, 0.1, 2.0, 2),
        (_x(3, 9), TOKENS[0], -100, 0.0, 0.0, 0.0, 1),
        (_x(3, 9), TOKENS[0], 1, 0.0, 0.1, 2.0, 0),
    ],
    "cross_entropy_grad": [
        (_c(3, 9), TOKENS[0], _c(3), _c(3)[0] + 9.0, _c(3)[1].clone(), 1, 0.1, 0.1, 2.0),
        (_c(9, 3).t(), TOKENS[0], _c(3), _c(0), _c(3, seed=1), 1, 0.0, 0.0, 0.0),
    ],
    "linear_cross_entropy": [
        (_c(3, 4), _c(9, 4), TOKENS[0], 1, 2, 0, 9, 0.1, 0.1, 2.0),
        (_c(4, 3).t(), _c(9, 4), TOKENS[0], -100, 0, 0, 9, 0.0, 0.0, 0.0),
    ],
    "linear_cross_entropy_stats": [(_c(3, 4), _c(9, 4), TOKENS[0], 0, 0.0)],
    "linear_cross_entropy_grad": [
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3), _c(3), _c(9, 4), 0, 9, 0.1, 0.1, 2.0, True),
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3), _c(3), None, 0, 9, 0.0, 0.0, 0.0, False),
        (_c(4, 3).t(), _c(0, 4), TOKENS[0], _c(3), _c(3), _c(0, 4), 9, 9, 0.0, 0.0, 0.0, True),
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3), _c(3)[0].clone(), None, 0, 9, 0.1, 0.1, 2.0, True, NUMBER, 1),
    ],
    "linear_cross_entropy_once": [
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3), 1, 0, 0, 9, 0.1, 0.1, 2.0, True, True, None),
        (_c(4, 3).t(), _c(9, 4), TOKENS[0], None, 1, 2, 0, 9, 0.0, 0.0, 0.0, False, False, None),
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3)[0].clone(), 1, 1, 0, 9, 0.1, 0.1, 2.0, True, True, _c(9, 4)),
    ],
    "linear_cross_entropy_grad_new": [
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3), _c(3), 0, 9, 0.1, 0.1, 2.0, True),
        (_c(4, 3).t(), _c(9, 4), TOKENS[0], _c(3), _c(3), 0, 9, 0.0, 0.0, 0.0, False),
        (_c(3, 4), _c(9, 4), TOKENS[0], _c(3), _c(3)[0].clone(), 0, 9, 0.1, 0.1, 2.0, True, NUMBER, 1),
    ],
    "l2_norm_squared": [([_c(3), _c(2, 2)],)],
    "adamw_": [
        ([_c(3)], [_c(3)], [_c(3)], [_c(3).square()], [], torch.tensor(0.5), 1, 0.1, 0.9, 0.99, 1e-8, 0.1),
        ([_c(3)], [_c(3)], [_c(3)], [_c(3).square()], [_c(3)], None, 2, 0.1, 0.9, 0.99, 1e-8, 0.1),
    ],
    "attention": [
        _attention(),
        _attention(causal=False),
        _attention(_x(4), RNG, None, None, window=2, softcap=2.0, dropout=0.25),
        _attention(None, None, CU, CU),
        (*_attention(_x(4), RNG, None, None, dropout=0.25), True),  # recompute
    ],
    "attention_grad": [
        (_c(1, 5, 4, 16), None, _c(1, 5, 4, 16), _c(1, 5, 2, 16), _c(1, 5, 2, 16), _c(1, 5, 4, 16), _c(1, 4, 5),
         *_attention()[3:]),
        (_c(1, 5, 4, 16), _c(1, 4, 5), _c(1, 5, 4, 16), _c(1, 5, 2, 16), _c(1, 5, 2, 16), None, None,
         *_attention(_c(4), RNG, None, None)[3:]),
    ],
}  # fmt: skip


def test_the_table_names_every_registered_op():
    registered = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("plait::")}
    own = {name for name in registered if name.startswith("bench_empty")}  # the launch suite's, once it was imported
    assert registered - own == set(CASES)


def _each(names):
    return [pytest.param(n, a, id=f"{n}-{i}") for n in names for i, a in enumerate(CASES[n])]


@pytest.mark.parametrize("name,arguments", _each(CASES))
def test_opcheck(name, arguments):
    opcheck(getattr(OPS, name).default, arguments)


@interpret
@needs_interpreter
@pytest.mark.parametrize(
    "name,arguments",
    _each(
        [
            "rms_norm_residual",
            "layer_norm_residual",
            "geglu",
            "swiglu",
            "rope",
            "rope_",
            "attention",
            "linear",
            "linear_act_grad",
            "linear_swiglu_grad",
            "cross_entropy",
            "cross_entropy_grad",
            "linear_cross_entropy",
            "linear_cross_entropy_stats",
            "linear_cross_entropy_grad",
            "linear_cross_entropy_once",
            "linear_cross_entropy_grad_new",
        ]
    ),
)
def test_opcheck_of_interpreted_kernels(name, arguments):
    opcheck(getattr(OPS, name).default, arguments)


class _Dropped(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return None


@pytest.mark.parametrize("name", [name for name in suite_launch.ops("meta") if "no gradient" not in name])
def test_where_no_gradient_comes_in_none_goes_out(name):
    op, inputs = suite_launch.ops("cpu")[name]
    for x in inputs:
        x.requires_grad_()
    out = op(*inputs)
    _Dropped.apply(out[0] if isinstance(out, tuple) else out).sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in inputs)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_a_norm_whose_sum_alone_is_used_gives_the_gradient_of_the_sum(norm):
    x, residual, weight = (normal(*shape).float().requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    grads = torch.autograd.grad(norm(x, weight, residual=residual)[1].square().sum(), (x, residual, weight))
    assert torch.equal(grads[0], 2.0 * (x + residual)) and torch.equal(grads[1], grads[0]) and not grads[2].any()


DIFFERENTIABLE = [
    n for n, cases in CASES.items() if any(isinstance(a, torch.Tensor) and a.requires_grad for a in cases[0])
]


def _gradcheck(name, arguments):
    op = getattr(OPS, name).default
    places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.requires_grad]

    def call(*tensors):
        values = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        out = op(*values)
        out = out if isinstance(out, tuple) else (out,)
        return tuple(o for o in out if o.requires_grad)

    assert torch.autograd.gradcheck(call, [arguments[i] for i in places], fast_mode=True)


@pytest.mark.parametrize("name,arguments", _each(DIFFERENTIABLE))
def test_gradcheck_in_fp64(name, arguments):
    _gradcheck(name, arguments)


@interpret
@needs_interpreter
@pytest.mark.long  # numerical differences by hundreds of interpreted launches; the oracles have theirs above
@pytest.mark.parametrize(
    "name,arguments",
    _each(
        ["rms_norm", "layer_norm", "swiglu", "geglu", "rope", "attention", "linear", "linear_act", "linear_swiglu"]
    ),
)
def test_gradcheck_of_interpreted_kernels_in_fp64(name, arguments):
    _gradcheck(name, arguments)


def _block(x, weight, gate_up, q, k, v, cos, sin, table):
    normed, h = kernels.rms_norm(x, weight, residual=x)
    hidden = kernels.linear_swiglu(normed, gate_up)
    hidden = kernels.linear(hidden, gate_up[:6, :4], activation="gelu")
    q, k = kernels.rope(*kernels.rope(q, k, cos, sin), cos, sin, interleaved=True)
    centred, _ = kernels.layer_norm(h, weight, weight, residual=normed)
    out, lse = kernels.attention(q, k, v, return_lse=True, window=3, dropout_p=0.25, rng=RNG)
    loss = kernels.linear_cross_entropy(x, table, TOKENS) + kernels.cross_entropy(h, TOKENS)
    rows = kernels.embedding(TOKENS, table) + kernels.dropout(x, 0.25, RNG)
    gates = kernels.swiglu(rows).sum() + kernels.geglu(centred).sum()
    return loss + hidden.sum() + out.square().sum() + lse.sum() + gates


BLOCK = (
    _x(2, 3, 8), _x(8), _x(8, 8, seed=1), _x(2, 5, 4, 8), _x(2, 5, 2, 8), _x(2, 5, 2, 8, seed=3),
    _c(5, 4), _c(5, 4, seed=1), _x(8, 8, seed=2),
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_block_compiles_to_one_graph_with_the_same_gradients():
    inputs = [x for x in BLOCK if x.requires_grad]
    eager = _block(*BLOCK)
    compiled = torch.compile(_block, fullgraph=True, backend="aot_eager")(*BLOCK)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled, inputs), torch.autograd.grad(eager, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_the_compiler_keeps_the_stride_order_of_inputs():
    assert all(torch.Tag.needs_fixed_stride_order in getattr(OPS, name).default.tags for name in CASES)


def test_every_public_op_has_its_oracle_beside_it():
    ops = "adamw_ attention cross_entropy dropout embedding geglu l2_norm layer_norm linear linear_cross_entropy"
    for name in f"{ops} linear_dgrad linear_swiglu linear_wgrad rms_norm rope swiglu".split():
        assert callable(getattr(kernels, name)) and callable(getattr(kernels, f"{name.rstrip('_')}_ref"))


def test_no_source_line_imports_more_than_torch_triton_and_the_standard_library():
    allowed = {"torch", "triton", "plait"} | set(sys.stdlib_module_names)
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                assert not name.startswith("torch.distributed"), f"{path.name} imports {name}"
                assert not name.startswith("plait.") or name.startswith("plait.kernels"), (
                    f"{path.name} imports {name}"
                )


def test_the_places_for_later_work_are_where_the_notes_say():
    """docs/kernels.md's table of doors: communication inside the matmul, fp8, experts."""
    home = Path(kernels.__file__).parent
    text = (ROOT / "docs" / "kernels.md").read_text()
    section = text.split("## Where later work fits")[1].split("\n## ")[0]
    places = re.findall(r"`(\w+)` \(`kernels/(\w+\.py)`\)", section)
    assert len(places) >= 8
    for name, file in places:
        assert re.search(rf"^def {name}\(", (home / file).read_text(), re.MULTILINE), f"{file} has no {name}"
    dots = {path.name: path.read_text().count("tl.dot(") for path in home.glob("matmul_*.py")}
    assert {name: count for name, count in dots.items() if count} == {"matmul_triton.py": 1, "matmul_gated.py": 2}


_PLAIN_SCRIPT = """
import sys, torch, triton
seen = {name.split(".")[0] for name in sys.modules}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in seen or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        if name == "plait" or name == "plait.kernels" or name.startswith("plait.kernels."):
            return None
        raise ImportError(f"a plain script has no {name}")
sys.meta_path.insert(0, Refuse())
from plait.kernels import attention
q, k = torch.randn(1, 8, 4, 64, requires_grad=True), torch.randn(1, 8, 2, 64)
attention(q, k, k).sum().backward()
print(q.grad.isfinite().all().item())
"""


def test_a_plain_script_with_torch_and_triton_alone_has_attention():
    done = subprocess.run([sys.executable, "-P", "-c", _PLAIN_SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def _normal(*shape, seed=0):
    return normal(*shape, seed=seed, dtype=torch.float32)


def _written_by_rope():
    q, k, angles = _normal(1, 3, 2, 8), _normal(1, 3, 1, 8, seed=1), _normal(3, 4)
    kernels.rope_(q, k, angles.cos(), angles.sin())
    return q, k


def _written_by_wgrad():
    out, bias_grad = torch.zeros(16, 16), torch.zeros(16)
    kernels.linear_wgrad(_normal(16, 16), _normal(16, 16, seed=1), out, accumulate=True, bias_grad=bias_grad)
    return out, bias_grad


def _written_by_adamw():
    lists = [[_normal(5, seed=i)] for i in range(3)] + [[_normal(5).square()]]
    kernels.adamw_(*lists, step=1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    return lists[0][0], lists[2][0], lists[3][0]


WRITERS = (
    _written_by_rope,
    _written_by_wgrad,
    _written_by_adamw,
    lambda: (kernels.embedding_wgrad(TOKENS, _normal(2, 3, 4), torch.zeros(8, 4), accumulate=True),),
)


@pytest.mark.parametrize("written", WRITERS)
def test_autograd_knows_what_was_written_in_place(written):
    """rope_ and linear_wgrad wrote by address: a backward took what another node had saved, changed, for good."""
    assert all(tensor._version > 0 for tensor in written())


@interpret
@needs_interpreter
@pytest.mark.parametrize("written", WRITERS)
def test_autograd_knows_what_a_kernel_wrote_in_place(written):
    assert all(tensor._version > 0 for tensor in written())


@interpret
@needs_interpreter
def test_a_backward_refuses_what_rope_has_turned_since():
    leaf = _normal(1, 3, 2, 8).requires_grad_()
    saved = leaf * 1.0
    out = saved.square().sum()
    angles = _normal(3, 4)
    with torch.no_grad():
        kernels.rope_(saved.detach(), _normal(1, 3, 1, 8), angles.cos(), angles.sin())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
