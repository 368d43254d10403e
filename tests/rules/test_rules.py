"""What rules must do beyond the table: memory, ambiguity, torch's random numbers, Opacus's layers, refusals."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from families import Free
from torch import nn

import dpfast
from dpfast.errors import DpfastWarning, InputError, UnsupportedModuleError
from dpfast.taps import registry
from dpfast.testing import check_rule, clipped_sum, loop_over_samples, norms_of, relative_error

ROOT = Path(__file__).resolve().parents[2]


def clipping(model, **options):
    return dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum", **options)


def test_example_of_the_guide():
    code = (ROOT / "docs" / "writing-a-rule.md").read_text().split("```python")[1].split("```")[0]
    names = {}
    exec(compile(code, "writing-a-rule.md", "exec"), names)
    registry.RULES.pop(names["Rescaled"])


def test_a_fault_that_is_registered_late_is_found():
    class Odd(nn.Linear):
        pass

    assert registry.find_fault(Odd(2, 2)) is None
    registry.register_fault(Odd)(lambda layer: "is odd")
    try:
        assert registry.find_fault(Odd(2, 2)) == "is odd"
    finally:
        registry._FAULTS.pop()
        registry._faults_of.cache_clear()


# --- embeddings ---


def test_large_table_needs_little_memory():
    """V = 1,000,000, D = 64, N = 256, T = 64: less than three times the backprops plus the weight's gradient."""
    resident = []

    def watch():
        page = Path("/proc/self/statm")
        while not done.is_set():
            resident.append(int(page.read_text().split()[1]) * 4096)
            done.wait(0.002)

    weight = torch.zeros(1_000_000, 64).requires_grad_()
    layer = nn.Embedding(1, 64)
    layer.num_embeddings, layer.weight = 1_000_000, nn.Parameter(weight.detach())
    wrapped = clipping(layer)
    output = wrapped(torch.randint(0, 1_000_000, (256, 64)))
    limit = 3 * 4 * (output.numel() + layer.weight.numel())
    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    output.sum().backward()
    done.set()
    watcher.join()
    assert max(resident) - resident[0] < limit
    assert layer.weight.grad.any()


def test_table_of_one_row_is_expanded_to_the_batch_and_nothing_else():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, 4), nn.Embedding(6, 4)

        def forward(self, x, positions):
            return self.tokens(x) + self.positions(positions)

    model, x = Positions(), torch.randint(0, 9, (5, 6))
    exact = loop_over_samples(model, lambda m, x: m(x, torch.arange(6).unsqueeze(0)).square().sum(), x)
    wrapped = clipping(model, max_grad_norm=1.0)
    wrapped(x, torch.arange(6).unsqueeze(0)).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    with pytest.raises(InputError, match=r"positions \(Embedding\): its output is the same whatever the batch"):
        wrapped(x, torch.arange(6)).square().sum().backward()


def test_positions_as_long_as_the_batch_are_not_taken_for_samples():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 4)

        def forward(self, x, labels=None):
            return x + self.table(torch.arange(6) if labels is None else labels)

    model, labels, x = Model(), torch.arange(6), torch.randn(6, 6, 4)
    exact = loop_over_samples(model, lambda m, x: m(x).square().sum(), x)
    wrapped = clipping(model)
    wrapped(x).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    wrapped(torch.randn(6, 4), labels).sum().backward()
    assert wrapped.get_norm_sample().shape == (6,)


# --- free parameters ---


def test_mask_that_looks_like_samples():
    """(T, T) with T = N: found out by comparing with the whole batch."""
    model, x = Free(), torch.randn(6, 5, 4)
    mask = torch.rand(6, 6)
    exact = loop_over_samples(model, lambda m, x: m(x, mask=mask.to(x.dtype)).square().sum(), x)
    dpfast.GradSampleModule(model, loss_reduction="sum")(x, mask=mask).square().sum().backward()
    for name in ("cls", "positions", "scale", "biases.0", "table.a", "inner.weight"):
        assert relative_error(model.get_parameter(name).grad_sample, exact[name]) <= 1e-5, name


def test_layer_that_mixes_its_samples_by_a_second_input_is_refused():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x, y):
            return self.scale * (x - y.mean(0))

    with pytest.raises(UnsupportedModuleError, match=r"samples meet in 1\.inner \(Mixing\)"):
        clipping(nn.Sequential(nn.Linear(3, 3)).append(_Twice(Mixing())))(torch.randn(4, 3)).sum().backward()


class _Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x.flip(0))


