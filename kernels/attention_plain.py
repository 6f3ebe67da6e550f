"""Attention in plain torch: the oracle, and the forward and backward that CPU (and fp64 CUDA) tensors take.

Not the public op (flash.py) and not Triton. `attention_ref` is short and differentiable by torch. `forward` and
`backward` are the same maths by hand in few batched calls: scores of one document at a time, heads of a group folded
into the rows of one matmul, so that grouped queries copy no keys. Where it covers the case (no window, softcap,
sinks, dropout; square if causal), torch's own blocked CPU kernel does the work instead.
"""

import itertools
from typing import NamedTuple

import torch

from plait.kernels.launch import compute_dtype, widened
from plait.kernels.philox import keep_mask_ref


class Options(NamedTuple):
    """What attention computes; window and softcap 0 mean off."""

    causal: bool
    scale: float
    window: int
    softcap: float
    dropout_p: float
    head_offset: int
    sample_offset: int


class Document(NamedTuple):
    """Rows of queries and of keys that see each other."""

    rows: slice
    cols: slice


def documents(cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, num_rows: int, num_cols: int) -> list[Document]:
    """The documents of a packed batch, or one that spans everything; ValueError where they reach out of it."""
    if cu_q is None or cu_k is None:
        return [Document(slice(0, num_rows), slice(0, num_cols))]
    starts, cols = cu_q.tolist(), cu_k.tolist()
    for name, bounds, most in (("queries", starts, num_rows), ("keys", cols, num_cols)):
        if bounds[0] < 0 or bounds[-1] > most or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"attention: cu_seqlens of {name} are {bounds}; expected ascending numbers, 0 to {most}")
    return [Document(slice(starts[i], starts[i + 1]), slice(cols[i], cols[i + 1])) for i in range(len(starts) - 1)]


def visible_ref(num_rows: int, num_cols: int, causal: bool, window: int, device: torch.device) -> torch.Tensor | None:
    """bool [T, S]: which keys a query sees, bottom-right aligned; None for all."""
    if not causal and not window:
        return None
    row = torch.arange(num_rows, device=device).unsqueeze(1) + (num_cols - num_rows)
    col = torch.arange(num_cols, device=device)
    seen = col <= row if causal else torch.ones(num_rows, num_cols, dtype=torch.bool, device=device)
    if window:
        seen = seen & (col > row - window) & (col < row + window)
    return seen


def attention_ref(
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
    """The oracle; differentiable by torch. Arguments as `plait.kernels.attention`.

    `recompute` is about memory, never about numbers: here torch saves what it likes.
    """
    dtype = compute_dtype(q.dtype)
    cu_q, cu_k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, cu_seqlens)
    group = q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=dtype, device=q.device)
    for rows, cols in documents(cu_q, cu_k, q.shape[1], k.shape[1]):
        qh = q[:, rows].to(dtype).transpose(1, 2)  # [B, H, T, K]
        kh = k[:, cols].to(dtype).repeat_interleave(group, 2).transpose(1, 2)
        vh = v[:, cols].to(dtype).repeat_interleave(group, 2).transpose(1, 2)
        scores = qh @ kh.transpose(2, 3) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible_ref(qh.shape[2], kh.shape[2], causal, window or 0, q.device)
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            sink = sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sink), -1)
        if scores.shape[-1] == 0:
            continue
        row_lse = torch.logsumexp(scores, -1)
        dead = torch.isneginf(row_lse)
        p = torch.exp(scores - row_lse.masked_fill(dead, 0.0).unsqueeze(-1))[..., : kh.shape[2]]
        if dropout_p:
            assert rng is not None
            samples = range(sample_offset, sample_offset + q.shape[0])
            heads = range(head_offset, head_offset + q.shape[2])
            keep = keep_mask_ref(
                rng, dropout_p, samples, heads, range(rows.start, rows.stop), range(cols.stop - cols.start)
            )
            p = torch.where(keep, p / (1.0 - dropout_p), 0.0)
        out[:, rows] = (p @ vh).transpose(1, 2)
        lse[:, :, rows] = row_lse
    return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rng: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, T, H, Kv] in q's dtype, lse [B, H, T])."""
    q, k, v, out_dtype = widened(q), widened(k), widened(v), q.dtype
    if cu_q is None and _blocked_fits(q, k, v, sinks, options):
        out, lse = _blocked_forward(q, k, v, options)
        return out.to(out_dtype, memory_format=torch.contiguous_format), lse
    docs = documents(cu_q, cu_k, q.shape[1], k.shape[1])
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=q.dtype, device=q.device)
    for doc in docs:
        rows, cols = doc
        piece = (q[:, rows], k[:, cols], v[:, cols])
        if _blocked_fits(*piece, sinks, options):
            out[:, rows], lse[:, :, rows] = _blocked_forward(*piece, options)
        else:
            out[:, rows], lse[:, :, rows] = _dense_forward(*piece, sinks, rng, doc, options)
    return out.to(out_dtype), lse


def backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, rng: torch.Tensor | None,
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv in q's dtype, dsinks [H] or empty)."""
    dtype, out_dtype = lse.dtype, q.dtype
    q, k, v, out, dout = widened(q), widened(k), widened(v), widened(out), widened(dout)
    if cu_q is None and dlse is None and _blocked_fits(q, k, v, sinks, options):
        dq, dk, dv = _blocked_backward(dout, q, k, v, out, lse, options)
        return dq.to(out_dtype), dk.to(out_dtype), dv.to(out_dtype), lse.new_empty(0)
    docs = documents(cu_q, cu_k, q.shape[1], k.shape[1])
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    delta = torch.linalg.vecdot(dout, out).transpose(1, 2)  # [B, H, T]
    if dlse is not None:  # that of a row which sees nothing is dropped, whatever it is
        delta = (delta - dlse).masked_fill_(torch.isneginf(lse), 0.0)
    for doc in docs:
        rows, cols = doc
        piece = (q[:, rows], k[:, cols], v[:, cols])
        if dlse is None and _blocked_fits(*piece, sinks, options):
            grads = _blocked_backward(dout[:, rows], *piece, out[:, rows], lse[:, :, rows], options)
        else:
            grads = _dense_backward(dout[:, rows], *piece, lse[:, :, rows], delta[:, :, rows], rng, doc, options)
        dq[:, rows], dk[:, cols], dv[:, cols] = grads
    return dq.to(out_dtype), dk.to(out_dtype), dv.to(out_dtype), sink_gradient(sinks, lse, delta)


def sink_gradient(sinks: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """dsinks [H] = -sum over rows of exp(sink - lse) * delta, or an empty tensor without sinks."""
    if sinks is None:
        return lse.new_empty(0)
    dead = torch.isneginf(lse)
    share = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse.masked_fill(dead, 0.0)).masked_fill(dead, 0.0)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _blocked_fits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, options: Options
) -> bool:
    """Whether torch's blocked CPU kernel computes this case."""
    plain = not (options.window or options.softcap or options.dropout_p) and sinks is None and not q.is_cuda
    return (
        plain
        and q.shape[3] == v.shape[3]
        and min(q.shape[0], q.shape[1], k.shape[1]) > 0
        and (not options.causal or q.shape[1] == k.shape[1])
    )


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, K] as [B, H, T, K] with unit stride in K."""
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _blocked_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's kernel takes fewer key heads than query heads as they are, forward and backward."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(q), _heads_first(k), _heads_first(v), 0.0, options.causal, scale=options.scale
    )
    return out.transpose(1, 2), lse.contiguous()


def _blocked_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(dout), _heads_first(q), _heads_first(k), _heads_first(v), _heads_first(out), lse,
        0.0, options.causal, scale=options.scale,
    )  # fmt: skip
    return dq.transpose(1, 2).contiguous(), dk.transpose(1, 2).contiguous(), dv.transpose(1, 2).contiguous()


def _fold_queries(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[B, T, KV * G, K] as [B * KV, G * T, K]: the heads of a group are rows of one matmul."""
    batch, num_rows, num_heads, width = x.shape
    x = x.view(batch, num_rows, num_groups, -1, width).permute(0, 2, 3, 1, 4)
    return x.reshape(batch * num_groups, -1, width)


