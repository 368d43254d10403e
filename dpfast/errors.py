"""The errors and warnings of dpfast, each also of the built-in type that Opacus raises in the same place."""


class DpfastError(Exception):
    """Base of every error that dpfast raises on purpose."""


class DpfastWarning(UserWarning):
    """Base of every warning that dpfast gives."""


class InputError(DpfastError, ValueError):
    """An argument does not fit: a shape, a dtype, a device, or a value out of its range."""


class LossError(InputError, RuntimeError):
    """A loss that is not one number; also of the type of torch's own error."""


class StateError(DpfastError, ValueError):
    """A call came at the wrong time: hooks added twice, a norm read before any backward."""


class UnsupportedModuleError(DpfastError, NotImplementedError):
    """A layer has no per-sample gradient (it mixes samples), or dpfast knows no way to compute it."""


class BackendError(DpfastError, ValueError):
    """The backend that was asked for does not exist, or cannot run here."""


class EscapedGradientError(DpfastError, ValueError):
    """A gradient reached a trainable parameter without being clipped."""


class MissingDependencyError(DpfastError, ImportError):
    """An optional package is missing, or its version is not one that dpfast knows."""
