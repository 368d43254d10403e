"""dpfast.opacus.PrivacyEngine beside Opacus's: the same steps, the same ε, and what it refuses."""

import copy
import io

import opacus
import pytest
import torch
import torch.nn.functional as F
from cases import assert_gradients, sum_loss
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators.errors import UnsupportedModuleError
from opacus_cases import PRIVATE_C as C
from opacus_cases import loader, opacus_example, private, train, weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpfast
from dpfast.errors import InputError, StateError
from dpfast.opacus import PrivacyEngine
from dpfast.testing import clipped_sum, loop_over_samples

MODES = ["dpfast", "dpfast_two_pass", "dpfast_materialize"]
HAS_WRAP_MODEL = hasattr(opacus.grad_sample, "GradSampleHooks")

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook", "ignore:Optimal order")


def trained_by_opacus(name="mlp", sigma=0.0, **options):
    engine, module, optimizer, criterion, batches = private(None, name, sigma=sigma, **options)
    sizes = train(module, optimizer, criterion, batches)
    return weights(module), engine, sizes


@pytest.mark.parametrize("name", ["mlp", "block"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_an_epoch_is_opacus_s(mode, name, sigma):
    """Poisson batches, noise from the same generator, accountant: the same weights and the same ε."""
    exact, opacus_engine, sizes = trained_by_opacus(name, sigma)
    engine, module, optimizer, criterion, batches = private(mode, name, sigma=sigma)
    assert isinstance(module, AbstractGradSampleModule) and isinstance(optimizer, DPOptimizer)
    assert optimizer.expected_batch_size == 6 and optimizer.max_grad_norm == C
    assert train(module, optimizer, criterion, batches, zero_first=False) == sizes
    assert_gradients(weights(module), exact, 2e-5)
    assert engine.accountant.history == opacus_engine.accountant.history
    if sigma:
        assert engine.get_epsilon(1e-5) == opacus_engine.get_epsilon(1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_empty_poisson_batches(mode):
    _, module, optimizer, criterion, _ = private(mode, sigma=1.0)
    before = weights(module)
    train(module, optimizer, criterion, [(torch.empty(0, 12), torch.empty(0, dtype=torch.long))])
    after = weights(module)
    for name, p in after.items():
        assert torch.isfinite(p).all()
        assert not torch.equal(p, before[name])  # the noise is added all the same


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("zero_first", [True, False])
def test_batch_memory_manager(mode, zero_first):
    exact, opacus_engine, _ = trained_by_opacus()
    engine, module, optimizer, criterion, batches = private(mode)
    with BatchMemoryManager(data_loader=batches, max_physical_batch_size=2, optimizer=optimizer) as parts:
        sizes = train(module, optimizer, criterion, parts, zero_first)
    assert max(sizes) <= 2
    assert_gradients(weights(module), exact, 2e-5)
    assert engine.accountant.history == opacus_engine.accountant.history


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_materialize"])
def test_per_layer_clipping(mode):
    thresholds = [0.1 * (i + 1) for i in range(6)]
    exact, _, _ = trained_by_opacus(max_grad_norm=thresholds, clipping="per_layer")
    _, module, optimizer, criterion, batches = private(mode, max_grad_norm=thresholds, clipping="per_layer")
    assert optimizer.max_grad_norm == pytest.approx(torch.tensor(thresholds).norm().item())
    train(module, optimizer, criterion, batches)
    assert_gradients(weights(module), exact, 2e-5)


def test_per_layer_thresholds_follow_the_optimizers_order():
    model, x, y = opacus_example("mlp")
    optimizer = torch.optim.SGD([{"params": [p]} for p in reversed(list(model.parameters()))], lr=0.5)
    thresholds = [0.1 * (i + 1) for i in range(6)]
    module, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader("mlp"),
        noise_multiplier=0.0,
        max_grad_norm=thresholds,
        clipping="per_layer",
    )
    F.cross_entropy(module(x * 100), y).backward()
    assert module.norm_clipper.flat_values == thresholds[::-1]
    for p, threshold in zip(optimizer.params, thresholds, strict=True):
        assert p.grad.norm() <= len(y) * threshold * (1 + 1e-6)


def test_adaptive_clipping_materialized():
    adaptive = {
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 3.0,
    }
    exact, _, _ = trained_by_opacus(clipping="adaptive", **adaptive)
    _, module, optimizer, criterion, batches = private("dpfast_materialize", clipping="adaptive", **adaptive)
    train(module, optimizer, criterion, batches)
    assert_gradients(weights(module), exact, 2e-5)
    assert optimizer.max_grad_norm != C


@pytest.mark.parametrize("mode", MODES)
def test_make_private_with_epsilon(mode):
    model = opacus_example("mlp")[0]
    made = PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader("mlp"),
        target_epsilon=5.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=C,
        grad_sample_mode=mode,
    )
    reference = opacus.accountants.utils.get_noise_multiplier(
        target_epsilon=5.0, target_delta=1e-3, sample_rate=0.25, epochs=2, accountant="rdp"
    )
    assert made[1].noise_multiplier == pytest.approx(reference)
    assert len(made) == (4 if mode == "dpfast_two_pass" else 3)


@pytest.mark.parametrize("mode", MODES)
def test_schedulers(mode):
    def run(mode):
        engine, module, optimizer, criterion, batches = private(mode, sigma=1.0)
        noise, clip = ExponentialNoise(optimizer, gamma=0.5), ExponentialGradClip(optimizer, gamma=0.5)
        for x, y in batches:
            train(module, optimizer, criterion, [(x, y)])
            noise.step()
            clip.step()
        assert optimizer.max_grad_norm == C / 16
        return weights(module), engine.accountant.history

    exact, history = run(None)
    actual, ours = run(mode)
    assert ours == history
    assert_gradients(actual, exact, 2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints(mode):
    engine, module, optimizer, criterion, batches = private(mode, sigma=1.0)
    noise = ExponentialNoise(optimizer, gamma=0.5)
    train(module, optimizer, criterion, batches)
    noise.step()
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=module, optimizer=optimizer, noise_scheduler=noise)
    other, module2, optimizer2, _, _ = private(mode, sigma=1.0)
    noise2 = ExponentialNoise(optimizer2, gamma=0.5)
    file.seek(0)
    other.load_checkpoint(path=file, module=module2, optimizer=optimizer2, noise_scheduler=noise2)
    assert all(torch.equal(p, weights(module2)[name]) for name, p in weights(module).items())
    assert other.get_epsilon(1e-5) == engine.get_epsilon(1e-5)
    assert noise2.last_epoch == noise.last_epoch
    file.seek(0)  # and into Opacus's own engine and module
    theirs, module3, optimizer3, _, _ = private(None, sigma=1.0)
    theirs.load_checkpoint(path=file, module=module3, optimizer=optimizer3)
    assert theirs.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_without_wrapping(mode):
    exact, _, _ = trained_by_opacus()
    model = opacus_example("mlp")[0]
    attributes = {name: set(m.__dict__) for name, m in model.named_modules()}
    _, hooks, optimizer, criterion, batches = private(mode, model=model, wrap_model=False)
    assert isinstance(hooks, AbstractGradSampleModule)
    train(model, optimizer, criterion, batches)
    assert type(model) is nn.Sequential
    assert_gradients(weights(model), exact, 2e-5)
    hooks.cleanup()
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == attributes
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    model(torch.randn(2, 12)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_fixed_batch_size(mode):
    """poisson_sampling=False: the loader is the one that was given, and accumulation is allowed."""
    exact, opacus_engine, _ = trained_by_opacus(poisson_sampling=False, sigma=1.0)
    engine, module, optimizer, criterion, batches = private(mode, poisson_sampling=False, sigma=1.0)
    assert train(module, optimizer, criterion, batches) == [6] * 4
    assert_gradients(weights(module), exact, 2e-5)
    assert engine.accountant.history == opacus_engine.accountant.history


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_materialize"])
def test_accumulated_passes_are_accounted_for(mode):
    """Two backward passes, one step: twice the sampling rate, and the average is over twice the samples."""

    def run(mode):
        engine, module, optimizer, criterion, batches = private(mode, poisson_sampling=False, sigma=1.0)
        for i, (x, y) in enumerate(batches):
            criterion(module(x), y).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        return weights(module), engine.accountant.history

    exact, history = run(None)
    actual, ours = run(mode)
    assert ours == history and ours == [(1.0, 0.5, 2)]
    assert_gradients(actual, exact, 2e-5)


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_materialize"])
def test_no_more_passes_than_batches(mode):
    """The rate of such a step would be above 1, of which get_epsilon() says "math domain error" after the training."""
    engine, module, optimizer, criterion, batches = private(mode, poisson_sampling=False, sigma=1.0)
    _, x, y = opacus_example("mlp")
    for _ in range(len(batches) + 1):
        criterion(module(x), y).backward()
    before = weights(module)
    with pytest.raises(StateError, match="5 backward passes, and an epoch has 4 batches"):
        optimizer.step()
    assert not engine.accountant.history and all(torch.equal(w, before[name]) for name, w in weights(module).items())


@pytest.mark.parametrize("mode", MODES)
def test_a_step_hook_of_ones_own_comes_behind_the_accountant(mode):
    engine, module, optimizer, criterion, batches = private(mode, sigma=1.0)
    seen = []
    optimizer.attach_step_hook(lambda _: seen.append("replaced"))
    optimizer.attach_step_hook(lambda of: seen.append((of is optimizer, engine.accountant.history[0][2])))
    steps = len(train(module, optimizer, criterion, batches))
    assert steps > 0 and seen == [(True, step + 1) for step in range(steps)]


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_materialize"])
def test_accumulation_under_poisson_sampling(mode):
    _, module, optimizer, criterion, _ = private(mode)
    _, x, y = opacus_example("mlp")
    for clear in (optimizer.zero_grad, module.zero_grad):
        criterion(module(x), y).backward()
        with pytest.raises(ValueError, match="Poisson sampling is not compatible with grad accumulation"):
            criterion(module(x), y).backward()
        clear()
    criterion(module(x), y).backward()
    optimizer.step()


def test_other_modes_are_opacus_s():
    for mode in ("hooks", "ghost", "functorch"):
        exact, _, _ = trained_by_opacus()
        engine = PrivacyEngine(accountant="rdp")
        _, module, optimizer, criterion, batches = private(mode, engine=engine)
        assert type(module).__module__.startswith("opacus.")
        if mode != "ghost":
            assert type(optimizer) is DPOptimizer
            train(module, optimizer, criterion, batches)
            assert_gradients(weights(module), exact, 1e-6)
    with pytest.raises(InputError, match=r"'nothing' is none of dpfast, .*dpfast_two_pass.* hooks, ew"):
        private("nothing")


def test_a_module_that_is_wrapped_already():
    model = opacus_example("mlp")[0]
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model)
    module = private("dpfast", model=wrapped)[1]
    assert module is wrapped
    for mode in ("dpfast_two_pass", "dpfast_materialize"):
        with pytest.raises(StateError, match="wrapped already"):
            private(mode, model=wrapped)
    with pytest.raises(StateError, match="wrapped already"):
        private("dpfast", model=wrapped, loss_reduction="sum")


# --- refusals ---


def test_modules_that_are_refused():
    for model, match in (
        (nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)), r"^1 \(BatchNorm1d\): BatchNorm cannot .*docs/err"),
        (nn.Linear(12, 5).eval(), "training mode"),
    ):
        with pytest.raises(UnsupportedModuleError, match=match) as found:
            private("dpfast", model=model)
        assert isinstance(found.value, dpfast.errors.UnsupportedModuleError)
    with pytest.raises(ValueError, match="different than optimizer"):
        PrivacyEngine().make_private(
            module=nn.Linear(2, 2),
            optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1),
            data_loader=loader("mlp"),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


