"""compile: auto in a job: every stage times eager and inductor before it joins, and the job tells which one it kept."""


def test_a_job_tells_what_each_stage_was_compiled_with(cluster):
    spec = {
        "version": 1,
        "name": "auto",
        "program": "stagekit.examples.gpt:Program",
        "params": {"layers": 1, "width": 16, "heads": 2, "sequence": 8, "batch": 4},
        "pipeline": {"stages": 2, "chunks": 2, "compile": "auto"},
        "train": {"steps": 2},
    }
    job = cluster.run(spec, timeout_s=420)
    assert {stage.compile for stage in job.plan.stages} <= {"eager", "inductor"}
