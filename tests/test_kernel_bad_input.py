"""Bad input to every argument of every public op: one TypeError or ValueError that begins with the op's name.

Not here: what each op takes and what comes out. The one idea: a good call of each op is a table, and every argument
of its signature is spoilt in turn, in every way that its kind can be. A dispatch mode watches that no op
of ours ran before the refusal.
"""

import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait import kernels
from tests.cases import needs_plain, normal

pytestmark = needs_plain  # the checks are the same in the interpreter


def _new(*shape, seed=0):
    return normal(*shape, seed=seed, dtype=torch.float32)


RNG = torch.tensor([1, 2])
TARGET, TOKENS = torch.tensor([0, 2, 1]), torch.tensor([[0, 1], [2, 3]])
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
PLACE = {"rng": RNG, "sample_offset": 0, "row_offset": 0, "col_offset": 0}
TERMS = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 1.0}
LOSS = {"target": TARGET, "ignore_index": -100, **TERMS, "weight_per_token": torch.ones(3), "reduction": "mean"}
ROPE = {"q": _new(1, 5, 4, 16), "k": _new(1, 5, 2, 16), "cos": _new(5, 8), "sin": _new(5, 8), "interleaved": False}

# A good call of each op by name, every argument of its signature given but for OMITTED.
GOOD = {
    "rms_norm": {"x": _new(2, 3, 8), "weight": _new(8), "eps": 1e-6, "residual": _new(2, 3, 8)},
    "layer_norm": {"x": _new(2, 3, 8), "weight": _new(8), "bias": _new(8), "eps": 1e-5, "residual": _new(2, 3, 8)},
    "rope": ROPE,
    "rope_": ROPE,
    "swiglu": {"gate_up": _new(2, 3, 8)},
    "geglu": {"gate_up": _new(2, 3, 8), "approximate": "tanh"},
    "dropout": {"x": _new(2, 3, 8), "p": 0.5, **PLACE},
    "embedding": {"tokens": TOKENS, "weight": _new(4, 8), "vocab_start": 0, "padding_idx": 0},
    "embedding_wgrad": {
        "tokens": TOKENS, "dout": _new(2, 2, 8), "out": _new(4, 8), "vocab_start": 0, "accumulate": True,
    },
    "linear": {
        "x": _new(2, 3, 8), "weight": _new(4, 8), "bias": _new(4), "activation": "gelu", "residual": _new(2, 3, 4),
        "dropout_p": 0.5, **PLACE, "allow_tf32": False,
    },
    "linear_dgrad": {
        "dout": _new(2, 3, 4), "weight": _new(4, 8), "pre": _new(2, 3, 8), "activation": "silu", "allow_tf32": False,
    },
    "linear_wgrad": {
        "x": _new(2, 3, 8), "dout": _new(2, 3, 4), "out": _new(4, 8), "accumulate": True, "bias_grad": _new(4),
        "allow_tf32": False,
    },
    "linear_swiglu": {"x": _new(2, 3, 8), "gate_up_weight": _new(4, 8), "allow_tf32": False},
    "attention": {
        "q": _new(1, 5, 4, 16), "k": _new(1, 5, 2, 16), "v": _new(1, 5, 2, 16), "causal": True, "scale": 0.25,
        "window": 3, "softcap": 1.0, "sinks": _new(4), "dropout_p": 0.5, "rng": RNG, "head_offset": 0,
        "sample_offset": 0, "cu_seqlens": CU, "return_lse": False, "recompute": False,
    },
    "cross_entropy": {"logits": _new(3, 9), **LOSS, "debug": True},
    "linear_cross_entropy": {
        "x": _new(3, 8), "weight": _new(4, 8), **LOSS, "vocab_start": 0, "num_classes": 4, "debug": True,
    },
    "adamw_": {
        "params": [_new(3, 4)], "grads": [_new(3, 4)], "exp_avgs": [_new(3, 4)], "exp_avg_sqs": [_new(3, 4).square()],
        "master": [_new(3, 4)], "step": 1, "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1,
        "grad_scale": torch.tensor(0.5), "loss_scale": torch.tensor(2.0), "found_inf": torch.tensor(0.0), "rng": RNG,
        "first_indices": [0],
    },
    "l2_norm": {"tensors": [_new(3), _new(2, 2)]},
    "l2_norm_squared": {"tensors": [_new(3), _new(2, 2)]},
}  # fmt: skip
# Callables, and what is checked against them (test_loss.py).
OMITTED = {"linear_cross_entropy": {"all_reduce", "grad_in_forward", "weight_grad_out", "loss_grad"}}
# Nothing is wrong with: fewer values or dims where leading dims are free, a dtype where several are taken.
RIGHT = {
    *(("swiglu", "gate_up", way) for way in ("half", "one dim more", "meta")),
    *(("geglu", "gate_up", way) for way in ("half", "one dim more", "meta")),
    *(("linear_swiglu", "x", way) for way in ("one dim more",)),
    *(("dropout", "x", way) for way in ("half", "one value less")),
    *(("embedding", "tokens", way) for way in ("one dim more", "one value less")),
    *(("embedding", "weight", way) for way in ("half", "one value less")),
    ("embedding_wgrad", "dout", "half"),
    *(("linear_wgrad", name, "one dim more") for name in ("out", "bias_grad")),
    *(("attention", name, way) for name, way in (("v", "one value less"), ("cu_seqlens", "one value less"))),
    ("attention", "sinks", "half"),
    *(("cross_entropy", "logits", way) for way in ("half", "one value less")),
    *((op, "weight_per_token", "half") for op in ("cross_entropy", "linear_cross_entropy")),
    *(("adamw_", name, way) for name in ("grad_scale", "loss_scale", "found_inf") for way in ("half", "integers")),
    *(("adamw_", name, "half") for name in ("params", "grads")),
    *((op, "tensors", way) for op in ("l2_norm", "l2_norm_squared") for way in ("half", "meta")),
}


