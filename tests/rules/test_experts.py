"""Mixtures of experts of transformers against a loop over samples, in all modes."""

import copy
import importlib
import inspect
import pkgutil
import types

import pytest
import torch
from huggingface import transformers
from torch import nn

import dpfast
from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, UnsupportedModuleError
from dpfast.rules import experts
from dpfast.taps import find_forward
from dpfast.testing import loop_over_samples, norms_of, relative_error

E, T = 4, 5


def mixtral(top_k=2, layers=1, implementation="eager", **options):
    config = transformers.MixtralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=E, num_experts_per_tok=top_k, max_position_embeddings=16, **options
    )  # fmt: skip
    model = transformers.MixtralForCausalLM._from_config(config, experts_implementation=implementation)
    return _grown(model)


def gpt_oss():
    config = transformers.GptOssConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=E, num_experts_per_tok=2, head_dim=4, pad_token_id=0,
    )  # fmt: skip
    return _grown(transformers.GptOssForCausalLM._from_config(config, experts_implementation="eager"))


def _grown(model):
    """Routers that start as zeros would send all tokens the same way."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def loss(model, ids):
    return torch.sin(3.0 * model(input_ids=ids).logits).flatten(1).mean(1)


def summed(model, ids):
    return loss(model, ids).sum()


def assert_right(model, ids, modes=("grad_sample", 1, 2), tolerance=1e-5):
    exact = loop_over_samples(model, summed, ids)
    norms = norms_of(exact)
    assert norms.min() > 0
    limit = float(norms.median())
    for mode in modes:
        module = copy.deepcopy(model)
        if mode == "grad_sample":
            wrapped = GradSampleModule(module, loss_reduction="sum")
            summed(wrapped, ids).backward()
            for name, p in module.named_parameters():
                if p.requires_grad:
                    error = (p.grad_sample - exact[name]).flatten(1).norm(dim=1)
                    assert (error <= tolerance * norms).all(), name
            continue
        wrapped = GradSampleModuleFastGradientClipping(module, loss_reduction="sum", passes=mode, max_grad_norm=limit)
        losses = loss(wrapped, ids)
        losses.sum().backward(retain_graph=mode == 2)
        factors = wrapped.get_clipping_coef().double()
        assert relative_error(wrapped.get_norm_sample(), norms) <= tolerance
        assert (factors * norms <= limit * (1 + 1e-6)).all()
        if mode == 2:
            wrapped.zero_grad()
            wrapped.disable_hooks()
            (factors * losses).sum().backward()
            wrapped.enable_hooks()
        for name, p in module.named_parameters():
            if p.requires_grad:
                total = torch.einsum("n,n...->...", factors, exact[name])
                assert (p.grad - total).norm() <= tolerance * max(total.norm(), 1e-3 * limit), name


@pytest.mark.parametrize("n", [3, T, E, 1])
def test_mixtral(n):
    assert_right(mixtral(layers=2).double(), torch.randint(0, 20, (n, T)))


def test_as_many_samples_as_positions_and_experts():
    assert_right(mixtral().double(), torch.randint(0, 20, (E, E)))


def test_one_position():
    assert_right(mixtral().double(), torch.randint(0, 20, (3, 1)))


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_implementations(implementation):
    model = mixtral(implementation=implementation)
    ids = torch.randint(0, 20, (3, T))
    reference = copy.deepcopy(model).double()
    reference.set_experts_implementation("eager")
    exact = loop_over_samples(reference, summed, ids)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    summed(wrapped, ids).backward()
    for name, p in model.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name


def test_biases_and_transposed_weights():
    assert_right(gpt_oss().double(), torch.randint(0, 20, (3, T)))


@pytest.mark.parametrize("trainable", ["experts", "gate"])
def test_frozen_beside(trainable):
    model = mixtral().double()
    for name, p in model.named_parameters():
        p.requires_grad_(trainable in name)
    assert_right(model, torch.randint(0, 20, (3, T)))


def test_experts_that_nobody_or_one_token_chose():
    model, ids = mixtral(top_k=1).double(), torch.randint(0, 20, (3, T))
    gate = model.model.layers[0].mlp.gate
    for tries in range(200):
        counts = _chosen(model, ids).bincount(minlength=E).tolist()
        if 0 in counts and 1 in counts:
            break
        torch.manual_seed(tries)
        gate.weight.data.normal_()
    assert 0 in counts and 1 in counts
    assert_right(model, ids)


def _chosen(model, ids):
    found = []
    handle = model.model.layers[0].mlp.gate.register_forward_hook(lambda m, a, out: found.append(out[2].flatten()))
    model(input_ids=ids)
    handle.remove()
    return found[0]


def test_a_sample_that_is_not_finite_stays_alone():
    model, ids = mixtral(), torch.randint(1, 20, (4, T))
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")
    ids[2, 1] = 0
    others = [0, 1, 3]
    clean = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    summed(clean, ids[others]).backward()
    batch = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    summed(batch, ids).backward()
    for (name, p), q in zip(batch._module.named_parameters(), clean._module.parameters(), strict=True):
        if "embed" in name:  # whose rows of NaN stand in nobody's else gradient
            assert p.grad_sample[others].isfinite().all()
        assert relative_error(p.grad_sample[others], q.grad_sample) <= 1e-5, name
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.warns(DpfastWarning):
        summed(wrapped, ids).backward()
        assert wrapped.nonfinite_samples == 1
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_autocast():
    model, ids = mixtral(), torch.randint(0, 20, (3, T))
    exact = norms_of(loop_over_samples(model, summed, ids))
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        value = summed(wrapped, ids)
    value.backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 0.1  # a token may take another expert in 16 bits


def test_checkpointing():
    model = mixtral(layers=2).double().train()
    plain = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    ids = torch.randint(0, 20, (3, T))
    exact = norms_of(loop_over_samples(plain, summed, ids))
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    summed(wrapped, ids).backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5


def test_units():
    """Persons with several samples."""
    model, ids, whose = mixtral().double(), torch.randint(0, 20, (4, T)), torch.tensor([1, 0, -1, 1])
    exact = loop_over_samples(model, summed, ids)
    persons = {name: torch.stack([g[1], g[0] + g[3]]) for name, g in exact.items()}
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with wrapped.units(whose, 2):
        summed(wrapped, ids).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(persons)) <= 1e-5


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_documents(rows):
    """Experts see the tokens of all documents, and each document is clipped as if it were alone in its row."""
    model, lengths = mixtral().double(), [4, 3, 2, 5][: 2 * rows]
    documents = [torch.randint(1, 20, (length,)) for length in lengths]
    exact = [loop_over_samples(model, summed_tokens, d[None], torch.arange(len(d))[None]) for d in documents]
    exact = {name: torch.cat([g[name] for g in exact]) for name in exact[0]}
    width = len(documents) // rows
    tokens, positions, ids = (torch.zeros(rows, 8, dtype=torch.int64) for _ in range(3))
    ids -= 1
    for row in range(rows):
        at = 0
        for d in range(row * width, (row + 1) * width):
            own = slice(at, at + lengths[d])
            tokens[row, own], positions[row, own], ids[row, own] = documents[d], torch.arange(lengths[d]), d
            at += lengths[d]
        positions[row, at:] = torch.arange(8 - at)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with wrapped.units(ids, len(documents)) as units:
        units.sums(losses_of_tokens(wrapped, tokens, positions)).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def losses_of_tokens(model, tokens, positions):
    return torch.sin(3.0 * model(input_ids=tokens, position_ids=positions, use_cache=False).logits).mean(2)


def summed_tokens(model, tokens, positions):
    return losses_of_tokens(model, tokens, positions).sum()


class Shared(nn.Module):
    """Experts that every token goes through."""

    def __init__(self):
        super().__init__()
        module = pytest.importorskip("transformers.models.inkling.modeling_inkling")
        sizes = {"n_shared_experts": 2, "moe_intermediate_size": 5, "hidden_size": 6, "hidden_act": "silu"}
        self.first, self.gate = nn.Linear(3, 6), nn.Linear(6, 2)
        self.experts = module.InklingSharedExperts(types.SimpleNamespace(**sizes))
        for p in self.experts.parameters():
            nn.init.normal_(p)

    def forward(self, x):
        x = self.first(x)
        return self.experts(x, gammas=self.gate(x).flatten(0, 1).sigmoid())


@pytest.mark.parametrize("n", [1, 2, T])
def test_experts_that_every_token_goes_through(n):
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(n, T, 3)
    exact = loop_over_samples(model, lambda m, x: torch.sin(m(x)).sum(), x)
    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    torch.sin(wrapped(x)).sum().backward()
    for name, p in wrapped._module.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    torch.sin(wrapped(x)).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_explained():
    uses = dpfast.explain(mixtral(), input_ids=torch.randint(0, 20, (3, T))).uses
    found = {use.parameter.rpartition("mlp.")[2]: use.rule for use in uses if "mlp" in use.parameter}
    assert found["experts.gate_up_proj"] == found["experts.down_proj"] == "experts_of_tokens"


# --- what mixes samples ---


@pytest.mark.parametrize("how", ["config", "argument"])
def test_the_balancing_loss_is_refused(how):
    model = mixtral(output_router_logits=how == "config")
    given = {} if how == "config" else {"output_router_logits": True}
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    ids = torch.randint(0, 20, (3, T))
    output = wrapped(input_ids=ids, labels=ids, **given)
    assert output.aux_loss is not None
    with pytest.raises(UnsupportedModuleError, match=r"MixtralForCausalLM: the load-balancing loss .* call the model"):
        output.loss.backward()
    wrapped.zero_grad()
    torch.sin(wrapped(input_ids=ids, **given).logits).sum().backward()  # which is not made of it
    with pytest.raises(UnsupportedModuleError, match="return_dict=False"):
        wrapped(input_ids=ids, return_dict=False, **given)


def test_the_balancing_loss_really_mixes():
    """A sample's gradient of it is not the same beside another sample."""
    model, ids = mixtral(output_router_logits=True), torch.randint(0, 20, (3, T))
    alone = [model(input_ids=x.unsqueeze(0)).aux_loss for x in ids]
    gate = model.model.layers[0].mlp.gate.weight
    of_alone = sum(torch.autograd.grad(a, gate)[0] for a in alone) / 3
    (of_batch,) = torch.autograd.grad(model(input_ids=ids).aux_loss, gate)
    assert (of_batch - of_alone).norm() > 1e-2 * of_batch.norm()


