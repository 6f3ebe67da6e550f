"""Snapshots of full training state: saved without stopping the loop, committed by one rename, restored onto any grid.

    from plait.ckpt import Sharded, Snapshots

    with Snapshots("runs/a", keep_last=3) as snapshots:
        snapshots.save(step, {"model": model, "optimizer": optimizer, "step": step})    # returns once copied
        snapshots.restore({"model": model, "optimizer": optimizer, "step": 0})          # newest good one

Knows no model and no grid: a tensor is a box of a named full tensor (`Sharded`, or a DTensor), or is on all ranks.
Several ranks: `Snapshots.of_process_group("runs/a")`; what only some ranks hold goes into `Replicas`.
The format is in docs/format.md. Reading order: box, values, dtensors, leaf, state, layout, manifest, tables, capture,
commit, reader, restore, lock, keep, snapshots; then watch and structure (a second save is cheap), interval, trigger
(when to save), delta; tiers, copier, uploads, tier_reader; codec, crypt; partner.
"""

from plait.ckpt.errors import SnapshotDamaged, SnapshotError, SnapshotLocked, StateError, TornSnapshot
from plait.ckpt.generators import rng_state
from plait.ckpt.handle import Handle
from plait.ckpt.leaf import Replicas, Sharded
from plait.ckpt.optimizer import optimizer_state
from plait.ckpt.partner import Partner
from plait.ckpt.restore import Report, Restored
from plait.ckpt.snapshots import Snapshots
from plait.ckpt.state import PerRank
from plait.ckpt.tiers import Tier
from plait.ckpt.trigger import Trigger

__all__ = [
    "Handle",
    "Partner",
    "PerRank",
    "Replicas",
    "Report",
    "Restored",
    "Sharded",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotLocked",
    "Snapshots",
    "StateError",
    "Tier",
    "TornSnapshot",
    "Trigger",
    "optimizer_state",
    "rng_state",
]
