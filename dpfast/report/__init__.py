"""What dpfast says of a model and of the machine. Imports ``modes`` and below."""

from dpfast.report.explain import explain
from dpfast.report.info import info
from dpfast.report.measure import Run
from dpfast.report.timing import clock, copy_bandwidth, gemm_rate, milliseconds

__all__ = [
    "Run",
    "clock",
    "copy_bandwidth",
    "explain",
    "gemm_rate",
    "info",
    "milliseconds",
]
