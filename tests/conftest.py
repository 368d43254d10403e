"""Shared set-up of the tests."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import on_device
import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# `./kernels` must not be importable as `kernels`: Hugging Face has a package of that name, and the tests
# must see what a user's installation sees, the mapping kernels/ -> dpfast.kernels.
sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != ROOT]

# Without a GPU the kernels run in Triton's interpreter, which must be chosen before Triton is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if place := os.environ.get("DPFAST_TEST_DEVICE"):  # `make test-gpu`
    on_device.put(place)

# The same cases in every run. `make fuzz` asks for more of them, `make check` for few.
every_run = {"derandomize": True, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("test", max_examples=300, **every_run)
settings.register_profile("check", max_examples=10, **every_run)
settings.register_profile("fuzz", max_examples=10_000, **every_run)
settings.load_profile("test")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests that share what their module makes once (processes, a site) run on one of xdist's workers, with `--dist
    loadgroup`: otherwise each worker makes it, at the same time."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.items() if hasattr(item, "_fixtureinfo") else ()
        shared = [name for name, made_by in fixtures if made_by[-1].scope == "module"]
        if shared:
            item.add_marker(pytest.mark.xdist_group(f"{item.location[0]} {' '.join(sorted(shared))}"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _placed(request, _seeded):
    if on_cpu := request.node.get_closest_marker("on_cpu"):
        for x in request.node.callspec.params.values() if hasattr(request.node, "callspec") else ():
            if isinstance(x, torch.nn.Module):  # which has been made with the file
                x.cpu()
    with on_device.on_cpu() if on_cpu else nullcontext():
        yield


@pytest.fixture
def reference_runs(monkeypatch):
    """Also on a GPU, where the kernels would run: what is tested is a way of the reference's."""
    monkeypatch.setenv("DPFAST_BACKEND", "reference")


@pytest.fixture
def kernels_run(monkeypatch):
    monkeypatch.setenv("DPFAST_BACKEND", "triton")


@pytest.fixture
def launches(monkeypatch, kernels_run):
    """The names of the kernels that are started. Each launcher runs as it is written: a repeated call, as on a GPU,
    starts what was started before by itself."""
    from dpfast.arithmetic.kernel_norms import import_kernels

    import_kernels()
    from dpfast.kernels import _launch, _repeat

    monkeypatch.setattr(_repeat, "_DEVICES", set())

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
