"""What a forward keeps outside of its modules (globals, attributes of classes, closures, defaults): looks leave it as
it was, and where samples in it move later sums, that is refused."""

import collections
import gc
import importlib
import random
import types
import typing
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_linears import D, N, Net, clipping, step

from dpfast import GradSampleModuleFastGradientClipping, compile_step, explain
from dpfast.trials import put_back

AUXILIARY, FEATURES, COUNT = [], {}, 0
TORCHS, PYTHONS, NUMPYS = torch.Generator(), random.Random(), numpy.random.RandomState()
NUMPYS_NEW = numpy.random.default_rng()
QUEUE, ARRAY, SPACE = torch.zeros(5), numpy.zeros(3), types.SimpleNamespace(n=0, inner=[collections.deque([0])])


class Meter:
    __slots__ = ("n", "total")

    def __init__(self):
        self.n, self.total = 0, 0.0

    def update(self, x):
        self.n, self.total = self.n + 1, self.total + x


METER = Meter()


class OwnList(list):
    def append(self, x):
        self.appended = x
        super().append(x)


class OwnDict(collections.OrderedDict):
    """Counts what is set."""

    sets = 0

    def __setitem__(self, key, value):
        OwnDict.sets += 1
        super().__setitem__(key, value)


class Pair(typing.NamedTuple):
    one: list
    two: Meter


class Lazy:
    __slots__ = ("made",)


OWN_LIST, OWN_DICT, USER_DICT, PAIR, LAZY = OwnList(), OwnDict(), collections.UserDict(), Pair([], Meter()), Lazy()


@pytest.fixture(autouse=True)
def as_at_first():
    _anew()


def _anew():
    global COUNT
    COUNT = SPACE.n = METER.n = 0
    AUXILIARY.clear()
    FEATURES.clear()
    Kept.calls, Kept.log[:] = 0, []
    SPACE.inner[0], METER.total = collections.deque([0]), 0.0
    QUEUE.zero_()
    ARRAY.fill(0)
    for generator, seed in ((TORCHS.manual_seed, 1), (PYTHONS.seed, 2), (NUMPYS.seed, 3)):
        generator(seed)
    NUMPYS_NEW.bit_generator.state = numpy.random.default_rng(4).bit_generator.state
    for name in ("later", "mean"):
        if name in vars(Kept):
            delattr(Kept, name)
    vars(helper).clear()
    OWN_LIST.clear()
    vars(OWN_LIST).clear()
    OWN_DICT.clear()
    USER_DICT.clear()
    PAIR.one.clear()
    PAIR.two.n = OwnDict.sets = 0
    if hasattr(LAZY, "made"):
        del LAZY.made


def helper():
    """Has attributes."""


