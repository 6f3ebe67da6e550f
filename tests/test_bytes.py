"""Fused ops that memory binds touch each input once and write each output once: counted in the interpreter.

Each case names every tensor with the passes over it, reads and writes per element; `shared` tensors (a weight, a
table, a number per row) are read by several programs, all but the first time out of a cache. What else is touched is
stated in bytes, so that nothing can be moved unseen. Rows wider than a program holds are the exception, stated here.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from plait import kernels
from plait.bench.accesses import AccessCounter
from plait.bench.kernel_work import STREAMS, work
from plait.kernels import dropout_op, gated, layernorm, matmul_direct, norm_rows, rmsnorm
from plait.kernels.launch import INTERPRETED
from plait.kernels.loss_triton import grad_launch, stats_launch
from tests.cases import interpret, needs_interpreter, normal, slow_interpreted

pytestmark = [interpret, needs_interpreter]
F32 = 4  # bytes of a statistic


class Row(NamedTuple):
    """A tensor with the passes over it that a kernel should make."""

    name: str
    tensor: torch.Tensor
    loads: int
    stores: int
    shared: bool = False


class Found(NamedTuple):
    """What a case touched: every tensor that it knows, and bytes of memory that it does not; None is not checked."""

    rows: list[Row]
    scratch: int | None = 0


Case = Callable[[AccessCounter, torch.dtype], Found]


def partial_bytes(num_rows: int, num_cols: int, size: int, num_sums: int = 1) -> int:
    """Gradients of a weight: a partial sum a program, written and read, added up and rounded once."""
    programs = norm_rows.num_partials(num_rows, num_cols)
    return num_sums * num_cols * (2 * F32 * programs + size)


def norm_forward(centred: bool, residual: bool, num_rows: int = 6, num_cols: int = 600) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        x, r = (normal(num_rows, num_cols, dtype=dtype, seed=s) for s in (1, 2))
        w, b = (normal(num_cols, dtype=dtype, seed=s) for s in (3, 4))
        mean = None
        with counter:
            if centred:
                y, h, mean, rstd = layernorm.forward(x, r if residual else None, w, b, 1e-6)
            else:
                y, h, rstd = rmsnorm.forward(x, r if residual else None, w, 1e-6)
        wide = num_cols > norm_rows._MAX_FORWARD
        again = (2 if centred else 1) * wide  # a row that no program holds is read again, out of the cache
        rows = [Row("x", x, 1 + again * (not residual), 0), Row("y", y, 0, 1), Row("rstd", rstd, 0, 1)]
        rows += [Row("weight", w, 1, 0, True)]
        rows += [Row("bias", b, 1, 0, True), Row("mean", mean, 0, 1)] if mean is not None else []
        rows += [Row("residual", r, 1, 0), Row("h", h, again, 1)] if residual else []
        return Found(rows)

    return case


def norm_backward(centred: bool, residual: bool, num_rows: int = 6, num_cols: int = 600) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        h, dy, dh = (normal(num_rows, num_cols, dtype=dtype, seed=s) for s in (1, 2, 3))
        w, mean, rstd = normal(num_cols, dtype=dtype), torch.zeros(num_rows), torch.ones(num_rows)
        with counter:
            if centred:
                dx, dw, db = layernorm.backward(dy, h, w, mean, rstd, dh if residual else None, True)
            else:
                dx, dw = rmsnorm.backward(dy, h, w, rstd, dh if residual else None)
        wide = num_cols > norm_rows._MAX_BACKWARD
        rows = [Row("h", h, 1 + wide, 0), Row("dy", dy, 1 + wide, 0), Row("dx", dx, 0, 1), Row("rstd", rstd, 1, 0)]
        rows += [Row("mean", mean, 1, 0)] if centred else []
        rows += [Row("dh", dh, 1, 0)] if residual else []
        if wide:  # a program's rows read the weight again, and the partial sums lie in memory
            return Found(rows, None)
        rows += [Row("weight", w, 1, 0, True)]
        return Found(rows, partial_bytes(num_rows, num_cols, dw.element_size(), 1 + centred))

    return case


def gated_forward(op: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        gate_up = normal(3, 2 * 1100, dtype=dtype)
        with counter:
            out = op(gate_up)
        return Found([Row("gate_up", gate_up, 1, 0), Row("out", out, 0, 1)])

    return case


def gated_backward(op: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        gate_up, dout = normal(3, 2 * 1100, dtype=dtype), normal(3, 1100, dtype=dtype)
        with counter:
            grad = op(dout, gate_up)
        return Found([Row("gate_up", gate_up, 1, 0), Row("dout", dout, 1, 0), Row("grad", grad, 0, 1)])

    return case


def rope(in_place: bool, interleaved: bool, rotary: int = 64) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        q, k = normal(2, 5, 6, 64, dtype=dtype), normal(2, 5, 2, 64, dtype=dtype)
        cos, sin = (normal(5, rotary // 2, dtype=torch.float32, seed=s) for s in (1, 2))
        with counter:
            out = (kernels.rope_ if in_place else kernels.rope)(q, k, cos, sin, interleaved=interleaved)
        rows = [Row("cos", cos, 1, 0, True), Row("sin", sin, 1, 0, True)]
        if in_place:
            return Found([*rows, Row("q", q, 1, 1), Row("k", k, 1, 1)])
        rows += [Row("q", q, 1, 0), Row("k", k, 1, 0), Row("q_out", out[0], 0, 1), Row("k_out", out[1], 0, 1)]
        return Found(rows)

    return case


def loss_stats(counter: AccessCounter, dtype: torch.dtype) -> Found:
    logits, target = normal(3, 5003, dtype=dtype), torch.tensor([0, 4999, 5002])
    stats = torch.empty(4, 3)
    with counter:
        stats_launch(logits, target, 0, 30.0, stats).run()
    return Found([Row("logits", logits, 1, 0), Row("target", target, 1, 0), Row("stats", stats, 0, 1)])


def loss_grad(in_place: bool) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        logits, target = normal(3, 5003, dtype=dtype), torch.tensor([0, 4999, 5002])
        lse, dloss = torch.full((3,), 9.0), torch.ones(3)
        grad = logits if in_place else torch.empty_like(logits)
        with counter:
            grad_launch(logits, target, lse, dloss, 0, 5003, 0.1, 1e-4, 0.0, grad).run()
        rows = [Row(n, t, 1, 0, True) for n, t in (("target", target), ("lse", lse), ("dloss", dloss))]
        rows += [Row("logits", logits, 1, 1)] if in_place else [Row("logits", logits, 1, 0), Row("grad", grad, 0, 1)]
        return Found(rows)

    return case


def dropout(counter: AccessCounter, dtype: torch.dtype) -> Found:
    x, rng = normal(2, 5, 700, dtype=dtype), torch.tensor([3, 4])
    out = torch.empty_like(x)
    with counter:
        dropout_op.forward_launch(x, rng, 0.1, 0, 0, 2, out).run()
    return Found([Row("x", x, 1, 0), Row("out", out, 0, 1), Row("rng", rng, 1, 0, True)])


def adamw(num_tensors: int, master: bool) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        shape = (1029,)
        rows: list[Row] = []
        lists: list[list[torch.Tensor]] = [[] for _ in range(5)]
        for i in range(num_tensors):
            p, g = (
                normal(*shape, dtype=dtype if master else torch.float32, seed=i),
                normal(*shape, dtype=torch.float32),
            )
            m, v, w = torch.zeros(shape), torch.zeros(shape), normal(*shape, dtype=torch.float32)
            for some, tensor in zip(lists, (p, g, m, v, w), strict=True):
                some.append(tensor)
            rows += [Row("grad", g, 1, 0), Row("exp_avg", m, 1, 1), Row("exp_avg_sq", v, 1, 1)]
            rows += [Row("param", p, 0, 1), Row("master", w, 1, 1)] if master else [Row("param", p, 1, 1)]
        with counter:
            how = dict(step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
            kernels.adamw_(*lists[:4], master=lists[4] if master else None, **how)
        return Found(rows, 0 if num_tensors == 1 else None)  # a table says where several tensors lie

    return case


def l2_norm(num_tensors: int) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        tensors = [normal(5000, dtype=dtype, seed=i) for i in range(num_tensors)]
        with counter:
            kernels.l2_norm_squared(tensors)
        return Found([Row("x", x, 1, 0) for x in tensors], None)

    return case


def embedding_forward(counter: AccessCounter, dtype: torch.dtype) -> Found:
    tokens, weight = torch.randperm(40)[:12], normal(40, 1500, dtype=dtype)
    with counter:
        out = kernels.embedding(tokens, weight)
    assert counter.loads.of(weight).elements == 12 * 1500
    return Found([Row("tokens", tokens, 1, 0, True), Row("out", out, 0, 1)], 12 * 1500 * weight.element_size())


def embedding_backward(accumulate: bool) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        tokens, dout = torch.randperm(12), normal(12, 1500, dtype=dtype)
        out = torch.zeros(12, 1500)
        with counter:
            kernels.embedding_wgrad(tokens, dout, out, accumulate=accumulate)
        return Found([Row("dout", dout, 1, 0), Row("out", out, int(accumulate), 1)], None)  # keys and their order

    return case


def activation_backward(sums: bool) -> Case:
    def case(counter: AccessCounter, dtype: torch.dtype) -> Found:
        dout, pre = normal(70, 300, dtype=dtype), normal(70, 300, dtype=dtype, seed=1)
        with counter:
            dpre, _ = matmul_direct.activation_backward(dout, pre, 1, sums=sums)
        rows = [Row("dout", dout, 1, 0), Row("pre", pre, 1, 0), Row("dpre", dpre, 0, 1)]
        return Found(rows, None if sums else 0)

    return case


NARROW, WIDE = 320, 33_000  # columns: several rows a program; more than a program holds
CASES: dict[str, Case] = {
    "rms_norm": norm_forward(False, False),
    "rms_norm residual": norm_forward(False, True),
    "rms_norm narrow": norm_forward(False, False, 9, NARROW),
    "rms_norm wide": norm_forward(False, False, 2, WIDE),
    "rms_norm residual wide": norm_forward(False, True, 2, WIDE),
    "rms_norm backward": norm_backward(False, False),
    "rms_norm residual backward": norm_backward(False, True),
    "rms_norm backward narrow": norm_backward(False, False, 9, NARROW),
    "rms_norm backward wide": norm_backward(False, False, 2, WIDE),
    "layer_norm": norm_forward(True, False),
    "layer_norm residual": norm_forward(True, True),
    "layer_norm residual narrow": norm_forward(True, True, 9, NARROW),
    "layer_norm wide": norm_forward(True, False, 2, WIDE),
    "layer_norm backward": norm_backward(True, False),
    "layer_norm residual backward": norm_backward(True, True),
    "layer_norm residual backward narrow": norm_backward(True, True, 9, NARROW),
    "layer_norm residual backward wide": norm_backward(True, True, 2, WIDE),
    "swiglu": gated_forward(gated.forward),
    "swiglu backward": gated_backward(gated.backward),
    "geglu": gated_forward(lambda x: gated.geglu_forward(x, False)),
    "geglu tanh": gated_forward(lambda x: gated.geglu_forward(x, True)),
    "geglu backward": gated_backward(lambda dout, x: gated.geglu_backward(dout, x, False)),
    "rope": rope(False, False),
    "rope interleaved": rope(False, True),
    "rope partial": rope(False, False, 32),
    "rope_": rope(True, False),
    "rope_ interleaved": rope(True, True),
    "cross entropy statistics": loss_stats,
    "cross entropy gradient": loss_grad(False),
    "cross entropy gradient in place": loss_grad(True),
    "dropout": dropout,
    "adamw one tensor": adamw(1, False),
    "adamw one tensor with master": adamw(1, True),
    "adamw table": adamw(5, False),
    "adamw table with masters": adamw(5, True),
    "l2_norm one tensor": l2_norm(1),
    "l2_norm table": l2_norm(5),
    "embedding": embedding_forward,
    "embedding backward": embedding_backward(False),
    "embedding backward accumulate": embedding_backward(True),
    "activation backward": activation_backward(False),
    "activation backward with sums": activation_backward(True),
}


@pytest.mark.parametrize("dtype", [slow_interpreted(torch.float32), torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_each_input_is_read_once_and_each_output_written_once(name, dtype):
    counter = AccessCounter()
    found = CASES[name](counter, dtype)
    known = 0
    for row in found.rows:
        loads, stores, numel = counter.loads.of(row.tensor), counter.stores.of(row.tensor), row.tensor.numel()
        assert (loads.passes, stores.passes) == (row.loads * numel, row.stores * numel), row.name
        if not row.shared:  # no other program reads it either
            assert (loads.accesses, stores.accesses) == (loads.passes, stores.passes), row.name
        known += (loads.passes + stores.passes) * row.tensor.element_size()
    if found.scratch is not None:
        assert counter.nbytes() == known + found.scratch


@triton.jit
def _reads_twice(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    again = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr + offsets, x + again, mask=offsets < n)
    tl.store(out_ptr, 0.0)  # every program writes the first element


def test_a_second_read_and_a_shared_write_are_seen():
    x, out = torch.ones(100), torch.empty(100)
    with AccessCounter() as counter:
        _reads_twice[(4,)](x, out, 100, BLOCK=32)
    assert counter.loads.of(x) == (200, 100, 200)
    # The first program writes element 0 twice, the three others once each.
    assert counter.stores.of(out) == (104, 100, 101)
    assert counter.nbytes() == (200 + 101) * 4 and counter.kernels == ["_reads_twice"]


def test_what_torch_does_in_between_counts():
    x, y = torch.ones(6, 8), torch.ones(8, 4)
    with AccessCounter() as counter:
        x.sum(0)
        x.view(8, 6)
        torch.empty(100)
        x @ y
    assert counter.nbytes() == (48 + 8 + 48 + 32 + 24) * 4 and counter.flop() == 2 * 6 * 8 * 4


def test_products_of_tiles_count_whole():
    x, w = normal(64, 64, dtype=torch.float32), normal(64, 64, dtype=torch.float32)
    with AccessCounter() as counter:
        matmul_direct.forward(x, w)
    assert INTERPRETED and counter.flop() == 2 * 64**3


# op -> statistics of a row in bytes: rstd, and mean, written forward and read backward.
STATISTICS = {
    "rms_norm": 2 * F32,
    "rms_norm_residual": 2 * F32,
    "layer_norm": 4 * F32,
    "layer_norm_residual": 4 * F32,
}
COLS = 600


def both_ways(op: str, rows: int) -> Callable[[], object]:
    """Forward and backward of an op by its direct functions, on inputs made before."""
    x, dy, r, dh = (normal(rows, COLS, dtype=torch.float32, seed=s) for s in range(4))
    w, stat, both = normal(COLS, dtype=torch.float32), torch.ones(rows), normal(rows, 2 * COLS, dtype=torch.float32)
    residual, sum_grad = (r, dh) if op.endswith("residual") else (None, None)
    rng = torch.tensor([3, 4])

    def run() -> None:
        match op:
            case "rms_norm" | "rms_norm_residual":
                rmsnorm.forward(x, residual, w, 1e-6)
                rmsnorm.backward(dy, x, w, stat, sum_grad)
            case "layer_norm" | "layer_norm_residual":
                layernorm.forward(x, residual, w, w, 1e-6)
                layernorm.backward(dy, x, w, stat, stat, sum_grad, True)
            case "swiglu":
                gated.forward(both)
                gated.backward(dy, both)
            case "geglu":
                gated.geglu_forward(both, True)
                gated.geglu_backward(dy, both, True)
            case "dropout":
                kernels.dropout(x[None], 0.1, rng)
                kernels.dropout(dy[None], 0.1, rng)

    return run


@pytest.mark.parametrize("op", STREAMS)
def test_bytes_that_a_benchmark_declares_are_what_the_kernels_move(op):
    """The growth of one row but for a norm's partial gradients, which stop growing at the sizes that are timed."""
    counted, declared = [], []
    for rows in (4, 8):
        run = both_ways(op, rows)
        with AccessCounter() as counter:
            run()
        partial = partial_bytes(rows, COLS, F32, 1 + op.startswith("layer")) if op in STATISTICS else 0
        counted.append(counter.nbytes() - partial)
        params = {"op": op, "cols": COLS, "rows": rows, "dtype": "float32", "backward": True}
        declared.append(work(params)[1])
    grown = [b - a for a, b in (counted, declared)]
    assert grown[0] == grown[1] + 4 * STATISTICS.get(op, 0)


def test_bytes_declared_for_rope_and_the_optimizer_are_what_the_kernels_move():
    q, k, tables = normal(1, 8, 4, 64), normal(1, 8, 2, 64), torch.zeros(8, 32)
    q, k = q.float(), k.float()
    with AccessCounter() as counter:
        kernels.rope(q, k, tables, tables)
    shape = {"batch": 1, "tokens": 8, "heads": 4, "kv_heads": 2, "dim": 64, "dtype": "float32", "backward": False}
    assert counter.nbytes() == work({"op": "rope", **shape})[1] + 2 * tables.numel() * F32
    tensors = [normal(4096, dtype=torch.float32, seed=s).abs() for s in range(4)]
    with AccessCounter() as counter:
        kernels.adamw_(
            *([t] for t in tensors), step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1
        )  # fmt: skip
    shape = {"tensors": 1, "elements": 4096, "dtype": "float32", "backward": False}
    assert counter.nbytes() == work({"op": "adamw_", **shape})[1]
