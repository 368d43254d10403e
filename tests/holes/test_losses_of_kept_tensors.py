"""Losses of tensors that the model's forward pass made, and that are not in what it returns or not to be found there:
kept in an attribute or by a hook, in an object with slots, by a function that is returned."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kept_tensors import APART, GIVES, MIX, TARGETS, C, D, K, N, Net, Slots, assert_as_the_loop, given, network, wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.testing import clipped_sum, loop_over_samples, relative_error

STEPS = 3


def ways(losses, *usual):
    """All losses of what is kept in an attribute or given by a function; the usual ones of what comes otherwise."""
    return [(how, gives) for gives in GIVES for how in (losses if gives in ("attribute", "closure") else usual)]


@pytest.mark.parametrize("mode", ["grad_sample", "one pass", "two passes"])
@pytest.mark.parametrize(("how", "gives"), ways(MIX, "spread"))
def test_samples_that_meet(how, gives, mode):
    model = network(gives)
    loss = MIX[how](*given(wrapped(model, mode), torch.randn(N, D)))
    with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
        loss.backward()
    assert all(p.grad is None and getattr(p, "grad_sample", None) is None for p in model.parameters())


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize(("how", "gives"), ways(APART, "squares", "distilled"))
def test_samples_apart(how, gives):
    """In steps that are looked at, and in others."""
    model = network(gives)
    plain, module = copy.deepcopy(model), wrapped(model)
    for _ in range(STEPS):
        x = torch.randn(N, D)
        module.zero_grad()
        if how == "squares":  # the targets are samples' own
            exact = loop_over_samples(plain, lambda m, x, t: _squares(*given(m, x), t), x, TARGETS)
        else:
            exact = loop_over_samples(plain, lambda m, x: APART[how](*given(m, x)), x)
        APART[how](*given(module, x)).backward()
        for name, total in clipped_sum(exact, C).items():
            own = model.get_parameter(name).grad
            assert relative_error(torch.zeros_like(total) if own is None else own, total) < 1e-4


def _squares(h, y, targets):
    return y.square().sum() + F.mse_loss(h, targets.to(h), reduction="sum")


def test_hard_examples():
    h, y = given(wrapped(network()), torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match="topk ranks the samples"):
        (y.sum() + h.square().sum(1).topk(2).values.sum()).backward()


def test_a_mixing_forward_that_gives_slots():
    class Mixing(Net):
        def forward(self, x):
            y = self.last(self.features(x))
            return Slots(y, (y - y.mean(0)) / y.std(0))

    module = wrapped(Mixing())
    with pytest.raises(UnsupportedModuleError, match="is no sum of samples' own"):
        module(torch.randn(N, D)).logits.pow(3).sum().backward()


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("mixes", [False, True])
def test_two_views(mixes):
    """A part of the loss is made between the forward passes, which is neither's."""
    module, plain = wrapped(network()), network()

    def loss(model, x):
        h, _ = given(model, x)
        part = (h - mixes * h.mean(0)).square().sum(1).sqrt().sum()
        other, y = given(model, x + 0.1)
        return part + (h * other).sum(1).square().sum() + y.square().sum()

    for _ in range(STEPS):
        x = torch.randn(N, D)
        if mixes:
            with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
                loss(module, x).backward()
            return
        module.zero_grad()
        exact = clipped_sum(loop_over_samples(plain, loss, x), C)
        loss(module, x).backward()
        for name, total in exact.items():
            assert relative_error(module._module.get_parameter(name).grad, total) < 1e-4


def test_hooks_and_kept_gradients_see_one_backward_pass():
    h, y = given(wrapped(network()), torch.randn(N, D))
    seen = []
    h.retain_grad()
    h.register_hook(seen.append)
    (y.sum() * 0 + h.square().sum()).backward()
    assert len(seen) == 1
    assert torch.equal(h.grad, 2 * h.detach())


def test_hooks_of_the_model_see_one_backward_pass_where_dimensions_are_told():
    module = wrapped(Square())
    y, h = module(torch.randn(N, D)), module._module.hidden
    kept, seen = module._module.twice, []
    h.retain_grad()
    h.register_hook(seen.append)
    (y.sum() * 0 + kept.square().sum()).backward()
    assert len(seen) == 1
    assert torch.equal(h.grad, 8 * h.detach())


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
def test_a_number_that_is_kept():
    """A loss of the samples' may be added, and no root of it."""

    class Aux(Net):
        def forward(self, x):
            y = super().forward(x)
            self.aux = self.hidden.square().sum()
            return y

    module = wrapped(Aux())
    (module(torch.randn(N, D)).square().sum() + module._module.aux).backward()
    module = wrapped(Aux())
    y = module(torch.randn(N, D))
    with pytest.raises(UnsupportedModuleError, match=r"\(6, 7\), samples meet in the loss"):
        (y.square().sum() + module._module.aux.sqrt()).backward()


