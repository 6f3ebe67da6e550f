"""What `plait kernels tune` tries: one case for each row of a table, with its candidates and real work for it.

Not the walk (tune.py). Shapes are those of a layer of a model of 4096 features; a row serves its whole class. The
device of a problem may be meta, for code alone, or the CPU in the interpreter, which tests run at small sizes.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product as every
from typing import Any

import torch

from plait.kernels import activations
from plait.kernels.attention_plain import Options, attention_ref
from plait.kernels.flash_launch import forward_launch, gradient_launches, launch_backward, launch_forward
from plait.kernels.flash_tiles import MEASURED as ATTENTION
from plait.kernels.flash_tiles import derived_tile, padded, tile_of
from plait.kernels.gated import swiglu_ref
from plait.kernels.launch import Launch, run_launches
from plait.kernels.matmul_launch import Epilogue, gated_grad_launch, plan, product_launches, swiglu_launch
from plait.kernels.matmul_tables import MEASURED as LINEAR
from plait.kernels.matmul_tables import TILES, Tile
from plait.kernels.measured import Key
from plait.kernels.tune import Case, Problem

_GELU, _SILU = 1, 3


def normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Standard normal values, the same on every call; of no memory on the meta device."""
    if device.type == "meta":
        return torch.empty(shape, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, dtype=dtype, generator=generator)


# Attention: (batch, tokens, heads, key heads) to be timed, and to be checked.
_FULL, _SMALL = (2, 4096, 32, 8), (1, 200, 2, 1)


def _attention_options(window: int, head_dim: int) -> Options:
    return Options(True, head_dim**-0.5, window, 0.0, 0.0, 0, 0)


def _attention_problem(
    kernel: str, head_dim: int, window: int, dtype: torch.dtype, device: torch.device, arch: int, small: bool
) -> Problem:
    """Causal attention: the launches of one kernel; the run is forward, or forward and backward for a gradient."""
    batch, num_tokens, num_heads, num_key_heads = _SMALL if small else _FULL
    options = _attention_options(window, head_dim)
    q, dout = (normal(batch, num_tokens, num_heads, head_dim, device=device, dtype=dtype, seed=i) for i in (0, 1))
    k, v = (normal(batch, num_tokens, num_key_heads, head_dim, device=device, dtype=dtype, seed=i) for i in (2, 3))
    none = (None, None, None)

    def launches() -> list[Launch]:
        out, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        stats = torch.zeros(batch, num_heads, num_tokens, dtype=torch.float32, device=device)
        if kernel == "forward":
            return [forward_launch(q, k, v, None, *none, options, out, stats, arch)]
        both = gradient_launches(dout, q, k, v, stats, stats, *none, options, out, dk, dv, arch)
        return [both[0] if kernel == "dq" else both[1]]

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = launch_forward(q, k, v, None, *none, options)
        if kernel == "forward":
            return out, lse
        dq, dk, dv, _ = launch_backward(dout, None, q, k, v, out, lse, None, *none, options)
        return (dq,) if kernel == "dq" else (dk, dv)

    def reference() -> tuple[torch.Tensor, ...]:
        inputs = [x.to(torch.float64).requires_grad_() for x in (q, k, v)]
        out, lse = attention_ref(*inputs, window=window or None, return_lse=True)
        if kernel == "forward":
            return out.detach(), lse.detach()
        dq, dk, dv = torch.autograd.grad(out, inputs, dout.to(torch.float64))
        return (dq,) if kernel == "dq" else (dk, dv)

    return Problem(launches, run, reference)


