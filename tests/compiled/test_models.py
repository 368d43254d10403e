"""Whole models as one graph against the loop over samples."""

import pytest
import torch
import torch.nn.functional as F
from small_steps import Transformer, check, exact_step, token_batch, token_losses
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpfast
from dpfast.arithmetic import is_traced
from dpfast.rules import recurrent
from dpfast.testing import relative_error


def hf_losses(model, tokens, targets):
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=13, n_positions=6, **dropout)
    ), hf_losses


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=13, **sizes)), hf_losses


def lora():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    return get_peft_model(llama()[0], config), hf_losses


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten()
        )
        self.head = nn.Linear(72, 4)

    def forward(self, x):
        return self.head(self.layers(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Words(nn.Module):
    """What is in front of the LSTM, and its first layer, need the gradient of an LSTM's input."""

    def __init__(self, layers=2, **options):
        super().__init__()
        self.table, self.rnn = nn.Embedding(11, 3), nn.LSTM(3, 4, layers, batch_first=True, **options)
        self.start = nn.Parameter(torch.randn(layers * (1 + self.rnn.bidirectional), 1, 4))
        self.head = nn.Linear(4 * (1 + self.rnn.bidirectional), 4)

    def forward(self, x):
        start = self.start.expand(-1, len(x), -1).contiguous()
        return self.head(self.rnn(self.table(x), (start, torch.tanh(start)))[0].mean(1))


class Scaled(nn.Module):
    """Numbers without dimensions: a temperature, a gate, a norm that is divided by."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 5), nn.Linear(5, 4)
        self.temperature, self.gate = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        h = torch.tanh(F.linear(x, self.first.weight / self.first.weight.norm(), self.first.bias))
        return self.temperature.exp() * self.last(h + self.gate * h.square())


def class_losses(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


class Checkpointed(Transformer):
    reentrant = False

    def forward(self, tokens):
        x = self.table(tokens) + self.positions(self.order)
        x = x + checkpoint(lambda x: self.down(F.gelu(self.up(self.norm(x)))), x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


def images(n):
    return torch.randn(n, 3, 8, 8), torch.randint(0, 4, (n,))


def sequences(n):
    return torch.randn(n, 5, 3), torch.randint(0, 4, (n,))


def rows(n):
    return torch.randn(n, 8), torch.randint(0, 4, (n,))


def words(n):
    return torch.randint(0, 11, (n, 6)), torch.randint(0, 4, (n,))


CASES = {
    "gpt2": (gpt2, token_batch),
    "llama": (llama, token_batch),
    "lora": (lora, token_batch),
    "cnn": (lambda: (Cnn(), class_losses), images),
    "lstm": (lambda: (Recurrent(), class_losses), sequences),
    "lstm of words, two layers": (lambda: (Words(), class_losses), words),
    "lstm of words, both ways": (lambda: (Words(1, bidirectional=True), class_losses), words),
    "numbers": (lambda: (Scaled(), class_losses), rows),
    "checkpointed": (lambda: (Checkpointed(), token_losses), token_batch),
    "checkpointed, reentrant": (lambda: (CheckpointedReentrant(), token_losses), token_batch),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model(name):
    torch.manual_seed(0)
    make, batches = CASES[name]
    net, losses = make()
    step = dpfast.compile_step(net, losses, max_grad_norm=0.5, batch_size=4, backend="aot_eager")
    for n in (4, 3):
        check(step, net, losses, batches(n))
    assert len(step._graphs) == 1


def test_a_captured_lstm_is_not_cudnns(monkeypatch):
    """Which asks for the block of memory that its weights stand on; a graph has no such thing."""
    used, own = [], recurrent._NATIVE["LSTM"]
    native = {"LSTM": lambda *args: used.append((is_traced(), torch.backends.cudnn.enabled)) or own(*args)}
    monkeypatch.setattr(recurrent, "_NATIVE", native)
    net, before = Words(), torch.backends.cudnn.enabled
    step = dpfast.compile_step(net, class_losses, max_grad_norm=0.5, batch_size=4, backend="eager")
    step(*words(4))
    assert {enabled for traced, enabled in used if traced} == {False} and torch.backends.cudnn.enabled == before
    assert all(enabled == before for traced, enabled in used if not traced)


def test_accumulation_and_optimizer():
    torch.manual_seed(0)
    net = Transformer()
    step = dpfast.compile_step(net, token_losses, max_grad_norm=0.5, batch_size=4, backend="aot_eager")
    one, two = token_batch(4), token_batch(3)
    sums = [exact_step(net, token_losses, batch, 0.5)[0] for batch in (one, two)]
    step(*one)
    step(*two)
    for name, p in net.named_parameters():
        assert relative_error(p.grad, sums[0][name] + sums[1][name]) < 2e-5
    step.forbid_grad_accumulation()
    with pytest.raises(dpfast.errors.StateError, match="accumulation"):
        step(*one)
