"""Runs of a tapped model on copies of it, which leave nothing behind: on fake tensors, or on some of its samples.

What the copies hold and reach, what a forward pass keeps outside of its modules, and the random numbers that it draws
are put back here. What such runs tell is found in ``looks``. Imports ``taps`` and below.
"""

from dpfast.trials import kept
from dpfast.trials.copies import OfCopy, among_all, copy_of, leaf_of, leaves_of_copy, tapped_again, without_graphs
from dpfast.trials.dependence import Dependence
from dpfast.trials.entries import Entries, Path, entries_in, given_whole, not_followed, number_of_entries, put_in
from dpfast.trials.exchanged_samples import exchanged, first_samples, taken, with_one_more
from dpfast.trials.fake_run import (
    ShapeTap,
    Values,
    WithoutGradients,
    Writes,
    calls_in_forward,
    fake_parameters,
)
from dpfast.trials.kept import trained_beside
from dpfast.trials.left_behind import ONE_AT_A_TIME, LeftBehind, nothing_left_behind, taking_back
from dpfast.trials.nobody import Nobody
from dpfast.trials.noise import NOISE, noise_like, stand_ins
from dpfast.trials.outside import put_back
from dpfast.trials.random_numbers import MOST_DRAWS, RandomNumbers, SameAtEverySize, same_random_numbers
from dpfast.trials.same_kernels import attention_written_out, same_kernels
from dpfast.trials.trial import Trial
from dpfast.trials.unsharded import copied_whole

__all__ = [
    "MOST_DRAWS",
    "NOISE",
    "ONE_AT_A_TIME",
    "Dependence",
    "Entries",
    "LeftBehind",
    "Nobody",
    "OfCopy",
    "Path",
    "RandomNumbers",
    "SameAtEverySize",
    "ShapeTap",
    "Trial",
    "Values",
    "WithoutGradients",
    "Writes",
    "among_all",
    "attention_written_out",
    "calls_in_forward",
    "copied_whole",
    "copy_of",
    "entries_in",
    "exchanged",
    "fake_parameters",
    "first_samples",
    "given_whole",
    "kept",
    "leaf_of",
    "leaves_of_copy",
    "noise_like",
    "not_followed",
    "nothing_left_behind",
    "number_of_entries",
    "put_back",
    "put_in",
    "same_kernels",
    "same_random_numbers",
    "stand_ins",
    "taken",
    "taking_back",
    "tapped_again",
    "trained_beside",
    "with_one_more",
    "without_graphs",
]
