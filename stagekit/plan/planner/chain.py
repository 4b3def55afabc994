"""What the planner cuts: the operations of one chunk in order, what each costs, and what stages of them cost and hold. Pure.

Prices a cut the way it will run: two halves of a backward only where an eager stage can part them, an overhead for each
action, a hop for what crosses. Called by stagekit.plan.planner.search; stagekit.graph.cut.chain makes one of a capture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from stagekit.plan.actions import Action, Op
from stagekit.plan.costs import Costs, Link
from stagekit.plan.memory import Footprint


@dataclass(frozen=True)
class Chain:
    """Operations by position, seconds for one chunk. `backward` is the whole one; where a stage runs it in halves, an
    operation whose weight can wait takes `input_grad` and later `weight_grad`, any other all of `backward` at once.

    `weights[i]`: which weight's gradient of operation i can wait, if the stage reads it nowhere else; None: none.
    `crossing_s[i]`: what a cut before i costs each side, both directions; `crossing_bytes[i]`: what it sends forward.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    weights: tuple[str | None, ...]
    crossing_s: tuple[float, ...]
    crossing_bytes: tuple[float, ...]
    legal: tuple[int, ...]
    readers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # weight → all positions that read it
    footprint: Footprint | None = None

    @cached_property
    def _sums(self) -> tuple[list[float], list[float]]:
        return [0.0, *accumulate(self.forward)], [0.0, *accumulate(self.backward)]

    @cached_property
    def _least_crossing_s(self) -> float:
        return min((self.crossing_s[cut] for cut in self.legal), default=0.0)

    def extra_s(self, cut: int) -> float:
        """Return what crosses a cut beyond the cheapest cut's crossing, in seconds of both directions."""
        return self.crossing_s[cut] - self._least_crossing_s

    def forward_of(self, begin: int, end: int) -> float:
        """Return the forward of [begin, end)."""
        return self._sums[0][end] - self._sums[0][begin]

    def backward_of(self, begin: int, end: int) -> float:
        """Return the whole backward of [begin, end)."""
        return self._sums[1][end] - self._sums[1][begin]

    def halves_of(self, begin: int, end: int) -> tuple[float, float]:
        """Return I and W of [begin, end) as an eager stage runs them."""
        early, late = self.backward_of(begin, end), 0.0
        for i in range(begin, end):
            weight = self.weights[i]
            if weight is not None and not any(begin <= j < end and j != i for j in self.readers.get(weight, ())):
                early += self.input_grad[i] - self.backward[i]
                late += self.weight_grad[i]
        return early, late


@dataclass(frozen=True, slots=True)
class Setting:
    """What holds for every candidate: speeds per rank, recomputation, whether stages are compiled (then nothing of a
    backward waits), the link, the memory of one rank in bytes (None: no limit)."""

    ranks: int
    speeds: tuple[float, ...]
    recompute: bool = False
    compiled: bool = False
    link: Link = field(default_factory=Link)
    memory_bytes: float | None = None


def costs_of(chain: Chain, begins: Sequence[int], stage_ranks: Sequence[int], setting: Setting) -> Costs:
    """Return what each stage of a cut costs as it will run.

    What crosses a cut beyond the cheapest one's crossing is charged to both sides, as the partition does: each further value
    is a message more.
    """
    ends = [*begins[1:], len(chain.forward)]
    last, link = len(begins) - 1, setting.link
    forward, whole, early, late = [], [], [], []
    for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        speed = setting.speeds[stage_ranks[stage]]
        once, back = chain.forward_of(begin, end) / speed, chain.backward_of(begin, end) / speed
        more = (chain.extra_s(begin) if stage else 0.0) + (chain.extra_s(end) if stage != last else 0.0)
        once, back = once + more / 2, back + more / 2
        again = once if setting.recompute and stage != last else 0.0
        first, second = (back, 0.0)
        if stage and not setting.compiled:  # the first stage owes nobody an input gradient
            first, second = (half / speed for half in chain.halves_of(begin, end))
            first += more / 2
        forward.append(once + link.action_s)
        whole.append(back + again + link.action_s)
        early.append(first + again + link.action_s)
        late.append(second + link.action_s)
    largest = max((chain.crossing_bytes[begin] for begin in begins[1:]), default=0.0)
    hop = link.hop_s(largest) if last else 0.0
    return Costs(tuple(forward), tuple(early), tuple(late), hop, backward=tuple(whole))


def bytes_of(
    chain: Chain, begins: Sequence[int], stage_ranks: Sequence[int], orders: Sequence[Sequence[Action]]
) -> tuple[int, ...]:
    """Return what each rank holds at most: states once, what autograd saves from a chunk's F until its B or W.

    Zeros where the chain has no footprint.
    """
    found = chain.footprint
    if found is None:
        return (0,) * len(orders)
    bounds = [*begins, len(chain.forward)]
    fixed, chunk = [0] * len(begins), [0] * len(begins)
    for thing in found.held:
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            if any(begin <= position < end for position in thing.positions):
                fixed[stage] += thing.fixed_bytes
                chunk[stage] += thing.chunk_bytes
    chunk = [size + found.received[begin] for size, begin in zip(chunk, begins, strict=True)]
    most = []
    for rank, row in enumerate(orders):
        held = peak = 0
        for action in row:
            if action.op is Op.F:
                held += chunk[action.stage]
                peak = max(peak, held)
            elif action.op is not Op.I:
                held -= chunk[action.stage]
        own = sum(size for size, owner in zip(fixed, stage_ranks, strict=True) if owner == rank)
        most.append(own + peak + found.workspace_bytes)
    return tuple(most)


def bound_of(chain: Chain, chunks: int, setting: Setting, *, trains: bool = True) -> float:
    """Return seconds that no plan of `chunks` chunks on these ranks can beat, whatever its cut and schedule.

    The mean work of a rank; the largest piece that no cut parts, all chunks of it; one chunk's way through all forwards
    and back, with the hops. Where an operation's halves cost less than its whole backward, they count. `trains`: False
    where plans have forwards alone.
    """
    link, fastest, ways = setting.link, max(setting.speeds), 2 if trains else 1
    least = [
        trains * min(b, i + w) for b, i, w in zip(chain.backward, chain.input_grad, chain.weight_grad, strict=True)
    ]
    work = [0.0, *accumulate(f + b for f, b in zip(chain.forward, least, strict=True))]
    bounds = [0, *chain.legal, len(chain.forward)]
    per_chunk = max(b - a for a, b in pairwise(work[bound] for bound in bounds)) / fastest
    if setting.recompute and trains:  # all but the last stage run their forwards twice, wherever that one begins
        per_chunk = max(
            per_chunk,
            min(
                max((work[-1] + chain.forward_of(0, begin)) / sum(setting.speeds), (work[-1] - work[begin]) / fastest)
                for begin in bounds[:-1]
            ),
        )
    else:
        per_chunk = max(per_chunk, work[-1] / sum(setting.speeds))
    crossing = min((chain.crossing_bytes[cut] for cut in chain.legal), default=0.0)
    early = sum(map(min, chain.backward, chain.input_grad)) if trains else 0.0
    way = (sum(chain.forward) + early) / fastest + ways * setting.ranks * link.action_s
    way += ways * (setting.ranks - 1) * link.hop_s(crossing)
    return max(chunks * (per_chunk + ways * link.action_s), way)