def test_a_capacity_is_refused():
    config = transformers.NllbMoeConfig(
        vocab_size=20, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_experts=E, expert_capacity=2,
        encoder_sparse_step=1, decoder_sparse_step=1, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(UnsupportedModuleError, match=r"ffn \(NllbMoeSparseMLP\): drops tokens where an expert has as"):
        GradSampleModule(transformers.NllbMoeForConditionalGeneration(config))


def test_adapters_on_weights_of_all_experts_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    model = peft.get_peft_model(mixtral(), config)
    with pytest.raises(UnsupportedModuleError, match=r"experts \(ParamWrapper\): .*target_parameters.* target_modules"):
        GradSampleModuleFastGradientClipping(model)


# --- every class of transformers ---


def decorated():
    """Every class of transformers with the decorator, from the source's names."""
    import transformers.models as models

    found = []
    for info in pkgutil.iter_modules(models.__path__):
        path = f"{models.__path__[0]}/{info.name}/modeling_{info.name}.py"
        try:
            with open(path) as file:
                if "use_experts_implementation" not in file.read():
                    continue
        except OSError:
            continue
        module = importlib.import_module(f"transformers.models.{info.name}.modeling_{info.name}")
        found += [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    return [c for c in found if issubclass(c, nn.Module) and find_forward_of(c)]


def find_forward_of(cls):
    return (
        getattr(cls.forward, "__wrapped__", None)
        and cls.forward.__globals__["__name__"] == "transformers.integrations.moe"
    )


class _Anything(types.SimpleNamespace):
    """A configuration that has whatever it is asked for: every size is 6, every activation SiLU."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "implementation" in name:
            return "eager"
        if "act" in name and "factor" not in name:
            return "silu"
        if "expert" in name and "size" not in name:
            return E
        if "limit" in name or "alpha" in name or "eps" in name:
            return 1.5
        if "latent" in name:
            return None
        return 6


def test_every_class_gives_what_its_own_forward_gives():
    classes = decorated()
    assert len(classes) > 30, classes
    for cls in classes:
        layer = cls(_Anything())
        if getattr(layer, "has_post_expert_norm", False):  # older transformers have none
            layer.post_expert_norm.requires_grad_(False)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(torch.randn_like(p))
        hidden = torch.randn(7, 6)
        scores = torch.rand(7, E)
        weights, index = scores.topk(2)
        own = layer(hidden, index, weights)
        assert find_forward(layer) is experts.experts_of_tokens
        for ours in (
            experts.experts_of_tokens(layer, experts._untapped, hidden, index, weights),
            experts.every_expert(layer, hidden, index, weights),
        ):
            assert relative_error(ours.flatten(1), own.flatten(1)) <= 1e-5, cls
