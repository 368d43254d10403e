"""install() and uninstall(): what stands in Opacus's registries, and what Opacus's modules give with it."""

import re
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from cases import assert_gradients, mean_loss, sum_loss
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus_cases import opacus_example
from torch import nn

import dpfast.opacus
from dpfast.errors import DpfastWarning, InputError, MissingDependencyError
from dpfast.opacus import _supported, samplers
from dpfast.taps import registry
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.5
GRAD, NORM = GradSampleModule.GRAD_SAMPLERS, GradSampleModuleFastGradientClipping.NORM_SAMPLERS


@pytest.fixture(autouse=True)
def _opacus_as_it_was():
    before = dict(GRAD), dict(NORM)
    yield
    dpfast.opacus.uninstall()
    for theirs, was in zip((GRAD, NORM), before, strict=True):
        theirs.clear()
        theirs.update(was)


@pytest.mark.parametrize("output_dtype", ["backprops", "float32", "param"])
@pytest.mark.parametrize("name", ["block", "mlp"])
def test_grad_samples_equal_loop_over_samples(name, output_dtype):
    model, x, y = opacus_example(name)
    exact = loop_over_samples(model, sum_loss, x, y)
    wrapped = GradSampleModule(model)  # before install: models that exist are served too
    dpfast.opacus.install(output_dtype)
    mean_loss(wrapped, x, y).backward()
    for key, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[key]) <= 1e-5, key


@pytest.mark.usefixtures("reference_runs")
@pytest.mark.parametrize("name", ["block", "mlp"])
def test_norms_are_upper_ends(name):
    model, x, y = opacus_example(name)
    norms = norms_of(loop_over_samples(model, sum_loss, x, y))
    dpfast.opacus.install()
    wrapped = GradSampleModuleFastGradientClipping(model)
    sum_loss(wrapped, x, y).backward()
    got = wrapped.get_norm_sample() / 6  # the loss is a sum and the module was told of a mean: times N
    assert relative_error(got, norms) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_samples_are_never_too_small(dtype):
    """Pairs of positions that cancel: Opacus's own bf16 norm is 0."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 8)
    a = torch.randn(4, 6, 16).to(dtype)
    b = torch.cat([torch.randn(4, 3, 8)] * 2, 1).mul(torch.tensor([1.0] * 3 + [-1.0] * 3)[:, None]).to(dtype)
    a[:, 3:] = (a[:, :3].float() * (1 + 2**-7)).to(dtype)
    exact = torch.einsum("ntp,ntd->npd", b.double(), a.double()).flatten(1).norm(dim=1)
    dpfast.opacus.install()
    norm = NORM[nn.Linear](layer, [a], b)[layer.weight]
    assert norm.dtype == torch.float32
    assert (norm.double() >= exact).all()
    assert (norm.double() <= exact * 1.5).all()


def test_dtype_of_grad_samples():
    layer = nn.Linear(3, 2).to(torch.bfloat16)
    a, b = torch.randn(4, 5, 3), torch.randn(4, 5, 2, dtype=torch.float16)
    exact = torch.einsum("ntp,ntd->npd", b.double(), a.double())
    for output_dtype, dtype in (("backprops", torch.float16), ("param", torch.bfloat16), ("float32", torch.float32)):
        dpfast.opacus.install(output_dtype)
        got = GRAD[nn.Linear](layer, [a], b)
        assert {g.dtype for g in got.values()} == {dtype}
        assert torch.equal(got[layer.weight], GRAD[nn.Linear](layer, [a], b)[layer.weight])
        assert relative_error(got[layer.weight], exact) <= 2 * torch.finfo(dtype).eps
    doubles = GRAD[nn.Linear](layer, [a.double()], b.double())
    assert {g.dtype for g in doubles.values()} == {torch.float32}
    with pytest.raises(InputError, match="'bfloat16'"):
        dpfast.opacus.install("bfloat16")


def test_layers_that_opacus_has_no_norm_sampler_for():
    """LayerNorm without bias and Embedding with padding, which Opacus gets wrong."""
    model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.LayerNorm(4, bias=False), nn.Linear(4, 2))
    model[0].weight.data[0] = 1.0  # the padding row is not zero, and yet gets no gradient
    x, y = torch.randint(0, 7, (5, 3)), torch.zeros(5, 3, 2)

    def loss(m, x, y):
        return (m(x) - y).square().sum()

    exact = loop_over_samples(model, loss, x, y)
    dpfast.opacus.install()
    wrapped = GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, x, y).backward()
    assert_gradients({k: p.grad_sample for k, p in model.named_parameters()}, exact)
    assert nn.LayerNorm in NORM and nn.Embedding in NORM


def test_four_dimensions_and_an_empty_batch():
    layer = nn.Linear(3, 2)
    dpfast.opacus.install()
    a, b = torch.randn(4, 2, 5, 3), torch.randn(4, 2, 5, 2)
    exact = torch.einsum("nstp,nstd->npd", b.double(), a.double()).flatten(1).norm(dim=1)
    norms = NORM[nn.Linear](layer, [a], b)[layer.weight].double()
    slack = 1e-4 if norms.is_cuda else 1e-5  # they are bounds, which kernels have wider
    assert (norms >= exact * (1 - 1e-7)).all() and relative_error(norms, exact) <= slack
    for norms in NORM[nn.Linear](layer, [a[:0]], b[:0]).values():
        assert norms.shape == (0,)


def clipped_by_opacus(model, x, y, ghost):
    """The clipped sum of one step of Opacus's own pipeline, no noise."""
    cls, optimizer = (
        (GradSampleModuleFastGradientClipping, DPOptimizerFastGradientClipping)
        if ghost
        else (GradSampleModule, DPOptimizer)
    )
    wrapped = cls(model, **({"max_grad_norm": C} if ghost else {}))
    optimizer = optimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=1
    )
    criterion = nn.CrossEntropyLoss()
    if ghost:
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)
    criterion(wrapped(x), y).backward()
    optimizer.pre_step()
    return {key: p.grad for key, p in model.named_parameters()}


