"""The taps of a wrapped module."""

from __future__ import annotations

from typing import ClassVar

from dpfast.modes.tapped_model import TappedModel
from dpfast.trials import tapped_again


class Hooks(TappedModel):
    """The taps of one module; ``dpfast.autograd_grad_sample.disable_hooks`` switches off those of every module."""

    enabled_in_process: ClassVar[bool] = True

    @property
    def enabled(self) -> bool:
        return self._enabled and Hooks.enabled_in_process

    @enabled.setter
    def enabled(self, enabled: bool) -> None:
        self._enabled = enabled

    def hang_up_again(self) -> None:
        """What a copy of the model has lost whose modules are made anew (torch.fx's GraphModule keeps no hooks)."""
        if not vars(self):  # it is copied without the wrapper, and not filled yet
            return
        tapped_again(self._taps)
        if self._root_handles and self._root_handles[-1].id not in self.model._forward_hooks:
            self._root_handles[-2:] = self._around_forward()
