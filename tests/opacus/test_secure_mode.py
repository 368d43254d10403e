"""PrivacyEngine(secure_mode=True): Opacus's draws, and Opacus's noise."""

from importlib.util import find_spec

import opacus
import pytest
import torch
from cases import assert_gradients
from opacus_cases import private, train, weights

from dpfast.opacus import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")


def test_secure_mode_needs_what_opacus_needs():
    if find_spec("torchcsprng") is None:
        with pytest.raises(ImportError, match="torchcsprng"):
            PrivacyEngine(secure_mode=True)
    else:
        assert PrivacyEngine(secure_mode=True).secure_rng is not None


@pytest.mark.on_cpu  # Opacus gives one generator to the loader, which draws on the CPU, and to the noise
@pytest.mark.parametrize("mode", ["dpfast", "dpfast_two_pass", "dpfast_materialize"])
def test_secure_mode_draws_as_opacus(mode):
    """Poisson sampling, Opacus's secure noise, the same steps. torchcsprng has no release for the torch of today, so a
    generator of torch's stands where its generator would: everything but the source of the bits is as in use."""

    def engine(cls):
        made = cls()
        made.secure_mode, made.secure_rng = True, torch.Generator().manual_seed(3)
        return made

    runs = []
    for cls, grad_sample_mode in ((opacus.PrivacyEngine, None), (PrivacyEngine, mode)):
        own = engine(cls)
        _, module, optimizer, criterion, batches = private(grad_sample_mode, engine=own, sigma=1.0, seed=None)
        assert optimizer.secure_mode and optimizer.generator is own.secure_rng
        sizes = train(module, optimizer, criterion, batches)
        runs.append((sizes, own.secure_rng.get_state(), weights(module)))
    (sizes, state, exact), (our_sizes, our_state, actual) = runs
    assert sizes == our_sizes and torch.equal(state, our_state)
    assert_gradients(actual, exact)
