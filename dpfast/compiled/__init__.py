"""The whole private step as one graph: captured through the same taps, rules and factors, compiled once.

``step`` is what a user calls, ``capture`` makes the graph, ``mode`` is the eager mode as it runs inside one,
``batches`` pads and masks. Imports ``modes`` and below.
"""

from dpfast.compiled.batches import Batch, num_samples, padded
from dpfast.compiled.step import compile_step

__all__ = ["Batch", "compile_step", "num_samples", "padded"]
