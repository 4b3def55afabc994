"""What a node checks before it prepares an attempt: which nodes it calls, what it refuses, who is to blame."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from piped.config import ConfigError
from piped.node.clock import ClockOffset
from piped.node.devices import interface_of
from piped.node.edges import EdgeError, Listener, call
from piped.node.model import DesiredAttempt, Edge, Peer, Phase, RankPlacement, Slot
from piped.node.orders import Place
from piped.node.preflight import Call, PreflightError, Wires, check, neighbours

PLACE = Place("n0", "node0", "127.0.0.1", "lo")


def attempt(*where: str, replicas: int = 1, peers: tuple[Peer, ...] = (), **spec: str) -> DesiredAttempt:
    """Return an attempt with a stage per rank and rank r on node `where[r]`."""
    stages = len(where) // replicas
    ranks = tuple(
        RankPlacement(rank, rank // stages, (rank % stages,), node, f"node{node[1:]}", Slot(0, "cpu:0"))
        for rank, node in enumerate(where)
    )
    known = peers or tuple(Peer(node, f"node{node[1:]}", "127.0.0.1", "") for node in dict.fromkeys(where))
    return DesiredAttempt(7, "j1", 1, Phase.PREPARE, spec=spec, ranks=ranks, peers=known)


def called(calls: list[Call]) -> dict[str, str]:
    return {each.peer.node_id: each.purpose for each in calls}


def test_a_node_calls_those_that_its_stages_exchange_with_and_rank_0s() -> None:
    chain = attempt("n0", "n1", "n2", "n3")
    assert called(neighbours(chain, "n0")) == {"n1": "stage 1 of rank 1"}
    assert called(neighbours(chain, "n3")) == {"n2": "stage 2 of rank 2", "n0": "the store of rank 0"}
    assert not neighbours(attempt("n0", "n0"), "n0")


def test_replicas_of_a_stage_call_the_next_in_their_ring() -> None:
    ring = attempt("n0", "n1", "n2", "n3", replicas=4)
    assert set(called(neighbours(ring, "n2"))) == {"n1", "n3", "n0"}
    assert set(called(neighbours(ring, "n0"))) == {"n1", "n3"}


def with_listener(node_id: str, scene: Callable[[str], Awaitable[None]], host: str = "127.0.0.1") -> None:
    async def run() -> None:
        listener = Listener(node_id)
        try:
            await scene(await listener.start(host))
        finally:
            await listener.stop()

    asyncio.run(run())


def test_a_wire_is_measured_within_bounds() -> None:
    async def scene(address: str) -> None:
        edge = await call(Peer("n1", "node1", "127.0.0.1", address), "127.0.0.1")
        assert edge is not None and edge.peer_id == "n1"
        assert 0 < edge.rtt_s < 5 and edge.bytes_per_s > 1e4
        assert await call(Peer("n1", "node1", "127.0.0.1", address), "127.0.0.1", measures=False) is None

    with_listener("n1", scene)


def test_a_name_with_several_addresses_is_listened_to_on_the_one_that_workers_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = socket.getaddrinfo
    both = [*real("127.0.0.1", 0, type=socket.SOCK_STREAM), *real("127.0.0.2", 0, type=socket.SOCK_STREAM)]
    twice = lambda host, port, *more, **other: both if host == "two" else real(host, port, *more, **other)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", twice)

    async def scene(address: str) -> None:
        name, _, port = address.rpartition(":")
        assert name == "two", "as other hosts shall resolve it"
        assert await call(Peer("n1", "node1", "two", f"127.0.0.1:{port}"), "127.0.0.1")
        with pytest.raises(EdgeError, match="no connection to"):
            await call(Peer("n1", "node1", "two", f"127.0.0.2:{port}"), "127.0.0.1")

    with_listener("n1", scene, "two")


def test_a_listener_ends_the_calls_under_way_without_complaint() -> None:
    complaints: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        listener = Listener("n1")
        host, _, port = (await listener.start("127.0.0.1")).rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"piped-edge 1 n1\n")
        assert await reader.readline() == b"n1\n"
        await listener.stop()

    asyncio.run(run())  # which would cancel, and complain of, what still runs
    assert not complaints


def test_another_node_at_the_address_is_found_out() -> None:
    async def scene(address: str) -> None:
        with pytest.raises(EdgeError, match=r"answers node id 'n9': two hosts have the address 10\.0\.0\.1"):
            await call(Peer("n1", "node1", "10.0.0.1", address), "127.0.0.1")

    with_listener("n9", scene)


def test_a_stranger_who_talks_to_the_listener_is_cut_off_and_others_are_answered() -> None:
    async def scene(address: str) -> None:
        host, _, port = address.rpartition(":")
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"piped-edge 1 n1\n" + (1 << 40).to_bytes(8), b"x" * 200_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(words)
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) in (b"", b"n1\n")
            writer.close()
        assert await call(Peer("n1", "node1", "127.0.0.1", address), "127.0.0.1")

    with_listener("n1", scene)


def run_check(desired: DesiredAttempt, folder: Path, place: Place = PLACE, min_free: int = 0) -> Wires:
    wires = Wires()
    asyncio.run(check(desired, folder, place, wires, min_free_bytes=min_free))
    return wires


def test_a_peer_that_is_not_there_is_named_with_its_stage_and_blamed(tmp_path: Path) -> None:
    with socket.socket() as unused:  # bound and not listening: nobody answers
        unused.bind(("127.0.0.1", 0))
        peer = Peer("n1", "node1", "127.0.0.1", f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(PreflightError) as caught:
            run_check(attempt("n0", "n1", peers=(peer,)), tmp_path)
    text = str(caught.value)
    assert text.startswith(f"node1 (stage 1 of rank 1) is not reached: no connection to {peer.probe_address}")
    assert "look at data_address of both nodes" in text
    assert (caught.value.is_nodes, caught.value.peer_id) == (False, "n1")


def test_a_node_that_reaches_none_of_several_is_to_blame_itself(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        peers = tuple(Peer(f"n{n}", f"node{n}", "127.0.0.1", address) for n in (1, 2))
        with pytest.raises(PreflightError) as caught:
            run_check(attempt("n1", "n0", "n2", peers=peers), tmp_path)
    assert (caught.value.is_nodes, caught.value.peer_id) == (True, "")


def test_edges_are_kept_and_measured_again_only_after_a_while(tmp_path: Path) -> None:
    async def scene(address: str) -> None:
        desired, wires = attempt("n0", "n1", peers=(Peer("n1", "node1", "127.0.0.1", address),)), Wires()
        for _ in range(2):
            await check(desired, tmp_path, PLACE, wires, min_free_bytes=0)
        assert (wires.revision, [edge.peer_id for edge in wires.all()]) == (1, ["n1"])

    with_listener("n1", scene)


@pytest.mark.parametrize(
    ("desired", "place", "min_free", "complaint", "is_nodes"),
    [
        (attempt("n0"), PLACE, 1 << 60, r"MiB are needed for logs and source \(min_free_mib\); free some space", True),
        (
            attempt("n0", python="/no/python"),
            PLACE,
            0,
            "python: '/no/python' is no executable file on this node",
            False,
        ),
        (attempt("n0"), Place("n0", "node0", "127.0.0.1", "eth7"), 0, "was on the interface eth7 .* restart", True),
        (attempt("n0"), Place("n0", "node0", "192.0.2.1", "eth7"), 0, "no interface of this machine has it", True),
    ],
)
def test_what_this_node_lacks_is_refused_in_words(
    desired: DesiredAttempt, place: Place, min_free: int, complaint: str, is_nodes: bool, tmp_path: Path
) -> None:
    with pytest.raises(PreflightError, match=complaint) as caught:
        run_check(desired, tmp_path, place, min_free)
    assert caught.value.is_nodes is is_nodes


def test_a_device_that_is_gone_is_named_with_its_stage(tmp_path: Path) -> None:
    rank = RankPlacement(0, 0, (3,), "n0", "node0", Slot(1, "cuda:1", "GPU-gone"))
    with pytest.raises(PreflightError, match=r"cuda:1 \(GPU-gone\) for stage 3 of rank 0 is not there any more"):
        run_check(DesiredAttempt(7, "j1", 1, Phase.PREPARE, ranks=(rank,)), tmp_path)


def test_a_state_directory_that_is_gone_is_the_nodes_fault(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="state directory can't be written: No such file") as caught:
        run_check(attempt("n0"), tmp_path / "gone")
    assert caught.value.is_nodes


def test_a_name_that_is_this_host_for_itself_alone_is_no_data_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]  # what Debian writes into /etc/hosts
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"'node-7' resolves to 127\.0\.1\.1 here .* write the IP address"):
        interface_of("node-7")


def test_the_offset_of_a_clock_is_the_quickest_answers_within_its_error() -> None:
    clock = ClockOffset()
    assert clock.best is None
    clock.sent(1, monotonic_ns=0, wall_ns=5_000_000_000)
    clock.answered(1, monotonic_ns=400_000_000, coordinator_ns=1_000_000_000)  # 0.4 s under way
    clock.sent(2, monotonic_ns=1_000_000_000, wall_ns=6_000_000_000)
    clock.answered(2, monotonic_ns=1_002_000_000, coordinator_ns=2_000_000_000)
    clock.answered(3, monotonic_ns=1, coordinator_ns=1)  # never sent
    clock.sent(4, 0, 0)
    clock.answered(4, 0, 0)  # by a coordinator that says no time
    assert clock.best == pytest.approx((4.001, 0.001))


def test_edges_hold_what_a_measurement_says() -> None:
    wires = Wires()
    wires.note(Edge("n1", 1.0, 2.0))
    wires.note(None)
    assert wires.is_fresh("n1") and not wires.is_fresh("n2") and wires.revision == 1