# --- attention and recurrence as torch has them ---


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_draws_the_random_numbers_of_torch(need_weights):
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    x = torch.randn(4, 5, 8)
    torch.manual_seed(3)
    expected = copy.deepcopy(layer)(x, x, x, need_weights=need_weights)
    wrapped = clipping(layer)
    torch.manual_seed(3)
    found = wrapped(x, x, x, need_weights=need_weights)
    assert torch.allclose(found[0], expected[0], atol=1e-6)
    assert not need_weights or torch.allclose(found[1], expected[1], atol=1e-6)


@pytest.mark.on_cpu
@pytest.mark.parametrize("layer", [nn.LSTM(4, 3, 2, dropout=0.5), nn.GRU(4, 3, 2, dropout=0.5)])
def test_recurrent_layers_with_dropout_between_them(layer):
    """The replay is of single layers, so no random number is drawn twice: clipped at C = ∞ the sum is autograd's."""
    x = torch.randn(5, 4, 4)  # (T, N, D): the layer says so itself
    plain = copy.deepcopy(layer)
    torch.manual_seed(3)
    expected = plain(x)[0]
    expected.square().sum().backward()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            return self.inner(x.transpose(0, 1))[0].transpose(0, 1)

    wrapped = clipping(Model(), max_grad_norm=1e6)
    torch.manual_seed(3)
    output = wrapped(x.transpose(0, 1))
    output.square().sum().backward()
    assert output.shape == (4, 5, 3)
    for name, p in layer.named_parameters():
        assert p.grad.isfinite().all() and p.grad.any(), name
    assert torch.allclose(output.transpose(0, 1), expected, atol=1e-6)  # the same numbers are drawn
    for (name, p), q in zip(layer.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) <= 1e-4, name


@pytest.mark.parametrize("kind", ["DPLSTM", "DPGRU", "DPRNN", "DPMultiheadAttention"])
def test_layers_of_opacus(kind):
    layers = pytest.importorskip("opacus.layers")
    if kind == "DPMultiheadAttention":

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = layers.DPMultiheadAttention(8, 2)

            def forward(self, x):
                x = x.transpose(0, 1)
                return self.inner(x, x, x)[0].transpose(0, 1)

        check_rule(Model(), torch.randn(5, 3, 8), dtypes=[torch.float32])
    else:
        model = getattr(layers, kind)(4, 3, num_layers=2, batch_first=True, bidirectional=True)
        x = torch.randn(5, 4, 4)
        exact = loop_over_samples(model, lambda m, x: m(x)[0].square().sum(), x)
        wrapped = clipping(model, max_grad_norm=float(norms_of(exact).median()))
        wrapped(x)[0].square().sum().backward()
        clipped = clipped_sum(exact, wrapped.max_grad_norm)
        for name, p in model.named_parameters():
            assert relative_error(p.grad, clipped[name]) <= 1e-4, name


# --- what is refused ---


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.BatchNorm1d(3), "normalises over the batch.*GroupNorm.*freeze it"),
        (nn.Embedding(3, 3, max_norm=1.0), "max_norm"),
        (nn.EmbeddingBag(3, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.AdaptiveLogSoftmaxWithLoss(3, 9, [3]), "different part"),
        (torch.jit.script(nn.Linear(3, 3)), "TorchScript"),
        (nn.LazyLinear(3), "not initialised"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_refused_at_wrapping_with_the_full_name(layer, why):
    model = nn.ModuleDict({"outer": nn.ModuleList([layer])})
    with pytest.raises(UnsupportedModuleError, match=rf"(?s)outer\.0 \(\w+\): .*{why}"):
        clipping(model)


def test_not_strict_fails_in_the_backward():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).requires_grad_(False))
    with pytest.warns(DpfastWarning, match="normalises over the batch"):
        wrapped = clipping(model, strict=False)
    output = wrapped(torch.randn(4, 3))
    with pytest.raises(UnsupportedModuleError, match=r"1 \(BatchNorm1d\): normalises over the batch"):
        output.sum().backward()
    assert model[0].weight.grad is None


def test_rule_that_forgets_a_parameter():
    class Linear(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.more = nn.Parameter(torch.ones(3))

    with pytest.raises(UnsupportedModuleError, match=r"0 \(Linear\): its rule gives no gradient of parameter 0\.more"):
        clipping(nn.Sequential(Linear()))(torch.randn(4, 3)).sum().backward()


@pytest.mark.parametrize("layer", [nn.LSTM(3, 3), nn.MultiheadAttention(4, 2), nn.Conv1d(3, 3, 1), nn.LSTMCell(3, 3)])
def test_input_without_samples(layer):
    width = 4 if isinstance(layer, nn.MultiheadAttention) else 3
    x = torch.randn(width) if isinstance(layer, nn.LSTMCell) else torch.randn(width, width)
    with pytest.raises(InputError, match="no dimension of samples"):
        output = clipping(layer)(*[x] * (3 if width == 4 else 1))
        (output[0] if isinstance(output, tuple) else output).sum().backward()
