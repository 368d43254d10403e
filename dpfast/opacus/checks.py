"""What a private optimizer refuses to step on."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from opacus.validators import errors as of_opacus
from torch import nn, optim

from dpfast.distributed import SharedSecret, find_wrapper, not_in, number_of_ranks
from dpfast.errors import InputError, StateError, warn_caller
from dpfast.errors import UnsupportedModuleError as OurError
from dpfast.modes import GradSampleModule, Left, held_by, not_noted
from dpfast.opacus.signals import Signals
from dpfast.taps import find_forward, find_rule

NO_COPIES = (
    "a private optimizer is not copied or pickled: torch would take three of its attributes, and break step() of all "
    "others of its class on the way. Copy the model, give a new optimizer the state_dict() of this one, and make that "
    "private (make_private of an engine whose accountant goes on, or the constructor)"
)

NO_SCALER = (
    "GradScaler scales the loss, and what it unscales has been clipped before: another sum than the one that the noise "
    "is for. Leave the scaler out: norms are taken in fp32 or fp64, and autocast to bfloat16 (the Trainer's bf16=True) "
    "needs none"
)

_private: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
"""What an engine has made private, as long as both live. Not the engine's own, so that engines can be copied."""


def check_before_steps(private: Any) -> Any:
    """Has the optimizer that a private one wraps look at what it is about to step on, and the private one at whether
    the loop goes on that it was in; returns the private one."""
    wrapped = private.original_optimizer
    private._step_skip_queue = Signals(private)
    for p in parameters_of(wrapped):
        if not hasattr(p, "summed_grad"):  # Opacus gives one to those alone that are trainable now
            p.summed_grad = None
    stepping = wrapped
    while not hasattr(stepping, "_optimizer_step_pre_hooks") and hasattr(stepping, "optimizer"):
        stepping = stepping.optimizer  # Accelerate's inherits the method for it; the one inside alone has hooks
    if hasattr(stepping, "register_step_pre_hook"):
        stepping.register_step_pre_hook(_check_step)
    return private


def check_noise(noise_multiplier: float) -> None:
    """Raises InputError where it is no number, negative or not finite."""
    try:
        # It is kept as it is, and no string can be computed with.
        fits = not isinstance(noise_multiplier, str) and 0.0 <= float(noise_multiplier) < math.inf
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise InputError(f"noise_multiplier={noise_multiplier!r} must be a finite number, and not negative")


def check_wraps(optimizer: Any) -> None:
    """Raises InputError for what is no optimizer, a private one, or one that takes several gradients a step."""
    if isinstance(optimizer, DPOptimizer):
        raise InputError(
            f"this {type(optimizer).__name__} is private already, and a second one would add noise to noise that the "
            "accountant has counted: give the optimizer that it wraps (original_optimizer)"
        )
    if isinstance(optimizer, optim.LBFGS):
        raise InputError(
            "LBFGS takes the gradient at several points for a step, and each would be a release of its own; take an "
            "optimizer that steps once for each gradient (SGD, Adam)"
        )
    if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
        raise InputError(f"optimizer={type(optimizer).__name__} is no torch.optim.Optimizer")


def parameters_of(optimizer: optim.Optimizer) -> list[Any]:
    """All of them, frozen ones too."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _check_step(optimizer: optim.Optimizer, *_: Any) -> None:
    check_frozen(optimizer)
    for p in parameters_of(optimizer):
        if not p.requires_grad:
            p.grad = None  # zeros of zero_grad(), by which momentum and weight decay would move what is frozen
    left = held_by(p for p in parameters_of(optimizer) if p.requires_grad)
    if left is not None and not left.unclipped:
        raise StateError(
            "p.grad holds clipped sums without noise, and nothing accounts for this step: call step() of the private "
            "optimizer that wraps this one (the engine's make_private returns it), and train with that"
        )
    held = [(p.grad, x) for p in parameters_of(optimizer) if (x := vars(p).get("grad_sample")) is not None]
    if any(grad is not None and not _is_taken(grad_sample) for grad, grad_sample in held):
        raise StateError(
            "p.grad is of samples that nobody has clipped (p.grad_sample), without noise, and nothing accounts for "
            "this step: call step() of the private optimizer that wraps this one (the engine's make_private returns "
            "it), and train with that; zero_grad() of that one comes before a step on what is public"
        )


def _is_taken(grad_sample: Any) -> bool:
    """Whether one of Opacus's optimizers has: it marks them, also those of several passes."""
    passes = grad_sample if isinstance(grad_sample, list) else [grad_sample]
    return all(hasattr(x, "_processed") for x in passes)