def _fold_keys(x: torch.Tensor) -> torch.Tensor:
    """[B, S, KV, K] as [B * KV, S, K]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _unfold_queries(x: torch.Tensor, batch: int, num_rows: int) -> torch.Tensor:
    """The inverse of `_fold_queries`: [B, T, H, K]."""
    x = x.view(batch, -1, num_rows, x.shape[-1])
    return x.transpose(1, 2)


def _scores(
    qh: torch.Tensor, kh: torch.Tensor, batch: int, num_rows: int, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scores [B, H, T, S] after softcap and mask, slope of the softcap or None); qh is scaled already."""
    scores = torch.bmm(qh, kh.transpose(1, 2)).view(batch, -1, num_rows, kh.shape[1])
    slope = None
    if options.softcap:
        scores = scores.div_(options.softcap).tanh_()
        slope = 1.0 - scores.square()
        scores = scores.mul_(options.softcap)
    seen = visible_ref(num_rows, kh.shape[1], options.causal, options.window, qh.device)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    return scores, slope


def _keep_scale(
    rng: torch.Tensor | None, shape: torch.Size, doc: Document, options: Options, dtype: torch.dtype
) -> torch.Tensor:
    """1 / (1 - p) where kept, else 0, for probabilities of `shape` [B, H, T, S].

    Rows count in the packed batch, columns in their document, so that Triton's tiles start at multiples of four.
    """
    assert rng is not None, "dropout without rng is refused by the public function"
    keep = keep_mask_ref(
        rng,
        options.dropout_p,
        range(options.sample_offset, options.sample_offset + shape[0]),
        range(options.head_offset, options.head_offset + shape[1]),
        range(doc.rows.start, doc.rows.stop),
        range(doc.cols.stop - doc.cols.start),
    )
    return keep.to(dtype).mul_(1.0 / (1.0 - options.dropout_p))


def _dense_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, rng: torch.Tensor | None,
    doc: Document, options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, num_rows, num_heads, _ = q.shape
    num_groups = k.shape[2]
    sink = None if sinks is None else sinks.to(q.dtype).view(1, -1, 1, 1)
    if k.shape[1] == 0 or q.numel() == 0:
        lse = torch.full((batch, num_heads, num_rows), float("-inf"), dtype=q.dtype, device=q.device)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
        return out, lse if sink is None else lse.copy_(sink.squeeze(-1))
    scores, _ = _scores(_fold_queries(q * options.scale, num_groups), _fold_keys(k), batch, num_rows, options)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        top = torch.maximum(top, sink)
    top = top.masked_fill_(torch.isneginf(top), 0.0)
    p = scores.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    if options.dropout_p:
        p = p.mul_(_keep_scale(rng, p.shape, doc, options, p.dtype))
    out = torch.bmm(p.view(batch * num_groups, -1, k.shape[1]), _fold_keys(v))
    out = out.view(batch, num_heads, num_rows, -1).div_(total.masked_fill(total == 0.0, 1.0))
    return out.transpose(1, 2), (top + total.log()).squeeze(-1)


def _dense_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    rng: torch.Tensor | None, doc: Document, options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, num_rows = q.shape[:2]
    num_cols, num_groups = k.shape[1:3]
    if num_cols == 0 or q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    qh, kh, vh = _fold_queries(q * options.scale, num_groups), _fold_keys(k), _fold_keys(v)
    doh = _fold_queries(dout, num_groups)
    scores, slope = _scores(qh, kh, batch, num_rows, options)
    p = scores.sub_(lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1)).exp_()
    dp = torch.bmm(doh, vh.transpose(1, 2)).view(p.shape)
    dropped = p
    if options.dropout_p:
        keep = _keep_scale(rng, p.shape, doc, options, p.dtype)
        dropped = p * keep
        dp = dp.mul_(keep)
    fold = (batch * num_groups, -1, num_cols)
    dv = torch.bmm(dropped.view(fold).transpose(1, 2), doh)
    ds = dp.sub_(delta.unsqueeze(-1)).mul_(p)
    if slope is not None:
        ds = ds.mul_(slope)
    ds = ds.view(fold)
    dq = torch.bmm(ds, kh).mul_(options.scale)
    dk = torch.bmm(ds.transpose(1, 2), qh)
    dk, dv = (x.view(batch, num_groups, num_cols, -1).transpose(1, 2) for x in (dk, dv))
    return _unfold_queries(dq, batch, num_rows), dk, dv
