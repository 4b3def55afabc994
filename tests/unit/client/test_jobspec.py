"""The job file: every mistake is told with its place and a hint; what is right survives the wire."""

import pytest

from pipeapi import jobproto, jobspec, values
from stagekit.errors import SplitError
from stagekit.plan.split import Balanced, parse_bytes, split_of

GOOD = """\
version: 1
name: gpt
program: stagekit.examples.gpt:Program
params: {layers: 4, lr: 0.003, tags: [1, a, null], nested: {deep: true}}
pipeline:
  stages: 4
  chunks: 8
train: {steps: 3}
"""


def load(text, *overrides):
    return jobspec.load_text(text.encode(), "job.yaml", overrides)


def mistakes(text, *overrides):
    with pytest.raises(jobspec.SpecError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_a_good_file_survives_the_wire_unchanged():
    job = load(GOOD)
    proto = jobproto.to_proto(job, environ={})
    assert jobproto.from_proto(proto) == job
    assert jobproto.to_dict(proto)["params"] == {
        "layers": 4,
        "lr": 0.003,
        "tags": [1, "a", None],
        "nested": {"deep": True},
    }


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("  chunks: 8", "  chunk: 8", ["pipeline.chunk: unknown field (job.yaml:7:3)", 'did you mean "chunks"?']),
        (
            "  chunks: 8",
            '  chunks: "8"',
            ['pipeline.chunks: is "8"; give a whole number of at least 1, or auto (job.yaml:7:11)'],
        ),
        (
            "  chunks: 8",
            "  chunks: 0",
            ["pipeline.chunks: 0: input should be greater than or equal to 1 (job.yaml:7:11)"],
        ),
        ("  stages: 4\n", "", ["pipeline.stages: missing (job.yaml:6:3)", "pipectl explain pipeline.stages"]),
        ("program: stagekit.examples.gpt:Program\n", "", ["program: missing", "explain program"]),
        ("stagekit.examples.gpt:Program", "train.py", ['"train.py" is no program (job.yaml:3:10)', "module:Class"]),
        ("name: gpt", "name: My Job", ['"My Job" does not fit']),
        ("version: 1", "version: 2", ["version", "job.yaml:1:10"]),
        (
            "  chunks: 8",
            "  chunks: 8\n  schedule: 1f2b",
            ['"1f2b" is none of gpipe, 1f1b, interleaved,', 'did you mean "1f1b"? (job.yaml:8:13)'],
        ),
        (
            "  chunks: 8",
            "  schedule: zb-v",
            ["stages_per_rank is 1, but zb-v runs 2 stages on each rank", "write stages_per_rank: 2 (job.yaml:6:3)"],
        ),
        (
            "  chunks: 8",
            "  schedule: zb-h1\n  stages_per_rank: 2",
            ["stages_per_rank is 2, but zb-h1 runs 1 stage", "write stages_per_rank: 1, or schedule: interleaved"],
        ),
        (
            "  chunks: 8",
            "  schedule: dualpipe-v\n  stages_per_rank: 2\n  chunks: 3",
            ["chunks is 3, but dualpipe-v on 2 ranks needs at least 4; write chunks: 4, or schedule: zb-v"],
        ),
        (
            "  chunks: 8",
            "  chunks: 8\n  stages_per_rank: 3",
            ["stages_per_rank is 3, which does not divide stages: 4 (job.yaml:8:20)"],
        ),
        *(
            (
                "  chunks: 8",
                f"  stages_per_rank: {given}",
                ["error: pipeline.stages_per_rank: is ", "; give a whole number of at least 1, or a list of one such"],
            )
            for given in ("[2, x]", "[]", "[0, 4]", "two", "2.5", "true")
        ),
        ("  chunks: 8", "  stages_per_rank: auto", ["`pipectl plan` compares other numbers on as many ranks"]),
        (
            "train: {steps: 3}",
            "train: {steps: 3}\nobserve: {trace_steps: [7]}",
            ["observe.trace_steps names step 7, but steps are 0 to 2 (job.yaml:9:24)"],
        ),
        ("  chunks: 8", "  split: [a, b]", ["split names 2 places where a stage begins, but 4 stages need 3"]),
        ("  chunks: 8", "  buckets: {cap: lots}", ["pipeline.buckets.cap", '"25MiB"']),
        ("  chunks: 8", "  split: [a, b, a]", ['pipeline.split: "a" is named twice']),
        ("  chunks: 8", "  split: bucket:0", ['pipeline.split: "bucket:0": a bucket holds at least 1 byte']),
        ("  chunks: 8", "  split: bucket:many", ['pipeline.split: "many" is not a size; write e.g. "25MiB"']),
        (
            "  chunks: 8",
            "  balance: {memory: 0}",
            ["pipeline.balance.memory: 0: input should be greater than or equal"],
        ),
        ("  chunks: 8", "  balance: {memory: lots}", ['pipeline.balance.memory: "lots" is not a size']),
        (
            "  chunks: 8",
            "  balance: {memori: 1GiB}",
            ["pipeline.balance.memori: unknown field", 'did you mean "memory"?'],
        ),
        ("  chunks: 8", "  balance: {speeds: [1, 1, 0, 1]}", ["pipeline.balance.speeds.2: 0: input should be greater"]),
        (
            "  chunks: 8",
            "  balance: {speeds: [1, 2]}",
            ["pipeline.balance: speeds has 2 numbers, but 4 stages with 1 per rank run on 4 ranks; give one"],
        ),
        (
            "  chunks: 8",
            "  split: layers\n  balance: {memory: 1GiB}",
            ["pipeline.balance: is for split: balanced, but split is 'layers'"],
        ),
        ("train: {steps: 3}", "train: {steps: 3}\nname: other", ["name: given twice (job.yaml:9:1)"]),
        ("train: {steps: 3}", "train: {steps: 3", ["(job.yaml:"]),
        ("train: {steps: 3}", "train: &t {steps: 3}\nobserve: *t", ["aliases are not allowed"]),
        ("train: {steps: 3}", "train: !!python/object:os.system {}", ["could not determine a constructor"]),
        ("train: {steps: 3}", "train: {steps: 3}\nenv: {lower: x}", ["lower: not an environment name"]),
        ("train: {steps: 3}", "train: {steps: 3}\nenv: {LD_PRELOAD: x}", ["LD_PRELOAD: reserved"]),
        ("train: {steps: 3}", "train: {steps: 3}\nrecovery: {grace: soon}", ["recovery.grace", '"30s"']),
        ("train: {steps: 3}", "train: {steps: 3}\nrecovery: {start_timeout: 0s}", ["recovery.start_timeout: '0s'"]),
    ],
)
def test_a_mistake_is_told_with_its_place_and_what_to_do(before, after, told):
    assert before in GOOD
    text = mistakes(GOOD.replace(before, after))
    for part in told:
        assert part in text


