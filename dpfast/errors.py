"""The errors and warnings of dpfast, each also of the built-in type that Opacus raises in the same place.

docs/errors.md is made of their docstrings (docs/errors_page.py).
"""

import sys
import warnings


class DpfastError(Exception):
    """Base of every error that dpfast raises on purpose."""

    def __str__(self) -> str:
        """The message, with the page of the documentation that says more; its own where it names one."""
        message = super().__str__()
        return message if "docs/" in message else f"{message} ({self.page()})".lstrip()

    @classmethod
    def page(cls) -> str:
        """Where its cause and remedy stand."""
        return f"docs/errors.md#{cls.__name__.lower()}"


class DpfastWarning(UserWarning):
    """Base of every warning that dpfast gives.

    Why:
        Something is slower than it could be, was dropped, or cannot be checked. What is promised holds all the same,
        unless the warning says what does not.
    What to do:
        What the message says; to make sure, `warnings.simplefilter("error", dpfast.errors.DpfastWarning)`.
    """


def warn_caller(message: str) -> None:
    """A DpfastWarning with the line that called the model, or ``backward``: the last that is neither ours nor torch's,
    however many frames of hooks stand in between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("dpfast", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DpfastWarning, stacklevel=level)


class InputError(DpfastError, ValueError):
    """An argument does not fit: a shape, a dtype, a device, or a value out of its range.

    Why:
        The message has the argument and what it is. A batch whose samples are in another dimension than is believed
        would be clipped wrongly without a word, so where that cannot be told, it is an error too.
    What to do:
        Give what the message asks for. Where *samples are not found*, copy its `layout={"name": ...}` line
        ([by hand](layouts.md#by-hand)).
    """


class LossError(InputError, RuntimeError):
    """A loss that is not one number; also of the type of torch's own error.

    Why:
        `backward()` starts from the sum or the mean over the samples. Two passes weight a loss for each sample, (N,),
        where (N, 1) would mix the samples' clip factors.
    What to do:
        Reduce the loss, and give `loss_reduction=` the same word, "mean" or "sum".
    """


class StateError(DpfastError, ValueError):
    """A call came at the wrong time: hooks added twice, a norm read before any backward.

    Why:
        What was asked for is not there yet, is gone, or would count a sample twice; or a second backward pass
        (`passes=2`) is not that of the first: dropout without a kept random state, another loss.
    What to do:
        Call in the order that the message says: `loss.backward()`, then norms, then `optimizer.step()`,
        `zero_grad()`. For two passes, `preserve_rng_state=True` in checkpoints, or the default of one pass. Under
        torch.distributed, see [what works with what](distributed.md#what-works-with-what).
    """


class UnsupportedModuleError(DpfastError, NotImplementedError):
    """A layer has no per-sample gradient (it mixes samples), or dpfast knows no way to compute it.

    Why:
        In BatchNorm, a mean over the batch, or attention across samples, a sample's gradient depends on the others, and
        clipping it bounds nothing. Some wrappers (pipeline stages, context parallel) hide layers from dpfast.
    What to do:
        GroupNorm or LayerNorm for BatchNorm (`opacus.validators.ModuleValidator.fix(model)`); compare and normalise
        within a sample; freeze the layer; or [write a rule](writing-a-rule.md).
    """


class BackendError(DpfastError, ValueError):
    """The backend that was asked for does not exist, or cannot run here.

    Why:
        `backend=` or `DPFAST_BACKEND` asks for kernels where there is no GPU or no Triton, or a compiler is missing.
    What to do:
        `python -m dpfast info` says what runs here, and why; `"auto"` takes what does.
    """


class EscapedGradientError(DpfastError, ValueError):
    """A gradient reached a trainable parameter without being clipped.

    Why:
        A parameter was used outside of its own module's forward, what a forward has kept came into the loss, or a
        penalty on the weights is in it.
    What to do:
        Call the module itself in the place of its weight; give penalties to the optimizer (`weight_decay`).
    """


class MissingDependencyError(DpfastError, ImportError):
    """An optional package is missing, or its version is not one that dpfast knows.

    Why:
        `dpfast.opacus` needs Opacus, `bench` and the examples what their extras have.
    What to do:
        The `pip install` line of the message.
    """
