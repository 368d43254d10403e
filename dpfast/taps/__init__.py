"""Catching each layer's activations and backprops on their way, and the registry of what makes factors of them.

A tap wraps a module's forward (``tap``), an autograd node behind it catches the gradient (``node``); rules are
registered and found in ``registry``. Imports ``factors`` and below.
"""

from dpfast.taps import registry
from dpfast.taps.activations import Activations
from dpfast.taps.around import sees_its_own_heads
from dpfast.taps.bags import bags_in_rows, picked_or_zeros
from dpfast.taps.broadcast import BroadcastMethod
from dpfast.taps.called import looks_again_at
from dpfast.taps.copies import tapped_again, without_graphs
from dpfast.taps.detached import DetachableParameters
from dpfast.taps.document_look import Told
from dpfast.taps.documents import Documents
from dpfast.taps.followed import Source
from dpfast.taps.gathered import end_model, experts_of, follow_model
from dpfast.taps.gave import Gave, numbers_of, runs_again
from dpfast.taps.held import Held
from dpfast.taps.inputs import keys_of, leaves_of, results_in
from dpfast.taps.kept import trained_beside
from dpfast.taps.layout import (
    Mixed,
    Rows,
    batch_in_front,
    batch_to_front,
    given_layout,
    kind_here,
    layouts,
    tokens_in,
    unfolded,
)
from dpfast.taps.leaves import refuses
from dpfast.taps.left_behind import LeftBehind, taking_back
from dpfast.taps.meeting import Meeting
from dpfast.taps.node import Record, TappedLayer
from dpfast.taps.nodes import Leads, ends_among, is_of_tap, nodes_behind
from dpfast.taps.noise import noise_like
from dpfast.taps.others import looked_at
from dpfast.taps.outside import put_back
from dpfast.taps.own_node import OwnStep, register_node
from dpfast.taps.owned import has_something_to_tap, owned_modules, owned_parameters
from dpfast.taps.passes import forget_compiled_code, in_backward, never_compiled, suspended, taps_suspended
from dpfast.taps.pieces import Pieces
from dpfast.taps.probe import Probe
from dpfast.taps.pulled_back import pulled_back, remaining
from dpfast.taps.random_numbers import same_random_numbers
from dpfast.taps.registry import (
    Rule,
    find_broadcast,
    find_fault,
    find_forward,
    find_likeness,
    find_rule,
    register_batch_dim,
    register_broadcast,
    register_by_row,
    register_fault,
    register_folded,
    register_forward,
    register_function,
    register_grad_sampler,
    register_norm_sampler,
    register_rule,
)
from dpfast.taps.seen import said_by
from dpfast.taps.shared import Shared
from dpfast.taps.tap import Tap, TappedForward, has_hooks

__all__ = [
    "Activations",
    "BroadcastMethod",
    "DetachableParameters",
    "Documents",
    "Gave",
    "Held",
    "Leads",
    "LeftBehind",
    "Meeting",
    "Mixed",
    "OwnStep",
    "Pieces",
    "Probe",
    "Record",
    "Rows",
    "Rule",
    "Shared",
    "Source",
    "Tap",
    "TappedForward",
    "TappedLayer",
    "Told",
    "bags_in_rows",
    "batch_in_front",
    "batch_to_front",
    "end_model",
    "ends_among",
    "experts_of",
    "find_broadcast",
    "find_fault",
    "find_forward",
    "find_likeness",
    "find_rule",
    "follow_model",
    "forget_compiled_code",
    "given_layout",
    "has_hooks",
    "has_something_to_tap",
    "in_backward",
    "is_of_tap",
    "keys_of",
    "kind_here",
    "layouts",
    "leaves_of",
    "looked_at",
    "looks_again_at",
    "never_compiled",
    "nodes_behind",
    "noise_like",
    "numbers_of",
    "owned_modules",
    "owned_parameters",
    "picked_or_zeros",
    "pulled_back",
    "put_back",
    "refuses",
    "register_batch_dim",
    "register_broadcast",
    "register_by_row",
    "register_fault",
    "register_folded",
    "register_forward",
    "register_function",
    "register_grad_sampler",
    "register_node",
    "register_norm_sampler",
    "register_rule",
    "registry",
    "remaining",
    "results_in",
    "runs_again",
    "said_by",
    "same_random_numbers",
    "sees_its_own_heads",
    "suspended",
    "taking_back",
    "tapped_again",
    "taps_suspended",
    "tokens_in",
    "trained_beside",
    "unfolded",
    "without_graphs",
]