@pytest.mark.parametrize("ghost", [True, False])
@pytest.mark.parametrize("name", ["block", "mlp"])
def test_opacus_clips_the_same_with_it(name, ghost):
    model, x, y = opacus_example(name)
    exact = clipped_sum(loop_over_samples(model, sum_loss, x, y), C)
    dpfast.opacus.install()
    assert_gradients(clipped_by_opacus(model, x, y, ghost), exact, 1e-5)


# --- order of registrations ---


def test_uninstall_leaves_no_trace_and_both_can_be_called_twice():
    before = dict(GRAD), dict(NORM)
    dpfast.opacus.uninstall()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpfast.opacus.install()
        dpfast.opacus.install("float32")
    assert GRAD[nn.Linear] is not before[0][nn.Linear]
    dpfast.opacus.uninstall()
    dpfast.opacus.uninstall()
    assert (dict(GRAD), dict(NORM)) == before


def test_samplers_of_another_library():
    @register_grad_sampler(nn.Linear)
    @register_norm_sampler(nn.LayerNorm)
    def theirs(layer, activations, backprops):
        return {}

    with pytest.warns(DpfastWarning, match="Linear grad sampler") as caught:
        dpfast.opacus.install()
    (said,) = (str(w.message) for w in caught)
    assert "LayerNorm norm sampler" in said and theirs.__module__ in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dpfast.opacus.install("param")  # says so once
    assert GRAD[nn.Linear] is not theirs
    dpfast.opacus.uninstall()
    assert GRAD[nn.Linear] is theirs and NORM[nn.LayerNorm] is theirs


def test_samplers_registered_over_ours():
    dpfast.opacus.install()

    @register_grad_sampler(nn.Linear)
    def later(layer, activations, backprops):
        return {}

    dpfast.opacus.uninstall()
    assert GRAD[nn.Linear] is later  # it is not ours to remove
    with pytest.warns(DpfastWarning, match="Linear grad sampler"):
        dpfast.opacus.install()
    register_grad_sampler(nn.Linear)(later)
    with pytest.warns(DpfastWarning, match="Linear grad sampler"):
        dpfast.opacus.install()
    dpfast.opacus.uninstall()
    assert GRAD[nn.Linear] is later


