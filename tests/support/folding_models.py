"""Models that fold their samples into rows, or mix them, between two layers."""

import torch
from torch import nn

from dpfast.errors import InputError, UnsupportedModuleError

T, D = 5, 6


class Model(nn.Module):
    """What its subclasses compute between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.lin, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.between(torch.tanh(self.first(x)))))


class Together(Model):
    """(N·T, D)."""

    def between(self, x):
        return self.lin(x.flatten(0, 1)).unflatten(0, (-1, T))


class OverAndOver(Model):
    """(T·N, D)."""

    def between(self, x):
        return self.lin(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (T, -1)).transpose(0, 1)


class Windows(Model):
    """(N·3, 2, D): attention within windows of two, and a norm."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.MultiheadAttention(D, 2, batch_first=True), nn.LayerNorm(D)

    def between(self, x):
        windows = torch.cat([x, x[:, :1]], 1).unflatten(1, (3, 2)).flatten(0, 1)
        windows = self.norm(windows + self.lin(windows, windows, windows, need_weights=False)[0])
        return windows.unflatten(0, (-1, 3)).flatten(1, 2)[:, :T]


class FoldedBehind(Model):
    """(T, N·3, 2), samples in front of parts in the second dimension."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)

    def between(self, x):
        parts = x.transpose(0, 1).unflatten(2, (3, 2)).flatten(1, 2)
        return self.lin(parts).unflatten(1, (-1, 3)).flatten(2).transpose(0, 1)


class Frames(Model):
    """Images (T·N, 1, 2, 3), one a frame, a group norm behind the convolution."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Conv2d(1, 2, 2, padding=1), nn.GroupNorm(1, 2)

    def between(self, x):
        frames = x.transpose(0, 1).reshape(-1, 1, 2, 3)
        return x + self.norm(self.lin(frames)).flatten(1)[:, :D].unflatten(0, (T, -1)).transpose(0, 1)


class RecurrentInRows(Model):
    """A time-first GRU over (2, N·T, 3), parts as time."""

    def __init__(self):
        super().__init__()
        self.lin = nn.GRU(3, 3)

    def between(self, x):
        out, _ = self.lin(x.flatten(0, 1).unflatten(1, (2, 3)).transpose(0, 1))
        return out.transpose(0, 1).flatten(1).unflatten(0, (-1, T))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(D))

    def forward(self, x):
        return x * self.gain


class RowsWithoutRule(OverAndOver):
    def __init__(self):
        super().__init__()
        self.lin = Gain()


class InWindow(nn.Module):
    """Swin's: what is added to a window's scores depends on which of its sample's it is."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.rand(2, 3, 3))

    def forward(self, x, mask):
        scores = (x @ x.mT + self.table.sum(0)).unflatten(0, (-1, len(mask)))
        return (scores + mask).flatten(0, 1).softmax(-1) @ x


class ShiftedWindows(Model):
    """(N·2, 3, D) in a layer without a rule."""

    def __init__(self):
        super().__init__()
        self.lin = InWindow()
        self.register_buffer("mask", torch.stack((torch.zeros(3, 3), torch.full((3, 3), -9.0).triu(1))))

    def between(self, x):
        windows = torch.cat((x, x[:, :1]), 1).unflatten(1, (2, 3)).flatten(0, 1)
        return self.lin(windows, self.mask).unflatten(0, (-1, 2)).flatten(1, 2)[:, :T]


class ShiftedWindowsOverAndOver(ShiftedWindows):
    """(2·N, 3, D)."""

    def between(self, x):
        windows = torch.cat((x, x[:, :1]), 1).unflatten(1, (2, 3)).transpose(0, 1).flatten(0, 1)
        return self.lin(windows, self.mask[:1]).unflatten(0, (2, -1)).transpose(0, 1).flatten(1, 2)[:, :T]


class Choices(Model):
    """Tokens (N·T,), in one row."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Embedding(9, D)

    def between(self, x):
        return x + self.lin((x.sum(2).abs() * 3).long().clamp(max=8).flatten()).unflatten(0, (-1, T))


class LooksAtValues(Together):
    """Cannot run on fake tensors."""

    def between(self, x):
        return super().between(x * float(x.isfinite().float().mean().item() == 1.0))


