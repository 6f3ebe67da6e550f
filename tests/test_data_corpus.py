"""plait.data: the corpus, its held-out part, and batches as a pure function of the step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.data import (
    IGNORE_INDEX,
    Batches,
    Corpus,
    build_standard_library,
    check_batch,
    held_out_batches,
    open_corpus,
    permute,
)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """2000 bytes that differ from place to place: byte i is i * 7 % 251."""
    path = tmp_path / "text"
    path.write_bytes(bytes(i * 7 % 251 for i in range(2000)))
    return Corpus.open(path)


def test_tokens_are_the_bytes_and_targets_are_one_ahead(corpus):
    windows = corpus.train_windows(16)
    batch = Batches(windows=windows, global_batch=4, seed=1).at(0)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64 and batch.tokens.is_contiguous()
    for row, window in enumerate(Batches(windows=windows, global_batch=4, seed=1).rows(0)):
        text = corpus.data[window * 16 : window * 16 + 17].tolist()
        assert batch.tokens[row].tolist() == text[:-1] and batch.targets[row].tolist() == text[1:]
    assert batch.num_tokens == 64


def test_held_out_part_is_never_trained_on(corpus):
    assert corpus.num_bytes == 2000 and corpus.num_train_bytes == 1900
    assert (len(corpus.train_windows(16)) - 1) * 16 + 17 <= 1900
    assert corpus.held_out_windows(16)[0].tolist() == corpus.data[1900:1917].tolist()


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_grid_reads_the_same_global_batch(corpus, dp):
    windows = corpus.train_windows(16)
    whole = Batches(windows=windows, global_batch=8, seed=3).at(5)
    parts = [Batches(windows=windows, global_batch=8, seed=3, dp=dp, coord=coord).at(5) for coord in range(dp)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)
    assert [part.sample_offset for part in parts] == [40 + coord * 8 // dp for coord in range(dp)]
    assert {part.num_tokens for part in parts} == {128}


def test_each_epoch_visits_every_window_once_in_another_order(corpus):
    windows = corpus.train_windows(16)
    batches = Batches(windows=windows, global_batch=1, seed=0)
    count = len(windows)
    first, second = ([batches.rows(epoch * count + i)[0] for i in range(count)] for epoch in range(2))
    assert sorted(first) == sorted(second) == list(range(count))
    assert first != second and first != list(range(count))
    assert first != [Batches(windows=windows, global_batch=1, seed=1).rows(i)[0] for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 400), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_permutation_is_a_bijection(size, seed, epoch):
    assert sorted(permute(index, size, seed, epoch) for index in range(size)) == list(range(size))


def test_permutation_reaches_large_sizes():
    size = 10**12 + 39
    seen = {permute(index, size, 5, 0) for index in range(100)}
    assert len(seen) == 100 and max(seen) > size // 2 and min(seen) < size // 2


@pytest.mark.parametrize("dp", [1, 2])
def test_held_out_rows_count_once_each_and_padding_does_not(corpus, dp):
    windows = corpus.held_out_windows(8)  # 100 bytes: 12 windows
    parts = [list(held_out_batches(windows, global_batch=8, dp=dp, coord=coord)) for coord in range(dp)]
    assert len(windows) == 12 and [batch.num_tokens for batch in parts[0]] == [64, 32]
    counted = [(batch.targets != IGNORE_INDEX).sum().item() for batches in parts for batch in batches]
    assert sum(counted) == 96
    seen = [row for batches in parts for batch in batches for row in batch.targets.tolist() if row[0] >= 0]
    assert sorted(seen) == sorted(windows[:, 1:].tolist())


def test_some_held_out_rows_are_evenly_spaced(corpus):
    batches = list(held_out_batches(corpus.held_out_windows(8), global_batch=4, max_rows=3))
    assert len(batches) == 1 and batches[0].num_tokens == 24
    assert batches[0].tokens[:3].tolist() == corpus.held_out_windows(8)[[0, 4, 8], :-1].tolist()


def test_standard_library_is_built_once_and_by_any_number_of_ranks(tmp_path):
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build_standard_library(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths[0] == paths[1] and list(tmp_path.iterdir()) == [paths[0]]
    corpus = open_corpus(None, tmp_path)
    assert corpus.num_bytes > 1_000_000
    text = bytes(corpus.data.tolist())
    assert b"import os" in text and b"class Thread" in text
    before = paths[0].stat().st_mtime_ns
    assert build_standard_library(tmp_path).stat().st_mtime_ns == before


def test_digest_tells_texts_apart(tmp_path):
    for name, text in (("a", b"x" * 9000), ("b", b"x" * 9000), ("c", b"x" * 8999 + b"y"), ("d", b"x")):
        (tmp_path / name).write_bytes(text)
    digests = [Corpus.open(tmp_path / name).digest for name in "abcd"]
    assert digests[0] == digests[1] and len(set(digests)) == 3


def test_bad_sizes_are_named(corpus, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        Corpus.open(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        Corpus.open(tmp_path / "absent")
    with pytest.raises(ValueError, match="seq is 100; the held-out part .* has 100 bytes, a row needs 101"):
        corpus.held_out_windows(100)
    with pytest.raises(ValueError, match="global_batch is 12; it must be a multiple of dp x micro_batch = 4 x 2"):
        check_batch(12, 4, 2)
    with pytest.raises(ValueError, match="global_batch is 3"):
        Batches(windows=corpus.train_windows(8), global_batch=3, seed=0, dp=2)
    assert check_batch(16, 2, 2) == 4
