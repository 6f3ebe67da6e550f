"""In which order the tiles of attention run, and what an order costs. Pure numbers: no tensor, no kernel.

Under a causal mask tiles differ: of n the last walks n times the keys of the first. The card hands programs out in
order, each to the first free slot, so whoever starts last ends last: heavy tiles come first, of all (batch, head)
pairs that run together. How many do is bounded by the bytes that they walk, which are to stay in the L2 cache
(flash_tiles.py); one pair after the other is an order too, that of `together` = 1.

Priced by `makespan` on the 132 multiprocessors of an H200, one program each, the start of a program as half a step
(assumed), causal, tiles and steps of 128, over `lower_bound`: 32 heads one after the other take 1.55 at 1k tokens,
1.29 at 2k, 1.14 at 4k, 1.06 at 8k, 1.005 at 16k; together 1.03 or less. A persistent form, whose programs walk lists
fixed by number (`makespan_of_lists`, heavy tiles dealt back and forth), is from 0.8 % faster (4k) to 2.8 % slower
(2k, batch 4): it could gain only the starts of programs, and triton overlaps nothing across the tiles of one
program. So there is none.
"""

import heapq
from collections.abc import Sequence


def pairs_together(num_pairs: int, group: int, pair_bytes: int, resident_bytes: int) -> int:
    """How many (batch, head) pairs start their tiles together, from 1 to `num_pairs`.

    `group` pairs next to each other walk the same `pair_bytes`; those of all pairs are at most `resident_bytes`.
    """
    return max(1, min(num_pairs, resident_bytes // max(1, pair_bytes) * group))


def tile_order(num_tiles: int, num_pairs: int, together: int) -> list[tuple[int, int]]:
    """(number of the tile, pair) of every program in order: what the kernels compute of their program id."""
    sections = [range(first, min(first + together, num_pairs)) for first in range(0, num_pairs, together)]
    return [(number, pair) for section in sections for number in range(num_tiles) for pair in section]


def causal_costs(num_tiles: int, num_pairs: int, together: int, start: float = 0.5) -> list[float]:
    """Steps of every program in order: tile number 0 is the heaviest of `num_tiles`; `start` is a program's own."""
    return [num_tiles - number + start for number, _ in tile_order(num_tiles, num_pairs, together)]


def makespan(costs: Sequence[float], slots: int) -> float:
    """When the last program ends if each goes in order to the first of `slots` that is free."""
    ends = [0.0] * slots
    for cost in costs:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def makespan_of_lists(costs: Sequence[float], slots: int) -> float:
    """The same of a persistent form: round by round, in turns from the first to the last slot and back."""
    ends = [0.0] * slots
    for position, cost in enumerate(costs):
        turn, slot = divmod(position, slots)
        ends[slot if turn % 2 == 0 else slots - 1 - slot] += cost
    return max(ends)


def lower_bound(costs: Sequence[float], slots: int) -> float:
    """No order ends before this: all slots busy, or the heaviest tile alone."""
    return max(sum(costs) / slots, max(costs))
