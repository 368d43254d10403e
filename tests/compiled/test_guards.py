"""What a capture takes as it was, and what is refused."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from small_steps import Mlp, Transformer, check, exact_step, mlp_batch, square_losses, token_batch, token_losses
from torch import nn

import dpfast
from dpfast.compiled.graph import Own
from dpfast.errors import BackendError, EscapedGradientError, InputError, StateError, UnsupportedModuleError
from dpfast.testing import relative_error


def compiled(net, losses=square_losses, **options):
    options = {"max_grad_norm": 0.5, "batch_size": 5, "backend": "eager", **options}
    return dpfast.compile_step(net, losses, **options)


class Noisy(Mlp):
    """A dropout that its tests can see."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.layers(self.dropout(x))


def test_another_shape_dtype_flag_or_clipper_is_captured_again():
    torch.manual_seed(0)
    net = Mlp()
    step = compiled(net)
    check(step, net, square_losses, mlp_batch(5))
    net.layers[0].weight.requires_grad_(False)
    check(step, net, square_losses, mlp_batch(5))
    assert net.layers[0].weight.grad is None
    net.layers[0].weight.requires_grad_(True)
    check(step, net, square_losses, mlp_batch(4))
    assert len(step._graphs) == 2
    net.double()
    x, y = (x.double() for x in mlp_batch(5))
    check(step, net, square_losses, (x, y))
    assert len(step._graphs) == 3 and net.layers[0].weight.grad.dtype == torch.float64
    net.float()
    step.norm_clipper = dpfast.ConstantPerLayerClipper(0.1)
    net.zero_grad()
    step(*mlp_batch(5))
    assert len(step._graphs) == 4 and step.clip_factors.shape == (4, 5)
    step.norm_clipper = None
    step.max_grad_norm = 0.05  # read at every step
    check(step, net, square_losses, mlp_batch(5))
    net.eval()
    check(step, net, square_losses, mlp_batch(5))
    assert len(step._graphs) == 5


def test_another_number_of_threads_is_captured_again():
    """Inductor writes it into its loops, and torch's own guards are off: the key has to say everything."""
    net, before = Mlp(), torch.get_num_threads()
    step = compiled(net)
    try:
        for threads, graphs in ((1, 1), (2, 2), (1, 2)):
            torch.set_num_threads(threads)
            check(step, net, square_losses, mlp_batch(5))
            assert len(step._graphs) == graphs
    finally:
        torch.set_num_threads(before)


def test_another_dtype_while_there_are_zeros_in_p_grad():
    """They are views of one block, whose types torch.compile found to differ: it took gradients of parameters along."""
    net = Mlp()
    step = compiled(net)
    step(*mlp_batch(5))
    net.zero_grad(set_to_none=False)
    net.double()
    batch = tuple(x.double() for x in mlp_batch(5))
    exact, _ = exact_step(net, square_losses, batch, step.max_grad_norm)
    step(*batch)
    for name, p in net.named_parameters():
        assert p.grad.dtype == torch.float64 and relative_error(p.grad, exact[name]) < 1e-5, name


def test_the_model_in_another_layout_or_dtype():
    """What torch's guards would have seen."""
    torch.manual_seed(0)
    net = Mlp()
    step = compiled(net, backend="aot_eager")
    check(step, net, square_losses, mlp_batch(5))
    with torch.no_grad():
        weight = net.layers[0].weight
        weight.data = weight.detach().mT.contiguous().mT
    assert not weight.is_contiguous()
    check(step, net, square_losses, mlp_batch(5))
    net.double()
    check(step, net, square_losses, tuple(x.double() for x in mlp_batch(5)))
    assert len(step._graphs) == 3