def _spoilt_tensor(x):
    yield "a list", [x.tolist()]
    yield "a string", "x"
    yield "complex", x.to(torch.complex64)
    yield "meta", x.to("meta")
    if x.is_floating_point():
        yield "integers", x.to(torch.int64)
        yield "half", x.half()
    else:
        yield "floats", x.float()
        yield "narrow", x.to(torch.int16)
    if x.dim():
        yield "one dim more", x.unsqueeze(0)
        yield "one value less", x[..., :-1]


def _spoilt_number(x):
    if isinstance(x, int):
        return {"below 0": -1, "a half": 0.5, "NaN": math.nan, "a string": "1"}.items()
    return {"below 0": -1.0, "NaN": math.nan, "infinite": math.inf, "a string": "1"}.items()


def _spoilt(x):
    """(way, value) for each way in which an argument of this kind can be wrong."""
    if isinstance(x, torch.Tensor):
        yield from _spoilt_tensor(x)
    elif isinstance(x, list):
        if not isinstance(x[0], torch.Tensor):
            yield from (("too many", x + x), ("below 0", [-1]))
            return
        yield "None in it", [None, *x[1:]]
        for way, value in _spoilt_tensor(x[0]):
            if way not in ("one dim more", "one value less") or len(x) == 1:
                yield way, [value, *x[1:]]
    elif isinstance(x, bool):
        return  # whatever is true or false
    elif isinstance(x, (int, float)):
        yield from _spoilt_number(x)
    elif isinstance(x, str):
        yield from (("another word", "nope"), ("a number", 1))


# Numbers that any sign, or infinity, suits.
RIGHT |= {
    ("attention", "scale", "below 0"),
    *((op, "ignore_index", "below 0") for op in ("cross_entropy", "linear_cross_entropy")),
    *((op, "eps", "infinite") for op in ("rms_norm", "layer_norm")),
}


