"""What workers write is there to the last byte, within the cap; no amount of it makes a shim or a daemon grow."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.control.scripts import acts, attempt_dir, let_go, running
from tests.support.cluster import wait_until

CAP = 64 << 20


def rss_mib(pid):
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


def shim_pid(cluster, job_id):
    return json.loads((attempt_dir(cluster, job_id) / "shim.json").read_text())["pid"]


def node_of(cluster, job_id):
    return next(node for node in cluster.nodes if node.folder in attempt_dir(cluster, job_id).parents)


def test_two_hundred_megabytes_without_a_newline_stay_within_the_cap_and_nothing_grows(cluster):
    job_id = cluster.submit(acts(cluster, "flood", "flood_of_one_line"))
    running(cluster, job_id)
    shim, daemon = shim_pid(cluster, job_id), node_of(cluster, job_id).process.pid
    before = rss_mib(shim), rss_mib(daemon)
    folder = attempt_dir(cluster, job_id) / "ranks" / "0"
    wait_until(lambda: (folder / "written").exists(), 60, "200 MB")
    assert rss_mib(shim) - before[0] < 4 and rss_mib(daemon) - before[1] < 16
    let_go(cluster, job_id)
    cluster.wait_for(job_id, "SUCCEEDED")
    kept = [(folder / name).stat().st_size for name in ("log.1", "log")]
    assert CAP // 2 <= sum(kept) <= CAP + 200
    said = cluster.pipectl("logs", job_id).stdout
    dropped = int(re.match(r"… dropped (\d+) bytes\n", said)[1])
    assert dropped + said.count("x") == len("rank 0 acts flood_of_one_line\n") + 200_000_000
    assert max(map(len, said.splitlines())) <= 1 << 20, "pipectl breaks what has no newline"
    assert said.endswith("the last word\n")
    assert rss_mib(daemon) - before[1] < 32


def test_bytes_that_are_no_text_and_the_last_words_before_an_exit_are_kept(cluster):
    job_id = cluster.submit(acts(cluster, "last-words", "last_words"))
    cluster.wait_for(job_id, "SUCCEEDED")
    log = (attempt_dir(cluster, job_id) / "ranks" / "0" / "log").read_bytes()
    assert log.endswith(b"\xff\xfe\x00 raw\n" + b"y" * 60_000 + b" the end")
    assert cluster.pipectl("logs", job_id).stdout.endswith("y the end\n")


def test_logs_that_are_followed_go_on_to_the_true_end_over_a_restart_of_the_daemon(cluster):
    job_id = cluster.submit(acts(cluster, "followed", "count_until_file"))
    running(cluster, job_id)
    node = node_of(cluster, job_id)
    command = [sys.executable, "-m", "pipectl", "--coordinator", cluster.address, "logs", "-f", job_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert "acts" in follower.stdout.readline() and follower.stdout.readline() == "line 1\n"
        node.kill()
        before = lines(cluster, job_id)
        wait_until(lambda: lines(cluster, job_id) > before + 10, 20, "lines without a daemon")
        node.start()
        let_go(cluster, job_id)
        cluster.wait_for(job_id, "SUCCEEDED")
        rest = follower.stdout.read()
        assert follower.wait(timeout=30) == 0, follower.stderr.read()
    numbers = [int(line.split()[1]) for line in rest.splitlines() if line.startswith("line ")]
    assert numbers == list(range(2, lines(cluster, job_id) + 1)), "each line once, in order"
    assert rest.endswith("the last word\n")


def lines(cluster, job_id):
    return (attempt_dir(cluster, job_id) / "ranks" / "0" / "log").read_text().count("line ")