class Folded(Net):
    """Keeps rows of several positions, and as many numbers in each as the batch has samples."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(7, N)

    def forward(self, x):
        hidden = self.features(x)
        self.rows, self.scores = hidden.reshape(-1, 7), self.router(hidden).flatten(0, 1)
        return self.last(self.rows.view(*hidden.shape))


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("kept", ["rows", "scores"])
@pytest.mark.parametrize("mixes", [False, True])
def test_samples_in_no_dimension_of_their_own(kept, mixes):
    model = Folded()
    plain, module = copy.deepcopy(model), wrapped(model)

    def loss(m, x):
        y, rows = m(x), getattr(getattr(m, "_module", m), kept)
        used = rows.softmax(1).mean(0).square() * 50 if mixes else rows.softmax(1).square()
        return y.square().sum() + used.sum()

    x = torch.randn(N, 3, D)
    if mixes:
        with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
            loss(module, x).backward()
        return
    assert_as_the_loop(module, plain, loss, x)


def test_samples_in_no_dimension_that_is_known_are_taken_on_trust():
    """What is in a reentrant checkpoint is in no graph."""

    class Rows(Net):
        def forward(self, x):
            hidden = checkpoint(lambda x: self.features(x).reshape(-1, 7), x.requires_grad_(), use_reentrant=True)
            self.rows = hidden * 2
            return self.last(hidden.view(*x.shape[:2], 7))

    module = wrapped(Rows())
    y = module(torch.randn(N, 3, D))
    with pytest.warns(DpfastWarning, match="taken on trust") as said:
        (y.square().sum() + module._module.rows.square().sum()).backward()
    assert said[0].filename == __file__
    assert module.get_norm_sample().shape == (N,)


class Square(Net):
    """As wide as the batch is long; what it keeps may have the samples in either dimension."""

    def __init__(self, turned=False):
        super().__init__()
        self.middle, self.last, self.turned = nn.Linear(7, N), nn.Linear(N, K), turned

    def forward(self, x):
        hidden = self.features(x)
        self.hidden = hidden.t() if self.turned else hidden
        self.twice = hidden * 2
        return self.last(hidden)


class Dispatched(Net):
    """As if there were as many experts as samples, each of which has rows of several."""

    def forward(self, x):
        hidden = self.features(x)
        rows = hidden.flatten(0, 1).view(4, -1, 7).transpose(0, 1) * 2
        self.of_experts = lambda: rows
        return self.last(hidden)


def test_another_dimension_as_long_as_the_batch():
    module = wrapped(Dispatched())
    y = module(torch.randn(N, 4, D))
    with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
        (y.square().sum() + 50 * module._module.of_experts().softmax(1).square().sum()).backward()


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("turned", [False, True])
def test_as_wide_as_the_batch(turned):
    for dim in (0, 1):
        module = wrapped(Square(turned))
        y, h = module(torch.randn(N, D)), module._module.hidden
        loss = y.square().sum() + 50 * (h - h.mean(dim, keepdim=True)).square().mean(dim).rsqrt().sum()
        if dim == turned:
            with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
                loss.backward()
        else:
            loss.backward()


class OfParameters(Net):
    """Keeps what each sample gets of a parameter alone, or what a parameter makes of it."""

    def __init__(self, width, keep):
        super().__init__()
        self.own, self.keep = nn.Parameter(torch.linspace(0.5, 1.5, width)), keep

    def forward(self, x):
        y = super().forward(x)
        self.kept = self.keep(self.own, y)
        return y


OF_PARAMETERS = {  # and the samples' dimension
    "a number": (lambda own, y: own.square().sum().expand(len(y)), 0),
    "columns": (lambda own, y: own.unsqueeze(1).expand(-1, len(y)), 1),
    "a layer": (lambda own, y: F.linear(y * torch.linspace(0.5, 1.5, N).to(y).view(N, 1, 1), own[:K].unsqueeze(0)), 1),
}


@pytest.mark.filterwarnings("error::dpfast.errors.DpfastWarning")
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize(("what", "width"), [("a number", 3), ("a number", N), ("columns", N), ("a layer", N)])
def test_kept_of_parameters(what, width, mixes):
    """As long as the batch in another dimension than the samples', too."""
    keep, dim = OF_PARAMETERS[what]
    torch.manual_seed(0)
    model = OfParameters(width, keep)
    plain, module = copy.deepcopy(model), wrapped(model)

    def loss(m, x):
        y = m(x)
        kept = getattr(m, "_module", m).kept.movedim(dim, 0).reshape(len(x), -1)
        used = kept.sum(0).square() if mixes else y.square().sum(1) * kept.sum(1).square()
        return y.square().sum() + used.sum()

    x = torch.randn(N, D)
    if mixes:
        with pytest.raises(UnsupportedModuleError, match="samples meet in the loss"):
            loss(module, x).backward()
        return
    assert_as_the_loop(module, plain, loss, x)