def test_all_mistakes_are_told_at_once_in_the_order_of_the_file():
    text = mistakes(GOOD.replace("chunks: 8", "chunk: 8").replace("steps: 3", "steps: -1"))
    assert text.index("pipeline.chunk:") < text.index("train.steps:")


def test_overrides_are_checked_like_the_file():
    assert load(GOOD, "pipeline.stages=2", "train.seed=7").pipeline.stages == 2
    assert "pipeline.stagez: unknown field" in mistakes(GOOD, "pipeline.stagez=2")
    assert "write FIELD=VALUE" in mistakes(GOOD, "pipeline.stages")


def test_null_environment_values_come_from_the_submitter_and_are_redacted():
    job = load(GOOD + "env: {TOKEN: null, OMP_NUM_THREADS: '1'}\n")
    proto = jobproto.to_proto(job, environ={"TOKEN": "s3cret"})
    assert proto.env["TOKEN"] == "s3cret"
    assert jobproto.to_dict(proto)["env"] == {"TOKEN": None, "OMP_NUM_THREADS": "1"}
    with pytest.raises(jobspec.SpecError, match=r"env.TOKEN: null, but not set in this environment"):
        jobproto.to_proto(job, environ={})


def test_an_environment_value_that_no_process_can_take_is_refused_with_the_limit():
    assert "at most 131068" in mistakes(GOOD + f"env: {{BIG: '{'x' * 131_068}'}}\n")


