"""The table of cards: every peak is the product of its factors, every row says where it is from, names are whole."""

from __future__ import annotations

import re

import pytest

from plait.bench.peaks import CARDS, card_named, card_of
from plait.metrics import PEAK_BF16

ROWS = [(card, dtype) for card in CARDS for dtype in card.peaks]


@pytest.mark.parametrize("card, dtype", ROWS, ids=lambda value: getattr(value, "part", value))
def test_a_peak_is_units_times_flop_per_clock_times_clock(card, dtype):
    peak = card.peaks[dtype]
    assert card.multiprocessors * peak.flop_per_clock * peak.clock_hz == pytest.approx(peak.flop_per_s, rel=2e-3)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.part)
def test_matrix_rates_double_as_the_width_halves(card):
    per_clock = {dtype: peak.flop_per_clock for dtype, peak in card.peaks.items()}
    assert per_clock["float16"] == per_clock["bfloat16"] == 2 * per_clock["tfloat32"]
    assert per_clock.get("float8", 2 * per_clock["bfloat16"]) == 2 * per_clock["bfloat16"]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.part)
def test_every_row_has_source_and_date(card):
    assert "data sheet" in card.source and re.fullmatch(r"20\d\d-\d\d", card.read)
    assert card.bytes_per_s > 1e12 and card.l2_bytes >= 40 << 20 and card.memory_gb >= 80


def test_an_h100_is_neither_sparse_nor_the_pcie_card():
    """triton.testing gives it 494.7 TFLOP/s in bf16, other tables 1979 (with sparsity), 2000 GB/s (PCIe)."""
    h100 = card_named("h100")
    assert (h100.flop_per_s("bfloat16"), h100.bytes_per_s) == (989e12, 3.35e12)


@pytest.mark.parametrize(
    "name, part",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GH200 480GB", None),  # another card: its name ends like the H200's
        ("NVIDIA GB200", None),
        ("NVIDIA H200 NVL", None),  # PCIe, 600 W
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA T4", None),
    ],
)
def test_a_card_is_known_by_its_whole_name(name, part):
    card = card_of({"gpus": [{"name": name}]})
    assert (card.part if card else None) == part


def test_a_machine_without_a_gpu_has_no_card():
    assert card_of({"gpus": []}) is None and card_of({}) is None


def test_float32_has_its_own_rate_and_what_tf32_allows():
    h200 = card_named("H200")
    assert (h200.flop_per_s("float32"), h200.most_flop_per_s("float32")) == (67e12, 494.5e12)
    assert h200.flop_per_s("int4") is None


@pytest.mark.parametrize("name", ["", "t4", "x"])
def test_an_unknown_card_is_refused_with_the_valid_names(name):
    with pytest.raises(ValueError, match="card: .* valid: H200, H100 80GB HBM3, A100, B200, MI300X"):
        card_named(name)


def test_the_training_loop_knows_the_same_peaks():
    """plait.metrics has a table of its own for MFU: it may not import bench."""
    for card in CARDS:
        for part, peak in PEAK_BF16:
            if card.part.split(" ")[0].split("-")[0] == part:
                assert peak == card.bf16_flop_per_s, part