def _attention_case(kernel: str, head_dim: int, window: int = 0, dtype: torch.dtype = torch.bfloat16) -> Case:
    meta = torch.device("meta")
    q, k = (normal(1, 128, heads, head_dim, device=meta, dtype=dtype, seed=0) for heads in (2, 1))
    options = _attention_options(window, head_dim)

    def key(arch: int) -> Key:
        kind, _ = derived_tile(kernel, padded(head_dim), q, k, k, options, arch)
        return (kernel, arch, padded(head_dim), kind)

    def present(arch: int) -> Any:
        return tile_of(kernel, q, k, k, options, arch)

    def candidates(arch: int) -> Iterator[Any]:
        _, derived = derived_tile(kernel, padded(head_dim), q, k, k, options, arch)
        short, long = ((16, 32, 64), (32, 64, 128)) if kernel == "dkdv" else ((64, 128), (32, 64, 128))
        for row, col, warps, stages in every(short, long, (4, 8), (2, 3)):
            yield derived._replace(block_row=row, block_col=col, num_warps=warps, num_stages=stages)
        if kernel == "forward" and derived.descriptors:  # elsewhere than on sm_90 no tile has them
            for col, stages in ((128, 2), (128, 3), (64, 2), (64, 3)):
                yield derived._replace(block_row=128, block_col=col, num_warps=4, num_stages=stages, specialized=True)

    name = f"attention.{kernel}.{head_dim}" + ".window" * bool(window)
    return Case(
        name, ATTENTION, key, present, candidates, partial(_attention_problem, kernel, head_dim, window, dtype)
    )


# Products: (op, class) -> (M, N, K) to be timed, and to be checked; the class of both is the same on every arch.
_PRODUCTS = {
    ("epilogue", "large"): ((8192, 4096, 2048), (1664, 1536, 192)),
    ("slope", "large"): ((8192, 4096, 2048), (1664, 1536, 192)),
    ("wgrad_wide", "large"): ((4096, 4096, 8192), (1664, 1536, 192)),
    ("gated_slope", "large"): ((8192, 8192, 2048), (1664, 1536, 192)),
    ("swiglu", "large"): ((8192, 8192, 2048), (1664, 1536, 192)),
    ("linear", "deep"): ((512, 1024, 4096), (128, 128, 1024)),
    ("linear", "small"): ((512, 1024, 512), (128, 128, 256)),
    ("linear", "few_rows"): ((16, 4096, 4096), (16, 128, 1024)),
}
# Rows, columns, depth, warps, stages: products of 128 to 256 by 64 to 256 fill the registers of 4 or 8 warps.
_LARGE_TILES = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 5), (128, 128, 32, 8, 4), (128, 128, 128, 8, 2),
    (128, 64, 64, 4, 4), (128, 64, 64, 8, 4), (64, 128, 64, 4, 4), (64, 256, 64, 8, 4),
)  # fmt: skip
_SMALL_TILES = (
    (64, 64, 64, 4, 3), (64, 64, 64, 4, 5), (64, 64, 128, 4, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 4), (64, 32, 64, 4, 5), (32, 64, 64, 4, 5),
)  # fmt: skip
_FEW_TILES = tuple((16, col, inner, warps, 5) for col in (32, 64, 128) for inner in (64, 128) for warps in (2, 4))

# Columns and stages where the loads have a group of warps of their own, by class and architecture: none spills in
# triton 3.9. Of two products at once, and where sums of rows may be asked for, tiles of 256 columns are too large.
_GROUPED_TILES = {
    ("large", 90): ((256, 4), (256, 3), (128, 4), (128, 5)),
    ("large", 100): ((256, 4), (256, 3), (128, 4), (128, 5)),
    ("deep", 90): ((128, 4), (128, 3)),
}
_GROUPED_NARROW = {"swiglu": ((128, 4), (128, 3)), "wgrad_wide": ((128, 4), (128, 5))}


def _product_tiles(op: str, kind: str, arch: int) -> Iterator[Tile]:
    derived = TILES.get((op, arch, kind)) or TILES["any", arch, kind]
    sizes = {"large": _LARGE_TILES, "few_rows": _FEW_TILES}.get(kind, _SMALL_TILES)
    for size in sizes:
        # A store in parts of at least 32 columns takes fewer registers: the more, the wider the tile.
        for parts in (1,) if op == "swiglu" else {64: (1, 2), 128: (2, 4), 256: (4,)}.get(size[1], (1,)):
            yield Tile(*size, parts, derived.group)
    grouped = _GROUPED_TILES.get((kind, arch), ())
    for col, stages in _GROUPED_NARROW.get(op, grouped) if grouped else ():
        # The compiler adds groups of four: on sm_90 to half of the computing warps, on sm_100 to the epilogue's.
        warps, parts = 4 if arch == 90 else 8, 4 if col == 256 else derived.parts
        yield Tile(128, col, 64, warps, stages, parts, derived.group, specialized=True)


