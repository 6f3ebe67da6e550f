"""Tables of runs: every element in exactly one run, strided walks as torch indexes, rows found, numbers written."""

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.kernels.tables import (
    collapse,
    device_table,
    find_row,
    shares_memory,
    split_ends,
    split_tail,
    strided_offsets,
    strided_runs,
    use_tables,
    with_chunks,
    write_launches,
)
from tests.cases import interpret, needs_interpreter, needs_plain


@given(
    st.lists(st.tuples(st.integers(0, 63), st.sampled_from([2, 4, 8])), min_size=1, max_size=5),
    st.integers(0, 200),
    st.none() | st.integers(0, 2**40),
)
def test_ends_and_body_cover_a_run_and_the_body_is_aligned(tensors, numel, index):
    addresses, item_bytes = [size * place for place, size in tensors], [size for _, size in tensors]
    runs = split_ends(addresses, item_bytes, numel, index)
    assert [e for run in runs for e in range(run.start, run.stop)] == list(range(numel))
    assert sum(run.aligned for run in runs) <= 1 and all(run.start < run.stop for run in runs)
    for run in runs:
        if run.aligned:
            assert (run.stop - run.start) % 16 == 0 and (index is None or (index + run.start) % 4 == 0)
            assert all((a + size * run.start) % 16 == 0 for a, size in zip(addresses, item_bytes, strict=True))
        elif sum(r.aligned for r in runs):
            assert run.stop - run.start < 16


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 4096])
def test_a_tail_is_cut_at_the_same_place_at_every_address(numel):
    cuts = [[run[:2] for run in split_tail(address, numel)] for address in (0, 2, 4, 16)]
    assert all(cut == cuts[0] for cut in cuts)
    assert sum(stop - start for start, stop in cuts[0]) == numel
    assert all(run.aligned == (run.stop % 16 == 0) for run in split_tail(64, numel))
    assert not any(run.aligned for run in split_tail(2, numel))


def _views(shape, order, gaps):
    """A tensor that holds its own offsets, with dims in memory in `order` and gaps between their elements."""
    sizes = [shape[dim] * gap for dim, gap in zip(order, gaps, strict=False)]
    base = torch.arange(math.prod(sizes)).view(sizes)
    view = base[tuple(slice(None, None, gap) for gap, _ in zip(gaps, order, strict=False))]
    return view.permute([list(order).index(dim) for dim in range(len(shape))])


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 3), max_size=6), st.booleans())
def test_strided_runs_visit_what_torch_indexes(data, shape, any_order):
    orders = [data.draw(st.permutations(range(len(shape)))) for _ in range(2)]
    gaps = [data.draw(st.lists(st.integers(1, 2), min_size=6, max_size=6)) for _ in range(2)]
    tensors = [_views(shape, order, gap) for order, gap in zip(orders, gaps, strict=True)]
    sizes, steps = collapse(shape, [t.stride() for t in tensors], any_order)
    seen = []
    for run in strided_runs([0, 0], [1, 1], sizes, steps):
        assert run.start == len(seen)
        inner, strides = run.tail[:3], [run.tail[3 + 4 * k : 7 + 4 * k] for k in range(2)]
        for flat in range(run.numel):
            places = []
            for size in reversed(inner):
                places.insert(0, flat % size)
                flat //= size
            places.insert(0, flat)
            offsets = (sum(i * s for i, s in zip(places, step, strict=True)) for step in strides)
            seen.append(tuple(a + offset for a, offset in zip(run.addresses, offsets, strict=True)))
    want = list(zip(*(t.flatten().tolist() for t in tensors), strict=True))
    assert sorted(seen) == sorted(want) if any_order else seen == want
    if any_order:
        assert [first for first, _ in seen] == sorted(first for first, _ in seen)


def test_dims_that_lie_like_one_are_merged():
    x = torch.empty(4, 5, 6)
    assert collapse(x.shape, [x.stride()], False) == ([120], [[1]])
    assert collapse(x.mT.shape, [x.mT.stride()], False) == ([4, 6, 5], [[30, 1, 6]])
    same = x.permute(2, 0, 1)
    assert collapse(same.shape, [same.stride(), same.stride()], True) == ([120], [[1], [1]])
    assert collapse((4, 5, 5), [x[:, :, :5].stride()], False) == ([20, 5], [[6, 1]])
    assert collapse((), [()], False) == ([], [[]])


def test_only_tensors_whose_elements_lie_on_one_another_share_memory():
    x = torch.ones(3, 4)
    for view in (x, x.t(), x[:, ::2], x[:0].expand(0, 4), x.as_strided((1, 3), (0, 2))):
        assert not shares_memory(view)
    for view in (x[:1].expand(2, 4), x[0, 0].expand(2), x[:, :1].expand(3, 2)):
        assert shares_memory(view)


def test_chunks_are_counted_row_by_row():
    assert with_chunks([[10, 7], [1, 8], [5, 9]], 4) == ([0, 10, 7, 3, 1, 8, 4, 5, 9], 6)


@triton.jit
def _find_kernel(table_ptr, out_ptr, num_rows, WIDTH: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64) * 997
    tl.store(out_ptr + tl.program_id(0), tl.load(find_row(table_ptr, num_rows, chunk, WIDTH) + 1))


@interpret
@needs_interpreter
@pytest.mark.parametrize("num_rows", [1, 2, 10_000])
def test_each_chunk_finds_its_row(num_rows):
    firsts = torch.arange(num_rows) * 3
    table = torch.stack((firsts, torch.arange(num_rows)), dim=1).contiguous()
    out = torch.empty(30, dtype=torch.int64)
    _find_kernel[(30,)](table, out, num_rows, WIDTH=2)
    assert torch.equal(out, (torch.arange(30) * 997 // 3).clamp(max=num_rows - 1))


@triton.jit
def _offsets_kernel(tail_ptr, out_ptr, first):
    flat = first + tl.arange(0, 32).to(tl.int64)
    tl.store(out_ptr + tl.arange(0, 32), strided_offsets(tail_ptr, 1, flat))


@interpret
@needs_interpreter
def test_offsets_of_a_strided_run_need_64_bits():
    tail = torch.tensor([3, 2, 5, *[0] * 4, 2**40, 2**33, 7, 2**31])
    out = torch.empty(32, dtype=torch.int64)
    _offsets_kernel[(1,)](tail, out, 28)
    flat = torch.arange(28, 60)
    places = (flat // 30, flat // 10 % 3, flat // 5 % 2, flat % 5)
    assert torch.equal(out, sum(p * s for p, s in zip(places, (2**40, 2**33, 7, 2**31), strict=True)))


@interpret
@needs_interpreter
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_numbers_written_from_arguments_are_the_table(count):
    values = [(-1) ** i * (2**40 * i + 16 * i + 1) for i in range(count)]
    table = torch.full((count + 1,), 77)
    for launch in write_launches(values, table[:count]):
        launch.run()
    assert table.tolist() == [*values, 77]
    assert torch.equal(table[:count], device_table(values, torch.device("cpu")))


@needs_plain
def test_tables_are_for_cuda_tensors_but_fp64_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not use_tables([torch.ones(1)])
    with FakeTensorMode():
        here, wide = torch.ones(1, device="cuda"), torch.ones(1, device="cuda", dtype=torch.float64)
        assert use_tables([here, here]) and not use_tables([here, wide])


@interpret
@needs_interpreter
def test_the_interpreter_follows_addresses_of_host_memory_only():
    assert use_tables([torch.ones(1), torch.ones(1, dtype=torch.float64)])
    assert not use_tables([torch.ones(1), torch.ones(1, device="meta")])
