"""The main job built from torch's own pieces, as torchtitan puts them together: the peer of the `train` suite.

DTensor tensor parallelism (with or without sequence parallelism), torch.distributed.pipelining's schedules, DDP or
FSDP2 over dp, torch.optim.AdamW, clipping over the whole grid. Not a second trainer: it is timed beside ours,
and it starts from our weights so that its losses can be compared before its time counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; x [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, half-split as in Hugging Face's Llama; x [B, H, T, K], cos and sin [T, K/2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class FeedForward(nn.Module):
    """SwiGLU; x [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=eps)
        self.attention = Attention(dim, heads, kv_heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=eps)
        self.ffn = FeedForward(dim, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        result: Tensor = x + self.ffn(self.ffn_norm(x))
        return result


class Stage(nn.Module):
    """The blocks of one pipeline stage, with the embedding on the first and the head on the last."""

    def __init__(
        self, blocks: dict[int, Block], embed: nn.Module | None, norm: nn.Module | None, head: nn.Module | None
    ):
        super().__init__()
        self.embed, self.norm, self.head = embed, norm, head
        self.layers = nn.ModuleDict({str(index): block for index, block in blocks.items()})
        self.angles: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.angles is not None
        x = self.embed(x) if self.embed is not None else x
        for block in self.layers.values():
            x = block(x, *self.angles)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def tensor_parallel_plan(stage: Stage, sequence_parallel: bool) -> dict[str, Any]:
    """Returns torchtitan's plan for the stage: column, row and, where asked, sequence parallel styles by name."""
    seq = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {}
    if stage.embed is not None:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=seq)
    if stage.head is not None:
        plan["head"] = ColwiseParallel(input_layouts=seq, output_layouts=Shard(-1), use_local_output=False)
        if sequence_parallel:
            plan["norm"] = SequenceParallel()
    for name in stage.layers:
        prefix = f"layers.{name}."
        if sequence_parallel:
            plan[prefix + "attention_norm"] = plan[prefix + "ffn_norm"] = SequenceParallel()
            plan[prefix + "attention"] = PrepareModuleInput(
                input_layouts=(seq, None, None), desired_input_layouts=(Replicate(), None, None)
            )
            plan[prefix + "ffn"] = PrepareModuleInput(input_layouts=(seq,), desired_input_layouts=(Replicate(),))
        for layer in ("attention.q", "attention.k", "attention.v", "ffn.gate", "ffn.up"):
            plan[prefix + layer] = ColwiseParallel()
        for layer in ("attention.out", "ffn.down"):
            plan[prefix + layer] = RowwiseParallel(output_layouts=seq)
    return plan


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy, mean over tokens; logits [B, T, V] (a DTensor sharded over V under tensor parallelism)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TorchStack:
    """Trains one stage on this rank; `step` is one optimizer step over num_microbatches micro-batches.

    device_mesh has axes dp, pp, tp; None is one process. data_parallel is 'ddp' or 'fsdp2'. step returns the mean
    loss of the global batch on every rank, as our trainer does.
    """

    def __init__(
        self,
        stage: Stage,
        device_mesh: DeviceMesh | None,
        *,
        num_microbatches: int,
        schedule: str,
        sequence_parallel: bool,
        data_parallel: str,
        weight_decay: float,
        max_norm: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        self.num_microbatches, self.max_norm = num_microbatches, max_norm
        self.dp, self.pp, self.tp = (
            device_mesh[name].size() if device_mesh is not None else 1 for name in ("dp", "pp", "tp")
        )
        self.pp_group: dist.ProcessGroup | None = None
        self.tp_group = device_mesh.get_group("tp") if device_mesh is not None and self.tp > 1 else None
        if device_mesh is not None and self.tp > 1:
            parallelize_module(stage, device_mesh["tp"], tensor_parallel_plan(stage, sequence_parallel))
        self.module: nn.Module = stage
        # DDP's transform turns DTensors into plain tensors, which then no longer say that they are shards.
        split = {
            name for name, p in stage.named_parameters() if isinstance(p, DTensor) and p.placements[0].is_shard()
        }
        if device_mesh is not None and self.dp > 1 and data_parallel == "fsdp2":
            for block in stage.layers.values():
                fully_shard(block, mesh=device_mesh["dp"], reshard_after_forward=False)
            fully_shard(stage, mesh=device_mesh["dp"], reshard_after_forward=False)
        elif device_mesh is not None and self.dp > 1:
            if self.tp > 1:
                _pre_dp_module_transform(stage)
            self.module = nn.parallel.DistributedDataParallel(
                stage, device_mesh=device_mesh["dp"], broadcast_buffers=False, gradient_as_bucket_view=True
            )
        self.pipeline = None
        if device_mesh is not None and self.pp > 1:
            self.pp_group = device_mesh.get_group("pp")
            pp_coord = device_mesh.get_local_rank("pp")
            pipeline_stage = PipelineStage(self.module, pp_coord, self.pp, torch.device("cpu"), group=self.pp_group)
            self.pipeline = SCHEDULES[schedule](pipeline_stage, num_microbatches, loss_fn=mean_loss)
            self.first, self.last = pp_coord == 0, pp_coord == self.pp - 1
        # Kept from here: DDP's transform puts new objects into the module at each forward; gradients go to these.
        self.params = list(stage.parameters())
        self.shards = [p for name, p in stage.named_parameters() if name in split]
        decay = [p for p in self.params if p.ndim >= 2]
        plain = [p for p in self.params if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=0.0, betas=betas, eps=eps, foreach=True
        )

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> float:
        """One step on this dp coordinate's tokens and targets [B, T] int64; returns the global mean loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with loss_parallel() if self.tp > 1 else contextlib.nullcontext():
            loss = (
                self._pipeline_step(tokens, targets)
                if self.pipeline is not None
                else self._plain_step(tokens, targets)
            )
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Every rank of the last stage holds the mean of its dp coordinate; the others hold 0.
        total = torch.tensor([loss], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total) / (self.dp * self.tp)

    def _pipeline_step(self, tokens: Tensor, targets: Tensor) -> float:
        assert self.pipeline is not None
        losses: list[Tensor] = []
        args = (tokens,) if self.first else ()
        kwargs: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.pipeline.step(*args, **kwargs)
        return sum(local_value(loss) for loss in losses) / self.num_microbatches if self.last else 0.0

    def _plain_step(self, tokens: Tensor, targets: Tensor) -> float:
        total = 0.0
        pieces = list(zip(tokens.chunk(self.num_microbatches), targets.chunk(self.num_microbatches), strict=True))
        for index, (x, y) in enumerate(pieces):
            with self._sync_only_if(index == len(pieces) - 1):
                loss = mean_loss(self.module(x), y) / len(pieces)
                loss.backward()
            total += local_value(loss)
        return total

    @contextlib.contextmanager
    def _sync_only_if(self, sync: bool) -> Iterator[None]:
        if isinstance(self.module, nn.parallel.DistributedDataParallel) and not sync:
            with self.module.no_sync():
                yield
            return
        set_sync: Callable[[bool], None] | None = getattr(self.module, "set_requires_gradient_sync", None)
        if set_sync is not None:
            set_sync(sync)
        yield

    def _clip(self) -> None:
        """Clips by the norm over all stages and shards; shards that DDP made plain tensors are summed over tp."""
        grads = [p.grad for p in self.params if p.grad is not None]
        dtensors = [g for g in grads if isinstance(g, DTensor)]
        shards = [p.grad for p in self.shards if p.grad is not None and not isinstance(p.grad, DTensor)]
        known = {id(g) for g in shards}
        plain = [g for g in grads if not isinstance(g, DTensor) and id(g) not in known]
        squares = square_norm(shards)
        if self.tp_group is not None:
            dist.all_reduce(squares, group=self.tp_group)
        squares += square_norm(dtensors) + square_norm(plain)
        if self.pp_group is not None:
            dist.all_reduce(squares, group=self.pp_group)
        scale = float((self.max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0))
        kinds: tuple[Sequence[Tensor], ...] = (dtensors, shards, plain)
        for kind in kinds:
            if kind and scale < 1.0:
                torch._foreach_mul_(list(kind), scale)


def square_norm(grads: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of gradients of one kind, plain or DTensor, as a plain [1] tensor."""
    if not grads:
        return torch.zeros(1)
    norm = torch.nn.utils.get_total_norm(grads, foreach=True)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float().reshape(1) ** 2


def local_value(loss: Tensor) -> float:
    """Returns a loss as a number, whole also where it is a DTensor."""
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
