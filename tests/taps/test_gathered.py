"""Experts in a list, each called with the rows that were picked for it: whose these are is followed, or refused."""

import pytest
import torch
from picked_rows import assert_right, loss
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastError, UnsupportedModuleError
from dpfast.taps import Operation, Picked, Shared, met_as_rows
from dpfast.taps.picked import Source
from dpfast.testing import loop_over_samples, norms_of, relative_error

D, T, E = 6, 5, 4

PICK = {
    "by number": lambda x, rows: x[rows],
    "index_select": lambda x, rows: x.index_select(0, rows),
    "by mask": lambda x, rows: x[torch.zeros(len(x), dtype=torch.bool).index_fill(0, rows, True)],
    "Switch": lambda x, rows: x[None, rows].reshape(-1, x.shape[-1]),
    "behind casts": lambda x, rows: x.to(x.dtype).contiguous()[rows],
    "a sum": lambda x, rows: (x + 0.0)[rows],
}
NOT_FOLLOWED = {
    "transposed": lambda x, rows: x.T[:, rows].T,
    "rolled": lambda x, rows: x.roll(0, 0)[rows],
}


def mlp():
    return nn.Sequential(nn.Linear(D, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, D))


class Rescaled(nn.Module):
    """Has no rule."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return torch.tanh(x * self.scale)


class Centred(nn.Module):
    """Mixes the rows that it gets."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x):
        return self.lin(x - x.mean(0))


class Block(nn.Module):
    """As LLaMAMoE: (N, T, D) -> (N, T, D)."""

    def __init__(self, pick=PICK["by number"], expert=mlp, top_k=2):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList(expert() for _ in range(E))
        self.pick, self.top_k = pick, top_k

    def forward(self, hidden):
        x = hidden.view(-1, D)
        weights, index = self.gate(x).topk(self.top_k)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, k = torch.where(index == e)
            rows, order = rows.sort()
            out = expert(self.pick(x, rows))
            y = y.index_add(0, rows, weights.softmax(1)[rows, k[order], None] * out)
        return y.view_as(hidden)


class Model(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        self.first = nn.Linear(3, D)
        self.block = Block(*args, **kwargs)
        self.last = nn.Linear(D, 2)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.block(x))


@pytest.mark.parametrize("how", PICK)
def test_rows_are_followed(how):
    assert_right(Model(PICK[how]), torch.randn(3, T, 3))


@pytest.mark.parametrize("shape", [(T, T), (E, T), (E, E), (1, T), (3, 1)])
def test_sizes(shape):
    assert_right(Model(), torch.randn(*shape, 3))


@pytest.mark.parametrize("expert", [lambda: nn.Linear(D, D), Rescaled])
def test_an_expert_is_one_layer(expert):
    assert_right(Model(expert=expert), torch.randn(3, T, 3))


@pytest.mark.parametrize("how", NOT_FOLLOWED)
def test_what_is_not_followed_is_refused(how):
    wrapped = GradSampleModuleFastGradientClipping(Model(NOT_FOLLOWED[how]), loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"block\.experts\.\d"):
        loss(wrapped, torch.randn(3, T, 3)).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    class Checkpointed(Block):
        def forward(self, hidden):
            return checkpoint(super().forward, hidden, use_reentrant=reentrant)

    model, x = Model(), torch.randn(3, T, 3)
    exact = norms_of(loop_over_samples(model, loss, x))
    model.block.__class__ = Checkpointed
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    if reentrant:  # within the block, which does not run again
        with pytest.raises(DpfastError, match=r"block\.experts\.\d.* outside of that block's forward"):
            loss(wrapped, x).backward()
        return
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_block_checkpointed(reentrant):
    class Checkpointed(Model):
        def forward(self, x):
            x = self.first(x)
            return self.last(x + checkpoint(self.block, x, use_reentrant=reentrant))

    model, x = Model(), torch.randn(3, T, 3)
    exact = norms_of(loop_over_samples(model, loss, x))
    model.__class__ = Checkpointed
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5