def check_frozen(optimizer: optim.Optimizer) -> None:
    """Raises StateError where a parameter is frozen and has a gradient: noise is for what is trainable, and a step of
    the optimizer takes all."""
    for p in (p for p in parameters_of(optimizer) if not p.requires_grad):
        of_skipped = getattr(p, "summed_grad", None)
        waits = of_skipped is not None and not hasattr(of_skipped, "_processed")
        if waits or (p.grad is not None and bool(p.grad.any())):
            raise StateError(
                f"a parameter {tuple(p.shape)} is frozen and has a gradient, which would be released without noise: it "
                "was trainable in the backward pass. Freeze it after step() and zero_grad(), make it trainable for "
                "step(), or set its grad to None"
            )


def why_none(params: Sequence[nn.Parameter]) -> str:
    """Why parameters hold nothing to step with."""
    if any(getattr(p, "_norm_sample", None) is not None for p in params):
        return (
            "the last backward pass was the first of two (passes=2), and has left norms alone. Take "
            "dpfast.opacus.ClippedLoss(model, optimizer, criterion) as the criterion, whose backward() runs both, or "
            "passes=1"
        )
    return "no backward pass of the dpfast module since the last step"


def check_clipped(params: Sequence[nn.Parameter], left: Left | None) -> None:
    """Raises StateError where p.grad is not a clipped sum; the norms of Opacus's ghost clipping are used up by it."""
    others = [] if left is None else not_noted(params)
    if others:
        raise StateError(
            f"{len(others)} of the {len(params)} parameters, one {tuple(others[0].shape)}, have a p.grad that no "
            "private backward pass has left, beside clipped sums in the others: it is not clipped. Wrap one module "
            "that holds all that the optimizer trains, or give what is not private an optimizer of its own; who "
            "changes a clipped sum writes into p.grad and does not replace it"
        )
    if left is not None and left.unclipped:
        raise StateError(
            "p.grad holds the gradients of a backward pass that clips nothing (after disable_hooks() or "
            "remove_hooks(), or of the model itself beside its compiled step): enable_hooks(), or wrap it again, and "
            "zero_grad() before the private one. Gradients of public data are added after step(), or by "
            "torch.autograd.grad"
        )
    if left is None and any(getattr(p, "grad_sample", None) is not None for p in params):
        raise StateError(
            "p.grad holds a sum that nobody has clipped, beside p.grad_sample of a GradSampleModule: its optimizer is "
            "opacus.optimizers.DPOptimizer, which clips p.grad_sample; or wrap the model in "
            "GradSampleModuleFastGradientClipping"
        )
    if left is None and (ordinary := [p for p in not_noted(params) if not _is_known(p)]):
        if any(hasattr(p, "_norm_sample") for p in ordinary):
            raise StateError(
                f"p.grad of {len(ordinary)} of the {len(params)} parameters, one {tuple(ordinary[0].shape)}, is of a "
                "single backward pass of ghost clipping, which clips in the second one: call backward() on the loss of "
                "the criterion that make_private returns (DPLossFastGradientClipping(model, optimizer, criterion)), "
                "with this optimizer"
            )
        raise StateError(
            f"p.grad of {len(ordinary)} of the {len(params)} parameters, one {tuple(ordinary[0].shape)}, is of no "
            "private backward pass, or was put in the place of what one has left: nobody has clipped it. Wrap the "
            "model that has these parameters in GradSampleModuleFastGradientClipping; who clips by other code takes "
            "Opacus's DPOptimizerFastGradientClipping, which adds noise to any sum"
        )
    for p in params if left is None else ():
        if hasattr(p, "_norm_sample"):
            p._norm_sample._clips = False


