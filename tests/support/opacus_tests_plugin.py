"""A pytest plugin for Opacus's own tests: dpfast in Opacus where asked, and torchvision importable beside any torch."""

import os
from importlib import import_module

import torch


def _import_torchvision() -> object:
    """Opacus's tests build torchvision's models. A torchvision that was compiled for another build of torch lacks
    its operators, which those models do not use, and imports once their names are declared. Returns what must live
    as long as the declarations."""
    library = None
    try:
        import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")
    except ImportError:
        pass  # the tests that need it fail, with dpfast and without
    return library


_LIBRARY = _import_torchvision()

if os.environ.get("OPACUS_TESTS_WITH_DPFAST"):
    import_module("dpfast.opacus").install()