class Past(nn.Sequential):
    """Its layers are called, and it is not."""

    between = staticmethod(torch.tanh)

    def __call__(self, x):
        return self[1](self.between(self[0](x)))


def test_layers_of_an_expert_that_are_called_past_it():
    """What the first gives of picked rows has these rows."""
    model, x = Model(expert=lambda: Past(nn.Linear(D, 7), nn.Linear(7, D))), torch.randn(3, T, 3)
    exact = norms_of(loop_over_samples(model, loss, x))
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5


def test_a_layer_of_an_expert_that_is_called_past_it():
    """Its first layer is called with rows that are followed, its last with what nobody has followed."""

    class NotFollowed(Past):
        between = staticmethod(lambda x: x.flip(-1))

    model = Model(expert=lambda: NotFollowed(nn.Linear(D, 7), nn.Linear(7, D)))
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"block\.experts\.\d\.1"):
        loss(wrapped, torch.randn(3, T, 3)).backward()


def test_units():
    model, x, whose = Model(), torch.randn(4, T, 3), torch.tensor([1, 0, -1, 1])
    exact = loop_over_samples(model, loss, x)
    persons = {name: torch.stack([g[1], g[0] + g[3]]) for name, g in exact.items()}
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with wrapped.units(whose, 2):
        loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(persons)) <= 1e-5


def test_two_passes():
    model, x = Model(), torch.randn(3, T, 3)
    exact = loop_over_samples(model, loss, x)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", passes=2, max_grad_norm=0.1)
    losses = torch.sin(3.0 * wrapped(x)).flatten(1).mean(1)
    losses.sum().backward(retain_graph=True)
    wrapped.zero_grad()
    wrapped.disable_hooks()
    factors = wrapped.get_clipping_coef()
    (factors * losses).sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5
    for name, p in model.named_parameters():
        total = torch.einsum("n,n...->...", factors.double(), exact[name])
        assert (p.grad - total).norm() <= 1e-5, name


def test_what_is_not_followed_is_refused_where_all_tokens_go_one_way():
    model = Model(NOT_FOLLOWED["rolled"], top_k=1)
    with torch.no_grad():
        model.block.gate.weight.zero_()
    wrapped = GradSampleModule(model, loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"block\.experts"):
        loss(wrapped, torch.randn(3, T, 3)).backward()


def test_an_expert_that_mixes_its_rows_is_refused():
    wrapped = GradSampleModuleFastGradientClipping(Model(expert=Centred), loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"samples meet in block\.experts\.\d\.lin"):
        loss(wrapped, torch.randn(3, T, 3)).backward()


def test_all_tokens_go_one_way_first():
    """Then what is learned of the experts looks as of any layer, and must not be believed."""
    model = Model(top_k=1)
    with torch.no_grad():
        model.block.gate.weight.zero_()
        model.block.gate.bias.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    x = torch.randn(3, T, 3)
    wrapped = GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    for _ in range(4):
        with torch.no_grad():
            model.block.gate.weight.normal_()
            model.block.gate.bias.zero_()
        wrapped.zero_grad()
        exact = loop_over_samples(_plain(model), loss, x)
        loss(wrapped, x).backward()
        for name, p in model.named_parameters():
            found = torch.zeros_like(exact[name]) if p.grad_sample is None else p.grad_sample
            assert (found - exact[name]).norm() <= 1e-5 * norms_of(exact).max(), name


def _plain(model, top_k=1):
    plain = Model(top_k=top_k)
    plain.load_state_dict(model.state_dict())
    return plain