def note_norms(params: Sequence[nn.Parameter]) -> None:
    """Of ``zero_grad()``, which Opacus's ghost clipping calls between its two passes: norms that are there for the
    first time are of the first, so what stands in p.grad later, beside the very same, is of the second."""
    for p in params:
        norms: Any = getattr(p, "_norm_sample", None)
        if norms is not None and not hasattr(norms, "_clips"):
            norms._clips = True


def _is_known(p: nn.Parameter) -> bool:
    """Whether an unnoted gradient is of the second pass of Opacus's ghost clipping, or is what the last step has
    released, which Opacus refuses."""
    norms = getattr(p, "_norm_sample", None)
    return getattr(norms, "_clips", False) or hasattr(getattr(p, "summed_grad", None), "_processed")


def check_one(modules: frozenset[int]) -> None:
    if len(modules) > 1:
        raise StateError(
            f"this step takes the clipped sums of {len(modules)} wrapped modules, and each clips by itself: a sample "
            f"could move what is released by {len(modules)}**0.5 times max_grad_norm and more. Wrap one module that "
            "holds them all"
        )


def keep_what_is_counted(optimizer: Any, accountant: Any, batches: int) -> None:
    """Has the accountant count each step, whatever hook the user attaches: theirs comes behind, not in its place.

    Args:
        batches: of an epoch. The accountant takes a step of k of them for one at k times their rate.
    """
    counted = _Counted(optimizer.step_hook, accountant, batches)
    optimizer.attach_step_hook(counted)
    optimizer.attach_step_hook = counted.attach


_TWO_EPOCHS = (
    "this step sums {} backward passes, and by their number the end of an epoch of {} batches is among them: a sample "
    "that is in the last batches of one and the first of the next is clipped in each, and moves the sum by up to 2C. "
    "End each epoch with a step()"
)


class _Counted:
    """A step hook. The accountant takes the entry of all steps so far out of its history, and puts it back with one
    more: an interrupt between the two (Ctrl-C) would have it forget them."""

    def __init__(self, count: Any, accountant: Any, batches: int):
        self._count, self._accountant, self._batches, self._then = count, accountant, batches, None
        self._passes = 0  # of all steps

    def attach(self, fn: Any) -> None:
        """As Opacus's: the last one that was attached is called."""
        self._then = fn

    def __call__(self, private: Any) -> None:
        if (passes := private.accumulated_iterations) > self._batches:
            raise StateError(
                f"this step sums {passes} backward passes, and an epoch has {self._batches} batches: a sample is in "
                "several of them and counts as often, which no sampling rate tells the accountant. Take as many as an "
                "epoch has batches at most, or a larger batch; nothing was released"
            )
        before, self._passes = self._passes % self._batches, self._passes + passes
        if before + passes > self._batches and passes > 1:
            warn_caller(_TWO_EPOCHS.format(passes, self._batches))
        history = self._accountant.history
        entries, last = len(history), history[-1:]
        try:
            self._count(private)
        except BaseException:
            if len(self._accountant.history) < entries:
                self._accountant.history += last
            raise
        if self._then is not None:
            self._then(private)


def check_units(module: Any, units: bool) -> None:
    """Raises StateError where records would be drawn for a module that clips ``units``: a user of many records would
    take part far more often than the accountant is told."""
    if module.needs_units and not units:
        raise StateError(
            "the module is wrapped already, for batches of units, and this make_private would draw records: give it "
            "user_of_record= again, or the plain nn.Module (to_standard_module() gives it back) where records are to "
            "be protected"
        )


