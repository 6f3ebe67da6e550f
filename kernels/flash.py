"""attention: softmax(q k^T * scale) v without storing the scores; backward computes them again.

Forward, per query i and the keys j it sees: s = softcap(q_i . k_j * scale), lse_i = log(sum_j exp(s) [+ exp(sink)]),
out_i = sum_j dropout(exp(s - lse_i)) v_j. Backward, with p = exp(s - lse), delta_i = dout_i . out_i - dlse_i:
ds = p * (dropout(dout_i . v_j) - delta_i), dq = ds k, dk = ds^T q, dv = dropout(p)^T dout,
dsink = -sum exp(sink - lse) delta.

Causal is bottom-right aligned: query i of T sees keys up to i + S - T. A row that sees no key gives out 0, lse -inf
(or the sink) and no gradient. Saved: q, k, v (the caller's), out, lse (4 bytes per query and head); with `recompute`
q, k, v only, and backward runs the forward kernel once more: the same bits. No atomics: the gradients of keys and of
queries are two kernels, each row written by one program in a fixed order. Statistics and sums are fp32 (fp64 for
fp64).
"""

import math

import torch

from plait.kernels import attention_plain
from plait.kernels.attention_plain import Options
from plait.kernels.dropout_op import check_offsets, check_rng
from plait.kernels.flash_launch import launch_backward, launch_forward
from plait.kernels.launch import check, check_device, check_floating, compute_dtype, use_triton
from plait.kernels.registration import below_autograd, once_differentiable, register

_MAX_HEAD_DIM = 256
_OPTIONS = (
    "Tensor? sinks, Tensor? rng, Tensor? cu_q, Tensor? cu_k, bool causal, float scale, int window, float softcap,"
    " float dropout_p, int head_offset, int sample_offset"
)
_NUM_OPTIONS = len(Options._fields)  # `recompute`, behind them, is no part of what is computed


def forward(q, k, v, sinks, rng, cu_q, cu_k, *options):
    """(out, lse) without checks or graph: the kernel itself, for code that has a backward of its own."""
    options = options[:_NUM_OPTIONS]
    if use_triton(q):
        return launch_forward(q, k, v, sinks, rng, cu_q, cu_k, options)
    return attention_plain.forward(q, k, v, sinks, rng, cu_q, cu_k, Options(*options))


def backward(dout, dlse, q, k, v, out, lse, sinks, rng, cu_q, cu_k, *options):
    """(dq, dk, dv, dsinks) without checks or graph; dsinks is empty without sinks.

    Where out or lse is None, both are computed again, to the same bits.
    """
    if out is None or lse is None:
        out, lse = forward(q, k, v, sinks, rng, cu_q, cu_k, *options)
    if use_triton(q):
        return launch_backward(dout, dlse, q, k, v, out, lse, sinks, rng, cu_q, cu_k, options)
    return attention_plain.backward(dout, dlse, q, k, v, out, lse, sinks, rng, cu_q, cu_k, Options(*options))


