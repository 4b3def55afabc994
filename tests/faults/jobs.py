"""The job that fault tests run: small, without big imports, slow enough to be watched, with known losses."""

from pathlib import Path

from tests.support.cluster import wait_until

PROGRAMS = Path(__file__).parents[1] / "e2e" / "programs"
STEPS = 40


def job(name, *, stages=2, pause_s=0.0, **more):
    """Return a job file; `pause_s` slows its steps and leaves its losses alone."""
    return {
        "version": 1,
        "name": name,
        "program": "broken:Fine",
        "source": str(PROGRAMS),
        "params": {"pause_s": pause_s},
        "pipeline": {"stages": stages, "chunks": 4},
        "train": {"steps": STEPS, "seed": 7},
        **more,
    }


def at_step(cluster, job_id, step):
    """Wait until the job has finished `step` steps; return its workers' pids by rank."""
    cluster.wait_for(job_id, "RUNNING")

    def reached():
        assert cluster.state(job_id) == "RUNNING", cluster.describe(job_id)
        return cluster.api.get(job_id).progress.step >= step

    wait_until(reached, 60, f"step {step} of {job_id}")
    return pids(cluster, job_id)


def pids(cluster, job_id):
    return {worker.rank: worker.pid for worker in cluster.api.get(job_id).workers}


def check_undisturbed(cluster, job_id, losses):
    """The job succeeded in its first attempt, started every worker once and has exactly these losses."""
    ended = cluster.wait_for(job_id, "SUCCEEDED")
    assert ended.attempt == 1
    spawned = cluster.events(job_id, "worker_spawned")
    assert len(spawned) == len(ended.workers)
    logs = [log for folder in cluster.attempt_dirs(job_id) for log in folder.glob("ranks/*/log")]
    assert [log.read_text().count('"worker_joined"') for log in logs] == [1] * len(ended.workers)
    assert cluster.losses(job_id) == losses
    return ended
