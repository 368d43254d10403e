"""A gradient is never lost or left out without a word: it is right, or an error names who lost it."""

import pytest
import torch
import torch.nn.functional as F
from released import in_two_passes, nothing_released
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dpfast import DpfastError, GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import EscapedGradientError
from dpfast.testing import clipped_sum, loop_over_samples, norms_of, relative_error

C = 0.1


class Functional(nn.Module):
    """A weight that is used in its own module's forward and once more beside it; ``own``: in neither or both."""

    def __init__(self, own: bool = True):
        super().__init__()
        self.body, self.head, self.own = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), own

    def forward(self, x):
        x = torch.tanh(self.body(x))
        x = torch.tanh(self.head(x)) if self.own else x
        return F.linear(x, self.head.weight)


class InPenalty(Functional):
    """Its weight enters the output through a norm."""

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))) * self.head.weight.norm()


@pytest.mark.parametrize("make", [Functional, lambda: Functional(own=False), InPenalty], ids=["both", "beside", "norm"])
def test_a_weight_used_outside_its_own_module(make):
    """``p.grad_sample`` has the gradients of all uses, or an error names the parameter."""
    torch.manual_seed(0)
    net = make()
    inputs = torch.randn(3, 4)
    exact = loop_over_samples(net, lambda m, x: m(x).square().sum(), inputs)
    model = GradSampleModule(net, loss_reduction="sum")
    try:
        model(inputs).square().sum().backward()
    except DpfastError as error:
        assert "head.weight" in str(error)
        return
    for name, p in net.named_parameters():
        assert p.grad_sample is not None, f"{name}: no grad_sample and no error"
        assert relative_error(p.grad_sample, exact[name]) < 1e-5, name


class Keeping(nn.Linear):
    """Keeps its own output; no reference to it is left once its forward has returned, but this one."""

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class WithAuxiliaryLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.keeping = nn.Linear(4, 3), Keeping(3, 3)

    def forward(self, x):
        return self.keeping(self.body(x))


@pytest.mark.parametrize("passes", [1, 2])
def test_an_output_that_was_stored_before_its_tap(passes):
    """A loss of ``module.kept``, stored in the module's forward: its gradient counts, or an error names the layer."""
    torch.manual_seed(0)
    net = WithAuxiliaryLoss()
    inputs = torch.randn(3, 4)

    def losses(model, x):
        inner = getattr(model, "_module", model)
        return model(x).square().sum(1) + 10.0 * inner.keeping.kept.square().sum(1)

    exact = loop_over_samples(net, lambda m, x: losses(m, x).sum(), inputs)
    model = GradSampleModuleFastGradientClipping(net, loss_reduction="sum", max_grad_norm=C, passes=passes)
    try:
        if passes == 2:
            in_two_passes(model, losses(model, inputs), "sum")
        else:
            losses(model, inputs).sum().backward()
    except DpfastError as error:
        assert "keeping" in str(error)
        return
    assert relative_error(model.get_norm_sample(), norms_of(exact)) < 1e-4
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(dict(net.named_parameters())[name].grad, expected) < 1e-3, name


class KeepingOnTheWay(nn.Module):
    """Keeps something that is made on the way to its output; gradients go through it to what is below."""

    def __init__(self, how):
        super().__init__()
        self.body, self.scale, self.how, self.kept = nn.Linear(4, 3), nn.Parameter(torch.rand(3)), how, None

    def forward(self, x):
        hidden = self.body(x) * self.scale
        self.kept = {"tensor": hidden, "list": [hidden], "tuple": (1, hidden), "dict": {"hidden": hidden}}[self.how]
        return hidden.tanh()


@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("how", ["tensor", "list", "tuple", "dict"])
def test_what_a_forward_keeps_on_the_way_to_its_output(how, passes):
    """A loss of it gave ``body`` its gradient and ``scale`` none, in every mode; not used, it does no harm. Through
    torch.func it is an error; function by function its gradients count."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), KeepingOnTheWay(how))
    inputs = torch.randn(3, 4)

    def losses(model, x, kept=1.0):
        output = model(x).square().sum(1)
        return output + tree_leaves(net[1].kept)[-1].square().sum(1) if kept else output

    def wrapped(**options):
        if passes == 0:
            return GradSampleModule(net, loss_reduction="sum", **options)
        return GradSampleModuleFastGradientClipping(
            net, max_grad_norm=C, passes=passes, loss_reduction="sum", **options
        )

    def backward(model, kept):
        model.zero_grad()
        if passes == 2:
            in_two_passes(model, losses(model, inputs, kept), "sum")
        else:
            losses(model, inputs, kept).sum().backward()

    model = wrapped(force_functorch=True)
    backward(model, kept=0.0)
    with pytest.raises(EscapedGradientError, match=r"1 \(KeepingOnTheWay\): a gradient left it"):
        backward(model, kept=1.0)
    model.to_standard_module()

    model = wrapped()
    if passes == 2:  # what is kept is no output of the model, so the second pass does not repeat it
        with nothing_released(model, "saw other activations or gradients"):
            backward(model, kept=1.0)
        return
    backward(model, kept=1.0)
    found = {name: p.grad_sample if passes == 0 else p.grad for name, p in net.named_parameters()}
    model.to_standard_module()
    samples = [{}, {}, {}]
    for n, of_one in enumerate(samples):
        net.zero_grad()
        losses(net, inputs[n : n + 1]).sum().backward()
        of_one.update({name: p.grad.double().clone() for name, p in net.named_parameters()})
    exact = {name: torch.stack([of_one[name] for of_one in samples]) for name in found}
    for name, expected in (exact if passes == 0 else clipped_sum(exact, C)).items():
        assert relative_error(found[name], expected) < 1e-3, name


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.GroupNorm(2, 8), nn.Linear(8, 8))
        self.head, self.reentrant = nn.Linear(8, 1), reentrant

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_two_passes_with_checkpointing(reentrant):
    """Both kinds of activation checkpointing give the clipped sum in two passes."""
    torch.manual_seed(0)
    net = Checkpointed(reentrant)
    inputs = torch.randn(3, 4, requires_grad=True)
    exact = loop_over_samples(net, lambda m, x: m(x.requires_grad_()).sum(), inputs.detach())
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, passes=2)
    in_two_passes(model, model(inputs)[:, 0])
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(dict(net.named_parameters())[name].grad, expected) < 1e-3, name


def test_ordinary_gradients_of_a_checkpointed_graph_made_before():
    """``GradSampleModule.disable_hooks()`` says "also through graphs made before": checkpointed ones too."""
    torch.manual_seed(0)
    model = GradSampleModule(Checkpointed(reentrant=False))
    loss = model(torch.randn(3, 4)).sum()
    model.disable_hooks()
    loss.backward()
    assert all(p.grad is not None and p.grad_sample is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_passes_with_checkpointing_and_peft(reentrant):
    """A LoRA model of PEFT whose blocks are checkpointed, the case that the mode of two passes is for."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    net = transformers.LlamaForCausalLM(config)
    net = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, p in net.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    ids = torch.randint(0, 32, (3, 6))

    def losses(model, ids):
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)

    exact = loop_over_samples(net, lambda m, x: losses(m, x).sum(), ids)
    net.enable_input_require_grads()
    net.gradient_checkpointing_enable({"use_reentrant": reentrant})
    net.train()
    model = GradSampleModuleFastGradientClipping(net, max_grad_norm=C, passes=2)
    in_two_passes(model, losses(model, ids))
    for name, expected in clipped_sum(exact, C).items():
        assert relative_error(dict(net.named_parameters())[name].grad, expected) < 1e-3, name
