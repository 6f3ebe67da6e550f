"""Rank, world size and session of a launch, asked of torch.distributed instead of the caller.

Not a use of a process group: no collective, and no thread ever waits here but the one that makes a Snapshots. The one
idea: the store through which the ranks of a launch found each other is new at every launch, so a number that rank 0
leaves there is equal on all ranks and never seen again.
"""

from __future__ import annotations

import secrets
from typing import Any


def options_of_group(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a caller's options of Snapshots with what the default process group says of this launch.

    store=True, and `partner` without a store, stand for a connection of its own to the group's store (the training
    thread may wait in another one). Without a group there is one rank, which needs none: store=True is left out.
    """
    launch = launch_of_group()
    store = options.get("store", True if options.get("partner") is not None else None)
    if store is True:
        import torch.distributed as dist

        shared: Any = dist.distributed_c10d._get_default_store() if launch else None
        store = shared.clone() if launch else None
    return {**launch, **options, "store": store}


def launch_of_group() -> dict[str, Any]:
    """Returns {"rank", "world_size", "session"} of the default process group; {} without one.

    All ranks call it in the same order. Blocks until rank 0 has, at most as long as the store's time limit.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"plait/ckpt/rank{rank}", 1)  # of this call, counted by each rank
    key = f"plait/ckpt/session{number}"
    if rank == 0:
        store.set(key, str(secrets.randbits(63)))
    return {"rank": rank, "world_size": world_size, "session": int(store.get(key))}