def test_a_sample_that_is_not_finite_stays_alone():
    model, x = Model(), torch.randn(4, T, 3)
    x[2, 1] = float("nan")
    wrapped = GradSampleModule(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    others = [0, 1, 3]
    exact = loop_over_samples(_plain(model, 2), loss, x[others])
    for name, p in model.named_parameters():
        assert (p.grad_sample[others] - exact[name]).norm() <= 1e-5 * norms_of(exact).max(), name


class WithBag(nn.Module):
    """Sends rows to experts itself, after what one bag gives for each sample was broadcast over its positions."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.table, self.bag = nn.Embedding(11, D), nn.EmbeddingBag(5, D, mode="sum")
        self.gate, self.head = nn.Linear(D, E), nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))

    def forward(self, x, words):
        h = self.how(self.table(x), self.bag(words))
        rows = h.reshape(-1, D)
        shares = self.gate(rows).softmax(-1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            here = (shares.argmax(-1) == e).nonzero()[:, 0]
            out[here] = expert(rows[here]) * shares[here, e, None]
        return self.head(out.view_as(h)).mean(1)


BROADCAST = {
    "behind": lambda h, bag: h + bag[:, None],
    "in front": lambda h, bag: bag[:, None] + h,
    "times": lambda h, bag: h * bag.unsqueeze(1).sigmoid() + bag[:, None],
    "by one number": lambda h, bag: h * bag.mean(1, keepdim=True)[:, None],
}


@pytest.mark.parametrize("n", [1, 3, T])
@pytest.mark.parametrize("how", BROADCAST)
def test_what_is_broadcast_over_rows_leaves_them_where_they_are(how, n):
    torch.manual_seed(0)
    model = WithBag(BROADCAST[how])
    x, words = torch.randint(0, 11, (n, T)), torch.randint(0, 5, (n, 4))
    exact = loop_over_samples(model, lambda m, *batch: m(*batch).square().sum(), x, words)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    wrapped(x, words).square().sum().backward()
    assert relative_error(wrapped.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_another_samples_rows_broadcast_over_all_are_refused():
    torch.manual_seed(0)
    model = WithBag(lambda h, bag: h + bag[:1, None])
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(DpfastError):
        wrapped(torch.randint(0, 11, (3, T)), torch.randint(0, 5, (3, 4))).square().sum().backward()


class OfPositions(nn.Module):
    """An expert with a table of positions (T,), which it adds to whole samples."""

    def __init__(self):
        super().__init__()
        self.lin, self.table = nn.Linear(D, D), nn.Embedding(T, D)

    def forward(self, x):
        return torch.tanh(self.lin(x) + self.table(torch.arange(x.shape[1])))


class OfSamples(nn.Module):
    """Picks whole samples."""

    def __init__(self):
        super().__init__()
        self.gate, self.first = nn.Linear(3, 2), nn.Linear(3, D)
        self.experts = nn.ModuleList(OfPositions() for _ in range(2))

    def forward(self, x):
        index, h = self.gate(x.mean(1)).argmax(1), self.first(x)
        y = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            rows = torch.where(index == e)[0]
            y = y.index_add(0, rows, expert(h[rows])) if len(rows) else y
        return y


def test_positions_in_an_expert_are_not_taken_for_as_many_samples():
    torch.manual_seed(0)
    model, x = OfSamples(), torch.randn(T, T, 3)
    with torch.no_grad():
        model.gate.bias.copy_(torch.tensor([50.0, 0.0]))
    model.gate.requires_grad_(False)
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    with pytest.raises(DpfastError, match=r"experts\.0\.table .*positions or a table that all samples share"):
        loss(wrapped, x).backward()
    wrapped.to_standard_module()
    for expert in model.experts:
        expert.table.requires_grad_(False)
    model.first.requires_grad_(False)
    exact = norms_of(loop_over_samples(model, loss, x))
    wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")
    loss(wrapped, x).backward()
    assert relative_error(wrapped.get_norm_sample(), exact) <= 1e-5


def test_rows_that_nobody_knows_beside_a_parameter_are_refused_by_name():
    """As equiformer-pytorch has them; it was a bare AssertionError."""
    model = GradSampleModule(nn.Linear(4, 4))
    weight = Shared.make(model._tapped._taps[0], ("weight", 1), torch.randn(4, requires_grad=True), ())
    operation = Operation(torch.mul, (torch.randn(3, 4), weight), {})
    with pytest.raises(UnsupportedModuleError, match=r"Linear: in mul, .* Net makes out of its input"):
        met_as_rows(operation, Picked(None, (None,), Source("Net", (3,))))
