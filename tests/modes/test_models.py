"""Models of Hugging Face as they are against a loop over samples; LoRA, checkpointing, 16 bits, compile."""

import copy

import huggingface
import pytest
import torch
from huggingface import MODELS, example, losses, summed_loss
from layers_table import PAGE, proves_model, rendered
from torch import nn

import dpfast
from dpfast.errors import UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def exact():
    """{model: its per-sample gradients}, each computed once."""
    cache = {}

    def of(name):
        if name not in cache:
            cache[name] = loop_over_samples(*_with_loss(*example(name)))
        return cache[name]

    return of


def _with_loss(model, inputs):
    return model, summed_loss, inputs


def wrap(model, gradients, **options):
    limit = float(norms_of(gradients).median())
    return dpfast.GradSampleModuleFastGradientClipping(model, max_grad_norm=limit, loss_reduction="sum", **options)


def assert_clipped(wrapped, gradients, tolerance=1e-5):
    """Norms; and the clipped sum as a whole, with the factors that were taken, which may not be too large."""
    norms, factors = norms_of(gradients), wrapped.get_clipping_coef().double()
    assert relative_error(wrapped.get_norm_sample(), norms) <= tolerance
    assert (factors * norms <= wrapped.max_grad_norm * (1.0 + tolerance)).all()
    assert (factors >= (wrapped.max_grad_norm / norms).clamp(max=1.0) * (1.0 - 1e-3 - tolerance)).all()
    names = [name for name, p in wrapped._module.named_parameters() if p.requires_grad]
    sums = [torch.einsum("n,n...->...", factors, gradients[name]).flatten() for name in names]
    found = [wrapped._module.get_parameter(name).grad.flatten() for name in names]
    assert relative_error(torch.cat(found), torch.cat(sums)) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_grad_sample(name, exact):
    model, inputs = example(name)
    summed_loss(dpfast.GradSampleModule(model, loss_reduction="sum"), inputs).backward()
    size = norms_of(exact(name)).norm()
    for key, p in model.named_parameters():
        if p.requires_grad and p.grad_sample is None:  # not used in this model's forward
            assert not exact(name)[key].any(), key
        elif p.requires_grad:
            assert (p.grad_sample.double() - exact(name)[key]).norm() <= 1e-5 * size, key
    proves_model(name, "grad_sample")


def test_tables_that_the_model_broadcasts_under_force_functorch(exact):
    model, inputs = example("T5")
    wrapped = wrap(model, exact("T5"), force_functorch=True)
    summed_loss(wrapped, inputs).backward()
    assert_clipped(wrapped, exact("T5"))


@pytest.mark.parametrize("name", MODELS)
def test_one_pass(name, exact):
    model, inputs = example(name)
    wrapped = wrap(model, exact(name))
    summed_loss(wrapped, inputs).backward()
    assert_clipped(wrapped, exact(name))
    proves_model(name, "passes=1")


@pytest.mark.parametrize("name", MODELS)
def test_two_passes(name, exact):
    model, inputs = example(name)
    wrapped = wrap(model, exact(name), passes=2)
    per_sample = losses(wrapped, inputs)
    per_sample.sum().backward(retain_graph=True)
    wrapped.disable_hooks()
    (wrapped.get_clipping_coef() * per_sample).sum().backward()
    wrapped.enable_hooks()
    for p in model.parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)
    assert_clipped(wrapped, exact(name))
    proves_model(name, "passes=2")


