"""embedding: rows of a vocabulary shard by token; tokens of other shards give rows of zeros.

Backward sums the gradients of equal tokens in a fixed order without atomics, so that runs agree bit for bit: on the
CPU in the order of the tokens (torch's dense embedding gradient), on CUDA in windows of the sorted tokens
(embed_triton.py). `embedding_wgrad` is that sum alone and can add into an fp32 view of a gradient bucket.
"""

import torch

from plait.kernels.dropout_op import check_offsets
from plait.kernels.embed_triton import add_rows, lookup
from plait.kernels.launch import check, check_device, check_floating, use_triton
from plait.kernels.registration import below_autograd, once_differentiable, register
from plait.kernels.tables import shares_memory


def embedding_ref(tokens: torch.Tensor, weight: torch.Tensor, *, vocab_start: int = 0) -> torch.Tensor:
    """The oracle; differentiable by torch."""
    local = tokens - vocab_start
    inside = (local >= 0) & (local < weight.shape[0])
    return weight[local.clamp(0, weight.shape[0] - 1)] * inside.unsqueeze(-1).to(weight.dtype)


def _all_inside(local: torch.Tensor, num_rows: int) -> bool:
    """Whether every token has a row here; False on a GPU, where a look would wait for the device."""
    if local.is_cuda or not local.numel():
        return False
    low, high = torch.aminmax(local)
    return int(low) >= 0 and int(high) < num_rows


def forward(tokens: torch.Tensor, weight: torch.Tensor, vocab_start: int) -> torch.Tensor:
    """embedding without checks or graph: the kernel itself, for code that has a backward of its own."""
    if use_triton(weight):
        return lookup(tokens, weight, vocab_start)
    local = tokens - vocab_start if vocab_start else tokens
    if _all_inside(local, weight.shape[0]):
        return torch.nn.functional.embedding(local, weight)
    outside = (local < 0) | (local >= weight.shape[0])
    out = torch.nn.functional.embedding(local.masked_fill(outside, 0), weight)
    return out.masked_fill_(outside.unsqueeze(-1), 0.0)


def _backward(dout: torch.Tensor, tokens: torch.Tensor, num_rows: int, vocab_start: int) -> torch.Tensor:
    if use_triton(dout):
        out = dout.new_empty((num_rows, dout.shape[-1]))
        add_rows(dout, tokens, out, vocab_start, accumulate=False)
        return out
    local = tokens - vocab_start if vocab_start else tokens
    outside = (local < 0) | (local >= num_rows)
    # One row past the shard collects what belongs elsewhere; being the padding row, it is skipped, not summed.
    local = local.masked_fill(outside, num_rows)
    grad = torch.ops.aten.embedding_dense_backward(dout.contiguous(), local, num_rows + 1, num_rows, False)
    return grad[:num_rows]


def wgrad_into(
    dout: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor, vocab_start: int, accumulate: bool
) -> None:
    """`embedding_wgrad` without checks or graph."""
    if use_triton(dout):
        add_rows(dout, tokens, out, vocab_start, accumulate)
        return
    local = tokens - vocab_start if vocab_start else tokens
    if accumulate and _all_inside(local, out.shape[0]):
        out.index_add_(0, local.reshape(-1), dout.reshape(-1, dout.shape[-1]).to(out.dtype))  # in the tokens' order
        return
    grad = _backward(dout.to(out.dtype), tokens, out.shape[0], vocab_start)
    out.add_(grad) if accumulate else out.copy_(grad)


class _Embedding(torch.autograd.Function):
    """Saves tokens, the caller's: 8 bytes per token."""

    @staticmethod
    def forward(ctx, tokens, weight, vocab_start, padding_idx=None):
        with below_autograd():
            out = _embedding(tokens, weight, vocab_start, padding_idx)
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.vocab_start, ctx.padding_idx = weight.shape[0], vocab_start, padding_idx
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (tokens,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            tokens = tokens.masked_fill(tokens == ctx.padding_idx, -1)  # a token of no shard
        return None, _embedding_grad(dout, tokens, ctx.num_rows, ctx.vocab_start), None, None


_embedding = register(
    "embedding(Tensor tokens, Tensor weight, int vocab_start, int? padding_idx=None) -> Tensor",
    lambda tokens, weight, vocab_start, padding_idx=None: forward(tokens, weight, vocab_start),
    lambda tokens, weight, vocab_start, padding_idx=None: weight.new_empty((*tokens.shape, weight.shape[1])),
    _Embedding.apply,
)
_embedding_grad = register(
    "embedding_grad(Tensor dout, Tensor tokens, int num_rows, int vocab_start) -> Tensor",
    _backward,
    lambda dout, tokens, num_rows, vocab_start: dout.new_empty((num_rows, dout.shape[-1])),
)
_embedding_grad_into = register(
    "embedding_grad_(Tensor dout, Tensor tokens, Tensor(a!) out, int vocab_start, bool accumulate) -> ()",
    wgrad_into,
    lambda dout, tokens, out, vocab_start, accumulate: None,
)


def embedding(
    tokens: torch.Tensor, weight: torch.Tensor, *, vocab_start: int = 0, padding_idx: int | None = None
) -> torch.Tensor:
    """weight[tokens - vocab_start] for int64 `tokens[...]` and `weight[V_local, D]`, giving [..., D].

    A token outside [vocab_start, vocab_start + V_local) gives zeros and no gradient; `padding_idx`, a token like any
    other (torch's negative ones count rows from the end: here they are refused), gives its row and no gradient. Saves
    the tokens. Raises TypeError on dtypes, ValueError on shapes, devices and a padding_idx < 0.
    """
    check_floating("embedding", weight=weight)
    check_device("embedding", weight, tokens=tokens)
    if tokens.dtype is not torch.int64:
        raise TypeError(f"embedding: tokens are {tokens.dtype}; expected torch.int64")
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"embedding: weight has shape {tuple(weight.shape)}; expected [V, D] with V > 0")
    check_offsets("embedding", vocab_start=vocab_start)
    if padding_idx is not None:
        check_offsets("embedding", padding_idx=padding_idx)
    return _embedding(tokens, weight, vocab_start, padding_idx)


def embedding_wgrad(
    tokens: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, *, vocab_start: int = 0, accumulate: bool = False
) -> torch.Tensor:
    """The weight gradient alone, written or added into `out[V_local, D]` (dout's dtype or fp32); returns `out`."""
    check_floating("embedding_wgrad", dout=dout)
    check_device("embedding_wgrad", dout, tokens=tokens, out=out)
    if tokens.dtype is not torch.int64:
        raise TypeError(f"embedding_wgrad: tokens are {tokens.dtype}; expected torch.int64")
    check_offsets("embedding_wgrad", vocab_start=vocab_start)
    if out.dtype not in (dout.dtype, torch.float32) or (dout.dtype is torch.float64 and out.dtype != dout.dtype):
        raise TypeError(f"embedding_wgrad: out is {out.dtype}; expected {dout.dtype} or float32")
    check(
        out.dim() == 2 and dout.shape == (*tokens.shape, out.shape[-1]),
        lambda: f"embedding_wgrad: dout {tuple(dout.shape)}, tokens {tuple(tokens.shape)}, out {tuple(out.shape)}",
    )
    check(
        not shares_memory(out),
        lambda: f"embedding_wgrad: out has strides {out.stride()}; its elements share memory",
    )
    with torch.no_grad():
        _embedding_grad_into(dout, tokens, out, vocab_start, accumulate)
    return out
