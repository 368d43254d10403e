"""One encoder for samples and for several rows of each: a query and its documents, windows and their regions."""

import pytest
import torch
from torch import nn

import dpfast
from dpfast.errors import DpfastError
from dpfast.testing import check_rule, clipped_sum, loop_over_samples, relative_error

G = torch.Generator().manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 8), layer()

    def forward(self, ids):
        x = self.layer(self.table(ids))
        return (x[0] if isinstance(x, tuple) else x).mean(1)


class Retrieval(nn.Module):
    """Scores of K documents to each query (Karpukhin et al. 2020, without negatives of the batch)."""

    def __init__(self, layer, *, documents_first=False, over_and_over=False, mixes=False):
        super().__init__()
        self.encoder = Encoder(layer)
        self.documents_first, self.over_and_over, self.mixes = documents_first, over_and_over, mixes

    def forward(self, query, documents):
        n, k, _ = documents.shape
        found = {}
        for name in ("documents", "query") if self.documents_first else ("query", "documents"):
            if name == "query":
                found[name] = self.encoder(query)
            elif self.over_and_over:
                found[name] = self.encoder(documents.transpose(0, 1).flatten(0, 1)).unflatten(0, (k, n)).transpose(0, 1)
            else:
                found[name] = self.encoder(documents.flatten(0, 1)).unflatten(0, (n, k))
        documents = found["documents"]
        if self.mixes:
            documents = documents - documents.mean(0)
        return (found["query"].unsqueeze(1) * documents).sum(-1)


class OfVectors(nn.Module):
    """The same of vectors, where ranks are the same and nothing else differs; a parameter of its own meets both."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(6, 4), nn.Parameter(torch.linspace(-1.0, 1.0, 4))

    def forward(self, query, documents):
        rows = self.layer(documents.flatten(0, 1)) * self.shift
        return ((self.layer(query) * self.shift).unsqueeze(1) * rows.unflatten(0, documents.shape[:2])).sum(-1)


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
    "lstm": lambda: nn.LSTM(8, 8, batch_first=True),
    "gru": lambda: nn.GRU(8, 8, batch_first=True),
}


def ids(*shape):
    return torch.randint(0, 11, shape, generator=G)


@pytest.mark.parametrize("how", [{}, {"documents_first": True}, {"over_and_over": True}], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_queries_and_documents(layer, how):
    """As many tokens as samples."""
    torch.manual_seed(0)
    check_rule(Retrieval(LAYERS[layer], **how), ids(4, 5), ids(4, 3, 4), dtypes=(torch.float64,))


@pytest.mark.parametrize("k", [1, 3, 4])
def test_vectors(k):
    torch.manual_seed(0)
    check_rule(OfVectors(), torch.randn(4, 6), torch.randn(4, k, 6), dtypes=(torch.float32, torch.float64))


def test_how_many_there_are_may_change():
    torch.manual_seed(0)
    plain = Retrieval(LAYERS["attention"]).double()
    model = dpfast.GradSampleModuleFastGradientClipping(plain, max_grad_norm=0.3, loss_reduction="sum")
    for n, k in ((4, 3), (3, 5), (5, 1), (1, 4), (12, 3)):
        query, documents = ids(n, 5), ids(n, k, 6)
        model.zero_grad()
        model(query, documents).sin().sum().backward()
        model.remove_hooks()
        exact = loop_over_samples(plain, lambda m, q, d: m(q, d).sin().sum(), query, documents)
        model.add_hooks()
        for name, expected in clipped_sum(exact, 0.3).items():
            assert relative_error(plain.get_parameter(name).grad, expected) <= 1e-6, (n, k, name)


@pytest.mark.parametrize("documents_first", [False, True])
def test_documents_of_other_queries_are_refused(documents_first):
    torch.manual_seed(0)
    model = dpfast.GradSampleModule(Retrieval(LAYERS["linear"], mixes=True, documents_first=documents_first))
    with pytest.raises(DpfastError, match=r"samples meet|several samples|not its own"):
        model(ids(4, 5), ids(4, 3, 6)).sum().backward()


def test_a_compiled_step():
    torch.manual_seed(0)
    net = OfVectors()
    query, documents = torch.randn(4, 6), torch.randn(4, 3, 6)
    step = dpfast.compile_step(
        net, lambda m, q, d: m(q, d).sin().sum(1), max_grad_norm=0.3, batch_size=6, backend="aot_eager"
    )
    step(query, documents)
    exact = clipped_sum(loop_over_samples(net, lambda m, q, d: m(q, d).sin().sum(), query, documents), 0.3)
    for name, expected in exact.items():
        assert relative_error(net.get_parameter(name).grad, expected) <= 1e-5, name
