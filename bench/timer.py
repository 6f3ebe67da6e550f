"""Times callables side by side: a round calls every provider once, in an order drawn anew for each round.

Host wall clock with a synchronising call around the timed one: right for CPU work and for whole training steps.
Samples are never dropped. The order comes from the seed, so that all ranks of a distributed case walk the same one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from plait.bench.spec import Options


def interleave(
    providers: dict[str, Callable[[], object]],
    options: Options,
    *,
    sync: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[float]]:
    """Returns the seconds of every counted call, per provider, one per round.

    sync is called before the clock starts and before it stops (a device synchronisation, or a barrier over ranks).
    progress(done, total) is called after each round. Raises ValueError for no provider or less than one round.
    """
    if not providers:
        raise ValueError("providers: empty; nothing to time")
    if options.rounds < 1 or options.warmup < 0:
        raise ValueError(f"options: rounds={options.rounds}, warmup={options.warmup}; need rounds >= 1, warmup >= 0")
    order = random.Random(options.seed)
    names = list(providers)
    samples: dict[str, list[float]] = {name: [] for name in names}
    total = options.warmup + options.rounds
    for round_index in range(total):
        order.shuffle(names)
        for name in names:
            sync()
            start = clock()
            providers[name]()
            sync()
            elapsed = clock() - start
            if round_index >= options.warmup:
                samples[name].append(elapsed)
        progress(round_index + 1, total)
    return samples
