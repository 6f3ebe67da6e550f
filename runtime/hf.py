"""Hugging Face Llama weights: safetensors and config.json, read onto any grid and written from any grid.

Not snapshots (`plait.ckpt` holds the full training state): weights only. The one idea: one table says which of their
tensors make one of ours (k and v, gate and up are stacked along a new first dim), and each rank reads only its box.
Needs the extra `plait[hf]`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from plait.model import LlamaStage, full_parameters
from plait.model_config import ModelConfig, RopeScaling, parameter_shapes
from plait.parallel.mesh import Mesh

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_FILE_BYTES = 5_000_000_000  # the size at which transformers starts another file
_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}

# ours -> theirs; several are stacked along dim 0
_GLOBAL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.q.weight": ("self_attn.q_proj.weight",),
    "attention.kv.weight": ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.down.weight": ("mlp.down_proj.weight",),
}


def hf_names(name: str) -> tuple[str, ...]:
    """Their names of one of our parameters: one, or as many as our dim 0 stacks."""
    if name in _GLOBAL:
        return (_GLOBAL[name],)
    prefix, index, rest = name.split(".", 2)
    if prefix != "layers" or rest not in _LAYER:
        raise ValueError(f"name is {name!r}; it is no parameter of the model")
    return tuple(f"model.layers.{index}.{part}" for part in _LAYER[rest])


# --- config.json ------------------------------------------------------------------------------------------------


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """config.json's content -> ModelConfig; ValueError names the first thing that this model does not have."""
    for key, wanted in (
        ("model_type", "llama"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
    ):
        if raw.get(key, wanted) != wanted:
            raise ValueError(f"config.json: {key} is {raw[key]!r}; only {wanted!r} is supported")
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: rope_type is {kind!r}; only 'default' and 'llama3' are supported")
    return ModelConfig(
        dim=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        ffn_dim=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        max_seq=raw.get("max_position_embeddings", 2048),
        head_dim=raw.get("head_dim") or 0,
        tied=raw.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
        rope_scaling=RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
        if kind == "llama3"
        else None,
        norm_eps=raw.get("rms_norm_eps", 1e-6),
    )


def config_to_hf(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """ModelConfig -> config.json's content, in the form that transformers 4 writes and 5 reads too."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq,
        "tie_word_embeddings": config.tied,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq,
        },
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_config(folder: str | Path) -> ModelConfig:
    """The dimensions of the model in `folder`."""
    folder = Path(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        return config_from_hf(raw)
    except KeyError as error:
        raise ValueError(f"{str(folder / 'config.json')!r} has no {error}") from error


# --- weights ----------------------------------------------------------------------------------------------------


def load_weights(folder: str | Path, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> int:
    """Reads each parameter's box from the safetensors files in `folder` into it; returns how many parameters.

    Values are cast to the parameter's dtype. Call it before the optimizer copies its master weights. ValueError names
    a tensor that is missing or has another shape.
    """
    with _Reader(Path(folder)) as reader, torch.no_grad():
        count = 0
        for name, parameter in named_parameters:
            placement = parameter.placement  # type: ignore[attr-defined]
            target = placement.local(parameter.detach())
            theirs = hf_names(name)
            for index, hf_name in enumerate(theirs):
                if len(theirs) == 1:
                    target.copy_(reader.box(hf_name, placement.full_shape, placement.offset, placement.shape))
                elif placement.offset[0] <= index < placement.offset[0] + placement.shape[0]:
                    part = reader.box(hf_name, placement.full_shape[1:], placement.offset[1:], placement.shape[1:])
                    target[index - placement.offset[0]].copy_(part)
            count += 1
        return count


def save_weights(
    folder: str | Path,
    stages: Mapping[int, LlamaStage],
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes the model to `folder`, from rank 0; every rank must call it. `dtype`: default the model's.

    One full tensor at a time is gathered, and rank 0 holds one file's tensors until it is complete.
    """
    some = next(iter(stages.values()))
    writer = None
    if mesh.rank == 0:
        writer = WeightWriter(Path(folder), some.config, dtype or some.options.dtype, max_file_bytes)
    for name, full in full_parameters(stages, mesh):
        if writer is not None:
            writer.add(name, full)
    if writer is not None:
        writer.close()


class _Reader:
    """The safetensors files of one folder, opened when first needed. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = _safetensors().safe_open
        index = folder / INDEX_FILE
        self._files: dict[str, Any] = {}
        if index.exists():
            self._place = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            self._place = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            path = self.folder / name
            if not path.is_file():
                raise FileNotFoundError(f"load_weights: no file {str(path)!r}")
            self._files[name] = self._open(str(path), framework="pt", device="cpu").__enter__()
        return self._files[name]

    def box(self, name: str, full: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._place:
            raise ValueError(f"load_weights: {str(self.folder)!r} has no tensor {name!r}")
        part = self._file(self._place[name]).get_slice(name)
        if tuple(part.get_shape()) != full:
            raise ValueError(
                f"load_weights: {name!r} in {str(self.folder)!r} is {tuple(part.get_shape())}; the model needs {full}"
            )
        return part[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


class WeightWriter:
    """Writes full tensors, given in the order of `parameter_shapes`, as files of at most `max_file_bytes`.

    The folder gets config.json, the data files and, when there are several, their index. Each file is written under a
    temporary name and renamed, the index last.
    """

    def __init__(
        self, folder: Path, config: ModelConfig, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        self._save_file = _safetensors_torch().save_file
        self.folder, self.config, self.dtype = folder, config, dtype
        self._files = _plan_files(config, dtype.itemsize, max_file_bytes)
        self._place = {name: file for file, names in self._files.items() for name in names}
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._given: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, full: torch.Tensor) -> None:
        """Takes one of our full tensors; a file is written as soon as it is complete."""
        theirs = hf_names(name)
        host = full.detach().to("cpu", self.dtype)
        for hf_name, tensor in zip(theirs, [host] if len(theirs) == 1 else host.unbind(0), strict=True):
            file = self._place[hf_name]
            self._given.add(hf_name)
            pending = self._pending.setdefault(file, {})
            pending[hf_name] = tensor.contiguous()
            if len(pending) == len(self._files[file]):
                self._write(file, pending)
                del self._pending[file]

    def close(self) -> None:
        """Writes config.json and the index; ValueError when a tensor was not given."""
        missing = [name for name in self._place if name not in self._given]
        if missing:
            raise ValueError(f"save_weights: no tensor was given for {missing[0]!r}")
        _write_json(self.folder / "config.json", config_to_hf(self.config, self.dtype))
        if len(self._files) > 1:
            total = sum(math.prod(shape) for shape in parameter_shapes(self.config).values()) * self.dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._place.items()))}
            _write_json(self.folder / INDEX_FILE, index)

    def _write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        path = self.folder / file
        self._save_file(tensors, str(path) + ".tmp", metadata={"format": "pt"})
        os.replace(str(path) + ".tmp", path)


def _plan_files(config: ModelConfig, itemsize: int, max_file_bytes: int) -> dict[str, list[str]]:
    """File name -> their tensor names, filled in order; a tensor larger than a file gets its own."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, shape in parameter_shapes(config).items():
        theirs = hf_names(name)
        num_bytes = math.prod(shape) * itemsize // len(theirs)
        for hf_name in theirs:
            if groups[-1] and used + num_bytes > max_file_bytes:
                groups.append([])
                used = 0
            groups[-1].append(hf_name)
            used += num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors": names for index, names in enumerate(groups)}


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("Hugging Face weights need safetensors: pip install 'plait[hf]'") from error
    return safetensors


def _safetensors_torch() -> Any:
    _safetensors()
    import safetensors.torch

    return safetensors.torch