class _Attention(torch.autograd.Function):
    """Saves q, k, v (the caller's), out and lse unless `recompute`; sinks, rng and cu_seqlens are small."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, rng, cu_q, cu_k, *options):
        with below_autograd():
            out, lse = _attention(q, k, v, sinks, rng, cu_q, cu_k, *options)
        recompute = options[_NUM_OPTIONS:] == (True,)
        ctx.save_for_backward(q, k, v, *((None, None) if recompute else (out, lse)), sinks, rng, cu_q, cu_k)
        ctx.options = options[:_NUM_OPTIONS]
        ctx.num_options = len(options)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, sinks, rng, cu_q, cu_k = ctx.saved_tensors
        if dout is None:
            dout = q.new_zeros((*q.shape[:3], v.shape[3]))
        dq, dk, dv, dsinks = _attention_grad(dout, dlse, q, k, v, out, lse, sinks, rng, cu_q, cu_k, *ctx.options)
        return dq, dk, dv, None if sinks is None else dsinks, *(None,) * (3 + ctx.num_options)


def _fake_forward(q, k, v, *args):
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=compute_dtype(q.dtype))


def _fake_backward(dout, dlse, q, k, v, out, lse, sinks, *args):
    dsinks = q.new_empty(0, dtype=compute_dtype(q.dtype)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


_attention = register(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}, bool recompute=False) -> (Tensor, Tensor)",
    forward,
    _fake_forward,
    _Attention.apply,
)
_attention_grad = register(
    "attention_grad(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? out, Tensor? lse,"
    f" {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    backward,
    _fake_backward,
)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if not len(of_q) == len(of_k) == len(of_v) == 4:
        dims = f"{len(of_q)}, {len(of_k)}, {len(of_v)}"
        raise ValueError(f"attention: q, k, v have {dims} dims; expected 4: [batch, tokens, heads, K]")
    batch, _, heads, width = of_q
    key_batch, num_keys, key_heads, key_width = of_k
    value_batch, num_values, value_heads, value_width = of_v
    if not (
        batch == key_batch == value_batch and num_keys == num_values and key_heads == value_heads
        and width == key_width
    ):  # fmt: skip
        raise ValueError(f"attention: q {tuple(of_q)}, k {tuple(of_k)}, v {tuple(of_v)} do not fit")
    if key_heads == 0 or heads % key_heads != 0:
        raise ValueError(f"attention: {heads} query heads must be a multiple of {key_heads} key heads")
    if not (0 < width <= _MAX_HEAD_DIM and 0 < value_width <= _MAX_HEAD_DIM):
        raise ValueError(f"attention: head dims {width} and {value_width}; expected 1 to {_MAX_HEAD_DIM}")


def _packed(
    q: torch.Tensor, cu_seqlens: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_q, cu_k), checked."""
    pair = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    check(len(pair) == 2, lambda: f"attention: {len(pair)} cu_seqlens; expected one, or a pair for queries and keys")
    cu_q, cu_k = pair
    check(q.shape[0] == 1, lambda: f"attention: cu_seqlens needs a batch of 1 (packed documents), got {q.shape[0]}")
    for cu in (cu_q, cu_k):
        check_device("attention", q, cu_seqlens=cu)
        if cu.dtype is not torch.int32:
            raise TypeError(f"attention: cu_seqlens is {cu.dtype}; expected torch.int32")
    check(
        cu_q.dim() == 1 and cu_q.shape == cu_k.shape and cu_q.shape[0] >= 2,
        lambda: (
            f"attention: cu_seqlens of shapes {tuple(cu_q.shape)} and {tuple(cu_k.shape)}; expected [documents + 1]"
        ),
    )
    return cu_q, cu_k


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng: torch.Tensor | None = None,
    head_offset: int = 0,
    sample_offset: int = 0,
    cu_seqlens: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    return_lse: bool = False,
    recompute: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q[B, T, H, K] on k[B, S, KV, K], v[B, S, KV, Kv]: out[B, T, H, Kv], with lse[B, H, T] on demand.

    H is a multiple of KV (grouped queries); head dims up to 256, any strides. `scale` defaults to K^-0.5. `window`
    counts the keys a query sees including its own position (both ways when not causal). `softcap` > 0 bounds scores.
    `sinks[H]` are logits without a value. Dropout needs `rng` int64 [2] = (seed, offset); its mask depends on the
    global (sample, head, row, column), where the offsets are those of q[0, :, 0]. `cu_seqlens` int32 [documents + 1],
    or a pair for queries and keys, packs documents in a batch of 1; rows past its end give 0. Its numbers ascend from
    0 to at most T (S): on the CPU a ValueError says so, on a GPU, where a look would wait, nobody looks.
    `recompute` saves neither out nor lse: one more forward in backward, the same bits.
    All of q, k, v, lse, sinks have gradients. Raises TypeError on dtypes, ValueError on everything else.
    """
    check_floating("attention", 3, q=q, k=k, v=v)
    _check_shapes(q, k, v)
    if window is not None:
        check_offsets("attention", window=window)
        check(window >= 1, lambda: f"attention: window is {window}; expected None or at least 1")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"attention: softcap is {softcap}; expected a finite number >= 0 (0 is off)")
    if scale is not None and not abs(scale) < math.inf:
        raise ValueError(f"attention: scale is {scale}; expected None or a finite number")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attention: dropout_p is {dropout_p}; expected 0 <= p < 1")
    if dropout_p:
        check(rng is not None, lambda: "attention: dropout needs rng, an int64 tensor [2] = (seed, offset)")
        check_rng("attention", rng, q)  # type: ignore[arg-type]
        check_offsets("attention", head_offset=head_offset, sample_offset=sample_offset)
    if sinks is not None:
        check_device("attention", q, sinks=sinks)
        check(
            sinks.shape == q.shape[2:3] and sinks.is_floating_point(),
            lambda: (
                f"attention: sinks {sinks.dtype} {tuple(sinks.shape)}; expected {q.shape[2]} floats, one a query head"
            ),
        )
    cu_q, cu_k = (None, None) if cu_seqlens is None else _packed(q, cu_seqlens)
    out, lse = _attention(
        q, k, v, sinks, rng if dropout_p else None, cu_q, cu_k, causal,
        q.shape[3] ** -0.5 if scale is None else float(scale), window or 0, float(softcap), float(dropout_p),
        head_offset, sample_offset, recompute,
    )  # fmt: skip
    return (out, lse) if return_lse else out
