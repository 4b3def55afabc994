"""Where every rank is, from the beats, and a look at it once a second. Memory only: a restart begins anew.

Decides nothing: `core.hangs` says which attempt stands still, and this posts it. `sessions` notes, `server` runs it.
"""

from __future__ import annotations

import asyncio

import structlog

from piped.coordinator.engine import Engine
from piped.core import hangs
from piped.core.events import HangFound
from piped.core.hangs import Position, Sighting
from piped.core.model import AttemptState
from piped.errors import UnavailableError

LOOK_EVERY_S = 1.0
log = structlog.get_logger("coordinator")


class HangWatch:
    """The newest position of each rank, by fence. Times are those of the loop's clock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[int, dict[int, Sighting]] = {}

    def note(self, fence: int, rank: int, position: Position, now_s: float) -> None:
        """Note where a rank is."""
        ranks = self._seen.setdefault(fence, {})
        first_s = ranks[rank].first_s if rank in ranks else now_s
        ranks[rank] = Sighting(position, first_s, now_s)

    async def run(self) -> None:
        """Look for attempts that stand still, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for found in self._look(asyncio.get_running_loop().time()):
                try:
                    await self._engine.post(found)
                except UnavailableError as error:  # a full disk, or the end: found again as long as it stands still
                    log.warning("hang_not_stored", fence=found.fence, error=str(error))

    def _look(self, now_s: float) -> list[HangFound]:
        state, found = self._engine.state, []
        for fence, ranks in list(self._seen.items()):
            attempt = state.attempts.get(fence)
            if attempt is None or attempt.state is AttemptState.STOPPING or attempt.is_terminal:
                del self._seen[fence]
                continue
            if attempt.state is not AttemptState.RUNNING:
                self._seen[fence] = {}  # a start takes its time, and says nothing
                continue
            hang = hangs.find(attempt, state.jobs[attempt.job_id].spec, state.nodes, ranks, now_s)
            if hang is not None:
                found.append(hang)
        return found
