"""plait._C.stream_copy: copies past the caches, at every width of a store, from any place to any place.

Lengths about the four pages that are copied in turn and about a line; what lies around the target stays as it is.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait import _C
from tests.csrc_memory import address_of, random_bytes

GROUP = 4 * 4096
SIZE = 5 * GROUP


@pytest.mark.parametrize("width", [64, 32, 0], ids=["avx512", "avx2", "memcpy"])
@given(st.integers(0, 130), st.integers(0, 130), st.integers(0, 4 * GROUP))
@example(0, 0, GROUP)
@example(0, 1, GROUP - 1)
@example(63, 0, GROUP + 1)
@example(1, 63, 2 * GROUP + 63)
@example(0, 0, 3 * GROUP + 4096)
@example(5, 7, 255)
@example(5, 7, 256)
def test_copies_what_memcpy_would_and_nothing_else(width, to, at, count):
    source, target = random_bytes(SIZE, seed=1), random_bytes(SIZE, seed=2)
    wanted = bytearray(target)
    wanted[to : to + count] = source[at : at + count]
    _C.stream_copy(address_of(target) + to, memoryview(source)[at : at + count], width)
    assert target == wanted
