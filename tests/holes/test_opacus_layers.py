"""Our two module classes in the place of Opacus's: what Opacus's own tests ask of them, and layers in other layouts."""

import pytest
import torch
import torch.nn.functional as F
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention
from released import in_two_passes
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import dpfast.opacus
from dpfast import (
    ConstantFlatClipper,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    PerSampleGradientClipper,
)
from dpfast.errors import InputError
from dpfast.testing import loop_over_samples, norms_of, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG")


def test_norm_sample_after_a_ghost_backward():
    """``p._norm_sample`` (N,) is there after the first of two passes, as in Opacus, for every trainable parameter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    net[2].bias.requires_grad_(False)
    inputs = torch.randn(5, 4)
    exact = loop_over_samples(net, lambda m, x: m(x).square().sum(), inputs)
    model = GradSampleModuleFastGradientClipping(net, passes=2)
    in_two_passes(model, model(inputs).square().sum(1))
    for name, p in net.named_parameters():
        if p.requires_grad:
            assert relative_error(p._norm_sample, norms_of({name: exact[name]})) < 1e-3, name
        else:
            assert not hasattr(p, "_norm_sample")


def test_a_frozen_parameter_gets_no_grad_sample():
    """Opacus's optimizer and tests ask ``hasattr(p, "grad_sample")``: False for a frozen parameter, always."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    model = GradSampleModule(net)
    assert not any(hasattr(p, "grad_sample") for p in net[0].parameters())
    model(torch.randn(5, 4)).sum().backward()
    model.zero_grad()
    assert not any(hasattr(p, "grad_sample") for p in net[0].parameters())
    assert all(hasattr(p, "grad_sample") for p in net[1].parameters())


def test_a_clipper_gives_a_frozen_parameter_no_grad_sample():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    clipper = PerSampleGradientClipper(net, ConstantFlatClipper(1.0))
    net(torch.randn(5, 4)).sum().backward()
    clipper.zero_grad()
    assert [hasattr(p, "grad_sample") for p in net.parameters()] == [False, False, True, True]
    clipper.close()


class Recurrent(nn.Module):
    """(N, T, D) in, a DPRNN that has positions first inside."""

    def __init__(self, cls: type[nn.Module]):
        super().__init__()
        self.rnn = cls(3, 4, batch_first=False)

    def forward(self, x):
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)


@pytest.mark.parametrize("cls", [DPRNN, DPGRU, DPLSTM])
@pytest.mark.parametrize("whole", [True, False], ids=["in a model", "alone"])
def test_recurrent_layers_with_positions_first(cls, whole):
    """A DPRNN with ``batch_first=False``: in a model of samples first, and wrapped itself with batch_first=False."""
    torch.manual_seed(0)
    net = Recurrent(cls) if whole else cls(3, 4, batch_first=False)
    inputs = torch.randn(5, 6, 3) if whole else torch.randn(6, 5, 3)

    def loss(model, x):
        output = model(x)
        return (output if whole else output[0]).square().sum()

    exact = loop_over_samples(net, loss, inputs, batch_dim=0 if whole else 1)
    model = GradSampleModule(net, batch_first=whole, loss_reduction="sum")
    loss(model, inputs).backward()
    for name, p in net.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) < 1e-5, name


class First(nn.Module):
    """A recurrent layer's output alone."""

    def __init__(self, rnn: nn.Module):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cls", [DPRNN, DPLSTM, nn.LSTM])
def test_packed_sequences_as_the_models_input(cls, batch_first):
    """Samples are counted by the sequences, whatever the dimension they are said to be in; gradients come in the order
    of the samples, not of their lengths."""
    torch.manual_seed(0)
    net = First(cls(3, 4, batch_first=batch_first))
    sequences = [torch.randn(length, 3) for length in (1, 4, 2)]
    exact = {name: [] for name, _ in net.named_parameters()}
    for x in sequences:
        net.zero_grad()
        net(pack_sequence([x])).data.square().sum().backward()
        for name, p in net.named_parameters():
            exact[name].append(p.grad.clone())
    net.zero_grad()
    model = GradSampleModule(net, batch_first=batch_first, loss_reduction="sum")
    model(pack_sequence(sequences, enforce_sorted=False)).data.square().sum().backward()
    for name, p in net.named_parameters():
        assert relative_error(p.grad_sample, torch.stack(exact[name])) < 1e-5, name


