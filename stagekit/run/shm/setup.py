"""Who shares memory with whom: the ranks of a pipeline offer, attach and agree, before the first message.

Every rank makes its memory and tells the others where it is (`Card`); each tries to open what it was offered through
/proc and reads the nonce back, so that a pair shares memory exactly where that works, whatever host names and namespaces
say; then all tell what they reached, and a pair uses shared memory if both did. All ranks decide from the same words.
What fails is a reason, never a crash. Moves nothing. Called by stagekit.run.groups.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagekit.errors import UserError
from stagekit.run.shm.helper import Bell, Helper, Link
from stagekit.run.shm.inbox import Inbox
from stagekit.run.shm.outbox import Outbox
from stagekit.run.shm.ring import NONCE_BYTES, Memory, Ring, refusal
from stagekit.run.shm.transport import Peers, ShmTransport

log = logging.getLogger(__name__)

VARIABLE = "STAGEKIT_TRANSPORT"
MODES = ("auto", "gloo", "shm")
SPIN_S = (
    200e-6  # before a receiver sleeps, where every rank has a core: waking it costs as much, 50e-6 took 10 % longer
)
Exchange = Callable[[str], list[str]]  # the text of every rank, in their order


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank tells the others: what it wants, and where its memory is."""

    mode: str
    refusal: str | None  # why it has no memory to offer
    host: str = ""  # one kernel and one numbering of processes
    pid: int = 0
    memory_fd: int = -1
    bell_fd: int = -1
    nonce: str = ""


class _Offer:
    """This rank's memory and bell, until they are the helper's."""

    def __init__(self, num_ranks: int) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.bell_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.bell = Bell(write_fd)
        try:
            self.fd, self.memory = Memory.make(num_ranks, nonce)
        except BaseException:
            self.bell.close()
            os.close(self.bell_fd)
            raise
        self.card = Card("", None, _host(), os.getpid(), self.fd, write_fd, nonce.hex())

    def withdraw(self) -> None:
        """Give everything back."""
        os.close(self.fd)
        self.memory.close()
        self.bell.close()
        os.close(self.bell_fd)


@dataclass(frozen=True, slots=True)
class _Attached:
    """A peer's memory and bell, opened."""

    memory: Memory
    bell: Bell
    pidfd: int

    def close(self) -> None:
        self.memory.close()
        self.bell.close()
        os.close(self.pidfd)


def connect(
    rank: int,
    num_ranks: int,
    exchange: Exchange,
    *,
    mode: str,
    refused: str | None,
    timeout_s: float,
    replicas: int = 1,
) -> tuple[ShmTransport | None, Helper | None, dict[int, str]]:
    """Return the transport of the peers that share memory with this rank, who has to close it, and the others' reasons.

    Called on every rank of the pipeline alike. `mode`: what the user asks for; `refused`: why this rank can't; `replicas`:
    pipelines that may be on this host, too. Raises UserError, on every rank alike, for a mode that doesn't exist, or "shm"
    where some pair can't.
    """
    offer, why = _make_offer(num_ranks, mode, refused)
    attached: dict[int, _Attached] = {}
    try:
        card = replace(offer.card if offer else Card(mode, why), mode=mode)
        cards = [Card(**json.loads(text)) for text in exchange(json.dumps(asdict(card)))]
        _check_modes(cards)
        reasons: dict[int, str] = {}
        for peer in range(num_ranks):
            if peer != rank:
                reason = _obstacle(card, cards[peer]) or _attach(cards[peer], num_ranks, attached, peer)
                if reason:
                    reasons[peer] = reason
        everyones = [_reasons(text) for text in exchange(json.dumps(reasons))]
        _refuse_if_demanded(cards, everyones)
        for peer in list(attached):
            if rank in everyones[peer]:
                reasons[peer] = everyones[peer][rank]
                attached.pop(peer).close()
        for peer, reason in reasons.items():
            log.debug("pipeline ranks %d and %d use gloo: %s", rank, peer, reason)
        if not attached or offer is None:
            return None, None, reasons
        spins = _spins(replicas * sum(c.host == card.host for c in cards))
        transport, helper = _build(rank, offer, attached, spins, timeout_s)
        os.close(offer.fd)  # everyone has opened it
        attached, offer = {}, None  # the helper's now
        return transport, helper, reasons
    finally:
        for theirs in attached.values():
            theirs.close()
        if offer is not None:
            offer.withdraw()


