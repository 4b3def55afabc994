"""JSON lines between worker, shim and node daemon: their names and shapes. Standard library only.

One message per line, at most MAX_LINE_BYTES, UTF-8, `{"type": ..., ...}`.

worker → shim → daemon (an inherited socketpair whose number is in PIPED_FD, then shim.sock):
    store      {endpoint}                      rank 0 listens: "host:port"
    joined     {}                              process group up, plan agreed, stages built
    plan       {plan}                          rank 0: the PlanSummary as a dict with its proto field names
    progress   {step, steps, loss, tokens_per_s, step_s}       last stage of replica 0, at most once a second
    beat       {step, section, action, waiting_on, age_s, longest_step_s}     every rank, once a second: steps finished; first step,
               (compiled) step, update, clip, data, eval, save or hook; the action of its list ("1F3") or empty; ranks that it waits for, or "all"; since it
               last moved; the longest of its newest hundred steps
    metrics    {samples: [{name, labels, value} | {name, labels, buckets, sum, exemplars?}]}   cumulative, once a second and at
               exit; buckets: len(BUCKETS_S) + 1 counts, each of its own bucket alone, the last for +Inf; exemplars:
               [[bucket, step, chunk, value]], the newest of each bucket
    failed     {is_transport, is_numeric, peer_rank, message, traceback, step, peer_message, peer_traceback}     before exit 1;
               the last two: what the peer told this rank of its own failure, else empty
    done       {step, loss}                    before exit 0: steps finished, the loss of the last

daemon → shim → worker:
    assign     the first line: job_id, attempt, fence, rank, world_size, ranks (list of {rank, replica, stages,
               node_name, device}), spec (the job file as a dict), data_address, attempt_dir, source_dir or null
    endpoint   {endpoint}                      where rank 0's store listens

daemon → shim:
    start      {ranks: [{rank, argv, env, assign, memory_bytes}]}   each rank at most once, whatever is asked; 0: no limit
    forward    {rank, message}                 to that worker
    stop       {grace_s, dumps_stacks}         SIGTERM, grace, SIGKILL; 0: SIGKILL at once; dumps_stacks: SIGQUIT, on which a worker
                                               writes its stacks into its log, 200 ms, SIGKILL
    ack        {keys: [[rank, kind]]}          the daemon holds these; the shim may forget them
    quit       {}                              nothing runs any more and every exit is acknowledged: leave

shim → daemon:
    hello      {version, fence, job_id, pid, ranks: {rank: {state, pid, starttime, code, signal, by_supervisor}}}  first
    spawned    {rank, pid, starttime}
    unkillable {rank}                          5 s after SIGKILL it has not ended
    exited     {rank, code, signal, by_supervisor, oom_killed, log_tail}
    worker     {rank, message}                 a line of that worker, as it came
    alive      {}                              once a second while ranks run: who is silent now, is so to one who listens
    All of these but the first and the last also carry boottime_ns: nanoseconds since boot (CLOCK_BOOTTIME) when the shim saw it.
"""

from __future__ import annotations

import json
from typing import Any

MAX_LINE_BYTES = 1 << 20
VERSION = 1

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return `message` as one line. Raises ValueError above MAX_LINE_BYTES."""
    line = json.dumps(message, separators=(",", ":"), allow_nan=True).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        kind = message.get("type")
        raise ValueError(f"message of type {kind!r} has {len(line)} bytes; the limit is {MAX_LINE_BYTES}")
    return line


class LineReader:
    """Cut a byte stream into messages; keeps the unfinished rest between calls."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages completed by `data`, in order.

        Raises ValueError for a line that is no JSON object or exceeds MAX_LINE_BYTES.
        """
        self._rest += data
        messages: list[Message] = []
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            try:
                message = json.loads(line)
            except RecursionError:
                raise ValueError(f"nested too deeply: {line[:80]!r}") from None
            if not isinstance(message, dict) or "type" not in message:
                raise ValueError(f"not a message: {line[:80]!r}")
            messages.append(message)
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return messages