@pytest.mark.parametrize(
    ("mode", "options", "match"),
    [
        ("dpfast", {"clipping": "adaptive"}, "dpfast_materialize"),
        ("dpfast_two_pass", {"clipping": "per_layer", "max_grad_norm": [1.0] * 6}, "'per_layer' does not go with"),
        ("dpfast", {"max_grad_norm": [1.0] * 6}, "one number otherwise"),
        ("dpfast", {"clipping": "per_layer", "max_grad_norm": 1.0}, "a list of one threshold"),
        ("dpfast", {"clipping": "per_layer", "max_grad_norm": [1.0] * 5}, "5 thresholds for 6"),
        ("dpfast", {"max_grad_norm": -1.0}, "positive finite"),
        ("dpfast", {"max_grad_norm": float("nan")}, "positive finite"),
        ("dpfast_two_pass", {"max_grad_norm": 0.0}, "positive finite"),
    ],
)
def test_options_that_are_refused(mode, options, match):
    with pytest.raises(InputError, match=match):
        private(mode, **options)


def test_per_layer_clipping_of_a_parameter_that_the_optimizer_lacks():
    model = opacus_example("mlp")[0]
    with pytest.raises(InputError, match=r"0\.bias.*not in the optimizer"):
        PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD([p for n, p in model.named_parameters() if n != "0.bias"], lr=0.1),
            data_loader=loader("mlp"),
            noise_multiplier=1.0,
            max_grad_norm=[1.0] * 5,
            clipping="per_layer",
        )


