"""Packed documents: what is one value in each of them, what the model keeps, and reentrant checkpoints."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.errors import DpfastError, DpfastWarning
from dpfast.testing import relative_error

DIM, UNITS = 8, 6
IDS = (torch.arange(24) // 4).view(2, 12)  # three documents of four tokens in each of two rows
MET = r"units meet|several units|other units' tokens|another unit's tokens"


class MeanBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + 2.0 * grad.mean(1, keepdim=True)


class FailsBackwards(torch.autograd.Function):
    """But once."""

    left = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if FailsBackwards.left == 0:
            raise RuntimeError("no backward pass here")
        return grad


class Model(nn.Module):
    """``way(self, hidden, beside)`` gives what comes to the head."""

    def __init__(self, way):
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(11, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 5)
        self.beside, self.way = nn.Linear(1, DIM), way

    def forward(self, tokens, beside):
        return self.head(self.way(self, torch.tanh(self.inner(self.table(tokens))), beside))


def centred(model, h, x):
    return h + model.beside((x - x.mean(1, keepdim=True)).unsqueeze(-1))


def of_each(model, h, x):
    return h + model.beside(x.unsqueeze(-1).to(h.dtype))


def averaged(model, h, x):
    return h + x.to(h.dtype).mean(1, keepdim=True).unsqueeze(-1)


def masked(model, h, x):
    return h * x.unsqueeze(-1)


AGES = torch.tensor([3.0, 5.0, 2.0, 7.0, 1.0, 4.0])[IDS]
LANGUAGES = torch.tensor([1, 2, 1, 3, 3, 1])[IDS]
SOME = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) < 0.5
PADDED = torch.ones(2, 12).bool()

MEET = {"ages": (centred, AGES), "languages": (averaged, LANGUAGES), "a mask": (averaged, SOME)}
APART = {"ages": (of_each, AGES), "languages": (of_each, LANGUAGES), "a mask": (masked, SOME), "all": (masked, PADDED)}


def loss_of(model, tokens, beside):
    with model.units(IDS, UNITS) as units:
        return units.sums(model(tokens, beside).square().sum(-1)).sum()


def wrapped(way, **options):
    torch.manual_seed(0)
    plain = Model(way).double()
    return plain, dpfast.GradSampleModuleFastGradientClipping(plain, max_grad_norm=0.3, loss_reduction="sum", **options)


@pytest.mark.parametrize("name", MEET)
def test_properties_of_other_documents_are_refused(name):
    way, beside = MEET[name]
    _, model = wrapped(way)
    with pytest.raises(DpfastError, match=MET):
        loss_of(model, torch.randint(0, 11, IDS.shape), beside.double() if way is centred else beside).backward()


@pytest.mark.parametrize("name", APART)
def test_properties_of_each_are_right(name):
    way, beside = APART[name]
    plain, model = wrapped(way)
    tokens = torch.randint(0, 11, IDS.shape)
    loss_of(model, tokens, beside).backward()
    found = {k: p.grad.clone() for k, p in plain.named_parameters() if p.grad is not None}
    model.to_standard_module()
    total = {k: torch.zeros_like(p) for k, p in plain.named_parameters()}
    for unit in range(UNITS):
        of_unit = (unit == IDS).double()
        loss = (plain(tokens, beside).square().sum(-1) * of_unit).sum()
        grads = torch.autograd.grad(loss, list(plain.parameters()), allow_unused=True, materialize_grads=True)
        norm = torch.stack([g.norm() for g in grads]).norm()
        for k, g in zip(total, grads, strict=True):
            total[k] += g * (0.3 / norm).clamp(max=1.0)
    for k, expected in total.items():
        assert relative_error(found.get(k, torch.zeros_like(expected)), expected) <= 1e-5, k


def test_what_is_kept_in_an_attribute_is_looked_at():
    def way(model, h, x):
        model.aux = h.mean(1).square().sum(-1)
        model.own = h.square().sum(-1)
        return h

    tokens = torch.randint(0, 11, IDS.shape)
    for name, fine in (("own", True), ("aux", False)):
        _, model = wrapped(way)
        with model.units(IDS, UNITS) as units:
            losses = units.sums(model(tokens, AGES).square().sum(-1)).sum()
            loss = losses + (units.sums(model._module.own).sum() if fine else model._module.aux.sum())
            if fine:
                loss.backward()
                continue
            with pytest.raises(DpfastError, match=rf"{name}.*several units"):
                loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_meets_backwards_within_a_checkpoint_is_refused(reentrant):
    def inside(h):
        return MeanBackwards.apply(torch.tanh(h))

    def way(model, h, x):
        return checkpoint(inside, of_each(model, h, x), use_reentrant=reentrant)

    plain, model = wrapped(way)
    ages = AGES.double().requires_grad_()
    with pytest.raises(DpfastError, match="the gradient at a token's row of its output changes with another unit's"):
        loss_of(model, torch.randint(0, 11, IDS.shape), ages)
        raise AssertionError("looked at in the forward pass")
    assert ages.grad is None and all(p.grad is None for p in plain.parameters())


def test_a_model_that_is_not_run_backwards_twice_is_on_trust():
    _, model = wrapped(lambda model, h, x: FailsBackwards.apply(h))
    FailsBackwards.left = 0
    with pytest.warns(DpfastWarning, match=r"Model could not be run backwards with some documents exchanged"):
        loss = loss_of(model, torch.randint(0, 11, IDS.shape), AGES)
    FailsBackwards.left = 1
    loss.backward()
