"""A pytest plugin for Opacus's own tests: dpfast in Opacus where asked, and torchvision importable beside any torch.

The environment's ``OPACUS_TESTS_LEG`` says what runs: "plain" (Opacus as it is), "installed"
(``dpfast.opacus.install()``), or "ours" (dpfast's two module classes in the place of Opacus's).
"""

import os
import sys
from functools import partialmethod
from importlib import import_module

from torchvision_apart import import_torchvision


def _put_ours() -> None:
    """Our classes under the names of Opacus's two, in every module of Opacus; what is imported later gets them too."""
    import_module("dpfast.opacus")  # so that Opacus knows ours for wrapped modules
    dpfast, grad_sample = import_module("dpfast"), import_module("opacus.grad_sample")
    ours = {
        grad_sample.GradSampleModule: dpfast.GradSampleModule,
        grad_sample.GradSampleModuleFastGradientClipping: type(
            "GradSampleModuleFastGradientClipping",
            (dpfast.GradSampleModuleFastGradientClipping,),
            {"__init__": partialmethod(dpfast.GradSampleModuleFastGradientClipping.__init__, passes=2)},
        ),
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "opacus":
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value in ours:
                    setattr(module, attribute, ours[value])


_LIBRARY = import_torchvision()
_LEG = os.environ.get("OPACUS_TESTS_LEG", "plain")
if _LEG == "installed":
    import_module("dpfast.opacus").install()
elif _LEG == "ours":
    _put_ours()