@pytest.mark.parametrize("mode", MODES)
def test_layers_that_opacus_has_replacements_for(mode):
    """nn.MultiheadAttention and nn.LSTM go in as they are."""

    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm = nn.Linear(3, 8), nn.LSTM(8, 8, batch_first=True)
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

        def forward(self, x):
            x, _ = self.lstm(self.embed(x.unflatten(1, (4, 3))))
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    model = Sequences()
    _, module, optimizer, criterion, _ = private(mode, model=model)
    x, y = torch.randn(6, 12), torch.randint(0, 5, (6,))
    exact = clipped_sum(loop_over_samples(copy.deepcopy(module).to_standard_module(), sum_loss, x, y), C)
    criterion(module(x), y).backward()
    optimizer.pre_step()
    assert_gradients({name: p.grad * 6 for name, p in model.named_parameters()}, exact, 2e-5)


@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass", "dpfast_materialize", "dpfast_compiled"])
@pytest.mark.parametrize(("n", "batch_size"), [(49, 1), (98, 2), (103, 1), (147, 3), (93, 1), (96, 4)])
def test_the_expected_batch_size_in_whole_numbers(mode, n, batch_size):
    """49 times 1/49 is less than 1 in fp64: one record was refused as none, and two were divided by one."""
    net = nn.Linear(2, 2)
    data = DataLoader(TensorDataset(torch.randn(n, 2), torch.zeros(n).long()), batch_size=batch_size)
    _, optimizer, *_ = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=C,
        grad_sample_mode=mode,
    )
    assert optimizer.expected_batch_size == batch_size


@pytest.mark.parametrize("mode", ["ghost", "dpfast_two_pass", "dpfast"])
@pytest.mark.parametrize("limits", [(1.0, 0.1), (0.1, 1.0)])
def test_a_module_that_is_made_private_again_with_another_c(mode, limits):
    """Opacus leaves a module that is wrapped as it is: noise for 0.1, and a sample added 1."""
    model, x, y = opacus_example("mlp", magnitude=10.0)
    exact = clipped_sum(loop_over_samples(model, sum_loss, x, y), limits[1])
    module = model
    for limit in limits:
        _, module, optimizer, criterion, _ = private(mode, model=module, max_grad_norm=limit, loss_reduction="sum")
    if mode == "dpfast":
        criterion = nn.CrossEntropyLoss(reduction="sum")
    criterion(module(x), y).backward()
    optimizer.step()
    assert module.max_grad_norm == optimizer.max_grad_norm == limits[1]
    assert_gradients({name: p.grad for name, p in model.named_parameters()}, exact, 1e-4)


def test_the_compiled_step_has_no_model_to_go_on_using():
    with pytest.raises(InputError, match="leave wrap_model=False out, and call the step"):
        private("dpfast_compiled", wrap_model=False)
    private("dpfast_compiled", wrap_model=True)