def warn_of_another(engine: Any, module: Any) -> None:
    """Warns where the engine has made another module private that lives: its accountant counts each one's steps as on
    draws of their own, and two on one draw are one release with 2**0.5 times the sensitivity."""
    made = _private.setdefault(engine, WeakSet())
    made.add(module)
    if _are_several(made):
        gc.collect()  # a wrapped model is in a cycle with its taps, so one that is gone may still be there
        if _are_several(made):
            warn_caller(
                "this engine has made another module private, and its accountant counts the steps of each as on a "
                "draw of its own. Steps of both on one batch must be accounted together, and its epsilon is too small "
                "for them: wrap one module that holds both, or take for each the batches of the loader that its own "
                "make_private has returned"
            )


def _are_several(made: WeakSet[Any]) -> bool:
    """Whether they are of several models; one that was wrapped anew is the same."""
    return len({id(getattr(m, "_module" if hasattr(m, "_module") else "model", m)) for m in made}) > 1


def check_ranks(left: Left | None, secret: SharedSecret | None) -> None:
    """Raises StateError where the sum is not over all ranks that add the same noise; ``secret``: what that is from."""
    if left is None:
        return
    if left.of_rank:
        raise StateError(
            "p.grad holds clipped gradients of this rank alone: the last backward pass was under no_sync(); take "
            "one without it before step()"
        )
    if left.ranks == 0 and secret is not None and number_of_ranks() > 1:
        raise StateError(
            "p.grad holds clipped gradients of this rank alone, and the optimizer shares its noise with others: "
            "call the DistributedDataParallel, not the module inside it (and leave out its python_reducer)"
        )
    if left.ranks > 1 and secret is None:
        raise StateError(
            f"p.grad holds the sum over {left.ranks} ranks, which must all add the same noise: give the optimizer "
            "secret=dpfast.distributed.SharedSecret.agreed() and the expected batch size of all ranks, or have "
            "dpfast.opacus.PrivacyEngine make it of a model in DistributedDataParallel"
        )
    if left.ranks and secret is not None and secret.ranks not in (None, left.ranks):
        raise StateError(
            f"p.grad holds the sum over {left.ranks} ranks, and its noise is from a secret that {secret.ranks} ranks "
            "have agreed on: others of them would add the same noise to another sum, and the difference of the two has "
            "none. Give this optimizer SharedSecret.agreed(group=...) of the ranks that its sum is over"
        )


def validate(module: nn.Module, *, over_ranks: bool = True) -> None:
    """What Opacus refuses, except layers that dpfast has a rule for (nn.MultiheadAttention, nn.LSTM, ...).

    Args:
        over_ranks: whether the mode leaves sums over ranks, under DistributedDataParallel and fully_shard.

    Raises:
        UnsupportedModuleError: dpfast's and Opacus's at once, with all faults.
    """
    faults = [] if module.training else ["Model needs to be in training mode (module.train())"]
    for name, m in module.named_modules():
        trainable = any(p.requires_grad for p in m.parameters(recurse=False))
        ours = find_rule(m) is not None or find_forward(m) is not None
        if trainable and type(m) in ModuleValidator.VALIDATORS and not ours:
            layer = f"{name} ({type(m).__name__})" if name else type(m).__name__
            faults.extend(f"{layer}: {fault}" for fault in ModuleValidator.VALIDATORS[type(m)](m))
    inner = module._module if isinstance(module, GradSampleModule) else module
    wrapper = find_wrapper(inner, module)
    whole = wrapper is not None and wrapper.kind in ("DDP", "FSDP2") and wrapper.module in (inner, module)
    if wrapper is not None and not (over_ranks and whole):
        faults.append(not_in(wrapper, "this grad_sample_mode"))
    if faults:
        raise UnsupportedModuleError("; ".join(faults))


class UnsupportedModuleError(OurError, of_opacus.UnsupportedModuleError):
    """Also Opacus's, which its users catch."""