def _cases():
    for op, arguments in GOOD.items():
        for name, value in arguments.items():
            for way, wrong in _spoilt(value):
                if (op, name, way) not in RIGHT:
                    yield pytest.param(op, name, wrong, id=f"{op}-{name}-{way}")


class _Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "plait":
            self.ran.append(func)
        return func(*args, **(kwargs or {}))


def _fresh(arguments):
    """The arguments, tensors that an op may write copied."""
    return {
        name: [x.clone() if isinstance(x, torch.Tensor) else x for x in value] if isinstance(value, list) else value
        for name, value in arguments.items()
    }


@pytest.mark.parametrize("op,name,wrong", list(_cases()))
def test_each_argument_that_is_wrong_is_refused_by_name_before_anything_runs(op, name, wrong):
    arguments = {**_fresh(GOOD[op]), name: wrong}
    with _Watch() as watch, pytest.raises((TypeError, ValueError)) as caught:
        getattr(kernels, op)(**arguments)
    assert watch.ran == []
    if not (isinstance(wrong, str) and isinstance(GOOD[op][name], (int, float))):  # Python's own TypeError is clear
        assert str(caught.value).startswith(op), str(caught.value)


@pytest.mark.parametrize("op", GOOD)
def test_a_tensor_that_is_needed_is_not_none(op):
    for name, parameter in inspect.signature(getattr(kernels, op)).parameters.items():
        if parameter.default is inspect.Parameter.empty and isinstance(GOOD[op][name], torch.Tensor):
            with pytest.raises(TypeError, match=f"^{op}: {name} is None; expected a tensor"):
                getattr(kernels, op)(**{**_fresh(GOOD[op]), name: None})


@pytest.mark.parametrize("op", GOOD)
def test_the_table_has_every_argument_and_its_call_is_good(op):
    function = getattr(kernels, op)
    assert set(inspect.signature(function).parameters) == set(GOOD[op]) | OMITTED.get(op, set())
    function(**_fresh(GOOD[op]))


@pytest.mark.parametrize("op", GOOD)
@pytest.mark.filterwarnings("ignore")
def test_a_good_call_is_one_graph_with_the_same_results_and_the_same_writes(op):
    """torch.compile(fullgraph=True) with every argument but `debug`, a look at values, which no graph has."""
    function, results = getattr(kernels, op), []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)):
        arguments = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in _fresh(GOOD[op]).items()}
        with torch.no_grad():
            found = call(**{name: x for name, x in arguments.items() if name != "debug"})
        results.append([x for x in tree_leaves((found, arguments)) if isinstance(x, torch.Tensor)])
    torch.testing.assert_close(*results)


def test_the_table_has_every_public_op():
    parts = {"linear_cross_entropy_grad", "linear_cross_entropy_stats", "merge_stats", "token_loss"}
    assert set(GOOD) == {name for name in kernels.__all__ if not name.endswith("_ref")} - parts


@pytest.mark.parametrize("seqlens", [(0, 3, 7), (0, 3, 2), (-1, 3, 5), (-2, -1)])
@pytest.mark.parametrize("side", [0, 1])
def test_documents_that_reach_out_of_the_batch_are_refused(seqlens, side):
    """They gave rows of other documents, or of none, without a word."""
    good = torch.linspace(0, 5, len(seqlens)).to(torch.int32)
    pair = [good, good]
    pair[side] = torch.tensor(seqlens, dtype=torch.int32)
    q, k = _new(1, 5, 2, 16), _new(1, 5, 2, 16, seed=1)
    for op in (kernels.attention, kernels.attention_ref):
        with pytest.raises(ValueError, match=rf"cu_seqlens of {('queries', 'keys')[side]} are \[.*0 to 5"):
            op(q, k, k, cu_seqlens=tuple(pair))


def test_one_side_of_documents_alone_is_refused():
    x = _new(1, 5, 2, 16)
    with pytest.raises(ValueError, match="1 cu_seqlens; expected one, or a pair"):
        kernels.attention(x, x, x, cu_seqlens=(CU,))
