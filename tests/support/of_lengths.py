"""Models that pack sequences, and what follows these: leaving padding out, or not."""

import copy

import torch
import torch.nn.functional as F
from cases import clipped_as_told
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.testing import clipped_sum, relative_error

D, T, C = 4, 9, 1.0
LENGTHS = torch.tensor([3, 9, 4, 6, 2, 5])
CHANGES = "changes with how long the longest sequence of the batch is: what follows (inner.)?rnn"


def valid(x, lengths):
    return (torch.arange(x.shape[1], device=x.device) < lengths[:, None]).unsqueeze(-1)


def masked_mean(x, lengths):
    return (x * valid(x, lengths)).sum(1) / lengths[:, None]


class Model(nn.Module):
    """An embedding, a packed layer and, as ``way`` says, what follows it."""

    enforce_sorted = False

    def __init__(self, way, cell=nn.GRU, batch_first=True, **options):
        super().__init__()
        self.table, self.rnn = nn.Embedding(20, D), cell(D, D, batch_first=batch_first, **options)
        width = D * (2 if options.get("bidirectional") else 1)
        self.mid, self.scores, self.head = nn.Linear(width, D), nn.Linear(D, 1, bias=False), nn.Linear(D, 3)
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.end = nn.Linear(D, D)
        self.conv, self.norm, self.drop = nn.Conv1d(width, D, 3, padding=1), nn.LayerNorm(D), nn.Dropout(0.5)
        self.way, self.batch_first, self.loss = way, batch_first, None

    def forward(self, tokens, lengths, classes=None):
        x = self.table(tokens)
        x = x if self.batch_first else x.transpose(0, 1)
        out, state = self.rnn(pack_padded_sequence(x, lengths.cpu(), self.batch_first, self.enforce_sorted))
        return self.way(self, out, state, lengths, classes)


def padded(model, out, **options):
    x = pad_packed_sequence(out, model.batch_first, **options)[0]
    return x if model.batch_first else x.transpose(0, 1)


def states(model, out, state, lengths, classes):
    state = state[0] if isinstance(state, tuple) else state
    return model.head(model.mid(state[-2:].transpose(0, 1).flatten(1) if model.rnn.bidirectional else state[-1]))


def mean_of_own(model, out, state, lengths, classes):
    return model.head(masked_mean(model.mid(padded(model, out)), lengths))


def sum_of_zeros(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out).sum(1)))


def maximum_of_own(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(x.masked_fill(~valid(x, lengths), -torch.inf).amax(1))


def last_of_own(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(x[torch.arange(len(x)), lengths - 1])


def total_length(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out, total_length=T)).mean(1))


def tokens_of_all(model, out, state, lengths, classes):
    """As many as the longest has: a loss outside leaves padding out."""
    return model.head(model.norm(model.mid(padded(model, out))))


def pooled_by_attention(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    scores = model.scores(x.tanh()).masked_fill(~valid(x, lengths), -torch.inf)
    return model.head((scores.softmax(1) * x).sum(1))


def attention(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    x = x + model.attention(x, x, x, key_padding_mask=~valid(x, lengths)[..., 0], need_weights=False)[0]
    return model.head(masked_mean(x, lengths))


def mask_of_the_longest(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return model.head((x * mask.unsqueeze(-1)).sum(1) / lengths[:, None])


def one_more_at_the_end(model, out, state, lengths, classes):
    """It stands behind the longest."""
    x = model.mid(padded(model, out))
    x = torch.cat([x, model.end(x[:, :1])], 1)
    mask = F.pad(valid(x[:, :-1], lengths)[..., 0], (0, 1), value=True)
    x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, :])
    return model.head((x * mask.unsqueeze(-1)).sum(1) / (1 + lengths[:, None]))


def convolved(model, out, state, lengths, classes):
    """What is padding is zeros to it, as what is behind the end."""
    return model.head(masked_mean(model.conv(padded(model, out).transpose(1, 2)).relu().transpose(1, 2), lengths))


def by_a_constant(model, out, state, lengths, classes):
    return states(model, out, state, lengths, classes) * (lengths[:, None] / T)


def own_losses(model, out, state, lengths, classes):
    """By sample, with connectionist temporal classification."""
    logits = model.head(model.mid(padded(model, out))).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logits, classes[:, None] % 2 + 1, lengths, torch.ones_like(lengths), reduction="none")


RIGHT = {
    "states": states,
    "mean of its own": mean_of_own,
    "sum of zeros": sum_of_zeros,
    "maximum of its own": maximum_of_own,
    "last of its own": last_of_own,
    "total_length": total_length,
    "tokens of all": tokens_of_all,
    "pooled by attention": pooled_by_attention,
    "attention": attention,
    "mask of the longest": mask_of_the_longest,
    "one more at the end": one_more_at_the_end,
    "convolved": convolved,
    "by a constant": by_a_constant,
    "ctc": own_losses,
}
CELLS = {
    "sorted by torch": {},
    "time first": {"batch_first": False},
    "lstm, both directions": {"cell": nn.LSTM, "bidirectional": True, "num_layers": 2},
}


