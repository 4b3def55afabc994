"""Loss scaling for half precision over a pipeline: all ranks skip the same optimizer steps.

`torch.amp.GradScaler` decides on one process' gradients. Here an infinite gradient on one rank, of any stage or replica,
is seen by all before anyone updates. The loss is inside the runtime, so that `Run.loss_scale` multiplies it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stagekit.errors import UserError
from stagekit.run.runtime import Run


class GradScaler(torch.amp.GradScaler):
    """As torch.amp.GradScaler, made of a deployed pipeline instead of a device; `scale` is not called.

    Every rank of the world calls `step(optimizer)` (`unscale_` before it, to clip) and `update()` alike; a rank whose
    stages train nothing passes None.
    """

    def __init__(self, run: Run, **options: Any) -> None:
        """`options`: those of torch.amp.GradScaler (init_scale, growth_factor, backoff_factor, growth_interval)."""
        super().__init__(run.device.type, **options)
        self._run = run
        self._nothing = torch.optim.SGD([nn.Parameter(torch.zeros(1, device=run.device))])
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(run.device)
        run.loss_scale = self.get_scale()

    def scale(self, outputs: Any) -> Any:
        """Refuse: the runtime scales the loss."""
        raise UserError("the loss is scaled inside Run.step; call step(optimizer) and update()")

    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide the gradients of `optimizer` by the scale; None: this rank has none."""
        super().unscale_(optimizer or self._nothing)

    def step(self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any) -> float | None:
        """Step `optimizer`, unless a gradient of any rank is infinite or NaN."""
        return super().step(optimizer or self._nothing, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale, on every rank alike; the next step's loss is multiplied by it."""
        super().update(new_scale)
        self._run.loss_scale = self.get_scale()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        super().load_state_dict(state_dict)
        self._run.loss_scale = self.get_scale()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        mine = found or {found_inf.device: found_inf.clone()}
        anywhere = self._run.is_anywhere(any(bool(flag) for flag in mine.values()))
        return {device: torch.full_like(flag, float(anywhere)) for device, flag in mine.items()}
