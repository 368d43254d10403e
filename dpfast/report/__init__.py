"""What dpfast says of a model and of the machine. Imports ``modes`` and below."""

from dpfast.report.explain import explain
from dpfast.report.info import info

__all__ = [
    "explain",
    "info",
]
