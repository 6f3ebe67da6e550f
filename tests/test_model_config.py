"""plait.model_config: the published sizes, and a refusal that names argument, value and what would be right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.model_config import MODELS, ModelConfig, flop_per_token, model_config, num_parameters, parameter_shapes

TINY = MODELS["tiny"]


@pytest.mark.parametrize(
    "preset, millions",  # as their publishers count them
    [("llama3-8b", 8030.261), ("llama3-70b", 70553.706), ("1b", 1235.814), ("tiny", 0.771)],
)
def test_presets_have_the_published_number_of_parameters(preset, millions):
    assert num_parameters(model_config(preset)) / 1e6 == pytest.approx(millions, abs=0.001)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_together_are_the_model(tied):
    config = replace(TINY, num_layers=7, tied=tied)
    parts = [
        parameter_shapes(config, layers, first=layers.start == 0, last=layers.stop == 7)
        for layers in (range(3), range(3, 5), range(5, 7))
    ]
    assert {name: shape for part in parts for name, shape in part.items()} == parameter_shapes(config)
    copies = 256 * 128 if tied else 0  # the table is on both ends
    counts = [num_parameters(config, r, first=r.start == 0, last=r.stop == 7) for r in (range(3), range(3, 7))]
    assert sum(counts) == num_parameters(config) + copies


def test_flop_follow_torchtitans_convention():
    """6 N + 12 l h q s with N without the embedding table; worked by hand for one layer."""
    config = ModelConfig(
        dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, vocab_size=10, max_seq=4, tied=False
    )
    layer = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert flop_per_token(config, 4) == 6 * (layer + 8 + 80) + 12 * 8 * 4
    assert flop_per_token(replace(config, tied=True), 4) == flop_per_token(config, 4)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(num_kv_heads=3), "num_kv_heads is 3; it must divide num_heads = 8: 1, 2, 4, 8"),
        (dict(dim=130, head_dim=0), "dim is 130; it must be a multiple of num_heads = 8"),
        (dict(head_dim=15), "head_dim is 15; it must be even"),
        (dict(num_layers=0), "num_layers is 0; it must be at least 1"),
        (dict(vocab_size=-1), "vocab_size is -1"),
    ],
)
def test_bad_dimensions_are_named(change, text):
    with pytest.raises(ValueError) as error:
        replace(TINY, **change)
    assert text in str(error.value)


@pytest.mark.parametrize(
    "change, grid, text",
    [
        (dict(), dict(tp=3), "tp is 3; it must divide num_heads = 8: 1, 2, 4, 8"),
        (dict(ffn_dim=350), dict(tp=4), "tp is 4; it must divide ffn_dim = 350"),
        (
            dict(num_heads=12, num_kv_heads=6, head_dim=16),
            dict(tp=4, seq=8),
            "tp is 4; it must divide num_kv_heads = 6",
        ),
        (dict(vocab_size=1), dict(tp=2), "tp is 2; it must be at most vocab_size = 1"),
        (dict(), dict(num_stages=5), "num_stages is 5; it must be in [1, 4]"),
        (
            dict(),
            dict(tp=2, seq=7, sequence_parallel=True),
            "seq is 7; under sequence parallel it must be",
        ),
        (dict(), dict(seq=0), "seq is 0"),
    ],
)
def test_grids_that_do_not_fit_are_named(change, grid, text):
    config = replace(TINY, **change)
    with pytest.raises(ValueError) as error:
        config.check_grid(**{**dict(tp=1, num_stages=1, seq=8, sequence_parallel=False), **grid})
    assert text in str(error.value)


def test_kv_heads_may_be_fewer_than_tp_ranks():
    replace(TINY, num_kv_heads=2).check_grid(tp=8, num_stages=4, seq=7, sequence_parallel=False)


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match="preset is 'huge'; valid: tiny, small, 125m, 1b, llama3-8b, llama3-70b"):
        model_config("huge")
