"""What the first step holds at most, in which a model and its loss are looked at, beside the plain step: who can train
a model must not run out of memory because it is looked at."""

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from memory import peak_of_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Gpt, Llama, language_losses, mlp, square_losses

import dpfast
from dpfast.looks import exchange
from dpfast.trials import written_out
from dpfast.trials.same_kernels import same_kernels

pytestmark = pytest.mark.on_cpu

MODELS = {
    "llama, bf16": (lambda: Llama(1024, 128, 352, 4, 4).to(torch.bfloat16), 3, 128, 1024, language_losses),
    "gpt": (lambda: Gpt(1000, 128, 3, 64, 4), 6, 64, 1000, language_losses),
    "mlp": (lambda: mlp(256, 4), 64, 0, 256, square_losses),
}


def batch(n, t, width):
    return tuple(torch.randint(0, width, (n, t)) if t else torch.randn(n, width) for _ in range(2))


def of_plain_and_look(name):
    """The peaks of a plain step, and of the first forward pass of a private one, with two looks."""
    build, n, t, width, losses = MODELS[name]
    torch.manual_seed(0)
    model, given = build(), batch(n, t, width)
    own = copy.deepcopy(model)
    private = dpfast.GradSampleModuleFastGradientClipping(model)
    losses(own, *given).mean().backward()  # autograd's and the products' own tables
    own.zero_grad(set_to_none=True)
    plain = peak_of_tensors(lambda: losses(own, *given).mean().backward(), own.parameters())
    return plain, peak_of_tensors(lambda: losses(private, *given), model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_looked_at_in_less_than_a_plain_step_takes(name):
    plain, look = of_plain_and_look(name)
    assert look <= 0.97 * plain, look / plain


def test_scores_that_are_written_out_are_there_a_part_at_a_time(monkeypatch):
    """As on a GPU, whose fused kernels a look does not take."""

    @contextmanager
    def as_on_a_gpu(*, attention=True):
        with sdpa_kernel(SDPBackend.MATH), written_out.InParts():
            yield

    monkeypatch.setattr(written_out, "_SCORES", 2**16)
    monkeypatch.setattr(exchange, "same_kernels", as_on_a_gpu)
    plain, look = of_plain_and_look("llama, bf16")
    assert look <= 0.97 * plain, look / plain


def test_on_a_gpu_attention_goes_by_parts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    q, made = torch.randn(2, 3, 4, 5, requires_grad=True), []
    monkeypatch.setattr(written_out, "_attend", lambda tensors, options: made.append(tensors) or tensors[0] * 2.0)
    for attention in (True, False):
        with same_kernels(attention=attention):
            F.scaled_dot_product_attention(q, q, q)
        assert len(made) == 1


def test_the_loss_is_looked_at_in_four_times_the_outputs_beside_a_plain_step():
    """Six gradients of their size, which cross entropy's second derivatives take; a plain step holds two."""
    build, n, t, vocabulary, losses = MODELS["gpt"]
    torch.manual_seed(0)
    model, given = build(), batch(n, t, vocabulary)
    own = copy.deepcopy(model)
    private = dpfast.GradSampleModuleFastGradientClipping(model)
    losses(own, *given).mean().backward()
    own.zero_grad(set_to_none=True)
    plain = peak_of_tensors(lambda: losses(own, *given).mean().backward(), own.parameters())
    first = peak_of_tensors(lambda: losses(private, *given).mean().backward(), model.parameters())
    assert first <= plain + 4.1 * 4 * n * t * vocabulary, (first - plain) / (4 * n * t * vocabulary)


# --- attention in parts ---


def attention(shape_of_mask=None, *, n=3, n_of_keys=3, heads=4, heads_of_keys=4, length=7, rank=4, **options):
    def numbers(n, heads, length):
        lead = {4: (n, heads), 3: (n,), 2: ()}[rank]
        return torch.randn(*lead, length, 6, dtype=torch.float64, requires_grad=True)

    torch.manual_seed(0)
    q, k, v = numbers(n, heads, 5), numbers(n_of_keys, heads_of_keys, length), numbers(n_of_keys, heads_of_keys, length)
    mask = None if shape_of_mask is None else torch.rand(shape_of_mask) > 0.3

    def run():
        torch.manual_seed(1)
        y = F.scaled_dot_product_attention(q, k, v, mask, **options)
        return y, *torch.autograd.grad(y.nan_to_num().sin().sum(), (q, k, v))

    return run


@pytest.mark.parametrize("scores", [1, 10, 40, 150])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_causal": True, "length": 5},
        {"scale": 0.3},
        {"enable_gqa": True, "heads_of_keys": 2},
        {"enable_gqa": True, "heads_of_keys": 2, "shape_of_mask": (3, 4, 5, 7)},
        {"enable_gqa": True, "heads_of_keys": 1},
        {"n_of_keys": 1},
        {"rank": 3},
        {"rank": 2},
        *({"shape_of_mask": shape} for shape in [(5, 7), (1, 1, 5, 7), (4, 1, 7), (3, 1, 5, 7), (3, 4, 5, 7)]),
    ],
)
def test_in_parts_it_is_the_same_attention(monkeypatch, scores, given):
    monkeypatch.setattr(written_out, "_SCORES", scores)
    run = attention(**given)
    with sdpa_kernel(SDPBackend.MATH):
        whole = run()
        with written_out.InParts():
            in_parts = run()
    for x, y in zip(whole, in_parts, strict=True):
        torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("scores", [1, 40, 2**24])
def test_what_is_dropped_out_is_the_same_again(monkeypatch, scores):
    """In the backward pass, and in the next run."""
    monkeypatch.setattr(written_out, "_SCORES", scores)
    run = attention(dropout_p=0.5)
    with sdpa_kernel(SDPBackend.MATH), written_out.InParts():
        once, again = run(), run()
    assert all(map(torch.equal, once, again))
    assert once[0].eq(0).sum() < once[0].numel()


def test_no_sample_sees_another_one_in_parts(monkeypatch):
    monkeypatch.setattr(written_out, "_SCORES", 10)
    q = torch.randn(3, 4, 5, 6)
    other = q.clone()
    other[1] += 1.0
    with sdpa_kernel(SDPBackend.MATH), written_out.InParts():
        one, two = (F.scaled_dot_product_attention(x, x, x) for x in (q, other))
    assert (one != two).flatten(1).any(1).tolist() == [False, True, False]