def batch():
    torch.manual_seed(0)
    tokens = torch.randint(1, 20, (6, T)) * (torch.arange(T) < LENGTHS[:, None])
    return tokens, LENGTHS, torch.tensor([0, 1, 2, 2, 1, 0])


def by_sample(model, tokens, lengths, classes):
    """(N,)"""
    out = model(tokens, lengths, classes)
    if out.dim() == 3:
        out = out * valid(out, lengths)
    return (3 * out).sin().flatten(1).sum(1) if out.dim() > 1 else out


def loss(model, *inputs):
    return by_sample(model, *inputs).sum()


def gradients(plain, make, *inputs):
    """Of all parameters, of the loss of the samples ``make`` gives."""
    model = copy.deepcopy(plain).double()
    found = torch.autograd.grad(make(model, *inputs), list(model.parameters()), allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for p, g in zip(model.parameters(), found, strict=True)
        ]
    )


def moved_by_the_longest(plain):
    """By which part of itself the gradient of the five others moves when the longest sample is taken out: fp64."""
    inputs, rest = batch(), torch.tensor([0, 2, 3, 4, 5])
    among = gradients(plain, lambda model, *some: by_sample(model, *some)[rest].sum(), *inputs)
    alone = gradients(plain, loss, *(x[rest] for x in inputs))
    return float((among - alone).norm() / among.norm())


def one_pass(model):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum")


def two_passes(model):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", passes=2)


def each_sample(model):
    return GradSampleModule(model, loss_reduction="sum")


MODES = {"one pass": one_pass, "two passes": two_passes, "each sample": each_sample}


def assert_right_in(mode, plain, make, exact, *inputs):
    """What a step leaves is these samples' gradients, clipped: p.grad, of single samples the sum of these, clipped."""
    model = MODES[mode](copy.deepcopy(plain))
    losses = make(model, *inputs)
    losses.sum().backward(retain_graph=mode == "two passes")
    factors = None if mode == "each sample" else model.get_clipping_coef()
    if mode == "two passes":
        model.zero_grad()
        model.disable_hooks()
        (factors * losses).sum().backward()
    named = dict(model._module.named_parameters())
    if factors is None:
        found = clipped_sum({k: p.grad_sample.double() for k, p in named.items() if p.grad_sample is not None}, C)
        summed = clipped_sum(exact, C)
    else:
        found = {k: p.grad for k, p in named.items() if p.grad is not None}
        summed = clipped_as_told(factors, exact, C)
    for name, expected in summed.items():
        assert relative_error(found.get(name, torch.zeros_like(expected)), expected) <= 1e-5, (mode, name)


def that_the_longest_moves(make):
    """A model that :func:`moved_by_the_longest` is large of: of other random numbers, which other devices have, it may
    be next to nothing. On a GPU looks see no less than 2⁻⁵ (docs/bounds.md)."""
    least = 1e-2 if torch.zeros(0).is_cpu else 2.0**-4
    for seed in range(64):
        torch.manual_seed(seed)
        if moved_by_the_longest(plain := make()) >= least:
            return plain
    raise AssertionError("the longest sample moves none of these models")


def mean(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out)).mean(1))


def maximum(model, out, state, lengths, classes):
    return model.head(padded(model, out).amax(1))


def softmax(model, out, state, lengths, classes):
    x = padded(model, out)
    return model.head((model.scores(x).softmax(1) * x).sum(1))


def attention_to_padding(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(masked_mean(x + model.attention(x, x, x, need_weights=False)[0], lengths))


def convolved_twice(model, out, state, lengths, classes):
    """Behind the first the padding is its bias and the constant, and what is behind the end zeros."""
    x = model.conv((model.conv(padded(model, out).transpose(1, 2)) + 2.0).relu()).transpose(1, 2)
    return model.head(masked_mean(x, lengths))


def pooled(model, out, state, lengths, classes):
    return model.head(F.adaptive_avg_pool1d(padded(model, out).transpose(1, 2), 2).sum(2))


def last(model, out, state, lengths, classes):
    return model.head(model.mid(padded(model, out))[:, -1] + model.end(state[-1]))


def relative_positions(model, out, state, lengths, classes):
    x = model.mid(padded(model, out))
    return model.head(masked_mean(x * torch.arange(x.shape[1])[:, None] / x.shape[1], lengths))


def by_the_longest(model, out, state, lengths, classes):
    """Nothing is padded here."""
    return states(model, out, state, lengths, classes) * (lengths / lengths.max())[:, None]


def by_all_lengths(model, out, state, lengths, classes):
    return states(model, out, state, lengths, classes) / lengths.sum()


def dropped_mean(model, out, state, lengths, classes):
    return model.head(model.drop(model.mid(padded(model, out))).mean(1))


def behind_a_gate(model, out, state, lengths, classes):
    """Which lets nothing through as long as its weight is zeros."""
    return states(model, out, state, lengths, classes) + model.gate(padded(model, out).mean(1))


WRONG = {
    "mean": mean,
    "maximum": maximum,
    "softmax": softmax,
    "attention to padding": attention_to_padding,
    "convolved twice": convolved_twice,
    "pooled": pooled,
    "last": last,
    "relative positions": relative_positions,
    "by the longest": by_the_longest,
    "by all lengths": by_all_lengths,
}
