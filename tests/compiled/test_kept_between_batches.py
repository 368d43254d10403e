"""What a graph would take along from one batch to the next, and what looks must leave as it was."""

import copy
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_steps import Mlp, check, mlp_batch, square_losses
from torch import nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer

import dpfast
from dpfast.errors import InputError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

N = 5
CENTER = torch.zeros(3)


def compiled(net, losses=square_losses, **options):
    return dpfast.compile_step(net, losses, **{"max_grad_norm": 0.5, "batch_size": N, "backend": "eager", **options})


def scaled_in_place(model, x, y):
    return square_losses(model, x.mul_(0.5), y)


@pytest.mark.parametrize("n", [N, 3])
def test_losses_may_write_to_their_batch(n):
    """A look is a run more, and must not be one on what the last one has written."""
    net = Mlp()
    step = compiled(net, scaled_in_place)
    for _ in range(9):  # looks are at the first, the second and the eighth
        x, y = mlp_batch(n)
        expected, net_alone = x * 0.5, copy.deepcopy(net)
        net.zero_grad()
        given = x.clone()
        step(given, y)
        alone = compiled(net_alone)
        alone(expected, y)
        assert torch.allclose(step.norms, alone.norms, rtol=1e-5)
        assert torch.equal(given, expected) or (n < N and torch.equal(given, x))


class Holder:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "wrap", [Holder, lambda x: UserDict(x=x), lambda x: x.cpu().numpy(), lambda x: {"x": Holder(x)}]
)
def test_what_hides_tensors_is_refused(wrap):
    """One that is used again for the next batch would bring the first one's samples into every sum."""
    step = compiled(Mlp(), lambda model, batch, y: model(y).sum(1))
    x, _ = mlp_batch(N)
    with pytest.raises(InputError, match=r"dict\(batch\)"):
        step(wrap(x), x)


def test_numbers_words_and_none_are_no_samples():
    net = Mlp()
    step = compiled(net, lambda model, x, y, scale, how, none: square_losses(model, x * scale, y))
    x, y = mlp_batch(N)
    step(x, y, 0.5, "mean", None)
    step(x, y, 2.0, "mean", None)
    assert len(step._graphs) == 2
    step(x, y, 2.0, range(3), np.True_)


class Centred(nn.Module):
    """A criterion that keeps a mean of what it sees (Caron et al. 2021, DINO, equation 4)."""

    def __init__(self):
        super().__init__()
        self.center = nn.Buffer(torch.zeros(3))

    def forward(self, output, y):
        losses = (output - self.center - y).square().sum(1)
        with torch.no_grad():
            self.center.mul_(0.9).add_(0.1 * output.mean(0))
        return losses


def by_closure():
    criterion = Centred()
    return lambda model, x, y: criterion(model(x), y), r"criterion\.center"


def by_global():
    def losses(model, x, y):
        output = model(x)
        found = (output - CENTER - y).square().sum(1)
        CENTER.view(-1).lerp_(output.detach().mean(0), 0.1)
        return found

    return losses, "CENTER"


@pytest.mark.parametrize("made", [by_closure, by_global])
def test_writes_to_a_stranger_are_refused_by_name(made):
    """With more samples than the graph has, one would change the losses of others in the same step."""
    losses, name = made()
    net = Mlp()
    step = compiled(net, losses, batch_size=2)
    with pytest.raises(UnsupportedModuleError, match=f"write to {name} .*buffer of the model"):
        step(*mlp_batch(N))
    assert all(p.grad is None for p in net.parameters())


def test_strangers_are_read_as_they_are_now():
    """A teacher whose weights follow the model's between steps."""
    teacher, net = Mlp(), Mlp()
    step = compiled(net, lambda model, x: (model(x) - teacher(x).detach()).square().sum(1))
    x, _ = mlp_batch(N)
    for _ in range(2):
        step(x)
        now = copy.deepcopy(teacher)(x).detach()
        losses = loop_over_samples(net, lambda model, x, now: (model(x) - now).square().sum(), x, now)
        assert relative_error(step.norms, norms_of(losses)) <= 1e-5
        with torch.no_grad():
            for p in teacher.parameters():
                p.mul_(0.5)


class Drawing(Mlp):
    def __init__(self, draws):
        super().__init__()
        self.generator, self.draws = torch.Generator(), draws

    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.generator) if self.draws else 0.0
        return self.layers(x + noise)


@pytest.mark.on_cpu
def test_generators():
    check(compiled(net := Drawing(False)), net, square_losses, mlp_batch(N))
    with pytest.raises(UnsupportedModuleError, match=r"a torch\.Generator of its own"):
        compiled(Drawing(True))(*mlp_batch(N))


@pytest.mark.on_cpu
def test_generators_of_a_torch_whose_graphs_hold_none(monkeypatch):
    """As 2.11 is."""
    create = PythonKeyTracer.create_arg

    def create_arg(self, a):
        if isinstance(a, torch._C.Generator):
            raise NotImplementedError(f"argument of type: {type(a)}")
        return create(self, a)

    monkeypatch.setattr(PythonKeyTracer, "create_arg", create_arg)
    with pytest.raises(UnsupportedModuleError, match=r"a torch\.Generator of its own.*leave generator= out"):
        compiled(Drawing(True))(*mlp_batch(N))


@pytest.mark.on_cpu  # on a GPU an index out of range is the end of the process's work there
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_operation_fails_in_a_graph_that_has_run(backend):
    """Its own error, and the next step is as if nothing had been."""
    net = nn.Linear(6, 3)
    losses = lambda model, x, y: F.cross_entropy(model(x), y, reduction="none")  # noqa: E731
    step = compiled(net, losses, backend=backend)
    x, y = torch.randn(N, 6), torch.randint(0, 3, (N,))
    for _ in range(4):
        check(step, net, losses, (x, y))
    net.zero_grad()
    with pytest.raises(IndexError, match="out of bounds"):
        step(x, y + 3)
    assert net.weight.grad is None
    check(step, net, losses, (x, y))


def test_a_model_that_torch_compiles_already():
    with pytest.raises(InputError, match="_orig_mod"):
        compiled(torch.compile(Mlp()))
