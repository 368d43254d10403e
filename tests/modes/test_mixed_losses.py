"""Losses in which samples meet behind the model, and what they say."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpfast
from dpfast.errors import StateError, UnsupportedModuleError
from dpfast.modes import counts

D, T = 4, 5


def targets(n, short=0, last=0, **_):
    found = torch.randint(0, 5, (n, T))
    found[0, T - short :] = found[:, T - last :] = -100
    return found


COUNTED = {  # whether it is refused where a sample has two targets less; and the options
    "ignored": (True, {"short": 2}),
    "smoothed": (True, {"short": 2, "label_smoothing": 0.1}),
    "weights of classes": (True, {"weight": torch.arange(1.0, 6.0)}),
    "as many each": (False, {"last": 1}),
    "all": (False, {}),
    "summed": (False, {"short": 2, "reduction": "sum"}),
    "one sample": (False, {"short": 2, "n": 1}),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("in_rows", [True, False])
@pytest.mark.parametrize("name", COUNTED)
def test_a_mean_over_unequal_numbers_of_targets_is_refused_in_every_batch(name, in_rows, batch_first):
    """The first batch has equally many, so forward passes with a sample exchanged have shown nothing."""
    torch.manual_seed(0)
    refused, options = COUNTED[name]
    wrapped = dpfast.GradSampleModuleFastGradientClipping(
        nn.Sequential(nn.Embedding(9, D), nn.Linear(D, 5)), batch_first=batch_first
    )

    def step(n=3, **options):
        labels = targets(n, **options) if batch_first else targets(n, **options).T
        logits = wrapped(torch.randint(0, 9, labels.shape))
        more = {k: options[k] for k in ("weight", "label_smoothing", "reduction") if k in options}
        if in_rows:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **more) / 4.0
        return F.cross_entropy(logits.transpose(1, 2), labels, **more) / 4.0

    for _ in range(2):
        step().backward()
    if not refused:
        step(**options).backward()
        return
    with pytest.raises(UnsupportedModuleError, match="take reduction='none', each sample's own mean"):
        step(**options).backward()
    wrapped.disable_hooks()
    step(**options).backward()  # an ordinary gradient may be of the batch


def test_a_mean_of_cross_entropies_is_not_captured(monkeypatch):
    """Whether it leaves targets out is read, of each batch that a replay may have."""
    wrapped = dpfast.GradSampleModuleFastGradientClipping(nn.Linear(5, 3), max_grad_norm=1.0)
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    monkeypatch.setattr(counts, "in_cuda_graph", lambda: True)
    with pytest.raises(StateError, match=r"captured in a CUDA graph.*reduction='none'"):
        F.cross_entropy(wrapped(x), y).backward()
    F.cross_entropy(wrapped(x), y, reduction="none").mean().backward()
    ((wrapped(x) * torch.eye(4, 3)).sum() / 3).backward()  # a number of Python's
    with pytest.raises(StateError, match="captured in a CUDA graph"):
        wrapped(x)[y > 0].mean().backward()
    F.cross_entropy(nn.Linear(5, 3)(x), y).backward()  # an ordinary one
