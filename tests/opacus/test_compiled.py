"""The engine's mode "dpfast_compiled": padded Poisson batches, one graph, Opacus's accountant and optimizer."""

import pytest
import torch
import transformers
from small_steps import Mlp
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from dpfast.errors import InputError
from dpfast.opacus import PrivacyEngine
from dpfast.opacus.compiled import PaddedCollate, losses_of
from dpfast.testing import clipped_sum, loop_over_samples, relative_error


def private(net, n=40, expected=8, **options):
    data = TensorDataset(torch.randn(n, 6), torch.randint(0, 3, (n,)))
    engine = PrivacyEngine(accountant="rdp")
    options = {"max_grad_norm": 0.5, "noise_multiplier": 0.0, **options}
    step, optimizer, loader = engine.make_private(
        module=net,
        optimizer=optim.SGD(net.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=expected),
        grad_sample_mode="dpfast_compiled",
        **options,
    )
    step._backend = "aot_eager"
    return engine, step, optimizer, loader


def losses(model, x, y):
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def test_an_epoch():
    torch.manual_seed(0)
    net = Mlp()
    engine, step, optimizer, loader = private(net)
    sizes = set()
    for (x, y), valid in loader:
        n = int(valid.sum())
        assert len(x) == len(y) == len(valid) and len(valid) % step.batch_size == 0 and valid[:n].all()
        assert not x[n:].any()
        exact = loop_over_samples(net, lambda model, x, y: losses(model, x, y).sum(), x[:n], y[:n])
        sums = clipped_sum(exact, 0.5)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimizer.zero_grad()
        step(x, y, valid=valid)
        optimizer.step()
        assert len(step.norms) == n
        for name, p in net.named_parameters():
            assert relative_error(8 * (before[name] - p), sums[name]) < 1e-4
        sizes.add(n)
    assert len(sizes) > 1 and len(step._graphs) == 1
    assert engine.accountant.history[0][2] == len(loader)


def test_per_layer_thresholds_are_in_the_optimizers_order():
    torch.manual_seed(0)
    net = Mlp()
    thresholds = [0.1, 0.2, 0.3, 0.4]
    _, step, optimizer, loader = private(net, clipping="per_layer", max_grad_norm=thresholds)
    (x, y), valid = next(iter(loader))
    step(x, y, valid=valid)
    assert step.clip_factors.shape == (4, int(valid.sum()))
    assert optimizer.max_grad_norm == pytest.approx(sum(c * c for c in thresholds) ** 0.5)


def test_without_poisson_sampling_the_last_batch_is_padded_too():
    _, step, _, loader = private(Mlp(), n=20, poisson_sampling=False)
    found = [(len(x), int(valid.sum())) for (x, _), valid in loader]
    assert found == [(step.batch_size, n) for n in (8, 8, 4)]


def test_losses_of_a_criterion():
    x, y = torch.randn(4, 3, 5), torch.randint(0, 3, (4, 5))
    found = losses_of(nn.CrossEntropyLoss())(lambda x: x, x, y)
    assert found.shape == (4,)
    torch.testing.assert_close(found.mean(), nn.functional.cross_entropy(x, y))
    with pytest.raises(InputError, match="no reduction"):
        losses_of(lambda x, y: x)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.MSELoss(reduction="sum"),
        nn.MSELoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.KLDivLoss(reduction="batchmean"),
        nn.KLDivLoss(reduction="sum"),
    ],
    ids=lambda criterion: f"{type(criterion).__name__}-{criterion.reduction}",
)
def test_losses_add_up_as_the_criterion_says(criterion):
    x, y = torch.randn(4, 3, 5), torch.rand(4, 3, 5)
    if isinstance(criterion, nn.CrossEntropyLoss):
        y = torch.randint(0, 3, (4, 5))
    found = losses_of(criterion)(lambda x: x, x, y)
    torch.testing.assert_close(found.sum() if criterion.reduction == "sum" else found.mean(), criterion(x, y))


def test_a_batch_that_hides_its_tensors():
    def collate(some):
        return transformers.BatchEncoding({"x": torch.stack(some)})

    with pytest.raises(InputError, match=r"holds a BatchEncoding.*dict\(batch\)"):
        PaddedCollate(collate, 4)([torch.randn(3)])


def test_what_does_not_fit():
    with pytest.raises(InputError, match="samples are first"):
        private(Mlp(), batch_first=False)
    with pytest.raises(InputError, match="adaptive"):
        private(Mlp(), clipping="adaptive")


def test_checkpoints_of_its_model(tmp_path):
    engine, step, optimizer, _ = private(Mlp())
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=step.model, optimizer=optimizer)
    before = [p.detach().clone() for p in step.model.parameters()]
    with torch.no_grad():
        for p in step.model.parameters():
            p.zero_()
    engine.load_checkpoint(path=path, module=step.model, optimizer=optimizer)
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