@pytest.mark.parametrize("name", ["GPT-2 (tied head)", "BERT", "ViT", "Llama", "T5", "OPT"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(name, reentrant, exact):
    model, inputs = example(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant and name != "ViT":
        model.enable_input_require_grads()
    wrapped = wrap(model, exact(name))
    summed_loss(wrapped, inputs).backward()
    assert_clipped(wrapped, exact(name))
    proves_model(name, f"checkpointing ({'reentrant' if reentrant else 'not reentrant'})")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["autocast", "bf16"])
def test_low_precision(name, way, exact):
    """Within the precision of bf16: five times what a loop over samples in bf16 loses, or 2 %."""
    model, inputs = example(name)
    low = loop_over_samples(model, summed_loss, inputs, dtype=torch.bfloat16)
    gradients = exact(name)
    size = norms_of(gradients).norm()
    lost = torch.stack([(low[key].double() - g).norm() for key, g in gradients.items()]).norm() / size
    if way == "bf16":
        model = model.bfloat16()
        inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    wrapped = wrap(model, gradients)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        loss = summed_loss(wrapped, inputs)
    loss.backward()
    assert_clipped(wrapped, gradients, tolerance=max(0.02, 5.0 * float(lost)))
    proves_model(name, way)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("GPT-2 (tied head)", ["c_attn", "wte"]),
        ("Llama", ["q_proj", "v_proj"]),
        ("BERT", ["query"]),
        ("T5", ["q", "v"]),
    ],
)
def test_lora(name, targets):
    peft = pytest.importorskip("peft")
    model, inputs = example(name)
    config = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    gradients = loop_over_samples(model, summed_loss, inputs)
    wrapped = wrap(copy.deepcopy(model), gradients)
    summed_loss(wrapped, inputs).backward()
    assert_clipped(wrapped, gradients)
    uses = dpfast.explain(wrapped, **inputs).uses
    assert uses and all("lora" in use.parameter for use in uses)  # no rule ever ran for the frozen base
    proves_model(name, "LoRA")


@pytest.mark.parametrize("name", ["Llama"])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping", "in place, after a step"])
def test_compile(name, when, exact):
    model, inputs = example(name)
    torch._dynamo.reset()
    if when == "before wrapping":
        called = wrapped = wrap(torch.compile(model, backend="aot_eager"), exact(name))
    elif when == "after wrapping":
        wrapped = wrap(model, exact(name))
        called = torch.compile(wrapped, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
        summed_loss(model, inputs).backward()  # compiled without taps
        model.zero_grad()
        called = wrapped = wrap(model, exact(name))
    for _ in range(2):
        wrapped.zero_grad()
        summed_loss(called, inputs).backward()
    gradients = exact(name)
    if when == "before wrapping":
        gradients = {f"_orig_mod.{key}": g for key, g in gradients.items()}
    assert_clipped(wrapped, gradients)
    proves_model(name, f"torch.compile ({when})")


def test_position_ids_of_one_row(exact):
    name = "GPT-2 (tied head)"
    model, inputs = example(name)
    wrapped = wrap(model, exact(name))
    summed_loss(wrapped, {**inputs, "position_ids": torch.arange(huggingface.T).unsqueeze(0)}).backward()
    assert_clipped(wrapped, exact(name))


def test_experts_without_a_rule_are_refused():
    config = huggingface.transformers.JetMoeConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_key_value_heads=1, kv_channels=4,
        num_local_experts=2, pad_token_id=0,
    )  # fmt: skip
    model = huggingface.transformers.JetMoeForCausalLM(config)
    with pytest.raises(UnsupportedModuleError, match=r"experts\S* \(\w+\): sends tokens of all samples .* freeze it"):
        dpfast.GradSampleModule(model)
    for key, p in model.named_parameters():
        p.requires_grad = ".experts" not in key and ".mlp" not in key
    dpfast.GradSampleModule(model)


def test_samples_folded_into_positions_come_apart():
    """Each token would be clipped by itself, otherwise."""

    class Folding(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x.flatten(0, 1)).view_as(x)

    model, x = Folding(), torch.randn(5, 4, 3)
    exact = loop_over_samples(model, lambda m, x: m(x).sum(), x)
    wrapped = dpfast.GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    wrapped(x).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) < 1e-5


def test_table_of_layers_is_current(request):
    """Every row stands there that the tests above and those of tests/rules prove, as they would write it."""
    from families import FAMILIES

    rows = {family: (rule, "; ".join(what for what, _, _ in cases())) for family, (rule, cases) in FAMILIES.items()}
    models = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and line.split(" | ")[0].removeprefix("| ") in MODELS:
            name, proved = line.strip("| ").split(" | ")
            models[name] = proved.split(", ")
            assert {"grad_sample", "passes=1", "passes=2", "autocast", "bf16"} <= set(models[name])
    assert list(models) == list(MODELS)
    assert PAGE.read_text() == rendered(rows, models)
