"""What an attack by plausible code of users found: calls, masks, outputs and arguments that were not looked at."""

import copy
import enum
import threading
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpfast import GradSampleModule, GradSampleModuleFastGradientClipping
from dpfast.errors import DpfastWarning, EscapedGradientError, InputError, StateError, UnsupportedModuleError
from dpfast.testing import loop_over_samples, norms_of, relative_error

MASK = torch.tensor([True, True, False, False])

C = 0.1


def clipping(model, **options):
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=C, loss_reduction="sum", **options)


def released(model):
    return torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm() / C


@dataclass
class Answer:
    logits: Tensor


class InAnObject(nn.Module):
    def __init__(self, mixes=False):
        super().__init__()
        self.lin, self.mixes = nn.Linear(4, 4), mixes

    def forward(self, x):
        x = self.lin(x)
        return Answer((x / x.std(0)).square().mean() if self.mixes else x)


class Kept(nn.Module):
    """An auxiliary head that is no part of the output, and is the first that a gradient comes to."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        features = torch.tanh(self.body(x))
        output = self.head(features)
        self.kept = self.aux(features)
        return output


@pytest.mark.parametrize("cls", [GradSampleModuleFastGradientClipping, GradSampleModule])
def test_padding_in_outputs_that_are_objects(cls):
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    x[2:] = torch.nan
    model = cls(
        InAnObject(),
        loss_reduction="sum",
        **({} if cls is GradSampleModule else {"max_grad_norm": C}),
    )
    with model.valid(MASK):
        output = model(x)
    output.logits.square().sum().backward()
    for p in model.parameters():
        found = p.grad_sample if cls is GradSampleModule else p.grad
        assert found.isfinite().all() and found.any()


def test_padding_where_a_gradient_comes_past_the_output_first():
    torch.manual_seed(0)
    model = clipping(Kept())
    with model.valid(MASK):
        output = model(torch.randn(4, 4))
    (output.square().sum() + model._module.kept.square().sum()).backward()
    assert (model.get_clipping_coef() > 0).tolist() == MASK.tolist()


def test_the_mask_is_that_of_the_forward_pass():
    """Its tensor may have the next batch's by the time of the backward pass."""
    torch.manual_seed(0)
    model, mask = clipping(nn.Linear(4, 3)), MASK.clone()
    with model.valid(mask):
        output = model(torch.randn(4, 4))
    mask.fill_(True)
    output.square().sum().backward()
    assert (model.get_clipping_coef() > 0).tolist() == MASK.tolist()


def test_forward_passes_with_other_masks():
    model, x = clipping(nn.Linear(4, 3)), torch.randn(4, 4)
    with model.valid(MASK):
        one = model(x)
    with model.valid(~MASK):
        two = model(x)
    with pytest.raises(StateError, match="other masks"):
        (one.sum() + two.sum()).backward()
    with model.valid(MASK):
        one = model(x)
    with model.valid(MASK.clone()):
        two = model(x)
    (one.sum() + two.sum()).backward()
    assert (model.get_clipping_coef() > 0).tolist() == MASK.tolist()


def test_padded_targets_after_the_mask():
    """It said that samples had other numbers of targets, where the padding alone had."""
    model, y = clipping(nn.Linear(8, 5)), torch.tensor([1, 2, -100, -100])
    with model.valid(MASK):
        loss = F.cross_entropy(model(torch.randn(4, 8)), y)
    loss.backward()
    assert (model.get_clipping_coef() > 0).tolist() == MASK.tolist()


class Mode(enum.Enum):
    TRAIN = 1


class Own(Tensor):
    """As torchvision's tv_tensors."""


class Mixes(nn.Module):
    def __init__(self, centres=True):
        super().__init__()
        self.first, self.second, self.centres = nn.Linear(4, 4), nn.Linear(4, 4), centres

    def forward(self, x, mode=None):
        x = self.first(x)
        return self.second(x - x.mean(0) if self.centres else x)


class Sorts(Mixes):
    """Rows come to the second layer in another order."""

    def forward(self, x, mode=None):
        order = x.sum(1).argsort()
        return self.second(torch.tanh(self.first(x))[order])[order.argsort()]


def a_function(model):
    model.more = nn.Identity()
    model.more.forward = lambda x: x


def a_lock(model):
    model.lock = threading.Lock()


