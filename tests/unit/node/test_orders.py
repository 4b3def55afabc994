"""What a rank is started with."""

from pathlib import Path

from pipeapi import jobproto, jobspec
from pipeapi.v1 import cluster_pb2, nodes_pb2
from piped.node import convert
from piped.node.attempt_dir import AttemptDir
from piped.node.orders import Place, start_message


def environment(tmp_path: Path, fence: int, **env: str) -> dict[str, str]:
    job = jobspec.JobFile.model_validate(
        {"version": 1, "name": "a", "program": "m:P", "pipeline": {"stages": 1}, "train": {"steps": 1}, "env": env}
    )
    slot = cluster_pb2.Slot(index=0, device="cpu:0", uuid="")
    rank = nodes_pb2.RankPlacement(rank=0, stages=[0], node_id="n", node_name="n", slot=slot)
    wanted = nodes_pb2.DesiredAttempt(
        job_id="j",
        fence=fence,
        attempt=1,
        phase=nodes_pb2.PHASE_RUN,
        spec=jobproto.to_proto(job, environ={}),
        ranks=[rank],
    )
    (attempt,) = convert.desired_state(nodes_pb2.DesiredState(attempts=[wanted]), 1).attempts
    directory = AttemptDir(tmp_path / "attempts" / str(fence), fence)
    message = start_message(attempt, attempt.ranks[0], directory, Place("n", "n", "10.0.0.1", "eth0"))
    return message["ranks"][0]["env"]


def test_all_attempts_of_a_node_share_one_compile_cache(tmp_path):
    caches = {environment(tmp_path, fence)["TORCHINDUCTOR_CACHE_DIR"] for fence in (1, 2)}
    assert caches == {str(tmp_path / "compile-cache")}


def test_a_job_may_name_another_compile_cache(tmp_path):
    assert environment(tmp_path, 1, TORCHINDUCTOR_CACHE_DIR="/fast")["TORCHINDUCTOR_CACHE_DIR"] == "/fast"
