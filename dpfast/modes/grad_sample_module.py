"""GradSampleModule: after a plain ``loss.backward()`` every parameter has its per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpfast.arithmetic import buffers
from dpfast.distributed import Wrapper, find_wrapper, not_in
from dpfast.errors import InputError, StateError, UnsupportedModuleError, warn_caller
from dpfast.factors import Dense, Factor
from dpfast.modes.accumulation import check_same_parameters, wait_for_noise
from dpfast.modes.blocks import VALID
from dpfast.modes.gathered import ordinary
from dpfast.modes.hooks import Hooks
from dpfast.modes.nonfinite_samples import DroppedSamples
from dpfast.modes.steps import Step, check_mask, check_own
from dpfast.rules import functorch
from dpfast.taps import Activations, batch_to_front, registry

_ESCAPED = (
    "a gradient reached a parameter of {count} steps past its own module's forward, or past a second use of it; their "
    "grad_sample is NaN: call the module instead of using its weight functionally"
)


class GradSampleModule(nn.Module):
    """Wraps a module; ``loss.backward()`` leaves ``p.grad_sample`` (N, *p.shape) beside the ordinary ``p.grad``.

    Args:
        m: the module to wrap. It is changed in place until :meth:`to_standard_module` gives it back.
        batch_first: samples are dimension 0 of inputs and outputs (True) or dimension 1 (False). A hint: what runs of
            the model on a few samples tell (docs/layouts.md) goes before it.
        loss_reduction: how the loss adds up samples, "mean" or "sum"; with "mean" a sample's gradient is N times
            its share.
        strict: refuse at once a module that :meth:`validate` finds fault with; otherwise the error comes with
            the first backward pass that reaches it, and a faulty layer that is frozen does no harm.
        force_functorch: take every layer's gradients through ``torch.func``, none through its rule.
        layout: where layers have their samples, by their names, where the model is not to be asked: a dimension (0, 1,
            ...), "N*k" (k rows of dimension 0 are one sample's and stand together), "k*N" (the samples come again and
            again) or "shared" (no samples). ``layout={"encoder.lin": 1}``.

    Raises:
        UnsupportedModuleError: ``strict`` and the module mixes samples (BatchNorm).
        InputError: ``loss_reduction`` is not "mean" or "sum"; ``layout`` names no layer or says nothing of it.
        StateError: the module is wrapped already.

    Numerics:
        grad_sample is fp32 (fp64 for fp64 inputs) whatever the parameter's dtype.

    Several backward passes without :meth:`zero_grad` make ``p.grad_sample`` a list, one entry a pass, as in Opacus; one
    that uses other parameters than those before it is a StateError, because the entries would not be of one pass.

    A gradient that reaches a parameter past its own module's forward (another module uses it functionally, or the loss
    has a penalty on the weights) would be missing in ``p.grad_sample``: ``backward()`` raises EscapedGradientError,
    which names the parameter, and leaves no ``p.grad_sample``. On a GPU, where such a gradient may only be told from
    those of several uses by its values, nobody waits for them: then ``p.grad_sample`` is NaN throughout, for every
    parameter, and a DpfastWarning follows when that has arrived.

    >>> import torch
    >>> model = GradSampleModule(nn.Linear(3, 2))
    >>> model(torch.ones(4, 3)).sum(1).mean().backward()
    >>> model.weight.grad_sample.shape
    torch.Size([4, 2, 3])
    """

    GRAD_SAMPLERS: ClassVar[dict[type[nn.Module], registry.GradSampler]] = registry.GRAD_SAMPLERS
    NORM_SAMPLERS: ClassVar[dict[registry.ModuleClass, registry.GradSampler]] = registry.NORM_SAMPLERS
    passes = 1
    gives_gradients = True
    _layout: Mapping[str, Any] | None = None

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        layout: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        check_loss_reduction(loss_reduction)
        self.validate(m, strict=strict)
        self._module = m
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.force_functorch = force_functorch
        self.grad_accumulation_allowed = True
        self._tapped: Hooks | None = None
        self._escaped = DroppedSamples(_ESCAPED)
        buffers.keep_what_is_free()
        self.add_hooks(layout=layout)
        self.set_grad_sample_to_none()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_module", "__deepcopy__", "__copy__"):  # a copy is one of the whole
                raise
            if isinstance(getattr(type(self), name, None), property):
                return object.__getattribute__(self, name)  # the property's own error, not the module's
            if name == "units" and not hasattr(self._module, name):
                raise AttributeError(
                    f"{type(self).__name__} gives gradients of samples and clips none; "
                    "GradSampleModuleFastGradientClipping has units(...)"
                ) from None
            return getattr(self._module, name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's
        if self._tapped is not None:
            self._tapped.hang_up_again()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"

    # --- hooks ---

    def add_hooks(
        self,
        *,
        loss_reduction: str | None = None,
        batch_first: bool | None = None,
        force_functorch: bool | None = None,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        """Taps the wrapped module; arguments as in the constructor, those left out as they were (Opacus has "mean",
        whatever it was).

        Raises:
            StateError: it is tapped already. InputError: ``loss_reduction`` is not "mean" or "sum", or for ``layout``.
        """
        loss_reduction = self.loss_reduction if loss_reduction is None else loss_reduction
        batch_first = self.batch_first if batch_first is None else batch_first
        force_functorch = self.force_functorch if force_functorch is None else force_functorch
        layout = self._layout if layout is None else layout
        check_loss_reduction(loss_reduction)
        tapped = Hooks(self._module, self, batch_first=batch_first, force_functorch=force_functorch, layout=layout)
        tapped.add()
        self._tapped, self._layout = tapped, layout
        self.loss_reduction, self.batch_first, self.force_functorch = loss_reduction, batch_first, force_functorch

    def remove_hooks(self) -> None:
        """Puts the wrapped module's layers back as they were. Safe to call twice."""
        if self._tapped is not None:
            self._tapped.remove()
            self._tapped = None

    @contextmanager
    def valid(self, mask: Tensor) -> Iterator[None]:
        """Within it the model is called with a padded batch, as in ``with model.valid(mask): output = model(x)``.

        A padded sample adds exactly nothing, whatever it holds, NaN too; its norm and clip factor are 0, and it is not
        counted as dropped. The backward pass may come later, within it or not.

        Args:
            mask: (N,) bool, True for samples, False for padding.

        Raises:
            InputError: it is no tensor; from the forward pass, where it is not bool or not as long as the batch.
            StateError: no hooks; from a forward pass in another thread, outside of it; from a backward pass within it
                whose forward pass was outside.
        """
        check_mask(mask)
        if self._tapped is None:
            raise StateError("valid(...) needs hooks: call add_hooks() first")
        with VALID.within(self, mask):
            yield

    def enable_hooks(self) -> None:
        """Undoes :meth:`disable_hooks`."""
        if self._tapped is not None:
            self._tapped.enabled = True

    def disable_hooks(self) -> None:
        """From here on backward passes give ordinary gradients, also through graphs made before."""
        if self._tapped is not None:
            self._tapped.enabled = False

    @property
    def hooks_enabled(self) -> bool:
        """Whether backward passes leave per-sample gradients: False without hooks, and after :meth:`disable_hooks`."""
        return self._tapped is not None and self._tapped.enabled

    def capture_backprops_hook(
        self,
        module: nn.Module,
        forward_input: Any,
        forward_output: tuple[Tensor, ...],
        loss_reduction: str,
        batch_first: bool,
    ) -> dict[nn.Parameter, Tensor]:
        """The per-sample gradients of one layer from its inputs and the gradients at its outputs.

        Args:
            module: the layer. forward_input: its inputs. forward_output: (backprops,).
            loss_reduction, batch_first: as in the constructor.

        Returns:
            {parameter: grad_sample (N, *shape)}; nothing is stored.
        """
        inputs = forward_input if isinstance(forward_input, (tuple, list)) else (forward_input,)
        activations, backprops = self.rearrange_grad_samples(
            module=module,
            backprops=forward_output[0],
            loss_reduction=loss_reduction,
            batch_first=batch_first,
            activations=inputs,
        )
        rule = registry.find_rule(module) or functorch.functorch
        return {p: factor.materialize() for p, factor in rule(module, activations, backprops).items()}

    def rearrange_grad_samples(
        self, *, module: nn.Module, backprops: Tensor, loss_reduction: str, batch_first: bool, activations: Any = None
    ) -> tuple[Activations, Tensor]:
        """(activations, backprops) with samples in front, backprops times N where the loss was a mean.

        Raises:
            StateError: no activations. InputError: ``loss_reduction`` is not "mean" or "sum".
        """
        check_loss_reduction(loss_reduction)
        if activations is None:
            raise StateError(
                f"No activations detected for {type(module).__name__}, run forward after add_hooks(model); "
                "dpfast keeps none on modules, so pass activations="
            )
        batch_dim = 0 if batch_first else 1
        activations = Activations(batch_to_front(x, batch_dim) for x in activations)
        backprops = batch_to_front(backprops, batch_dim)
        if loss_reduction == "mean":
            backprops = backprops * backprops.shape[0]
        return activations, backprops

    # --- mode: materialize each factor as it comes ---

    def on_forward(self, inputs: Sequence[Tensor], call: tuple[Any, Any]) -> None:
        """Raises StateError where a wrapper of torch.distributed would make something else of the gradients."""
        wrapper = self._wrapper()
        if wrapper is not None:
            raise StateError(not_in(wrapper, type(self).__name__))

    def _wrapper(self) -> Wrapper | None:
        assert self._tapped is not None
        found = find_wrapper(self._module, self)
        if found is None and self._tapped.has_stand_ins():
            return Wrapper("FSDP2 around", self._module, "")
        return found

    @property
    def defers(self) -> bool:
        """Samples' gradients are wanted layer by layer."""
        return False

    def on_factor(self, step: Step, parameter: nn.Parameter, factor: Factor, only_use: bool) -> Tensor | None:
        scale = self._scale(step)
        grad_sample = factor.materialize(scale=scale)
        if step.valid is not None:
            padding = ~step.valid.to(grad_sample.device)
            grad_sample = grad_sample.masked_fill(padding.view(-1, *[1] * (grad_sample.dim() - 1)), 0.0)
            factor = Dense(grad_sample)  # the total is read from it
        total = ordinary(factor, grad_sample, scale).to(parameter.dtype)
        if parameter in step.gathered:
            step.gathered[parameter] += grad_sample
        else:
            step.gathered[parameter] = grad_sample
        return total

    def has_left(self) -> bool:
        """Whether what earlier backward passes have left is still there."""
        parameters = list(self._module.parameters())
        return any(getattr(p, "grad_sample", None) is not None for p in parameters) or wait_for_noise(parameters)

    def on_finish(self, step: Step) -> None:
        check_own(dict.fromkeys(self._module.parameters()), step.gathered)
        if any(getattr(p, "grad_sample", None) is not None for p in step.gathered):
            self.check_accumulation()
        check_same_parameters(self._module.named_parameters(), step.gathered)
        if step.sums_differ:  # nobody waits for the device
            at_fault = torch.stack(step.sums_differ).any()
            self._escaped.add(torch.where(at_fault, torch.nan, torch.zeros(1, device=at_fault.device)))
            for grad_sample in step.gathered.values():
                grad_sample.masked_fill_(at_fault.to(grad_sample.device), torch.nan)
        for parameter, grad_sample in step.gathered.items():
            before = getattr(parameter, "grad_sample", None)
            if before is None:
                parameter.grad_sample = grad_sample  # type: ignore[attr-defined]  # as in Opacus
            else:
                earlier = before if isinstance(before, list) else [before]
                parameter.grad_sample = [*earlier, grad_sample]  # type: ignore[attr-defined]  # as above

    def _scale(self, step: Step) -> float:
        return float(step.num_samples or 0) if self.loss_reduction == "mean" else 1.0

    # --- grad_sample ---

    def set_grad_sample_to_none(self) -> None:
        """Sets ``p.grad_sample`` to None for every trainable parameter; a frozen one has no such attribute."""
        for p in self._module.parameters():
            if p.requires_grad:
                p.grad_sample = None  # type: ignore[attr-defined]  # as in Opacus
            elif hasattr(p, "grad_sample"):
                del p.grad_sample

    def del_grad_sample(self) -> None:
        """Deletes ``p.grad_sample`` from every parameter that has one."""
        for p in self._module.parameters():
            if hasattr(p, "grad_sample"):
                del p.grad_sample

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad`` (``set_to_none`` applies to it alone) and sets ``p.grad_sample`` to None."""
        self.set_grad_sample_to_none()
        super().zero_grad(set_to_none)

    def forbid_grad_accumulation(self) -> None:
        """From here on a second backward pass without :meth:`zero_grad` raises StateError (Poisson sampling)."""
        self.grad_accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        """Undoes :meth:`forbid_grad_accumulation`."""
        self.grad_accumulation_allowed = True

    def check_accumulation(self) -> None:
        """Raises StateError where accumulation is forbidden; called where a backward pass meets another's answer."""
        if not self.grad_accumulation_allowed:
            raise StateError(
                "Poisson sampling is not compatible with grad accumulation, and the last backward pass's gradients are "
                "there: call step() and zero_grad() after each, or take BatchMemoryManager; what the optimizer does "
                "not train keeps its own (model.zero_grad(), or freeze it)"
            )

    # --- the wrapped module ---

    def to_standard_module(self) -> nn.Module:
        """The wrapped module without any trace of dpfast."""
        self.cleanup()
        return self._module

    def cleanup(self) -> None:
        """Takes everything of dpfast off the module and its parameters. For who went on using the module itself, as
        with Opacus's ``wrap_model=False``. Safe to call twice."""
        self.remove_hooks()
        for p in self._module.parameters():
            for name in ("grad_sample", "_norm_sample"):
                if hasattr(p, name):
                    delattr(p, name)

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Whether this one layer has per-sample gradients; its children are not looked at."""
        return next(_faults(module, ""), None) is None

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """What keeps the model from having per-sample gradients: a list of errors, empty where nothing does.

        Raises:
            UnsupportedModuleError: ``strict`` and there is a fault; the message holds them all. InputError: no Module.
        """
        check_is_module(module)
        errors: list[NotImplementedError] = [error for name, m in module.named_modules() for error in _faults(m, name)]
        if errors and strict:
            raise UnsupportedModuleError("; ".join(map(str, errors)))
        if errors:
            warn_caller("; ".join(map(str, errors)))
        return errors


def check_is_module(module: object) -> None:
    """Raises InputError for what is none."""
    if not isinstance(module, nn.Module):
        raise InputError(f"{module!r} is no torch.nn.Module: give the one that holds the parameters")


def check_loss_reduction(loss_reduction: str) -> None:
    """Raises InputError where it is not "mean" or "sum"."""
    if loss_reduction not in ("mean", "sum"):
        raise InputError(f"loss_reduction = {loss_reduction!r}. Only 'sum' and 'mean' losses are supported")


def _faults(module: nn.Module, name: str) -> Iterator[UnsupportedModuleError]:
    """Why this layer has no per-sample gradients."""
    where = f"{name or 'model'} ({type(module).__name__})"
    fault = registry.find_fault(module)
    if fault is not None:
        yield UnsupportedModuleError(f"{where}: {fault}")


__all__ = ["GradSampleModule"]
