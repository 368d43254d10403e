"""The names that modules had before they stood in wings; ``import dpfast.ops`` and pickles use them."""

from __future__ import annotations

import importlib
import sys

FORMER_NAMES = {
    "accumulation": "modes.accumulation",
    "autograd_grad_sample": "modes.autograd_grad_sample",
    "bounds": "arithmetic.bounds",
    "broadcast": "taps.broadcast",
    "clipping": "modes.clippers",
    "cost": "arithmetic.cost",
    "detached": "taps.detached",
    "dropped": "modes.nonfinite_samples",
    "fast_gradient_clipping": "modes.fast_gradient_clipping",
    "grad_sample_module": "modes.grad_sample_module",
    "merge": "factors.merge",
    "ops": "arithmetic.ops",
    "per_sample_gradient_clipper": "modes.per_sample_gradient_clipper",
    "reference": "arithmetic.reference",
    "registry": "taps.registry",
    "reshaped": "factors.reshaped",
    "tap": "taps.tap",
    "tapped_model": "modes.tapped_model",
}
"""In the package: what a user may have imported, or has in a pickle."""


def keep_former_names() -> None:
    """Lets each module be imported by its former name as well."""
    package = sys.modules["dpfast"]
    for former, name in FORMER_NAMES.items():
        module = sys.modules[f"dpfast.{former}"] = importlib.import_module(f"dpfast.{name}")
        setattr(package, former, module)