def test_a_file_above_a_mebibyte_is_refused():
    assert "at most 1048576" in mistakes(GOOD + "# " + "x" * (1 << 20))


def test_explain_knows_every_field_and_only_those():
    assert {row[0] for row in jobspec.explain("")} == set(jobspec.JobFile.model_fields)
    ((name, _, default, text),) = jobspec.explain("pipeline.chunks")
    assert (name, default) == ("chunks", "8") and "microbatches" in text
    with pytest.raises(KeyError, match="nope"):
        jobspec.explain("pipeline.nope")
    for field in jobspec.JobFile.model_fields:
        assert all(row[3] for row in jobspec.explain(field)), field


@pytest.mark.parametrize(
    ("text", "size"), [("25MiB", 25 << 20), ("1 kB", 1000), ("1.5 GiB", 3 << 29), (7, 7), ("0", 0)]
)
def test_sizes_are_read_with_their_units(text, size):
    assert values.parse_size(text) == size


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ("params: {x: 99999999999999999999}", "x: 99999999999999999999 does not fit into 64 bits (job.yaml:4:9)"),
        ('params: {x: "\\uD800"}', "lone surrogate"),
        ("params: {x: 2026-01-01}", "is no number, string, list or mapping; quote it"),
        ("params: {1: a}", "params"),
        ("checkpoint: {dir: runs/gpt}", '"runs/gpt" is no absolute path'),
        ('checkpoint: {dir: ""}', '"" is no absolute path'),
        ("observe: {trace_steps: [3]}", "trace_steps names step 3, but steps are 0 to 2"),
    ],
)
def test_values_that_would_fail_late_are_refused_early(after, told):
    text = GOOD.replace("params: {layers: 4, lr: 0.003, tags: [1, a, null], nested: {deep: true}}\n", "")
    lines = text.splitlines()
    lines.insert(3, after)
    assert told in mistakes("\n".join(lines) + "\n")


def test_an_override_that_is_no_yaml_is_a_mistake_and_no_traceback():
    assert '"[" is no YAML value' in mistakes(GOOD, "params.x=[")