def test_rules_and_samplers_of_users():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight

    dpfast.opacus.install()
    assert Scale not in GRAD
    registries = (registry.RULES, registry.GRAD_SAMPLERS, registry.NORM_SAMPLERS)
    try:

        @dpfast.register_grad_sampler(Scale)
        def sampler(layer, activations, backprops):
            return {layer.weight: activations[0] * backprops}

        dpfast.opacus.install()
        model, x = nn.Sequential(nn.Linear(3, 3), Scale()), torch.randn(4, 3)
        GradSampleModule(model, loss_reduction="sum")(x).sum().backward()
        assert torch.allclose(model[1].weight.grad_sample, model[0](x))
        assert torch.allclose(NORM[Scale](model[1], [x], torch.ones(4, 3))[model[1].weight], x.norm(dim=1))
    finally:
        for table in registries:
            table.pop(Scale, None)
    dpfast.opacus.uninstall()
    assert Scale not in GRAD and Scale not in NORM


def test_layers_that_are_known_by_name():
    """Of packages that are imported. None of them was registered."""
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    opt = pytest.importorskip("transformers.models.opt.modeling_opt")
    classes = pytorch_utils.Conv1D, llama.LlamaRMSNorm
    before = [(GRAD.get(cls), NORM.get(cls)) for cls in classes]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), pytorch_utils.Conv1D(4, 6), llama.LlamaRMSNorm(4), nn.Linear(4, 3))
    tokens, y = torch.randint(7, (5, 8)), torch.randint(3, (5, 8))

    def loss(model, tokens, y):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), y.flatten(), reduction="sum")

    exact = loop_over_samples(model, loss, tokens, y)
    dpfast.opacus.install()
    assert all(cls in GRAD and cls in NORM for cls in classes)
    assert opt.OPTLearnedPositionalEmbedding not in GRAD  # it has other inputs, which Opacus's hooks do not hand on
    wrapped = GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, tokens, y).backward()
    for key, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[key]) <= 1e-5, key
    of_norm = NORM[llama.LlamaRMSNorm](model[2], [torch.randn(5, 8, 4)], torch.randn(5, 8, 4))
    assert of_norm[model[2].weight].shape == (5,)
    dpfast.opacus.uninstall()
    assert [(GRAD.get(cls), NORM.get(cls)) for cls in classes] == before


# --- Opacus that is missing, or unknown ---


@pytest.mark.parametrize("version", ["1.5.3", "2.0.0", "1.7.0", "0.13"])
def test_opacus_of_an_unknown_version(version):
    with pytest.raises(MissingDependencyError, match=rf"{re.escape(version)} is installed.*'dpfast\[opacus\]'"):
        _supported.check(version)


@pytest.mark.parametrize("version", ["1.5.4", "1.6.0", "1.6.1+local"])
def test_opacus_of_a_known_version(version):
    _supported.check(version)


def test_opacus_missing(tmp_path):
    (tmp_path / "opacus.py").write_text("raise ImportError('No module named opacus')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import dpfast; import dpfast.opacus"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    last = run.stderr.strip().splitlines()[-1]
    assert "MissingDependencyError" in last and "No module named opacus" in last
    assert "pip install 'dpfast[opacus]'" in last
    assert issubclass(MissingDependencyError, ImportError) and issubclass(MissingDependencyError, dpfast.DpfastError)


def test_opacus_takes_ours_for_wrapped_modules():
    from opacus.grad_sample import AbstractGradSampleModule

    assert isinstance(dpfast.GradSampleModule(nn.Linear(2, 2)), AbstractGradSampleModule)
    assert isinstance(dpfast.GradSampleModuleFastGradientClipping(nn.Linear(2, 2)), AbstractGradSampleModule)
    assert not isinstance(nn.Linear(2, 2), AbstractGradSampleModule)


def test_install_and_uninstall_in_several_threads(monkeypatch):
    """One that came while another was halfway found registries that fitted nothing: a KeyError, or samplers left."""
    halfway, goes_on = threading.Event(), threading.Event()
    norm_sampler = samplers._norm_sampler

    def waits(key, rule):
        halfway.set()
        goes_on.wait(10)
        return norm_sampler(key, rule)

    before = dict(GRAD), dict(NORM)
    monkeypatch.setattr(samplers, "_norm_sampler", waits)
    installs = threading.Thread(target=dpfast.opacus.install)
    installs.start()
    halfway.wait(10)
    uninstalls = threading.Thread(target=dpfast.opacus.uninstall)
    uninstalls.start()
    uninstalls.join(0.2)
    waited = uninstalls.is_alive()
    goes_on.set()
    installs.join()
    uninstalls.join()
    dpfast.opacus.uninstall()
    dpfast.opacus.uninstall()
    assert waited and before == (GRAD, NORM)
