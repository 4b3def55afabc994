"""What the stages of a cut model cost as they will run: times per action, and what a message between two ranks takes. Pure.

Called by stagekit.plan.plan for its predictions and for zb-auto; the planner prices cuts that are not made yet alike.
"""

from __future__ import annotations

from stagekit.plan.contract import ModelSpec, StageSpec, TensorSpec
from stagekit.plan.costs import Costs, Link
from stagekit.plan.shapes import evaluate

_DTYPE_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def tensor_bytes(tensor: TensorSpec, symbols: dict[str, int]) -> int:
    """Return the bytes of `tensor` for these symbol values."""
    size = _DTYPE_BYTES.get(tensor.dtype, 1)
    for dim in tensor.shape:
        size *= evaluate(dim, symbols)
    return size


def stage_output_bytes(model: ModelSpec, stage: StageSpec) -> int:
    """Return the bytes that one example chunk of `stage` sends to later stages."""
    symbols = {symbol.name: symbol.example for symbol in model.symbols}
    return sum(tensor_bytes(e.tensor, symbols) * len(e.targets) for e in model.edges if e.source == stage.index)


def model_costs(
    model: ModelSpec, *, compile: str = "eager", recompute: bool = False, link: Link | None = None
) -> Costs:
    """Return what each stage costs; the executor's actions alone, all equal, where nothing was measured.

    A backward in halves leaves for later what can wait in an eager stage that owes an input gradient; all else is in the
    first half. With `recompute` all stages but the last run their forward again before either backward.
    """
    link, last = link or Link(), len(model.stages) - 1
    largest = max((stage_output_bytes(model, stage) for stage in model.stages[:-1]), default=0)
    hop = link.hop_s(largest) if last else 0.0
    if not any(stage.forward_s or stage.backward_s for stage in model.stages):
        alike = (link.action_s,) * len(model.stages)
        return Costs(alike, alike, alike, backward=alike)
    forward, whole, early, late = [], [], [], []
    for stage in model.stages:
        again = stage.forward_s if recompute and stage.index != last else 0.0
        first, second = stage.backward_s, 0.0
        if stage.index and compile == "eager" and stage.input_grad_s + stage.weight_grad_s:
            first, second = stage.input_grad_s, stage.weight_grad_s
        forward.append(stage.forward_s + link.action_s)
        whole.append(stage.backward_s + again + link.action_s)
        early.append(first + again + link.action_s)
        late.append(second + link.action_s)
    return Costs(tuple(forward), tuple(early), tuple(late), hop, backward=tuple(whole))
