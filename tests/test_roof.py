"""The least time of a launch: peaks are those of bench, an argument counts once, products at the rate of inputs."""

import math

import pytest
import torch

from plait.bench.peaks import CARDS
from plait.kernels import pinned
from plait.kernels.gate import amd_points, default_points
from plait.kernels.inspect import meta
from plait.kernels.launch import Launch
from plait.kernels.roof import ROOFS, bound, dot_dtypes, least_bytes

ROOF = ROOFS["sm_90"]


class Named:
    """A kernel by its arguments' names."""

    arg_names = ("x", "out", "table", "num")


def test_the_peaks_are_those_of_the_table_of_cards():
    cards = {card.arch: card for card in CARDS if card.part != "H100 80GB HBM3"}  # of the two sm_90 the H200 counts
    assert set(cards) == set(ROOFS)
    for arch, roof in ROOFS.items():
        card = cards[arch]
        assert (roof.card, roof.bytes_per_s) == (card.part, card.bytes_per_s)
        assert roof.flop_per_s == {dtype: card.peaks[dtype].flop_per_s for dtype in roof.flop_per_s}


def test_an_argument_counts_at_most_once_each_way_and_memory_behind_a_table_as_asked():
    x = meta(8, 4).expand(8, 4)
    wide = torch.empty(1, 4, dtype=torch.bfloat16, device="meta").expand(8, 4)  # four elements that are read often
    launch = Launch(Named, (1,), (x, meta(8, 4), wide, 3), {})
    work = {"loads": {"x": 1000.0, "table": 1000.0, "memory": 500.0}, "stores": {"out": 10.0, "x": 64.0}}
    assert least_bytes(launch, work) == 64 + 8 + 500 + 10 + 64


def test_the_larger_of_both_times_bounds_and_says_which():
    assert bound(ROOF, 4.8e6, 0.0, set()) == (1.0, "memory")
    assert bound(ROOF, 4.8e6, 989e6, {"bfloat16"}) == (1.0, "memory")
    us, by = bound(ROOF, 4.8e6, 989e7, {"float32", "bfloat16"})  # the fastest of the dtypes: a bound from below
    assert by == "compute" and math.isclose(us, 10.0)
    with pytest.raises(KeyError, match="int8"):
        bound(ROOF, 1.0, 1.0, {"int8"})


def test_dtypes_of_products_are_read_from_the_kernel():
    dot = "%1 = tt.dot %a, %b, %c{} : tensor<64x32x{}> * tensor<32x64x{}> -> tensor<64x64xf32> loc(#loc)"
    assert dot_dtypes(dot.format("", "bf16", "bf16")) == {"bfloat16"}
    assert dot_dtypes(dot.format(", inputPrecision = tf32", "f32", "f32")) == {"tfloat32"}
    assert dot_dtypes(dot.format("", "f32", "f32") + "\n" + dot.format("", "f16", "f16")) == {"float32", "float16"}
    assert dot_dtypes("%1 = arith.addf %a, %b : tensor<64xf32>") == set()


def test_every_pinned_row_has_its_bound_but_where_memory_decides_the_work():
    for rows in pinned.Pins.read(pinned.PATH).data.values():
        for key, row in rows.items():
            arch = key.split()[1]
            assert (row.bound_us >= 0) == (row.flop >= 0) and (row.bound_by != "") == (row.flop >= 0), key
            if row.flop >= 0:  # no time under that of all that is asked for, or of the fastest rate
                asked = row.nbytes / ROOFS[arch].bytes_per_s * 1e6
                slowest = row.flop / ROOFS[arch].flop_per_s["float32"] * 1e6
                assert row.bound_us <= max(asked, slowest) * (1 + 1e-4) + 1e-4, key
    assert len(amd_points()) in (0, 53) and len(default_points()) <= 80