class Kept(Net):
    """With a layer that runs from the fourth pass on, so that it is looked at after a forward, too."""

    calls, log = 0, []

    def __init__(self, how):
        super().__init__()
        self.how, self.late = how, nn.Linear(7, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        h = self.how(self, self.first(x).tanh())
        return self.last(h) + (self.late(h) if self.passes > 3 else 0)


def _as_it_is(self, h):
    return h


def losses_in_a_list(self, h):
    AUXILIARY.append(h.square().mean(1))
    return h


def features_in_a_dict(self, h):
    FEATURES.update(h=h, mean=h.detach().mean().item())
    return h


def counts(self, h):
    global COUNT
    COUNT += 1
    type(self).calls += 1
    self.log.append(COUNT)
    Kept.later = COUNT
    SPACE.n += 1
    SPACE.inner[0].append(SPACE.n)
    helper.n = getattr(helper, "n", 0) + 1
    METER.update(1.0)
    return h


def keeps_in_objects(self, h):
    OWN_LIST.append(len(OWN_LIST))
    OWN_DICT[len(OWN_DICT)] = 1
    USER_DICT[len(USER_DICT)] = 1
    PAIR.one.append(1)
    PAIR.two.update(1.0)
    LAZY.made = getattr(LAZY, "made", 0) + 1
    return h


def written_in_place(self, h):
    QUEUE.add_(1)
    ARRAY[0] += 1
    return h


def draws(self, h):
    drawn = (torch.rand(1, generator=TORCHS).item(), PYTHONS.random(), NUMPYS.rand(), NUMPYS_NEW.random())
    return h * (1 + 0.1 * sum(drawn))


def _state():
    features = {name: x.tolist() if isinstance(x, torch.Tensor) else x for name, x in FEATURES.items()}
    objects = (vars(helper).copy(), SPACE.n, list(SPACE.inner[0]), METER.n, METER.total)
    own = (list(OWN_LIST), vars(OWN_LIST).copy(), dict(OWN_DICT), OwnDict.sets, dict(USER_DICT), list(PAIR.one))
    objects += (*own, PAIR.two.n, getattr(LAZY, "made", None))
    drawn = (TORCHS.get_state().tolist(), PYTHONS.getstate(), repr(NUMPYS.get_state()), NUMPYS_NEW.bit_generator.state)
    classes = (Kept.calls, list(Kept.log), vars(Kept).get("later"))
    return len(AUXILIARY), features, COUNT, objects, classes, QUEUE.tolist(), ARRAY.tolist(), drawn


def _trained(how, wrap):
    """State and losses of nine steps."""
    torch.manual_seed(0)
    net = Kept(how)
    model, seen = wrap(net), []
    for number in range(9):
        AUXILIARY.clear()
        output = model(torch.randn(N + number % 3, D))
        loss = output.square().sum() + sum(x.sum() for x in AUXILIARY)
        if "h" in FEATURES:
            loss = loss + FEATURES["h"].square().sum()
        loss.backward()
        seen.append((_state(), loss.item()))
        model.zero_grad()
    return seen


def _plain(model):
    return model


HOWS = [losses_in_a_list, features_in_a_dict, counts, keeps_in_objects, written_in_place, draws]


@pytest.mark.parametrize("how", HOWS)
def test_looks_leave_it_as_it_was(how):
    """A loss of what trials had left in a list failed, in a backward pass or by being several samples'."""
    plain = _trained(how, _plain)
    _anew()
    for number, (one, other) in enumerate(zip(plain, _trained(how, clipping), strict=True)):
        assert one == other, number


def in_closures():
    n, seen = 0, []

    class Closure(Net):
        def forward(self, x, memory={}):  # noqa: B006  # which is kept
            nonlocal n
            n += 1
            seen.append(n)
            memory[n] = x
            self.counts = n, len(seen), len(memory)
            return self.last(self.first(x).tanh())

    return Closure()


def test_closures_and_defaults_are_left_as_they_were():
    net = in_closures()
    model = clipping(net)
    for number in range(1, 4):
        step(model, torch.randn(N, D))
        assert net.counts == (number,) * 3


def test_explain_leaves_it_as_it_was():
    for how in HOWS:
        net, x = Kept(how), torch.randn(N, D)
        before = _state()
        explain(net, x).measure(lambda output: output.square().sum() + sum(x.sum() for x in AUXILIARY))
        assert _state() == before, how.__name__


def test_captures_leave_it_as_it_was():
    seen = []

    def losses(model, x):
        seen.append(1)
        return model(x).square().sum(1)

    class Counted(Kept):
        def forward(self, x):
            return self.last(counts(self, self.first(x).tanh()))

    captured, before = compile_step(Counted(None), losses, max_grad_norm=1.0, batch_size=N), _state()
    captured(torch.randn(N, D))
    assert _state() == before and not seen


def test_layers_that_run_again_leave_it_as_it_was():
    """One without a rule, whose forward a backward pass repeats."""

    class Own(nn.Module):
        runs = 0

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            Own.runs += 1
            return x * self.weight.cumsum(0).sin()

    model = clipping(nn.Sequential(nn.Linear(D, 3), Own()))
    for number in range(1, 4):
        step(model, torch.randn(N, D))
        assert Own.runs == number


def test_what_a_library_makes_once_stays():
    """A kernel that is made at the first pass is not made again in each of a look's."""
    made = []

    class Lazy(Net):
        kernel, kernels = None, {}

        def forward(self, x):
            if Lazy.kernel is None:
                made.append(1)
                Lazy.kernel = Lazy.kernels["tanh"] = torch.jit.trace(torch.tanh, torch.ones(1))
            return self.last(Lazy.kernel(self.first(x)))

    clipping(Lazy())(torch.randn(N, D))
    assert Lazy.kernel is not None and Lazy.kernels


def test_a_module_that_others_hold_is_left_as_it_was():
    """A teacher in training, deep inside of which buffers follow its batches."""
    teacher = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.BatchNorm1d(7))))))
    norm = teacher[0][0][0][0][0]

    class Taught(Net):
        def forward(self, x):
            h = self.first(x)
            with torch.no_grad():
                teacher(h[:1].expand(2, -1) * 0)
            return self.last(h)

    model = clipping(Taught())
    for number in range(1, 4):
        step(model, torch.randn(N, D))
        assert norm.num_batches_tracked == number


def test_gradients_of_leaves_that_others_train_are_left_as_they_were():
    """A look's backward pass goes through checkpoints as they are, and so to leaves that a closure holds."""
    scale = torch.ones(7, requires_grad=True)

    class Scaled(Net):
        def forward(self, x):
            return self.last(
                checkpoint(lambda h: h * scale.detach() + scale.sum() * 0, self.first(x), use_reentrant=True)
            )

    for before in (None, torch.ones(7)):
        scale.grad = before
        clipping(Scaled())(torch.randn(N, D))
        assert scale.grad is before and (before is None or torch.equal(before, torch.ones(7)))


PACKAGE = {
    "__init__": "",
    "models": """
from torch import nn
from installed import losses
from installed.losses import note

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        h = self.first(x).tanh()
        note(h)
        losses.COUNT += 1
        return self.last(h)
""",
    "losses": """
KEPT, COUNT = [], 0

def note(h):
    KEPT.append(h.square().mean(1))
""",
}


def test_a_model_of_an_installed_package(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "installed"
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    importlib.invalidate_caches()
    models, losses = (importlib.import_module(f"installed.{name}") for name in ("models", "losses"))
    step(clipping(models.Model()), torch.randn(N, D))
    assert len(losses.KEPT) == losses.COUNT == 1


def test_no_model_is_held_by_its_code():
    """A forward may have its model in a closure."""

    def made():
        class Own(Net):
            def forward(self, x):
                assert isinstance(net, Net)
                return self.last(self.first(x))

        net = Own()
        with put_back(net):
            net(torch.randn(N, D))
        return weakref.ref(net)

    gone = made()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("how", HOWS)
def test_what_moves_nothing_is_none(how):
    """Of a model that is looked at with all of its layers."""
    model = GradSampleModuleFastGradientClipping(Kept(how), max_grad_norm=1.0)
    model(torch.randn(N, D))
