"""What clients call about jobs. Reads the state, posts events, decides nothing.

A job is named by its id, or by its name, which means the newest job of that name; by TENANT/NAME where several tenants use it.
"""

from __future__ import annotations

import asyncio
import difflib
import time
import uuid
from collections.abc import AsyncIterator

from pipeapi.v1 import jobs_pb2, jobs_pb2_grpc, spec_pb2
from piped import wire
from piped.coordinator.artifacts import ArtifactFiles
from piped.coordinator.bulk import BulkLinks, FileName
from piped.coordinator.cluster import check_texts
from piped.coordinator.engine import Engine
from piped.coordinator.history import History
from piped.coordinator.progress import ProgressBoard
from piped.coordinator.tasks import Closing, merge
from piped.core import placement, specs
from piped.core.events import CancelRequested, HoldRequested, JobSubmitted, ReleaseRequested
from piped.core.model import Attempt, AttemptState, Job, JobSpec, State
from piped.errors import FieldViolation, NotFoundError, SpecError, UserError, WrongStateError

WATCH_INTERVAL_S = 0.25  # at most one message per watch in that time
MAX_REQUEST_ID = 128


def find_job(state: State, text: str) -> Job:
    """Return the job of that id, else the newest of that NAME or TENANT/NAME.

    Raises NotFoundError with near names, and WrongStateError for a name that jobs of several tenants have.
    """
    if text in state.jobs:
        return state.jobs[text]
    tenant, _, name = text.rpartition("/")
    named = [job for job in state.jobs.values() if job.spec.name == name and tenant in ("", job.spec.tenant)]
    tenants = sorted({job.spec.tenant for job in named})
    if len(tenants) > 1:
        choices = ", ".join(f"{each}/{name}" for each in tenants)
        raise WrongStateError(f"jobs of {len(tenants)} tenants are called {name!r}: write {choices}, or an id")
    if named:
        return max(named, key=lambda job: job.submit_seq)
    near = difflib.get_close_matches(text, {job.spec.name for job in state.jobs.values()}, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "see pipectl get jobs"
    raise NotFoundError(f"no job has the id or name {text!r}; {hint}")


class JobService(jobs_pb2_grpc.JobServiceServicer):
    """Submit, look, watch, cancel, and read what workers wrote."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        board: ProgressBoard,
        bulk: BulkLinks,
        files: ArtifactFiles,
        closing: Closing,
    ) -> None:
        self._engine, self._history, self._board = engine, history, board
        self._bulk, self._files, self._closing = bulk, files, closing

    async def Validate(self, request: jobs_pb2.ValidateRequest, _context: object) -> jobs_pb2.ValidateResponse:
        spec = self._checked(request.spec)
        state, warnings = self._engine.state, []
        quota = state.quotas.get(spec.tenant)
        if quota is not None and spec.world_size > quota:
            warnings.append(
                f"the job would wait: it needs {spec.world_size} slots, tenant {spec.tenant} may hold {quota}"
            )
        if not placement.can_ever_fit(spec, state.nodes.values()):
            _, reason = placement.place(spec, state.nodes.values(), {})
            warnings.append(f"the job would wait: {reason}")
        return jobs_pb2.ValidateResponse(warnings=warnings)

    async def Submit(self, request: jobs_pb2.SubmitRequest, _context: object) -> jobs_pb2.SubmitResponse:
        spec = self._checked(request.spec)
        if not 1 <= len(request.request_id) <= MAX_REQUEST_ID:
            text = f"has {len(request.request_id)} characters; send 1 to {MAX_REQUEST_ID}, the same for every retry"
            raise SpecError((FieldViolation("request_id", text),))
        job_id = f"j-{uuid.uuid4().hex[:10]}"
        state = await self._engine.post(JobSubmitted(job_id, request.request_id, wire.spec_hash(request.spec), spec))
        accepted = state.submissions[spec.tenant, request.request_id].job_id
        return jobs_pb2.SubmitResponse(job_id=accepted, replayed=accepted != job_id)

    async def Get(self, request: jobs_pb2.GetRequest, _context: object) -> jobs_pb2.GetResponse:
        return jobs_pb2.GetResponse(job=self._message(find_job(self._engine.state, request.job).job_id))

    async def List(self, request: jobs_pb2.ListRequest, _context: object) -> jobs_pb2.ListResponse:
        jobs = self._engine.state.jobs.values()
        chosen = (job for job in jobs if not (request.live_only and job.is_terminal))
        return jobs_pb2.ListResponse(jobs=[self._message(job.job_id) for job in chosen])

    async def Watch(self, request: jobs_pb2.WatchRequest, _context: object) -> AsyncIterator[jobs_pb2.WatchResponse]:
        """Send the job now, and after changes, at most every WATCH_INTERVAL_S, until it is terminal."""
        job_id = find_job(self._engine.state, request.job).job_id
        changed, end = self._engine.watch(job_id)
        last: jobs_pb2.Job | None = None
        sent_s = 0.0
        try:
            while True:
                changed.clear()
                message = self._message(job_id)
                if message != last:
                    yield jobs_pb2.WatchResponse(job=message)
                    last, sent_s = message, time.monotonic()
                if self._engine.state.jobs[job_id].is_terminal:
                    return
                await self._closing.race(changed.wait())
                await self._closing.race(asyncio.sleep(max(0.0, sent_s + WATCH_INTERVAL_S - time.monotonic())))
        finally:
            end()

    async def Cancel(self, request: jobs_pb2.CancelRequest, _context: object) -> jobs_pb2.CancelResponse:
        job_id = find_job(self._engine.state, request.job).job_id
        await self._engine.post(CancelRequested(job_id))
        return jobs_pb2.CancelResponse(job=self._message(job_id))

    async def Hold(self, request: jobs_pb2.HoldRequest, _context: object) -> jobs_pb2.HoldResponse:
        job_id = find_job(self._engine.state, request.job).job_id
        check_texts(who=request.who, why=request.why)
        await self._engine.post(HoldRequested(job_id, request.who, request.why))
        return jobs_pb2.HoldResponse(job=self._message(job_id))

    async def Release(self, request: jobs_pb2.ReleaseRequest, _context: object) -> jobs_pb2.ReleaseResponse:
        job_id = find_job(self._engine.state, request.job).job_id
        check_texts(who=request.who)
        await self._engine.post(ReleaseRequested(job_id, request.who))
        return jobs_pb2.ReleaseResponse(job=self._message(job_id))

    async def Logs(self, request: jobs_pb2.LogsRequest, _context: object) -> AsyncIterator[jobs_pb2.LogsResponse]:
        """Send the ranks' logs as they are on the nodes; with `follow`, until every rank is over."""
        job_id = find_job(self._engine.state, request.job).job_id
        shown_fence = 0
        changed, end = self._engine.watch(job_id)
        try:
            while True:
                changed.clear()
                job, attempt = self._newest(job_id)
                if attempt is not None and attempt.fence != shown_fence:
                    shown_fence = attempt.fence
                    async for each in self._logs(attempt, request):
                        yield each
                elif not request.follow or job.is_terminal:
                    return
                else:
                    await self._closing.race(changed.wait())
        finally:
            end()

    async def FailureReport(
        self, request: jobs_pb2.FailureReportRequest, _context: object
    ) -> jobs_pb2.FailureReportResponse:
        state = self._engine.state
        job = find_job(state, request.job)
        number = request.attempt or job.attempt
        attempt = next((a for a in state.attempts.values() if a.job_id == job.job_id and a.attempt == number), None)
        if attempt is None:
            told = "it was never placed" if not job.attempt else f"it had attempts 1 to {job.attempt}"
            raise NotFoundError(f"job {job.job_id} has no attempt {number or 1}: {told}")
        if attempt.outcome in (None, AttemptState.SUCCEEDED):
            raise WrongStateError(
                f"attempt {number} of job {job.job_id} is {attempt.state.value}: only one that was stopped has a report"
            )
        return wire.report_to_proto(attempt)

    async def Events(self, request: jobs_pb2.EventsRequest, _context: object) -> jobs_pb2.EventsResponse:
        job_id = find_job(self._engine.state, request.job).job_id if request.job else ""
        records = await self._history.page(job_id, request.from_event_seq)
        return jobs_pb2.EventsResponse(events=[wire.record_to_proto(each) for each in records])

    async def WatchEvents(
        self, request: jobs_pb2.WatchEventsRequest, _context: object
    ) -> AsyncIterator[jobs_pb2.WatchEventsResponse]:
        job_id = find_job(self._engine.state, request.job).job_id if request.job else ""
        async for records in self._history.follow(job_id, request.from_event_seq):
            events = [wire.record_to_proto(each) for each in records]
            yield jobs_pb2.WatchEventsResponse(events=events, next_event_seq=records[-1].event_seq + 1)

    async def Trace(self, request: jobs_pb2.TraceRequest, _context: object) -> AsyncIterator[jobs_pb2.TraceResponse]:
        """Send what workers recorded, rank after rank."""
        job, attempt = self._newest(find_job(self._engine.state, request.job).job_id)
        if attempt is None:
            raise NotFoundError(f"job {job.job_id} has recorded nothing yet: it has not been placed")
        match request.kind:
            case jobs_pb2.RECORD_KIND_TRACE:
                ranks = [each.rank for each in attempt.placement]
            case jobs_pb2.RECORD_KIND_STEPS:
                ranks = [wire.reporting_rank(job.spec, attempt)]
            case jobs_pb2.RECORD_KIND_PLAN:
                ranks = [0]
            case _:
                raise UserError("Trace serves the kinds TRACE, STEPS and PLAN; logs come from Logs")
        for rank in ranks:
            name = _file(attempt, rank, jobs_pb2.RecordKind.Name(request.kind))
            async for data, _ in merge([self._bulk.read(name)], self._closing):
                yield jobs_pb2.TraceResponse(rank=rank, data=data)

    async def _logs(self, attempt: Attempt, request: jobs_pb2.LogsRequest) -> AsyncIterator[jobs_pb2.LogsResponse]:
        ranks = sorted(set(request.ranks)) or [each.rank for each in attempt.placement]
        if ranks[-1] >= len(attempt.placement):
            raise NotFoundError(f"the job has ranks 0 to {len(attempt.placement) - 1}, not {ranks[-1]}")

        def is_over() -> bool:
            return self._engine.state.attempts[attempt.fence].is_terminal

        async def one(rank: int) -> AsyncIterator[jobs_pb2.LogsResponse]:
            name = _file(attempt, rank, "RECORD_KIND_LOG")
            pieces = self._bulk.read(name, tail_bytes=request.tail_bytes, follow=request.follow, is_over=is_over)
            async for data, next_offset in pieces:
                yield jobs_pb2.LogsResponse(rank=rank, data=data, next_offset=next_offset)

        async for each in merge([one(rank) for rank in ranks], self._closing):
            yield each

    def _checked(self, message: spec_pb2.JobSpec) -> JobSpec:
        spec = wire.spec_from_proto(message)
        specs.check(spec)
        self._files.require(spec.source_sha256)
        return spec

    def _newest(self, job_id: str) -> tuple[Job, Attempt | None]:
        job = self._engine.state.jobs[job_id]
        return job, self._engine.state.attempts.get(job.fence)

    def _message(self, job_id: str) -> jobs_pb2.Job:
        job, attempt = self._newest(job_id)
        return wire.job_to_proto(job, attempt, self._board.of(job.fence))


def _file(attempt: Attempt, rank: int, kind: str) -> FileName:
    placed = attempt.placement[rank]
    return FileName(placed.node_id, placed.node_name, attempt.fence, rank, kind)