def _make_offer(num_ranks: int, mode: str, refused: str | None) -> tuple[_Offer | None, str | None]:
    why = refused or (f"{VARIABLE}=gloo" if mode == "gloo" else refusal())
    if why is not None:
        return None, why
    try:
        return _Offer(num_ranks), None
    except (OSError, ValueError) as error:
        return None, f"no memory to share: {error}"


def _host() -> str:
    """Return what two processes have in common that number processes alike under one kernel."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError as error:
        return f"unknown ({secrets.token_hex(8)}): {error}"


def _obstacle(mine: Card, theirs: Card) -> str | None:
    """Return why two ranks don't even try."""
    if mine.refusal or theirs.refusal:
        return mine.refusal or f"on the other side: {theirs.refusal}"
    return None if mine.host == theirs.host else "not on one host, or in other pid namespaces"


def _attach(card: Card, num_ranks: int, attached: dict[int, _Attached], peer: int) -> str | None:
    """Open what a peer offers and put it into `attached`; return the reason if that fails."""
    opened: list[int] = []
    try:
        try:
            pidfd = os.pidfd_open(card.pid)
            opened.append(pidfd)
            bell_fd = os.open(f"/proc/{card.pid}/fd/{card.bell_fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            opened.append(bell_fd)
            fd = os.open(f"/proc/{card.pid}/fd/{card.memory_fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = Memory(fd, num_ranks)
            finally:
                os.close(fd)
            if memory.nonce.hex() != card.nonce:
                memory.close()
                raise OSError("process and descriptor are another's")
        except BaseException:
            for fd in opened:
                os.close(fd)
            raise
    except (OSError, ValueError) as error:
        return f"opening the memory of process {card.pid} failed: {error}"
    attached[peer] = _Attached(memory, Bell(bell_fd), pidfd)
    return None


def _reasons(text: str) -> dict[int, str]:
    return {int(peer): reason for peer, reason in json.loads(text).items()}


def _check_modes(cards: Sequence[Card]) -> None:
    for rank, card in enumerate(cards):
        if card.mode not in MODES:
            raise UserError(
                f"{VARIABLE} is {card.mode!r} on pipeline rank {rank}; it can be auto (shared memory between CPU ranks of "
                "one host, gloo elsewhere), gloo or shm"
            )


def _refuse_if_demanded(cards: Sequence[Card], everyones: Sequence[dict[int, str]]) -> None:
    for rank, reasons in enumerate(everyones):
        for peer, reason in sorted(reasons.items()):
            if "shm" in (cards[rank].mode, cards[peer].mode):
                raise UserError(
                    f"{VARIABLE}=shm, but pipeline ranks {rank} and {peer} can't share memory: {reason}; "
                    f"{VARIABLE}=auto uses gloo there"
                )


def _spins(num_ranks_here: int) -> range:
    """Return how often a receiver looks before it sleeps, as a range: SPIN_S long where every rank has a core, else 0."""
    if num_ranks_here > len(os.sched_getaffinity(0)):
        return range(0)
    words, looks = memoryview(bytearray(64)).cast("q"), range(1000)
    fastest = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        for _ in looks:
            if words[0] != 0:
                break
        fastest = min(fastest, time.perf_counter() - begun)
    return range(int(SPIN_S / fastest * len(looks)))


def _build(
    rank: int, offer: _Offer, attached: dict[int, _Attached], spins: range, timeout_s: float
) -> tuple[ShmTransport, Helper]:
    """Return the transport over what was attached, and the helper that owns all of it."""
    links = {}
    for peer, theirs in attached.items():
        call_helper, call_peer = offer.bell.ring, theirs.bell.ring
        outbox = Outbox(Ring(theirs.memory, rank), call_helper, call_peer, timeout_s)
        inbox = Inbox(Ring(offer.memory, peer), call_helper, call_peer, spins, timeout_s)
        links[peer] = Link(peer, theirs.memory, theirs.bell, theirs.pidfd, outbox, inbox)
    outboxes = Peers({peer: link.outbox for peer, link in links.items()})
    inboxes = Peers({peer: link.inbox for peer, link in links.items()})

    def forget() -> None:
        outboxes.clear()
        inboxes.clear()

    helper = Helper(offer.memory, offer.bell_fd, offer.bell, links, forget)
    return ShmTransport(outboxes, inboxes), helper