class Scaled(Mlp):
    """Holds a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(0.5)

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_tensor_that_a_module_holds_may_have_other_values_alone():
    torch.manual_seed(0)
    net = Scaled()
    step = compiled(net, backend="aot_eager")
    check(step, net, square_losses, mlp_batch(5))
    net.scale.fill_(0.25)
    check(step, net, square_losses, mlp_batch(5))
    net.scale.data = torch.tensor(0.25, dtype=torch.float64)
    net.zero_grad()
    with pytest.raises(StateError, match="an attribute of a module, and no buffer"):
        step(*mlp_batch(5))
    assert all(p.grad is None for p in net.parameters())


class Distilled(Mlp):
    """With a teacher in a list, so that it is no child."""

    def __init__(self):
        super().__init__()
        self.teachers = [Mlp().requires_grad_(False)]

    def forward(self, x):
        return self.layers(x) - self.teachers[0](x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_parameters_of_a_model_that_is_no_child_are_inputs(backend):
    torch.manual_seed(0)
    net, batch = Distilled(), mlp_batch(5)
    step = compiled(net, backend=backend)

    def is_the_eager_step():
        eager = dpfast.GradSampleModuleFastGradientClipping(copy.deepcopy(net), max_grad_norm=0.5, loss_reduction="sum")
        square_losses(eager, *batch).sum().backward()
        net.zero_grad()
        step(*batch)
        for p, expected in zip(net.parameters(), eager.parameters(), strict=True):
            assert type(p.grad) is torch.Tensor and relative_error(p.grad, expected.grad) < 1e-6

    is_the_eager_step()
    with torch.no_grad():
        for p in net.teachers[0].parameters():  # a moving average, say
            p.mul_(0.5).add_(0.1)
    is_the_eager_step()
    assert len(step._graphs) == 1
    assert all(p.grad is None for p in net.teachers[0].parameters())
    net.teachers[0].requires_grad_(True)
    net.zero_grad()
    with pytest.raises(StateError, match="trained since"):
        step(*batch)
    with pytest.raises(UnsupportedModuleError, match=r"a gradient reached a tensor .* kept in a list.* freeze it"):
        compiled(net, backend=backend)(*batch)
    assert all(p.grad is None for p in net.parameters())


def test_dropout_is_fresh_in_each_step_and_off_in_eval():
    torch.manual_seed(0)
    net = Noisy()
    step, batch = compiled(net), mlp_batch(5)

    def norms():
        net.zero_grad()
        step(*batch)
        return step.norms

    one, two = norms(), norms()
    assert not torch.equal(one, two) and net.seen == 2, "learning and capture leave buffers alone"
    torch.manual_seed(3)
    three = norms()
    torch.manual_seed(3)
    assert torch.equal(three, norms())
    net.eval()
    assert torch.equal(norms(), norms())


def test_autocast():
    torch.manual_seed(0)
    net = Mlp()
    step, batch = compiled(net), mlp_batch(5)
    check(step, net, square_losses, batch)
    exact = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        step(*batch)
    assert len(step._graphs) == 2
    for p, g in zip(net.parameters(), exact, strict=True):
        assert p.grad.dtype == torch.float32 and 0 < (p.grad - g).norm() < 0.05 * g.norm()


class Reads(Mlp):
    def forward(self, x):
        scale = x.abs().max().item()  # the line
        return self.layers(x / scale)


class Branches(Mlp):
    def forward(self, x):
        if (x > 0).any():  # the line
            return self.layers(x)
        return self.layers(-x)


@pytest.mark.parametrize("kind", [Reads, Branches])
def test_a_model_that_reads_values_is_refused_with_the_line(kind):
    with pytest.raises(UnsupportedModuleError, match=r"reads a tensor's values at .*test_guards.py:\d+, `.*# the line"):
        compiled(kind())(*mlp_batch(5))


class Replaces(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = self.mean * 0.9
        return self.layers(x)


def test_a_forward_that_replaces_a_buffer_is_refused():
    with pytest.raises(UnsupportedModuleError, match="in the place of buffer mean"):
        compiled(Replaces())(*mlp_batch(5))


def penalty(model, x, y):
    return square_losses(model, x, y) + model.layers[0].weight.square().sum()


def test_gradients_that_escape_are_found_at_capture():
    net = Mlp()
    with pytest.raises(EscapedGradientError, match=r"layers\.0\.weight"):
        compiled(net, penalty)(*mlp_batch(5))
    with pytest.raises(UnsupportedModuleError, match=r"reaches net\.layers\.\d.* by a closure"):
        compiled(net, lambda model, x, y: square_losses(net, x, y) + 0.0 * square_losses(model, x, y))(*mlp_batch(5))
    assert all(p.grad is None and not p._backward_hooks for p in net.parameters())
    square_losses(net, *mlp_batch(5)).sum().backward()  # the model is free
    with pytest.raises(StateError, match="no private step has left"):
        compiled(net)(*mlp_batch(5))


def test_a_sum_that_is_replaced_between_two_steps_is_refused():
    """One of several was taken for clipped, as the others were."""
    net = Mlp()
    step = compiled(net)
    step(*mlp_batch(5))
    net.layers[0].bias.grad = 100 * net.layers[0].bias.grad
    with pytest.raises(StateError, match="no private step has left"):
        step(*mlp_batch(5))


def test_losses_that_mix_samples_are_refused():
    def mixes(model, x, y):
        z = F.normalize(model(x))
        return F.cross_entropy(z @ z.T, torch.arange(len(x)), reduction="none")

    with pytest.raises(UnsupportedModuleError, match="product of all pairs"):
        compiled(Mlp(), mixes)(*mlp_batch(5))


class Mixes(Mlp):
    def forward(self, x):
        return self.layers(x - x.mean(0))


@pytest.mark.parametrize("first", [1, 5])
def test_a_model_that_mixes_samples_is_refused_once_samples_tell(first):
    step = compiled(Mixes())
    with pytest.raises(UnsupportedModuleError):
        step(*mlp_batch(first))
        step(*mlp_batch(5))


def test_what_does_not_fit():
    net = Mlp()
    step = compiled(net, chunks=False)
    x, y = mlp_batch(5)
    for mask in (torch.ones(4, dtype=torch.bool), torch.ones(5), torch.ones(5, 1, dtype=torch.bool)):
        with pytest.raises(InputError, match=r"valid .* one entry a sample, \(5,\)"):
            step(x, y, valid=mask)
    with pytest.raises(InputError, match="batch of 6 samples is larger than batch_size=5, and chunks=False"):
        step(*mlp_batch(6))
    with pytest.raises(InputError, match=r"\[\(5, 6\), \(4, 3\)\] must all have its samples in their first"):
        step(x, y[:4])
    with pytest.raises(InputError, match="batch_size=0"):
        compiled(net, batch_size=0)
    with pytest.raises(UnsupportedModuleError, match="BatchNorm"):
        compiled(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(StateError, match="the module itself"):
        compiled(dpfast.GradSampleModule(Mlp()))
    with pytest.raises(StateError, match="no step has run"):
        step.norms  # noqa: B018


def test_without_a_compiler(monkeypatch):
    def fails(*_):
        from torch._inductor.exc import InvalidCxxCompiler

        raise InvalidCxxCompiler

    net = Mlp()
    with pytest.raises(BackendError, match=r"cannot compile here.*Inductor needs a C\+\+ compiler"):
        compiled(net, backend=fails)(*mlp_batch(5))
    check(compiled(net), net, square_losses, mlp_batch(5))


def test_a_batch_as_long_as_its_sequences_by_accident():
    """The graph's size, or the first draw's, equals T or D: nothing goes by that."""
    torch.manual_seed(0)
    for size, first in ((5, 3), (8, 5), (6, 5)):  # T = 5, D = 8
        net = Transformer()
        step = compiled(net, token_losses, batch_size=size)
        for n in (first, size):
            check(step, net, token_losses, token_batch(n))


def test_strides_are_none_of_the_graphs_business():
    torch.manual_seed(0)
    net = Mlp()
    step = compiled(net)
    x, y = torch.randn(5, 9), torch.randn(3, 5)
    for batch in (mlp_batch(5), (x[:, ::2].repeat(1, 2)[:, :6], y.T), (x[:, 1:7], y.T.clone())):
        check(step, net, square_losses, batch)
    assert len(step._graphs) == 1
    net.layers[0].weight.data = torch.randn(6, 8).T
    check(step, net, square_losses, mlp_batch(5))


def test_what_a_model_consists_of_is_in_torchs_own_order():
    for net in (Transformer(), nn.Sequential(Mlp(), Noisy(), nn.ModuleList([Transformer()] * 2))):
        own = Own.of(net)
        for found, theirs in ((own.modules, net.modules()), (own.parameters, net.parameters())):
            assert all(x is y for x, y in zip(found, theirs, strict=True))
        assert all(x is y for x, y in zip(own.buffers, net.buffers(), strict=True))


@pytest.mark.parametrize(
    "mixing",
    [
        lambda m, x, y: square_losses(m, x, y) / square_losses(m, x, y).detach().mean(),
        lambda m, x, y: square_losses(m, x.roll(1, 0), y),
        lambda m, x, y: square_losses(m, x.flip(0), y) + square_losses(m, x, y),
        lambda m, x, y: square_losses(m, x - x.mean(0), y),
    ],
)
@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_loss_that_depends_on_other_samples_is_refused(mixing, n):
    net = Mlp()
    step = compiled(net, mixing)
    with pytest.raises(InputError, match="changes with the other samples"):
        step(*mlp_batch(n))
    assert all(p.grad is None for p in net.parameters())


def test_a_loss_that_is_first_seen_with_one_sample_is_looked_at_again():
    net = Mlp()
    step = compiled(net, lambda m, x, y: square_losses(m, x, y) / square_losses(m, x, y).detach().sum())
    step(*mlp_batch(1))
    net.zero_grad()
    with pytest.raises(InputError, match="changes with the other samples"):
        step(*mlp_batch(4))


@pytest.mark.parametrize("gone", [False, True])
def test_what_a_step_has_left_is_watched_when_it_is_gone(gone):
    """A step may be a local variable, and the model's own backward pass comes after it."""
    from dpfast.opacus import DPOptimizerFast

    net, (x, y) = Mlp(), mlp_batch(5)
    step = compiled(net)
    step(x, y)
    sgd = torch.optim.SGD(net.parameters(), lr=1.0)
    optimizer = DPOptimizerFast(sgd, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=5)
    if gone:
        del step
        gc.collect()
    square_losses(net, x, y).sum().backward()
    with pytest.raises(StateError, match="clips nothing"):
        optimizer.step()
