"""plait.hf: names, config.json, and boxes of safetensors files. Agreement with transformers is in test_model.py."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace

import pytest
import torch

from plait.hf import WeightWriter, config_from_hf, config_to_hf, hf_names, load_weights, read_config
from plait.model_config import MODELS, ModelConfig, parameter_shapes
from plait.parallel.placement import Placement

CONFIG = ModelConfig(
    dim=8, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=12, vocab_size=11, max_seq=16, tied=False
)


def full_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Distinct numbers in every parameter."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}


def write(folder, config, tensors, **kwargs):
    writer = WeightWriter(folder, config, torch.float32, **kwargs)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.close()


def parameter(placement: Placement, rows: int | None = None) -> torch.nn.Parameter:
    """A shard of zeros with padding up to `rows` rows."""
    shape = (rows or placement.shape[0], *placement.shape[1:])
    result = torch.nn.Parameter(torch.zeros(shape))
    result.placement = placement  # type: ignore[attr-defined]
    return result


@pytest.mark.parametrize("preset", MODELS)
def test_config_survives_the_round_trip(preset):
    config = MODELS[preset]
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config, torch.bfloat16)))) == config


def test_config_of_transformers_5_is_read():
    raw = config_to_hf(MODELS["1b"], torch.float32)
    rope = dict(raw.pop("rope_scaling"), rope_theta=raw.pop("rope_theta"))
    assert config_from_hf({**raw, "rope_parameters": rope}) == MODELS["1b"]


@pytest.mark.parametrize(
    "change, text",
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; only 'llama'"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type is 'yarn'"),
    ],
)
def test_what_this_model_lacks_is_refused(change, text):
    with pytest.raises(ValueError) as error:
        config_from_hf({**config_to_hf(CONFIG, torch.float32), **change})
    assert text in str(error.value)


def test_a_missing_key_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="config.json' has no 'hidden_size'"):
        read_config(tmp_path)


def test_names_are_those_of_llama():
    assert hf_names("layers.3.attention.kv.weight") == (
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.3.self_attn.v_proj.weight",
    )
    with pytest.raises(ValueError, match="name is 'layers.0.bias'; it is no parameter"):
        hf_names("layers.0.bias")


@pytest.mark.parametrize("max_file_bytes", [10**9, 700])
def test_every_box_comes_back(tmp_path, max_file_bytes):
    tensors = full_tensors(CONFIG)
    write(tmp_path, CONFIG, tensors, max_file_bytes=max_file_bytes)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (max_file_bytes == 10**9)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert not list(tmp_path.glob("*.tmp"))
    parts = {
        "embed.weight": (Placement((11, 8), (6, 0), (5, 8)), 6),  # the second half of a padded vocabulary
        "layers.1.attention.q.weight": (Placement((16 // 2, 8), (4, 0), (4, 8)), None),
        "layers.0.attention.kv.weight": (Placement((2, 4, 8), (0, 2, 0), (2, 2, 8)), None),
        "layers.1.ffn.gate_up.weight": (Placement((2, 12, 8), (0, 6, 0), (2, 6, 8)), None),
        "layers.1.ffn.down.weight": (Placement((8, 12), (0, 6), (8, 6)), None),
        "norm.weight": (Placement.whole((8,)), None),
    }
    parameters = {name: parameter(placement, rows) for name, (placement, rows) in parts.items()}
    assert load_weights(tmp_path, parameters.items()) == len(parts)
    for name, (placement, _) in parts.items():
        assert torch.equal(placement.local(parameters[name].detach()), tensors[name][placement.box]), name
    assert not parameters["embed.weight"][5].any()


def test_wrong_or_missing_tensors_are_named(tmp_path):
    write(tmp_path, CONFIG, full_tensors(CONFIG))
    with pytest.raises(ValueError, match=r"'model.norm.weight' in .* is \(8,\); the model needs \(9,\)"):
        load_weights(tmp_path, [("norm.weight", parameter(Placement.whole((9,))))])
    with pytest.raises(ValueError, match="has no tensor 'model.layers.2.input_layernorm.weight'"):
        load_weights(tmp_path, [("layers.2.attention_norm.weight", parameter(Placement.whole((8,))))])
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        load_weights(tmp_path / "nowhere", [])


def test_an_incomplete_model_is_not_closed(tmp_path):
    tensors = full_tensors(replace(CONFIG, num_layers=1))
    with pytest.raises(ValueError, match="no tensor was given for 'model.layers.1"):
        write(tmp_path, CONFIG, tensors)
    assert not (tmp_path / "config.json").exists()


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'plait\[hf\]'"):
        load_weights(tmp_path, [])
