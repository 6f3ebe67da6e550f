"""Splits layers over stages. Every layer lands on exactly one stage; by themselves sizes differ by one at most."""

from __future__ import annotations

from collections.abc import Sequence


def split_layers(num_layers: int, num_stages: int, layers_of: Sequence[int] | None = None) -> tuple[range, ...]:
    """Contiguous layer ranges, one per stage in stage order; earlier stages take the odd layers.

    `layers_of`: how many layers each stage has; None: as even as can be. Raises ValueError when there are fewer
    layers than stages, or the counts are not those of so many stages and layers.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise ValueError(
            f"num_layers={num_layers} cannot be split over num_stages={num_stages}: every stage needs "
            f"at least one layer, so use at most {max(num_layers, 0)} stages"
        )
    size, odd = divmod(num_layers, num_stages)
    counts = [size + (stage < odd) for stage in range(num_stages)] if layers_of is None else list(layers_of)
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ValueError(
            f"layers_of={counts}: must be {num_stages} counts, one per stage, of 1 or more, that add up to "
            f"{num_layers} layers"
        )
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))
