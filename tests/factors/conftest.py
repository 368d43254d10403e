"""Where kernels run, and what they start; on how many threads."""

import sys

import pytest
import torch

from dpfast.arithmetic.kernel_norms import import_kernels


@pytest.fixture
def kernels_run(monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", "triton")


@pytest.fixture
def launches(monkeypatch, kernels_run):
    """The names of the kernels that are started."""
    import_kernels()
    from dpfast.kernels import _launch

    started, launch = [], _launch.launch

    def counted(kernel, *args, **arguments):
        started.append(kernel.__name__)
        return launch(kernel, *args, **arguments)

    for name, module in list(sys.modules.items()):
        if name.startswith("dpfast.kernels.") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", counted)
    return started


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