def test_the_schema_that_editors_read_takes_what_people_write():
    import jsonschema

    schema = jobspec.JobFile.model_json_schema()
    job = {"version": 1, "name": "a", "program": "a:B", "train": {"steps": 1}}
    jsonschema.validate(
        job | {"pipeline": {"stages": 1, "buckets": {"cap": "25MiB"}}, "recovery": {"grace": "30s"}}, schema
    )
    for bad in ({"stages": 0}, {"stages": 1, "buckets": {"cap": "lots"}}, {"stages": 1, "chunk": 2}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(job | {"pipeline": bad}, schema)


def test_what_a_balanced_split_weighs_survives_the_wire():
    text = "  balance: {memory: 20GiB, speeds: [1, 1, 0.5, 2], optimizer_state: 0, block_boundaries: true}"
    job = load(GOOD.replace("  chunks: 8", text))
    proto = jobproto.to_proto(job, environ={})
    assert jobproto.from_proto(proto) == job
    assert split_of(jobproto.to_dict(proto)["pipeline"]) == Balanced(
        memory_bytes=20 << 30, speeds=(1.0, 1.0, 0.5, 2.0), optimizer_state=0.0, block_boundaries=True
    )
    proto.pipeline.ClearField("balance")  # as stored before there was one
    assert split_of(jobproto.to_dict(proto)["pipeline"]) == Balanced()


SIZES = [
    "25MiB",
    "1.5 GB",
    "1 kB",
    "2KB",
    "4096",
    "7 B",
    "1.5 GiB",
    " 3 KiB ",
    "1.2.3",
    "MiB",
    "5 mib",
    "-1",
    "1e3",
    "٣",
    "",
]


@pytest.mark.parametrize("text", SIZES)
def test_the_job_file_and_the_library_read_the_same_sizes(text):
    try:
        size = values.parse_size(text)
    except ValueError:
        with pytest.raises(SplitError):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == size


def test_start_values_survive_the_wire():
    job = load(GOOD + "init: per_op\nweights: /data/llama\n")
    proto = jobproto.to_proto(job, environ={})
    assert jobproto.from_proto(proto) == job
    assert (proto.init, proto.weights) == ("per_op", "/data/llama")
    assert (load(GOOD).init, load(GOOD).weights) == ("auto", None)
    assert 'weights: "llama" is no absolute path' in mistakes(GOOD + "weights: llama\n")
    assert "init" in mistakes(GOOD + "init: drawn\n")


def test_a_transformers_directory_is_absolute_or_inside_the_source():
    program = "stagekit.examples.gpt:Program"
    assert load(GOOD.replace(program, "hf:/data/llama")).program == "hf:/data/llama"
    assert load(GOOD.replace(program, "hf:./model") + "source: .\n").program == "hf:./model"
    told = mistakes(GOOD.replace(program, "hf:./model"))
    assert "program hf:./model is relative" in told and "add `source: .`" in told
    assert "hf:FOLDER" in mistakes(GOOD.replace(program, '"hf:"'))


def test_how_a_job_trains_survives_the_wire():
    text = GOOD.replace("{steps: 3}", "{steps: 3, accumulate: 4, precision: fp16}")
    job = load(text, "pipeline.buckets.compress=bf16")
    proto = jobproto.to_proto(job, environ={})
    assert jobproto.from_proto(proto) == job
    train = jobproto.to_dict(proto)["train"]
    assert (train["accumulate"], train["precision"]) == (4, "fp16")
    proto.train.accumulate, proto.train.precision = 0, ""  # of a job that was stored before there were these
    train = jobproto.to_dict(proto)["train"]
    assert (train["accumulate"], train["precision"]) == (1, "fp32")


@pytest.mark.parametrize("field", ["train.accumulate=2", "pipeline.buckets.compress=bf16"])
def test_what_only_training_has_is_refused_in_a_forward_job(field):
    name = field.partition("=")[0]
    assert f"{name} is for training" in mistakes(GOOD, "pipeline.schedule=forward", field)
    load(GOOD, "pipeline.schedule=forward", "train.precision=bf16")


@pytest.mark.parametrize(
    "field",
    [
        "pipeline.recompute=true",
        "train.clip_grad_norm=1.0",
        "train.accumulate=2",
        "train.eval_every=1",
        "checkpoint={dir: /data/gpt}",
    ],
)
def test_what_only_training_has_is_refused_beside_a_schedule_file_of_forwards_alone(field):
    name, text = field.partition("=")[0], "0F0,0F1\n1F0,1F1\n"
    job = load(GOOD, "pipeline.schedule=mine.csv", "pipeline.stages=2", "pipeline.chunks=2", field)
    told = f"{name}: is for training, but mine.csv lists forwards alone, which train nothing; leave it out"
    assert ": ".join(jobspec.schedule_misfit(job, text)) == told
    for backward in ("0B0,0B1", "0I0,0I1", "0W0,0W1"):
        assert jobspec.schedule_misfit(job, f"0F0,0F1,{backward}\n1F0,1F1\n") is None
    assert "pipeline.chunks" in jobspec.schedule_misfit(job, "0F0\n1F0\n")


def test_speeds_are_one_per_rank_of_a_schedule_file():
    sets = ("pipeline.schedule=mine.csv", "pipeline.stages=2", "pipeline.chunks=1", "pipeline.balance.speeds=[1, 2]")
    told = ("pipeline.balance.speeds", "has 2 numbers, but mine.csv has lines for 1; give one number per rank")
    assert jobspec.schedule_misfit(load(GOOD, *sets), "0F0,1F0,1B0,0B0\n") == told
    assert jobspec.schedule_misfit(load(GOOD, *sets), "0F0,0B0\n1F0,1B0\n") is None