def _product_operands(op: str, sizes: tuple[int, int, int], new: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """a[M, K] and b[N, K] as training lays them out: weights of a gradient transposed, of wgrad both."""
    num_rows, num_cols, num_inner = sizes
    if op == "wgrad_wide":
        return new(num_inner, num_rows, seed=0).t(), new(num_inner, num_cols, seed=1).t()
    if op in ("slope", "gated_slope"):
        return new(num_rows, num_inner, seed=0), new(num_inner, num_cols, seed=1).t()
    return new(num_rows, num_inner, seed=0), new((2 if op == "swiglu" else 1) * num_cols, num_inner, seed=1)


def _product_reference(
    op: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, side: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What the op's launch writes, in fp32; `side` is the residual, or what the activation had as its input."""
    x = a.float() @ b.float().t()
    if op == "swiglu":
        gate, up = x.chunk(2, dim=1)
        return (activations.activate(gate, _SILU) * up,)
    if op == "gated_slope":
        gate_up = side.float().requires_grad_()
        return torch.autograd.grad(swiglu_ref(gate_up), gate_up, x)
    if op == "slope":
        return (activations.activation_grad(x, side.float(), _GELU),)
    if op == "wgrad_wide":
        return (x,)
    x = x + bias.float()
    return (activations.activate(x, _GELU) + side.float(), x) if op == "epilogue" else (x,)


def _product_problem(op: str, kind: str, dtype: torch.dtype, device: torch.device, arch: int, small: bool) -> Problem:
    """One product with the epilogue that its op is launched with."""
    sizes = _PRODUCTS[op, kind][small]
    new = partial(normal, device=device, dtype=dtype)
    a, b = _product_operands(op, sizes, new)
    num_rows, num_cols = sizes[0], sizes[1] * (2 if op == "gated_slope" else 1)
    side, bias = new(num_rows, num_cols, seed=2), new(num_cols, seed=3)
    wide = torch.float32 if op == "wgrad_wide" else dtype
    out, pre = (torch.empty(num_rows, num_cols, dtype=of, device=device) for of in (wide, dtype))
    extra = {
        "epilogue": Epilogue(bias, _GELU, True, 0, pre, None, num_rows, side),
        "slope": Epilogue(slope=_GELU, pre=side),
        "linear": Epilogue(bias=bias),
    }.get(op, Epilogue())

    def launches() -> list[Launch]:
        how = plan(op, a, b, arch)
        if op == "swiglu":
            return [swiglu_launch(a, b, out, None, how)]
        if op == "gated_slope":
            return [gated_grad_launch(a, b, side, 0, out, None, how)]
        return product_launches(a, b, out, extra, how)

    def run() -> tuple[torch.Tensor, ...]:
        run_launches(launches())
        return (out, pre) if op == "epilogue" else (out,)

    return Problem(launches, run, lambda: _product_reference(op, a, b, bias, side))


def _product_case(op: str, kind: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    def present(arch: int) -> Tile:
        return LINEAR.get((op, arch, kind)) or TILES.get((op, arch, kind)) or TILES["any", arch, kind]

    return Case(
        f"linear.{op}.{kind}",
        LINEAR,
        lambda arch: (op, arch, kind),
        present,
        partial(_product_tiles, op, kind),
        partial(_product_problem, op, kind, dtype),
    )


def cases(names: Iterable[str] = (), dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """Every case, or those whose name begins with one of `names`."""
    found = [_attention_case(kernel, width, 0, dtype) for width in (64, 128) for kernel in ("forward", "dq", "dkdv")]
    found += [_attention_case("forward", 128, 1024, dtype)]
    found += [_product_case(op, kind, dtype) for op, kind in _PRODUCTS]
    prefixes = tuple(names) or ("",)
    return [case for case in found if case.name.startswith(prefixes)]
