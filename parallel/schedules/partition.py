"""Splits layers over stages. Every layer lands on exactly one stage; sizes differ by one at most."""

from __future__ import annotations


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Contiguous layer ranges, one per stage in stage order; earlier stages take the odd layers.

    Raises ValueError when there are fewer layers than stages.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise ValueError(
            f"num_layers={num_layers} cannot be split over num_stages={num_stages}: every stage needs "
            f"at least one layer, so use at most {max(num_layers, 0)} stages"
        )
    size, odd = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, odd) for stage in range(num_stages + 1)]
    return tuple(range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True))
