"""Which instructions the CPU's two libraries of matrix products use: by what each may, not by what the processor has.

MKL leaves AVX-512 unused on processors that are not Intel's; oneDNN, which torch carries for convolutions, asks the
processor alone. Either can be told by its environment to use less.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

UNKNOWN, AVX2, AVX512 = "unknown", "AVX2", "AVX-512"
AVX512_IN_HALVES = "AVX-512 in halves"
"""On arithmetic units of 256 bits, each instruction in two halves (AMD's Zen 4): as many numbers a cycle as AVX2."""

_ONEDNN_CAPS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_MKL_CAP = "MKL_ENABLE_INSTRUCTIONS"


@lru_cache(maxsize=1)
def of_processor() -> str:
    """The widest that the processor has; :data:`UNKNOWN` where it has none of them, or does not say."""
    flags = set(_cpuinfo("flags").split())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        # No flag tells how wide the units are. Of AMD's family 25, Zen 3 and 4, only the latter has AVX-512.
        halves = (_cpuinfo("vendor_id"), _cpuinfo("cpu family")) == ("AuthenticAMD", "25")
        return AVX512_IN_HALVES if halves else AVX512
    return AVX2 if {"avx2", "fma"} <= flags else UNKNOWN


def of_onednn() -> str:
    """What oneDNN's products use."""
    cap = next((os.environ[name].upper() for name in _ONEDNN_CAPS if os.environ.get(name)), "")
    return _capped(of_processor(), cap)


def of_mkl() -> str:
    """What MKL's products use."""
    widest = of_processor()
    if widest in (AVX512, AVX512_IN_HALVES) and _cpuinfo("vendor_id") != "GenuineIntel":
        widest = AVX2
    return _capped(widest, os.environ.get(_MKL_CAP, "").upper())


def _capped(instructions: str, cap: str) -> str:
    """``cap``: the widest that a library may use, by its own name; nothing and "ALL" do not limit."""
    if cap in ("", "ALL", "DEFAULT") or cap.startswith(("AVX512", "AVX10")):
        return instructions
    return UNKNOWN if instructions == UNKNOWN or not cap.startswith("AVX2") else AVX2


@lru_cache(maxsize=4)
def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
