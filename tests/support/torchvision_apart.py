"""torchvision importable beside any build of torch."""

from importlib import import_module

import torch


def import_torchvision() -> object:
    """A torchvision that was compiled for another build of torch lacks its operators, which the models of the tests do
    not use, and imports once their names are declared. Returns what must live as long as the declarations."""
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
