"""What generators share: on which rank a stage lives, lanes written as words, which sizes are refused. Pure."""

from __future__ import annotations

from plait.parallel.schedules.action import Action, Op, ScheduleError, pair
from plait.parallel.schedules.schedule import Schedule, add_reduce_grad


def stage_map(num_ranks: int, chunks: int, style: str = "loop") -> tuple[int, ...]:
    """stage -> rank for `chunks` stages on each of `num_ranks` ranks.

    "loop": 0 1 2 3 0 1 2 3; "v": 0 1 2 3 3 2 1 0, so that neighbours at the turns share a rank and send nothing. The
    same as torch.distributed.pipelining's generate_stage_to_rank_mapping. ValueError for another style.
    """
    require_sizes("stage_map", num_ranks=num_ranks, chunks=chunks)
    if style not in ("loop", "v"):
        raise ValueError(f"style={style!r}: valid are 'loop' and 'v'")
    up = tuple(range(num_ranks))
    turns = [up if style == "loop" or chunk % 2 == 0 else up[::-1] for chunk in range(chunks)]
    return tuple(rank for turn in turns for rank in turn)


def require_sizes(name: str, **sizes: int) -> None:
    """Raises ScheduleError naming the first size that is no integer >= 1."""
    for argument, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"schedule {name}: {argument}={value!r}: valid are integers >= 1")


class LaneWriter:
    """Writes the lane of a rank from words; each word takes the next micro-batch of its chunk.

    `F0`: forward of the rank's first stage; `I1` `B1`: backward of its second; `W0`: the oldest queued weight
    gradient of that chunk, `W`: of any chunk, nothing if none is queued; `F0+B1`: both as a pair.
    """

    def __init__(self, *stages: int) -> None:
        self.lane: list[Action] = []
        self._stages = stages
        self._next = {(op, chunk): 0 for op in (Op.F, Op.B) for chunk in range(len(stages))}
        self._queued: list[tuple[int, int]] = []  # (chunk, micro-batch)

    def put(self, words: str, times: int = 1) -> None:
        """Appends the words, `times` times over."""
        for _ in range(times):
            for word in words.split():
                if word[0] == Op.W:
                    self._put_weight(word[1:])
                elif "+" in word:
                    forward, backward = map(self._action, word.split("+"))
                    self.lane.append(pair(forward, backward))
                else:
                    self.lane.append(self._action(word))

    def _action(self, word: str) -> Action:
        op, chunk = Op(word[0]), int(word[1:])
        key = (Op.F if op is Op.F else Op.B, chunk)
        microbatch = self._next[key]
        self._next[key] += 1
        if op is Op.I:
            self._queued.append((chunk, microbatch))
        return Action(self._stages[chunk], op, microbatch)

    def _put_weight(self, chunk: str) -> None:
        oldest = next((entry for entry in self._queued if chunk in ("", str(entry[0]))), None)
        if oldest is not None:
            self._queued.remove(oldest)
            self.lane.append(Action(self._stages[oldest[0]], Op.W, oldest[1]))


def vee(name: str, num_microbatches: int, lanes: list[list[Action]]) -> Schedule:
    """The schedule of these lanes, two stages on each rank in V shape; micro-batches that do not exist are left out.

    A sound schedule of more micro-batches stays sound without some of them: nothing of one needs another. Of a pair
    whose other half is left out the single action remains. REDUCE_GRAD follows each stage's last backward.
    """
    kept = [_without_surplus(lane, num_microbatches) for lane in lanes]
    place = stage_map(len(lanes), 2, "v")
    return Schedule(name, 2 * len(lanes), num_microbatches, tuple(map(add_reduce_grad, kept)), place)


def _without_surplus(lane: list[Action], num_microbatches: int) -> list[Action]:
    """The lane's actions of micro-batches 0 .. num_microbatches - 1."""
    new: list[Action] = []
    for action in lane:
        kept = [half for half in action.singles if (half.microbatch or 0) < num_microbatches]
        new += [action] if len(kept) == len(action.singles) else kept
    return new
