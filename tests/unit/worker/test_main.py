"""What a worker says of its failure: the cause, where it was, and none of what carried it up."""

from piped.worker.main import describe_failure, traceback_of
from piped.worker.train import TrainingError
from stagekit.errors import StageError


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
