"""The coordinator as commands see it: one channel, calls with deadlines, gRPC errors as exit codes.

The only module of pipectl that imports grpc and generated stubs; imported by commands when they run.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from pipeapi.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, jobs_pb2_grpc, spec_pb2
from pipectl.errors import CommandError, Exit

T = TypeVar("T")
CONNECT_S = 0.9
CALL_S = 15.0
OUTAGE_S = 120.0  # how long a watch waits for a coordinator that went away
UPLOAD_BYTES = 256 * 1024
TERMINAL = (jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED)

_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: Exit.USAGE,
    grpc.StatusCode.NOT_FOUND: Exit.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: Exit.CONFLICT,
    grpc.StatusCode.FAILED_PRECONDITION: Exit.CONFLICT,
    grpc.StatusCode.ABORTED: Exit.CONFLICT,
    grpc.StatusCode.OUT_OF_RANGE: Exit.CONFLICT,
    grpc.StatusCode.PERMISSION_DENIED: Exit.DENIED,
    grpc.StatusCode.UNAUTHENTICATED: Exit.DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exit.UNSCHEDULABLE,
    grpc.StatusCode.UNAVAILABLE: Exit.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Exit.UNREACHABLE,
}

_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED)


def _dial(host: str, port: int, outcome: queue.SimpleQueue[str]) -> None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        outcome.put(str(getattr(error, "strerror", None) or error))
    else:
        outcome.put("")


class Coordinator:
    """One connection. Every method raises CommandError with the exit code that the error means."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._connect()
        options = [
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 500),
            ("grpc.min_reconnect_backoff_ms", 500),
            ("grpc.max_reconnect_backoff_ms", 2000),
        ]
        channel = grpc.insecure_channel(address, options=options)
        self.jobs = jobs_pb2_grpc.JobServiceStub(channel)
        self.cluster = cluster_pb2_grpc.ClusterServiceStub(channel)
        self.artifacts = jobs_pb2_grpc.ArtifactServiceStub(channel)

    def _connect(self) -> None:
        """Raise CommandError unless something listens; a name server that is silent counts as silence, too."""
        host, _, port = self.address.rpartition(":")
        if not port.isdigit():
            raise CommandError(f'"{self.address}" is no address; write host:port', Exit.USAGE)
        outcome: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_dial, args=(host.strip("[]"), int(port), outcome), daemon=True).start()
        try:
            problem = outcome.get(timeout=CONNECT_S)
        except queue.Empty:
            problem = f"no answer within {CONNECT_S} s"
        if problem:
            raise CommandError(
                f"no coordinator at {self.address}: {problem}",
                Exit.UNREACHABLE,
                "start one with `piped coordinator`, or name another with --coordinator",
            )

    def call(self, method: Callable[..., T], request: Any, *, timeout_s: float = CALL_S) -> T:
        """Make one unary call."""
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise command_error(error, self.address) from None

    def stream(self, method: Callable[..., Iterator[T]], request: Any) -> Iterator[T]:
        """Make one streaming call."""
        try:
            yield from method(request)
        except grpc.RpcError as error:
            raise command_error(error, self.address) from None

    def get(self, job: str) -> jobs_pb2.Job:
        """Return the job of that id or name."""
        response: jobs_pb2.GetResponse = self.call(self.jobs.Get, jobs_pb2.GetRequest(job=job))
        return response.job

    def nodes(self) -> list[cluster_pb2.Node]:
        """Return the registered nodes."""
        return list(self.call(self.cluster.ListNodes, cluster_pb2.ListNodesRequest()).nodes)

    def patiently(self, call: Callable[[], T]) -> T:
        """Return what `call` does; a coordinator that went away is waited for, as a watch does."""
        deadline_s = time.monotonic() + OUTAGE_S
        while True:
            try:
                return call()
            except CommandError as error:
                if error.exit_code != Exit.UNREACHABLE or time.monotonic() > deadline_s:
                    raise
            time.sleep(0.5)

    def submit(self, spec: spec_pb2.JobSpec) -> str:
        """Submit once, whatever the network does in between; return the job id."""
        request = jobs_pb2.SubmitRequest(request_id=str(uuid.uuid4()), spec=spec)
        deadline = time.monotonic() + CALL_S
        while True:
            try:
                response: jobs_pb2.SubmitResponse = self.jobs.Submit(request, timeout=CALL_S)
                return response.job_id
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                    raise command_error(error, self.address) from None
                time.sleep(0.5)  # the same request id: a lost reply can't submit twice

    def watch(self, job_id: str) -> Iterator[jobs_pb2.Job]:
        """Yield the job after each change until it is terminal, across restarts of the coordinator."""
        last = jobs_pb2.Job()
        while last.state not in TERMINAL:
            for response in self._lasting(lambda: self.jobs.Watch(jobs_pb2.WatchRequest(job=job_id))):
                last = response.job
                yield last

    def watch_events(self, job: str, from_event_seq: int) -> Iterator[jobs_pb2.Event]:
        """Yield events as they come, each once, across restarts of the coordinator; of a job until it has ended."""
        request = jobs_pb2.WatchEventsRequest(job=job, from_event_seq=from_event_seq)
        for response in self._lasting(lambda: self.jobs.WatchEvents(request)):
            yield from response.events
            request.from_event_seq = response.next_event_seq

    def _lasting(self, call: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield what the stream sends, made anew for as long as OUTAGE_S while nobody serves it, until it ends well."""
        lost_at: float | None = None
        while True:
            try:
                for response in call():
                    lost_at = None
                    yield response
                return
            except grpc.RpcError as error:
                lost_at = lost_at or time.monotonic()
                if error.code() not in _PASSING or time.monotonic() - lost_at > OUTAGE_S:
                    raise command_error(error, self.address) from None
            time.sleep(0.5)

    def upload(self, sha256: str, data: bytes) -> None:
        """Store an artifact unless the coordinator has it."""
        if self.call(self.artifacts.Has, jobs_pb2.HasRequest(sha256=sha256)).present:
            return

        def messages() -> Iterator[jobs_pb2.UploadRequest]:
            yield jobs_pb2.UploadRequest(sha256=sha256)
            for at in range(0, len(data), UPLOAD_BYTES):
                yield jobs_pb2.UploadRequest(data=data[at : at + UPLOAD_BYTES])

        self.call(self.artifacts.Upload, messages(), timeout_s=300.0)

    def records(self, job: str, kind: jobs_pb2.RecordKind) -> dict[int, bytes]:
        """Return what workers recorded, by rank: the whole files."""
        files: dict[int, bytes] = {}
        for part in self.stream(self.jobs.Trace, jobs_pb2.TraceRequest(job=job, kind=kind)):
            files[part.rank] = files.get(part.rank, b"") + part.data
        return files


def command_error(error: grpc.RpcError, address: str) -> CommandError:
    """Return the error that a status means to the user."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNIMPLEMENTED or "HTTP/2" in details or "http2 header" in details:
        return CommandError(
            f"what listens at {address} is no coordinator: {details}",
            Exit.UNREACHABLE,
            "name its gRPC address; `piped coordinator` takes 127.0.0.1:7400 unless told otherwise",
        )
    if code is grpc.StatusCode.UNAVAILABLE and ("connect" in details.lower() or "socket" in details.lower()):
        return CommandError(f"the coordinator at {address} went away: {details}", Exit.UNREACHABLE, "try again")
    return CommandError(details or code.name, _CODES.get(code, Exit.JOB_FAILED))