class DropsOut(Together):
    """The same numbers are dropped in every run."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def between(self, x):
        return super().between(x) + 0.0 * self.drop(x)


class Experts(Model):
    """Each token goes to one of two layers."""

    def __init__(self):
        super().__init__()
        self.lin = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def between(self, x):
        tokens, out = x.flatten(0, 1), torch.zeros(x.shape[0] * T, D, dtype=x.dtype)
        which = (tokens.sum(1) > 0).long()
        for i, lin in enumerate(self.lin):
            rows = (which == i).nonzero().squeeze(1)
            out = out.index_add(0, rows, lin(tokens[rows]))
        return out.unflatten(0, (-1, T))


RIGHT = [
    Together, OverAndOver, Windows, FoldedBehind, Frames, RecurrentInRows, RowsWithoutRule, Choices, LooksAtValues,
    DropsOut, ShiftedWindows, ShiftedWindowsOverAndOver, Experts,
]  # fmt: skip


# --- rows that are nobody's ---


class Centred(Model):
    """Of each sample, what it differs by from the batch's mean."""

    def between(self, x):
        return self.lin(x - x.mean(0))


class AttentionOverBatch(Model):
    """Positions for samples in an attention that takes the second dimension for these."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def between(self, x):
        y = x.transpose(0, 1)
        return self.lin((y @ y.transpose(1, 2)).softmax(2) @ y).transpose(0, 1)


class Neighbour(Model):
    """A sample sees the one before it."""

    def between(self, x):
        return self.lin(x + x.roll(1, 0))


class SeesTheFirst(Model):
    """All see the first."""

    def between(self, x):
        return self.lin(x + x[:1])


class MixedRows(Model):
    """(N·T, D), taken apart in another order than they came together."""

    def between(self, x):
        return self.lin(x.flatten(0, 1).unflatten(0, (T, -1)).transpose(0, 1))


class Turned(Model):
    """The samples in the opposite order."""

    def between(self, x):
        return self.lin(x.flip(0)).flip(0)


class InTheMiddle(Model):
    """Rows (T, N, 2 halves), in one dimension."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def between(self, x):
        y = self.lin(x.transpose(0, 1).unflatten(2, (2, 3)).flatten(0, 2))
        return y.unflatten(0, (T, -1, 2)).flatten(2).transpose(0, 1)


class HiddenBehindZeros(Model):
    """A layer that lets nothing through before its first step."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(D, D)
        nn.init.zeros_(self.adapter.weight)
        nn.init.zeros_(self.adapter.bias)

    def between(self, x):
        return self.lin(x) + self.adapter(x - x.mean(0))


class HiddenGate(HiddenBehindZeros):
    """A parameter that does."""

    def __init__(self):
        super().__init__()
        self.adapter, self.gate = None, nn.Parameter(torch.zeros(1))

    def between(self, x):
        x = self.lin(x)
        return x + self.gate.tanh() * (x - x.mean(0))


class HiddenInZeros(Model):
    """What is mixed is zero."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D, bias=False)
        nn.init.zeros_(self.lin.weight)

    def between(self, x):
        out = self.lin(x)
        return x + out.mean(0)


class HiddenByBeingAlike(Model):
    """A norm over one number gives all samples the same."""

    def __init__(self):
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(1), nn.Linear(1, 3)

    def between(self, x):
        q, k, v = self.lin(self.norm(x.mean(-1, keepdim=True))).unbind(-1)
        return x + ((q @ k.mT).softmax(-1) @ v).unsqueeze(-1)


REFUSED = {
    Centred: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    AttentionOverBatch: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    Neighbour: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    SeesTheFirst: (UnsupportedModuleError, r"samples meet in lin \(Linear\)"),
    MixedRows: (UnsupportedModuleError, r"samples meet in|another order"),
    Turned: (InputError, r"lin \(Linear\): its samples stand in another order than in the model's input"),
    InTheMiddle: (InputError, r"lin \(Linear\): its samples are folded into rows in an order that is neither"),
    **dict.fromkeys(
        (HiddenBehindZeros, HiddenGate, HiddenInZeros, HiddenByBeingAlike), (UnsupportedModuleError, "samples meet in")
    ),
}
