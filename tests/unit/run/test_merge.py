"""What the model returned for each chunk becomes what it returns for the batch."""

import pytest
import torch

from stagekit.errors import UserError
from stagekit.plan.contract import OutputSpec, TensorSpec
from stagekit.run.merge import Cat, Mean, Stack, Sum, flatten_rules, merge_outputs

ROWS = OutputSpec("y", TensorSpec(("s0", 2), (2, 1), "float32"), merge_dim=0)
SCALAR = OutputSpec("z", TensorSpec((), (), "float32"))
CONSTANT = OutputSpec(None, None, constant="tag")
CHUNKS = [
    {"y": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "z": torch.tensor(1.0)},
    {"y": torch.tensor([[5.0, 6.0]]), "z": torch.tensor(4.0)},
]
WEIGHTS = [2.0, 1.0]


def merge(outputs, spec=None):
    return merge_outputs(outputs, flatten_rules(spec, outputs), CHUNKS, WEIGHTS)


def test_by_default_rows_are_concatenated_scalars_averaged_by_weight_and_constants_kept():
    rows, scalar, constant = merge([ROWS, SCALAR, CONSTANT])
    assert rows.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert float(scalar) == pytest.approx((2 * 1 + 1 * 4) / 3)
    assert constant == "tag"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(Sum(), 5.0), (Mean(), 2.0), (Stack(), [1.0, 4.0]), (max, 4.0), (lambda parts: float(parts[-1]), 4.0)],
)
def test_a_rule_of_the_callers_wins(rule, expected):
    (merged,) = merge([SCALAR], rule)
    assert (merged.tolist() if isinstance(merged, torch.Tensor) else merged) == pytest.approx(expected)


def test_rules_may_be_given_in_the_outputs_structure():
    _, scalar = merge([ROWS, SCALAR], {"logits": Cat(0), "loss": Sum()})
    assert float(scalar) == 5.0


def test_a_structure_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(UserError, match="3 leaves, the model returns 2"):
        flatten_rules((Sum(), Sum(), Sum()), [ROWS, SCALAR])
    with pytest.raises(UserError, match="use Cat"):
        flatten_rules(("sum", None), [ROWS, SCALAR])
