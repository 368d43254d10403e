"""Which backend runs: the kernels where they can, the reference elsewhere or where it is asked for."""

from __future__ import annotations

import os
import warnings
from functools import lru_cache
from typing import Literal

import torch

from dpfast.arithmetic.kernel_norms import import_kernels
from dpfast.errors import BackendError, DpfastWarning

Backend = Literal["auto", "triton", "reference"]


_BACKENDS = ("auto", "triton", "reference")


_OLDEST_GPU = (8, 0)

_KEEP_SUBNORMALS = ("gfx942",)
"""Architectures of AMD whose matrix instructions keep subnormal inputs of 16 bits. gfx90a takes them for zero
(PyTorch's notes on numerical accuracy, MI200); of others we know nothing."""


def kernels_interpreted() -> bool:
    """Whether Triton's interpreter, which runs kernels on the CPU, is switched on."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@lru_cache(maxsize=64)
def _why_not_on(device: torch.device, sixteen_bits: bool = False) -> str | None:
    """Why the kernels cannot run on ``device``, or not on inputs of 16 bits; None where they can."""
    kernels, problem = import_kernels()
    if kernels is None:
        return f"Triton is not usable ({problem})"
    if device.type == "cpu":
        return None if kernels_interpreted() else "Triton has no CPU backend (TRITON_INTERPRET=1 runs its interpreter)"
    if device.type != "cuda":
        return f"the kernels have no support for {device.type} devices"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _OLDEST_GPU:
        name = torch.cuda.get_device_name(device)
        return f"{name} (sm_{capability[0]}{capability[1]}) is older than sm_{_OLDEST_GPU[0]}{_OLDEST_GPU[1]}"
    if torch.version.hip is not None and sixteen_bits:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if arch not in _KEEP_SUBNORMALS:
            return f"the matrix cores of {arch} may take subnormal numbers of 16 bits for zero: norms too small"
    return None


# What torch.compiler.assume_constant_result does, which would import the compiler: asked, not traced.
_why_not_on.__wrapped__._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=64)
def _auto_backend(device: torch.device, sixteen_bits: bool) -> str:
    why_not = _why_not_on(device, sixteen_bits)
    if why_not is None:
        return "triton"
    warnings.warn(f"dpfast takes the reference backend on {device}: {why_not}", DpfastWarning, stacklevel=4)
    return "reference"


def _has_sixteen_bits(dtypes: tuple[torch.dtype, ...]) -> bool:
    return any(dtype.itemsize == 2 for dtype in dtypes)


def choose_backend(backend: str, device: torch.device, *dtypes: torch.dtype) -> str:
    """ "triton" or "reference" for a request, a device and the inputs' dtypes.

    ``DPFAST_BACKEND`` overrides "auto". fp64 goes to the reference, whose cuBLAS keeps fp64.

    Raises:
        BackendError: an unknown name, or a backend that cannot run on this device or dtype.
    """
    source = "backend"
    if backend == "auto" and (wanted := os.environ.get("DPFAST_BACKEND")):
        backend, source = wanted, "DPFAST_BACKEND"
    if backend not in _BACKENDS:
        raise BackendError(f"{source}={backend!r} is not one of {', '.join(map(repr, _BACKENDS))}")
    if backend == "auto":
        if device.type == "cpu" or torch.float64 in dtypes:  # the interpreter is for tests, which ask for it
            return "reference"
        return _auto_backend(device, _has_sixteen_bits(dtypes))
    if backend == "triton":
        double = torch.float64 in dtypes
        why_not = "the kernels have no fp64" if double else _why_not_on(device, _has_sixteen_bits(dtypes))
        if why_not is not None:
            raise BackendError(f"{source}='triton' on {device}: {why_not}. Use backend='auto' or 'reference'.")
    return backend


def backend_report(device: torch.device) -> tuple[str, str]:
    """(the backend that "auto" takes on ``device``, why)."""
    chosen = choose_backend("auto", device)
    if os.environ.get("DPFAST_BACKEND") not in (None, "", "auto"):
        return chosen, "DPFAST_BACKEND says so"
    return chosen, _why_not_on(device) or (
        "the einsum path is faster than an interpreter" if device.type == "cpu" else "Triton runs here"
    )
