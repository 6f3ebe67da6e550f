"""CRC32C and XXH3-128 of plait._C: vectors, folding against tables, chaining, blocks, odd buffers.

Cases: CRC32C vectors of RFC 3720 B.4 and the check value of the Rocksoft model; XXH3-128 vectors made with the
python-xxhash package over (7 i + 3) mod 251, at the lengths where the algorithm changes its path.
"""

from __future__ import annotations

import hypothesis
import numpy
import pytest
from hypothesis import strategies

from plait import _C

CRC32C_VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),  # check value of the catalogue of parametrised CRCs
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (  # an iSCSI read command
        bytes.fromhex(
            "01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"
        ),
        0xD9963A56,
    ),
]
XXH3_VECTORS = {
    0: "99aa06d3014798d86001c324468d497f",
    1: "22bbb76b211a39ba13e608bc156defed",
    3: "ce31763cbf8245a5a9088dda485b481c",
    4: "47197970590746b1788a609154b0fe20",
    8: "e3bc8a5f461715553cd024e3d63a1588",
    9: "c72c88247a9a56d7eafab1c7f123109f",
    16: "ce0b9647ab24f88460d75c5e47d40a24",
    17: "bfd327edcc2fbd12eeed7654312a26d7",
    128: "a04233e3c9599748ef7e4d57ed67de26",
    129: "6e83694c09641bb7a28da26446fd5ab0",
    240: "9a8457fec9cfea5e2288b3c22f48dea4",
    241: "07870750a974395682b1de299f6e411e",
    1024: "f96a1bbdb2fef572f75e768c7cdd54b2",
    100000: "c0f903c0bf0d5d15d449c3d3e190d6d6",
}
WIDTHS = [0, 16, 32, 64]  # bytes an instruction: tables, and what this processor can of folding
FRONTS = [64, 128, 256]  # bytes folded side by side


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("data", "expected"), CRC32C_VECTORS)
def test_crc32c_vectors(data, expected, width):
    assert _C.crc32c(data, width=width) == expected


def bitwise_crc32c(data: bytes) -> int:
    """The definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@hypothesis.given(strategies.binary(max_size=300))
def test_all_paths_follow_the_definition(data):
    assert {_C.crc32c(data, width=width) for width in WIDTHS} == {bitwise_crc32c(data)}


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, *(n * f + more for f in FRONTS for n in (1, 2, 5) for more in (-1, 0, 1, 13)), 1 << 16]
)
def test_folding_equals_tables(size, offset):
    data = numpy.random.default_rng(size).bytes(size + offset)
    part = memoryview(data)[offset:]
    assert {_C.crc32c(part, 7, width) for width in WIDTHS} == {_C.crc32c(part, 7, 0)}


@hypothesis.given(strategies.binary(max_size=8000), strategies.integers(0, 8000))
def test_crc32c_chains(data, cut):
    cut = min(cut, len(data))
    for width in WIDTHS:
        first = _C.crc32c(data[:cut], width=width)
        assert _C.crc32c(data[cut:], first, width) == _C.crc32c(data)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096])
def test_blocks_are_the_crcs_of_the_parts(size):
    data = numpy.random.default_rng(0).bytes(size)
    expected = [_C.crc32c(data[i : i + 4096]) for i in range(0, size, 4096)]
    assert _C.crc32c_blocks(data, 4096) == expected


@pytest.mark.parametrize("size", XXH3_VECTORS)
def test_xxh3_vectors(size):
    data = bytes((i * 7 + 3) % 251 for i in range(size))
    assert _C.xxh3_128(data).hex() == XXH3_VECTORS[size]


def test_any_contiguous_buffer_is_taken():
    array = numpy.arange(24, dtype=numpy.float32).reshape(4, 6)
    for function in (_C.crc32c, _C.xxh3_128):
        assert function(array) == function(array.tobytes()) == function(bytearray(array.tobytes()))
    assert _C.crc32c(numpy.zeros((0, 3))) == 0


def test_bad_arguments_are_refused():
    array = numpy.zeros((4, 6))
    with pytest.raises(ValueError, match="contiguous"):
        _C.crc32c(array[:, ::2])
    with pytest.raises(TypeError):
        _C.crc32c("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_bytes is 0"):
        _C.crc32c_blocks(b"x", 0)
