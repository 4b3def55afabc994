"""A program's mode: what each needs, and what contradicts it, told before anything is built."""

import sys

import pytest

from stagekit.errors import ScheduleError, UserError
from stagekit.load import check_mode, load_program

SOURCE = """
class Base:
    def __init__(self, mode=None):
        if mode:
            self.mode = mode
    def build_model(self): ...
    def example_inputs(self): ...
    def batches(self, start_step, replica, replicas): ...

class Trains(Base):
    def loss(self, output, target): ...
    def optimizer(self, named_parameters): ...

class Scores(Base):
    mode = "forward"
    def collect(self, outputs): ...

class Either(Trains):
    def collect(self, outputs): ...

class Shards(Scores):
    def parallelize(self, stage_module, mesh): ...

class Lacks(Base):
    mode = "forward"

class Forgot(Base):
    def collect(self, outputs): ...

class Other(Trains):
    mode = "backward"
"""


@pytest.fixture
def load(tmp_path):
    (tmp_path / "modes_of_programs.py").write_text(SOURCE)
    yield lambda name, **params: load_program(f"modes_of_programs:{name}", params, str(tmp_path))
    sys.path.remove(str(tmp_path))
    sys.modules.pop("modes_of_programs", None)


def test_a_forward_program_needs_no_loss_and_no_optimizer(load):
    assert check_mode(load("Scores"), "forward")
    assert not check_mode(load("Trains"), "1f1b")


def test_a_constructor_may_choose_the_mode(load):
    assert check_mode(load("Either", mode="forward"), "forward")
    assert not check_mode(load("Either", mode="train"), "gpipe")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Lacks", 'Lacks lacks collect for mode "forward"'),
        ("Forgot", 'Forgot lacks loss, optimizer for mode "train".*or write mode = "forward" in it'),
        ("Either", r'has collect\(\), which only programs of mode "forward" are asked for'),
        ("Shards", r'has parallelize\(\), which only programs of mode "train" are asked for'),
        ("Other", "Other.mode is 'backward'"),
    ],
)
def test_a_mode_that_its_methods_do_not_fit_is_refused(load, name, told):
    with pytest.raises(UserError, match=told):
        load(name)


@pytest.mark.parametrize(
    ("name", "schedule", "told"),
    [
        ("Scores", "1f1b", 'its mode is "forward".*but 1f1b has backwards; write schedule: forward'),
        ("Trains", "forward", "forward has no backward, but Trains trains"),
    ],
)
def test_a_schedule_that_contradicts_the_mode_is_refused(load, name, schedule, told):
    with pytest.raises(ScheduleError, match=told):
        check_mode(load(name), schedule)
