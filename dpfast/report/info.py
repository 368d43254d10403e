"""What is there: versions, devices, and the backend that "auto" takes on each."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from dpfast.arithmetic import backend_report, cost, product_report
from dpfast.taps import registry


def info() -> dict[str, str]:
    """Versions, devices, and for each device the backend that "auto" would take and why."""
    report = {
        "dpfast": _version("dpfast"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "opacus": _version("opacus"),
    }
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        backend, why = backend_report(device)
        report[str(device)] = f"{name}: backend {backend}, because {why}"
    report["products on a CPU"] = product_report()
    report["norms on a CPU"] = cost.norm_report()
    report["layers with a rule"] = ", ".join(sorted(cls.__name__ for cls in registry.classes_with_rules()))
    report["other layers"] = "torch.func (vmap over samples)"
    return report


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