WAYS = {
    "an enum": (None, lambda model, x: model(x, Mode.TRAIN)),
    "a function": (None, lambda model, x: model(x, torch.relu)),
    "a slice": (None, lambda model, x: model(x, slice(3))),
    "a tensor of a subclass": (None, lambda model, x: model(x.as_subclass(Own)).as_subclass(Tensor)),
    "a module that is a lambda": (a_function, lambda model, x: model(x)),
    "what cannot be copied": (a_lock, lambda model, x: model(x)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_is_called_with_does_not_keep_it_from_being_looked_at(way):
    prepare, call = WAYS[way]
    torch.manual_seed(4)
    mixing, sorting = Mixes(), Sorts().double()
    for model in (mixing, sorting):
        if prepare is not None:
            prepare(model)
    with pytest.raises(UnsupportedModuleError, match="second"):
        call(clipping(mixing), torch.randn(6, 4)).square().sum().backward()
    x = torch.tensor([[3.0, 1, 1, 1], [0.1] * 4, [-0.1, 0, 0, 0]]).double()
    call(clipping(sorting), x)[0].square().sum().backward()  # the first sample's loss alone
    assert released(sorting) <= 1.0 + 1e-6


class Random(Mixes):
    """Asks for what a look must not touch."""

    def forward(self, x, generator):
        return super().forward(x + torch.rand(x.shape, generator=generator))


def test_a_model_that_cannot_be_looked_at_says_so():
    model = clipping(Random())
    with pytest.warns(DpfastWarning, match="Random could not be run .* it takes a Generator"):
        model(torch.randn(6, 4), torch.Generator())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(6, 4), torch.Generator())


class Chooses(Mixes):
    def forward(self, x, stage="warm"):
        x = self.first(x)
        return self.second(x - x.mean(0) if stage == "main" or self.second.training else x)


@pytest.mark.parametrize("what", ["a child's mode", "a name"])
def test_what_changes_the_forward_later_is_looked_at_again(what):
    model = clipping(Chooses())
    model._module.second.eval()
    model(torch.randn(6, 4)).square().sum().backward()
    model.zero_grad()
    model._module.second.train(what == "a child's mode")
    with pytest.raises(UnsupportedModuleError, match="second"):
        model(torch.randn(6, 4), "main" if what == "a name" else "warm").square().sum().backward()


class Folds(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x, way):
        n, t, _ = x.shape
        if (sum(way) if isinstance(way, tuple) else way) == 2:
            return self.lin(x.reshape(n * t, 4)).view(n, t, 3)
        return self.lin(x.transpose(0, 1).reshape(n * t, 4)).view(t, n, 3).transpose(0, 1)


@pytest.mark.parametrize("kind", [int, np.int64, lambda way: (way - 1, 1)], ids=["int", "NumPy", "window"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_small_number_that_chooses_where_samples_are(by_name, kind):
    """Steps with another one than the first had were clipped by the first one's rows: a sample moved the sum by 2.7·C,
    until the next look."""
    torch.manual_seed(0)
    model, x, plain = clipping(net := Folds()), 10.0 * torch.randn(5, 6, 4), Folds()
    plain.load_state_dict(net.state_dict())
    for way in map(kind, (2, 2, 2, 3, 3, 2)):
        model.zero_grad()
        loss = (model(x, way=way) if by_name else model(x, way)).square()
        loss.sum().backward()
        exact = loop_over_samples(plain, lambda m, x, way=way: m(x, way).square().sum(), x)
        assert relative_error(model.get_norm_sample(), norms_of(exact)) <= 1e-5


def test_numbers_that_go_on_are_no_kinds_of_their_own():
    model = clipping(Folds())
    for i in range(40):
        model(torch.randn(2, 3, 4), i)
    assert len(model._tapped.probe._looks) == 17
    for i in range(10):
        model(torch.randn(2, 3, 4), (i, i, i, i))
    assert len(model._tapped.probe._looks) == 18


def test_texts_of_a_batch_are_no_kind_of_their_own():
    model = clipping(Mixes(centres=False))
    for i in range(3):
        model(torch.randn(2, 4), [f"a{i}", f"b{i}"])
    assert len(model._tapped.probe._looks) == 1


class Loops(nn.Module):
    """Each sample by itself, without a dimension for samples."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, xs):
        return torch.stack([self.lin(x).sum(0) for x in xs])


@pytest.mark.parametrize("positions", [3, 4])
def test_a_loop_over_samples(positions):
    """With as many positions as samples these were taken for each other: one sample moved the sum by 3.4·C."""
    with pytest.raises(InputError, match=r"lin \(Linear\): it runs once for each sample"):
        clipping(Loops())(torch.randn(4, positions, 4)).square().sum().backward()


class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def encode(self, x):
        return self.lin(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)

    def forward(self, x):
        return self.encode(x)


@pytest.mark.parametrize("cls", [GradSampleModuleFastGradientClipping, GradSampleModule])
def test_methods_other_than_forward(cls):
    """Positions were clipped as samples, 4·C from one sample."""
    model, x = cls(Encodes()), torch.randn(2, 5, 4)
    model(x).square().mean().backward()
    for call in (model.encode, lambda x: model._module.lin(x)):
        model.zero_grad()
        with pytest.raises(StateError, match=r"lin \(Linear\) runs outside of the wrapped model's forward"):
            call(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(call(x).detach(), call(x))  # as PEFT saves prompts
        with torch.no_grad():
            call(x)


def test_losses_in_outputs_that_are_objects():
    model = GradSampleModuleFastGradientClipping(InAnObject(mixes=True), max_grad_norm=C)
    with pytest.raises(UnsupportedModuleError, match="output 0 of the model"):
        model(torch.randn(6, 4)).logits.backward()


class Centred(nn.Module):
    """Mixes samples, of which no shape tells."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, y=None):
        x = self.first(x)
        return self.last(x - x.mean(0) if y is None else x + y - y.mean(0))


@pytest.mark.parametrize("wrong", ["another size", "another length"])
def test_a_call_that_fails_takes_no_later_one_for_looked_at(wrong):
    """The first call's look finds nothing, for the model cannot run; the next is a look again."""
    wrapped = clipping(Centred())
    wrong = (torch.randn(3, 5),) if wrong == "another size" else (torch.randn(3, 4), torch.randn(5, 4))
    right = [torch.randn(3, 4) for _ in wrong]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match=r"must match|cannot be multiplied"):
            wrapped(*wrong)
    with pytest.raises((UnsupportedModuleError, InputError), match=r"depends on|mix"):
        wrapped(*right).square().sum(1).sum().backward()


class OfAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, several, scale=1.0):
        return torch.stack([self.lin(x).tanh() for x in several], 1).sum(1) * scale


def test_a_list_of_what_may_be_samples_is_said():
    """Six texts in a list were four samples, as many as each has tokens, without a word."""
    model = clipping(OfAList())
    with pytest.warns(DpfastWarning, match=r"list of 6 tensors: dimension 0 of each, 4, is taken"):
        model([torch.randn(4, 4) for _ in range(6)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model([torch.randn(4, 4) for _ in range(6)])
        clipping(OfAList())((torch.randn(4, 4), torch.randn(4, 4)))  # a pair: a state, two views
        clipping(OfAList())(torch.randn(6, 4, 4))


def test_a_layer_that_was_put_in_after_wrapping():
    """The error named functional use, and its remedies did not help."""
    model = GradSampleModuleFastGradientClipping(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), max_grad_norm=C)
    x = torch.randn(3, 4)
    model(x).square().sum().backward()
    model.zero_grad()
    model._module[1] = nn.Linear(4, 2)
    with pytest.raises(EscapedGradientError, match=r"1\.\w+ .* put into the model after that was wrapped"):
        model(x).square().sum().backward()
    model.zero_grad()
    model.remove_hooks()
    model.add_hooks()
    model(x).square().sum(1).mean().backward()
    assert model._module[1].weight.grad.norm() > 0.0


def test_a_parametrization_that_was_put_in_after_wrapping():
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.randn(3, 4)
    model = GradSampleModule(plain, loss_reduction="sum")
    torch.nn.utils.parametrizations.weight_norm(plain[0])
    with pytest.raises(EscapedGradientError, match=r"0\.parametrizations\.[\w.]+ .*, was put into the model"):
        model(x).square().sum().backward()
    model.zero_grad()
    model.remove_hooks()
    model.add_hooks()
    exact = loop_over_samples(copy.deepcopy(model).to_standard_module(), lambda m, x: m(x).square().sum(), x)
    model(x).square().sum().backward()
    for name, p in plain.named_parameters():
        assert relative_error(p.grad_sample, exact[name]) <= 1e-5, name
