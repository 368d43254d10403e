"""In which dtype sums are taken, what its arithmetic may lose, and what must not round it further."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from itertools import starmap

import torch
from torch import Tensor

from dpfast.arithmetic.tracing import is_traced

_NOTHING = nullcontext()


def exact_arithmetic() -> AbstractContextManager[object]:
    """Autocast off: our own arithmetic must not be rounded to 16 bits."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):  # asked several times a layer
        return _NOTHING
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    stack = ExitStack()
    for device in on:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def accumulating_dtype(*tensors: Tensor) -> torch.dtype:
    """fp64 where any of the tensors is fp64, else fp32: what sums are taken in and, unless asked otherwise, returned
    in."""
    for t in tensors:
        if t.dtype is torch.float64:
            return torch.float64
    return torch.float32


def towards_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, no entry larger than it was: what a clip factor is rounded with, subnormal ones included."""
    if x.dtype.itemsize <= dtype.itemsize:
        return x.to(dtype)
    if is_traced() and (x.dtype, dtype) == (torch.float64, torch.float32):
        return _cut(x)
    rounded = x.to(dtype)
    too_large = rounded.abs() > x.abs()
    bits = rounded.view(_BITS[dtype.itemsize])
    return torch.add(bits, too_large, alpha=-1).view(dtype)  # the number before, of either sign


def _cut(x: Tensor) -> Tensor:
    """The same in a graph, where a compiler may take a number that is rounded and compared with what it was for the
    same number: all that fp32 has no room for is cut off before, so that the rounding is none."""
    kept = (x.view(torch.int64) & -(2**29)).view(torch.float64)  # 23 of the 52 bits behind the first
    below_normal = (x * 2.0**149).trunc() * 2.0**-149
    largest = torch.finfo(torch.float32).max
    cut = torch.where(x.abs() < 2.0**-126, below_normal, kept).clamp(-largest, largest)
    return torch.where(x.isfinite(), cut, x).to(torch.float32)


_BITS = {2: torch.int16, 4: torch.int32}


_OF_ALL = (("generic", "all"), ("mkldnn", "all"))  # an operator may say otherwise; what could be reduced counts
_OF_PRODUCTS = (*_OF_ALL, ("mkldnn", "matmul"), ("cuda", "matmul"))
_OF_CONVOLUTIONS = (*_OF_ALL, ("mkldnn", "conv"))
_ENVIRONMENT = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_LOST = {"tf32": 2.0**-9, "f16": 2.0**-9, "high": 2.0**-9}
_EXACT = frozenset({"", "ieee", "none", "highest", "strict"})
_switch = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: "")  # torch before 2.9 has none
"""``torch.backends.….fp32_precision``, whose properties take ten times as long: this is asked several times a layer."""


_precision = getattr(torch._C, "_get_float32_matmul_precision", torch.get_float32_matmul_precision)


def reduced_products() -> float:
    """The relative error of one fp32 product that a global switch lets run in TF32 or bf16 operands; 0 where none does.

    Whatever says so counts, for any device: torch's new switches and its old one, and oneDNN's environment.
    """
    said = {_torch_precision(), *starmap(_switch, _OF_PRODUCTS)}
    if said <= _EXACT:
        return _environment()
    return max(*map(_lost, said), _environment())


def reduced_convolutions() -> bool:
    """The same for convolutions on a CPU."""
    return not _EXACT.issuperset(starmap(_switch, _OF_CONVOLUTIONS)) or _environment() > 0.0


def _lost(value: str) -> float:
    return 0.0 if value in _EXACT else _LOST.get(value, 2.0**-7)


def _torch_precision() -> str:
    try:
        return _precision()
    except RuntimeError:  # the new switches have been used as well, and only they can be asked
        return ""


@lru_cache(maxsize=1)
def _environment() -> float:
    """oneDNN reads it once, too."""
    return max(_lost(os.environ.get(name, "").lower()) for name in _ENVIRONMENT)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """cuDNN, which takes fp32 convolutions in TF32 unless told otherwise, takes them in fp32."""
    cudnn = torch.backends.cudnn
    try:
        before, switch = cudnn.allow_tf32, (cudnn, "allow_tf32")
        cudnn.allow_tf32 = False
    except RuntimeError:  # the new switch is in use, and only that can be
        before, switch = cudnn.conv.fp32_precision, (cudnn.conv, "fp32_precision")  # type: ignore[attr-defined]
        cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # torch's stubs lack it
    try:
        yield
    finally:
        setattr(*switch, before)


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of the dtype that accumulates."""
    return 2.0**-53 if dtype == torch.float64 else 2.0**-24


def smallest_normal(dtype: torch.dtype) -> float:
    """The error of one operation that underflows, hardware that flushes subnormals to zero included."""
    return 2.0**-1022 if dtype == torch.float64 else 2.0**-126