class Bags(nn.Module):
    def __init__(self, mode: str = "sum", **options):
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4, mode=mode, **options)

    def forward(self, indices, offsets):
        return self.bags(indices, offsets)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("bags", [[[1, 2, 2], [3], [4, 5, 1, 0]], [[1], [3], [2], [4, 5, 1, 0]]])
@pytest.mark.parametrize("cls", [GradSampleModule, GradSampleModuleFastGradientClipping])
def test_bags_in_one_row_with_offsets(cls, bags, mode):
    """An EmbeddingBag with indices (K,) and offsets (N,): N samples, not K, though indices are the first input."""
    torch.manual_seed(0)
    net = Bags(mode)
    indices = torch.tensor([i for bag in bags for i in bag])
    offsets = torch.tensor([0, *map(len, bags)])[:-1].cumsum(0)
    exact = _by_bag(net, bags)
    model = cls(net, loss_reduction="sum")
    model(indices, offsets).square().sum().backward()
    norms = norms_of({"weight": exact})
    if cls is GradSampleModule:
        assert relative_error(net.bags.weight.grad_sample, exact) < 1e-5
    else:
        assert relative_error(model.get_norm_sample(), norms) < 1e-3


@pytest.mark.parametrize("in_front", ["indices", "offsets"])
def test_bags_with_their_last_offset(in_front):
    """Offsets are one more than bags, also where they are the model's first input."""
    torch.manual_seed(0)
    net = Bags(include_last_offset=True)
    indices, offsets = torch.tensor([1, 2, 2, 3, 4, 5, 1, 0]), torch.tensor([0, 3, 4, 8])
    plain = Bags()
    plain.load_state_dict(net.state_dict())
    exact = _by_bag(plain, [[1, 2, 2], [3], [4, 5, 1, 0]])
    model = GradSampleModule(net, loss_reduction="sum")
    inputs = {"indices": indices, "offsets": offsets}
    first = inputs.pop(in_front)
    model(**{in_front: first}, **inputs).square().sum().backward()
    assert relative_error(net.bags.weight.grad_sample, exact) < 1e-5


def test_bags_that_the_model_makes_of_its_samples_are_refused():
    """Offsets that are no input of the model: its samples are the rows of its input, and these bags mix them."""

    class Pairs(Bags):
        def forward(self, x):
            return self.bags(x, torch.arange(0, len(x), 2))

    model = GradSampleModule(Pairs())
    with pytest.raises(InputError, match=r"bags \(EmbeddingBag\): dimension 0 of its output follows the batch, but"):
        model(torch.arange(8)).sum().backward()


def _by_bag(net: Bags, bags: list[list[int]]) -> torch.Tensor:
    gradients = []
    for bag in bags:
        net.zero_grad()
        net(torch.tensor(bag), torch.tensor([0])).square().sum().backward()
        gradients.append(net.bags.weight.grad.double())
    net.zero_grad()
    return torch.stack(gradients)


class Attending(nn.Module):
    """Samples second, as nn.MultiheadAttention has them by default: (T, N, E)."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention, self.head = nn.Embedding(10, 8), DPMultiheadAttention(8, 2), nn.Linear(8, 2)

    def forward(self, ids):
        x = self.embedding(ids).transpose(0, 1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(0))


@pytest.mark.parametrize("grad_sample_mode", ["dpfast", "dpfast_two_pass", "dpfast_materialize"])
def test_a_model_of_attention_with_positions_first_trains(grad_sample_mode):
    """A model of DPMultiheadAttention in (T, N, E) layout takes a step of the engine in every mode."""
    torch.manual_seed(0)
    net = Attending()
    data = DataLoader(TensorDataset(torch.randint(0, 10, (8, 5)), torch.randint(0, 2, (8,))), batch_size=4)
    before = [p.detach().clone() for p in net.parameters()]
    made = dpfast.opacus.PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=data,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        poisson_sampling=False,
        grad_sample_mode=grad_sample_mode,
    )
    model, optimizer = made[:2]
    criterion = made[2] if len(made) == 4 else F.cross_entropy
    for ids, labels in made[-1]:
        optimizer.zero_grad()
        criterion(model(ids), labels).backward()
        optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
