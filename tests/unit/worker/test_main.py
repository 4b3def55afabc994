"""What a worker says of its failure: the cause, where it was, and none of what carried it up."""

from piped.worker.main import describe_failure, traceback_of
from piped.worker.train import TrainingError
from stagekit.errors import RemoteError, StageError


def read_labels():
    raise ValueError("the label file is one line short")


def failed_stage():
    """Return the error that `train` raises when user code raised inside a stage."""
    try:
        try:
            try:
                read_labels()
            except ValueError as error:
                text = f"rank 3, stage 3, chunk 1, F: ValueError: {error}"
                raise StageError(text, rank=3, stage=3, chunk=1, op="F") from error
        except StageError as error:
            raise TrainingError(2, None) from error
    except TrainingError as error:
        return error


def test_a_traceback_ends_with_the_cause_and_its_place():
    lines = traceback_of(failed_stage()).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "in read_labels" in "\n".join(lines)
    assert lines[-2:] == ["ValueError: the label file is one line short", "raised in rank 3, stage 3, chunk 1, F"]
    assert not any("direct cause" in line or "TrainingError" in line for line in lines)


def test_an_error_without_a_cause_is_shown_as_it_is():
    assert traceback_of(SyntaxError("invalid")) == "SyntaxError: invalid\n"


def test_the_message_is_the_causes_and_the_step_is_the_trainings():
    told = describe_failure(failed_stage(), "text")
    assert (told["message"], told["step"]) == ("ValueError: the label file is one line short", 2)
    assert not told["is_transport"]


def dropped(told, **place):
    """Return what `train` raises on a rank that heard of another one's error."""
    try:
        try:
            raise RemoteError(
                told, rank=3, **{"stage": 3, "chunk": 1, "op": "F", "traceback": "its traceback", **place}
            )
        except RemoteError as error:
            raise TrainingError(2, None) from error
    except TrainingError as error:
        return describe_failure(error, "text")


def test_a_victim_quotes_the_failing_rank_as_that_rank_would_report():
    told = dropped("rank 3, stage 3, chunk 1, F: ValueError: the label file\nis one line short")
    assert (told["is_transport"], told["peer_rank"], told["step"]) == (True, 3, 2)
    assert (told["peer_message"], told["peer_traceback"]) == ("ValueError: the label file", "its traceback")


def test_an_error_outside_the_stages_is_quoted_without_the_rank():
    told = dropped("rank 3: the batch has 7 rows", stage=-1, chunk=-1, op="")
    assert told["peer_message"] == "the batch has 7 rows"


def test_a_rank_that_saw_a_connection_break_in_its_stage_is_pointed_at_and_not_quoted():
    told = dropped(
        "rank 3, stage 3, chunk 1, F: RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed by peer"
    )
    assert (told["peer_rank"], told["peer_message"], told["peer_traceback"]) == (3, "", "")
