"""The dimensions of a model, what they imply (parameter shapes, counts, FLOP) and which grids they fit on.

Not the model (`plait.model`) and nothing that needs torch. The one idea: `parameter_shapes` is the one table of
names and full shapes; counts, the files of other formats and the checks all read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretch: rotations with a wavelength above `original_seq / low_freq_factor` slow down by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_seq: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU; ValueError names what cannot be."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    vocab_size: int
    max_seq: int  # what the rotary tables were made for; longer rows are allowed
    head_dim: int = 0  # 0: dim / num_heads
    tied: bool = False  # the head's weight is the embedding's
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "max_seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads}; it must divide num_heads = {self.num_heads}: "
                f"{_divisors(self.num_heads)}"
            )
        if not self.head_dim:
            if self.dim % self.num_heads:
                raise ValueError(f"dim is {self.dim}; it must be a multiple of num_heads = {self.num_heads}")
            object.__setattr__(self, "head_dim", self.dim // self.num_heads)
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even, because RoPE rotates pairs")

    def check_tp(self, tp: int) -> None:
        """Raises ValueError unless heads, kv heads and ffn divide over tp ranks (fewer kv heads are replicated)."""
        for name in ("num_heads", "ffn_dim"):
            value = getattr(self, name)
            if value % tp:
                raise ValueError(f"tp is {tp}; it must divide {name} = {value}: {_divisors(value)}")
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            raise ValueError(
                f"tp is {tp}; it must divide num_kv_heads = {self.num_kv_heads}, or be a multiple of it "
                "so that each kv head is held by as many ranks"
            )
        if self.vocab_size < tp:
            raise ValueError(f"tp is {tp}; it must be at most vocab_size = {self.vocab_size}")

    def check_grid(self, *, tp: int, num_stages: int, seq: int, sequence_parallel: bool) -> None:
        """Raises ValueError unless the model, with rows of `seq` tokens, fits the grid."""
        self.check_tp(tp)
        if not 1 <= num_stages <= self.num_layers:
            raise ValueError(
                f"num_stages is {num_stages}; it must be in [1, {self.num_layers}]: a stage has at least one layer"
            )
        if seq < 1:
            raise ValueError(f"seq is {seq}; it must be at least 1")
        if sequence_parallel and seq % tp:
            raise ValueError(f"seq is {seq}; under sequence parallel it must be a multiple of tp = {tp}")


def _divisors(value: int) -> str:
    return ", ".join(str(n) for n in range(1, value + 1) if value % n == 0)


_LLAMA3 = ModelConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_dim=14336,
    vocab_size=128256,
    max_seq=8192,
    rope_theta=500000.0,
)
# The first two are byte-level and sized for CPUs; 125m has GPT-2 small's width and depth with Llama 2's vocabulary;
# the others are the published shapes of Llama 3.2 1B, Llama 3 8B and 70B.
MODELS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        dim=128, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=352, vocab_size=256, max_seq=128, tied=True
    ),
    "small": ModelConfig(
        dim=256, num_layers=8, num_heads=8, num_kv_heads=4, ffn_dim=704, vocab_size=256, max_seq=256, tied=True
    ),
    "125m": ModelConfig(
        dim=768, num_layers=12, num_heads=12, num_kv_heads=12, ffn_dim=2048, vocab_size=32000, max_seq=1024, tied=True
    ),
    "1b": replace(
        _LLAMA3,
        dim=2048,
        num_layers=16,
        head_dim=64,
        ffn_dim=8192,
        max_seq=131072,
        tied=True,
        rope_scaling=RopeScaling(32.0, 1.0, 4.0, 8192),
    ),
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, dim=8192, num_layers=80, num_heads=64, ffn_dim=28672),
}


def model_config(preset: str) -> ModelConfig:
    """The dimensions of a preset; ValueError lists the known ones."""
    if preset not in MODELS:
        raise ValueError(f"preset is {preset!r}; valid: {', '.join(MODELS)}")
    return MODELS[preset]


def parameter_shapes(
    config: ModelConfig, layers: range | None = None, *, first: bool = True, last: bool = True
) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of the parameters of a stage with these layers (None: all), in the order of the model.

    A tied weight appears once in a stage, as `embed.weight`; it is on the first and on the last stage.
    """
    dim, vocab = config.dim, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    if first or (last and config.tied):
        shapes["embed.weight"] = (vocab, dim)
    for index in range(config.num_layers) if layers is None else layers:
        prefix = f"layers.{index}."
        shapes[prefix + "attention_norm.weight"] = (dim,)
        shapes[prefix + "attention.q.weight"] = (config.num_heads * config.head_dim, dim)
        shapes[prefix + "attention.kv.weight"] = (2, config.num_kv_heads * config.head_dim, dim)
        shapes[prefix + "attention.out.weight"] = (dim, config.num_heads * config.head_dim)
        shapes[prefix + "ffn_norm.weight"] = (dim,)
        shapes[prefix + "ffn.gate_up.weight"] = (2, config.ffn_dim, dim)
        shapes[prefix + "ffn.down.weight"] = (dim, config.ffn_dim)
    if last:
        shapes["norm.weight"] = (dim,)
        if not config.tied:
            shapes["head.weight"] = (vocab, dim)
    return shapes


def num_parameters(config: ModelConfig, layers: range | None = None, *, first: bool = True, last: bool = True) -> int:
    """Parameters of a stage (default: of the model); padding of the vocabulary is not counted."""
    return sum(math.prod(shape) for shape in parameter_shapes(config, layers, first=first, last=last).values())


def flop_per_token(config: ModelConfig, seq: int) -> int:
    """FLOP of one token's forward and backward, by torchtitan's convention: 6 N + 12 l h q s.

    N: parameters that multiply, so all but the embedding table, whose rows are looked up, but with the head, tied or
    not. l layers, h heads of size q, rows of s tokens; the causal mask is not credited, nor is recompute.
    """
    multiplied = num_parameters(config) - (0 if config.tied else config.vocab_size * config.dim)
    return 6 * multiplied + 12 * config.num_layers * config.num_heads * config.head_dim * seq
