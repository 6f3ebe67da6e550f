"""Addresses of more than 2^31 elements, read off the compiler's first form of every kernel that is launched.

Not here: runs with huge strides (the ops' own files, in the interpreter) and with huge tensors (test_ops_gpu.py). The
one idea: an overflow is a product in 32 bits of two numbers that are only known at run time, one of them a size or a
stride. Each product of that kind is listed here with the reason why it is small; any other is a failure.
"""

import re

import pytest

from plait.kernels.inspect import compile_launch
from plait.kernels.points import points
from tests.cases import needs_compiler

# By kernel, what may be multiplied in 32 bits: products that count programs, tiles or columns, never elements.
PROGRAMS = {"num_tiles", "together", "num_splits", "steps", "first_pair", "section"}
SMALL = {
    "attention_forward_kernel": PROGRAMS,
    "attention_query_gradient_kernel": PROGRAMS,
    "attention_key_gradient_kernel": PROGRAMS | {"group"},  # a head
    "attention_delta_kernel": PROGRAMS | {"num_heads"},  # times VALUE_DIM: the columns of one token
    "matmul_kernel": PROGRAMS | {"split", "num_rows"},  # partial sums of rows, one of each a split
    "_activation_backward": {"program", "rows_per_program"},  # a row
    "_gated_backward": {"num_cols"},  # twice: the columns of one row
    "_loss_stats": {"stride_stats_row"},  # three times the tokens of a chunk
}
_DEFINED = re.compile(r"\s*(%[\w#:]+)(?:, %\w+)* = (\S+) (.*)")
_PRODUCT = re.compile(r"\s*%\w+ = arith\.muli (%[\w#]+), (%[\w#]+).* : \S*i32\b")
_SAME = ("tt.splat", "tt.broadcast", "tt.expand_dims", "arith.extsi", "arith.trunci")


def _one_point_a_kernel():
    found = {}
    for name, make in points().items():
        found.setdefault(make("sm_90").kernel.__name__, name)
    return sorted(found.items())


def _source(name, defined):
    """The value that `name` repeats or widens."""
    while (known := defined.get(name)) and known[0] in _SAME:
        name = re.search(r"%[\w#]+", known[1])[0]
    return name


def narrow_products(code):
    """(left, right) of each product in 32 bits with an argument of the kernel and without a constant."""
    lines = code.splitlines()
    defined = {m[1]: (m[2], m[3]) for line in lines if (m := _DEFINED.match(line))}
    for line in lines:
        if m := _PRODUCT.match(line):
            pair = [_source(name, defined) for name in (m[1], m[2])]
            if any(name not in defined for name in pair) and not any(name.startswith("%c") for name in pair):
                yield tuple(re.sub(r"_\d+$", "", name[1:]) for name in pair)


def narrow_strides(code):
    """Lines that use a stride of 32 bits without widening it first; multiplied by a constant, too."""
    uses = [line.strip() for line in code.splitlines() if "%stride_" in line and "tt.func" not in line]
    return [line for line in uses if "arith.extsi" not in line and "i64" not in line]


@pytest.mark.offline
@needs_compiler
@pytest.mark.parametrize("kernel,name", _one_point_a_kernel())
def test_no_size_or_stride_is_multiplied_in_32_bits(kernel, name):
    code = compile_launch(points()[name]("sm_90"), "sm_90").asm["ttir"]
    allowed = SMALL.get(kernel, set())
    wrong = [pair for pair in narrow_products(code) if not allowed & set(pair)]
    wrong += [line for line in narrow_strides(code) if not any(re.search(rf"%{one}\b", line) for one in allowed)]
    assert wrong == []


def test_a_product_in_32_bits_is_seen():
    code = """
    %0 = tt.splat %stride_x_row : i32 -> tensor<64xi32>
    %1 = arith.muli %rows, %0 : tensor<64xi32>
    %2 = arith.extsi %stride_y_row : i32 to i64
    %3 = arith.muli %0, %c16_i32 : tensor<64xi32>
    """
    assert list(narrow_products(code)) == [("rows", "stride_x_row")]
    assert narrow_strides(code) == ["%0 = tt.splat %stride_x_row : i32 -> tensor<64xi32>"]
