"""attention: every option over every entry point, what is saved for backward, and 64-bit offsets.

An option that one entry point takes and another forgets was a bug elsewhere: the table below must name every keyword,
and each must act through each entry point as it does in the oracle, gradients too.
"""

import inspect
import re

import pytest
import torch

from plait.kernels import attention, attention_ref, flash
from plait.kernels.attention_plain import Options
from plait.kernels.flash_points import Point
from plait.kernels.inspect import compile_launch
from tests.cases import compare, needs_compiler, normal, slow_interpreted
from tests.test_flash import RNG, both

_DROPOUT = {"dropout_p": 0.4, "rng": RNG}
SINKS = torch.tensor([0.5, -1.0], dtype=torch.float64)
# Keyword -> (arguments with it, the same without): all but recompute change the result.
OPTIONS = {
    "causal": ({"causal": False}, {}),
    "scale": ({"scale": 0.75}, {}),
    "window": ({"window": 3}, {}),
    "softcap": ({"softcap": 1.5}, {}),
    "sinks": ({"sinks": SINKS}, {}),
    "dropout_p": (_DROPOUT, {}),
    "rng": (_DROPOUT | {"rng": RNG + 1}, _DROPOUT),
    "head_offset": (_DROPOUT | {"head_offset": 3}, _DROPOUT),
    "sample_offset": (_DROPOUT | {"sample_offset": 2}, _DROPOUT),
    "recompute": ({"recompute": True, "window": 3}, {"window": 3}),
}
# Two documents of 5 and 8 queries and of 5 and 9 keys.
PACKED = tuple(torch.tensor(ends, dtype=torch.int32) for ends in ((0, 5, 13), (0, 5, 14)))
ENTRIES = {
    "out": {},
    "out and lse": {"return_lse": True},
    "packed": {"cu_seqlens": PACKED},
    "packed out and lse": {"cu_seqlens": PACKED, "return_lse": True},
}


def _inputs(dtype=torch.float64):
    return tuple(
        normal(1, n, heads, 16, dtype=dtype, seed=i) for i, (n, heads) in enumerate(((13, 2), (14, 1), (14, 1)))
    )


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_the_table_names_every_keyword_and_the_oracle_takes_the_same():
    keywords, of_oracle = (inspect.signature(f).parameters for f in (attention, attention_ref))
    assert list(keywords) == list(of_oracle)
    assert all(keywords[name].default == of_oracle[name].default for name in keywords)
    entries = {name for arguments in ENTRIES.values() for name in arguments}
    assert set(keywords) == {"q", "k", "v"} | set(OPTIONS) | entries


@both
@pytest.mark.parametrize("entry", [slow_interpreted(e) if "packed" in e else e for e in ENTRIES])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts_through_every_entry_point(option, entry, path):
    given, without = ({**arguments, **ENTRIES[entry]} for arguments in OPTIONS[option])
    inputs = _inputs()
    compare(*(lambda *x, f=f: f(*x, **given) for f in (attention, attention_ref)), *inputs)
    with_it, plain = (_tuple(attention(*inputs, **arguments)) for arguments in (given, without))
    same = all(torch.equal(a, b) for a, b in zip(with_it, plain, strict=True))
    assert same == (option == "recompute")


@both
@pytest.mark.parametrize("packed", [False, slow_interpreted(True)])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_direct_functions_give_the_bits_of_the_op(option, packed, path):
    given = {**OPTIONS[option][0], "return_lse": True, **({"cu_seqlens": PACKED} if packed else {})}
    q, k, v = leaves = [x.requires_grad_() for x in _inputs()]
    sinks = given["sinks"].clone().requires_grad_() if "sinks" in given else None
    out, lse = attention(*leaves, **(given | {"sinks": sinks}))
    dout, dlse = normal(*out.shape, seed=5), normal(*lse.shape, seed=6)
    wanted = torch.autograd.grad((out, lse), [*leaves, *[sinks] * (sinks is not None)], (dout, dlse))
    numbers = Options(
        given.get("causal", True), given.get("scale", 0.25), given.get("window", 0), given.get("softcap", 0.0),
        given.get("dropout_p", 0.0), given.get("head_offset", 0), given.get("sample_offset", 0),
    )  # fmt: skip
    extra = (sinks, given.get("rng"), *(PACKED if packed else (None, None)))
    with torch.no_grad():
        got = flash.forward(q, k, v, *extra, *numbers)
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)
        for saved in (got, (None, None)):  # the second is what recompute leaves
            gradients = flash.backward(dout, dlse, q, k, v, *saved, *extra, *numbers)
            assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=False))
            assert len(gradients) == 4 and (gradients[3].numel() == 0) == (sinks is None)


@both
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("option", ["causal", "sinks", "dropout_p", "window"])
def test_saved_for_backward_are_out_and_lse_in_bytes_and_nothing_under_recompute(option, recompute, path):
    """Beside the caller's tensors: 2 bytes a value of out, 4 a row of lse. A broadcast key is kept as it is."""
    q, k, v = (x.requires_grad_() for x in _inputs(torch.float16))
    k = k[:, :1].expand(1, 14, 1, 16)
    given = OPTIONS[option][0]
    mine = {x.untyped_storage().data_ptr() for x in (q, k, v, RNG, *[SINKS] * ("sinks" in given))}
    saved = {}

    def pack(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = attention(q, k, v, recompute=recompute, **given)
    own = sum(num_bytes for pointer, num_bytes in saved.items() if pointer not in mine)
    assert own == (0 if recompute else 2 * out.numel() + 4 * 2 * 13)
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, v)))


_ADDRESS = re.compile(r"tt\.addptr [^:]*: (?:tensor<[\dx]*)?!tt\.ptr<(\w+)>>?, (?:tensor<[\dx]*)?(i\d+)")


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("variant", ["plain", "packed"])
@pytest.mark.parametrize("kernel", ["forward", "delta", "dq", "dkdv"])
def test_offsets_into_tensors_have_64_bits(kernel, variant):
    """No stride is multiplied in 32 bits; such offsets are a place in a row of lse or cu_seqlens, or as counted."""
    code = compile_launch(Point(kernel, 128, 128, variant).launch("sm_80"), "sm_80").asm["ttir"]
    addresses = _ADDRESS.findall(code)
    assert len(addresses) == len(re.findall(r"tt\.addptr", code)) > 5
    narrow = [pointee for pointee, width in addresses if width != "i64"]
    channels = {"forward": 1, "delta": 0, "dq": 1, "dkdv": 2}[kernel]  # of the rows that are written, at the end
    sinks = kernel == "forward" and variant == "packed"  # the head of a sink
    assert set(narrow) <= {"f32", "i32", "bf16"} and narrow.count("bf16") == channels + sinks
    uses = [line for line in code.splitlines() if re.search(r"%stride_\w+", line) and "tt.func" not in line]
    assert uses and [line for line in uses if "arith.extsi" not in line] == []
