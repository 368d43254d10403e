"""Rows of measurements, one JSON object a line, each appended when it is measured: a run may end at any time."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
SAME = ("machine", "torch", "commit")  # a row of this machine, torch and commit is not measured again


def environment(device: str) -> dict[str, str | None]:
    """What a row must say of where it was measured; `driver` is None on a CPU."""
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "driver": (_nvidia_smi("driver_version") or torch.version.hip) if device == "cuda" else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def read(path: Path) -> list[dict]:
    """The rows of a file, oldest first; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def processor() -> dict[str, str]:
    """Of which family and model the CPU is, and the widest instructions that it has and that torch and its libraries
    may use: less where their environment says so."""
    from dpfast.arithmetic import instruction_set  # a GPU's rows need none of it

    family, model = (_of_cpu(field) for field in ("cpu family", "model"))
    used = {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": instruction_set.of_onednn(),
        "MKL": instruction_set.of_mkl(),
    }
    return {
        "cpu": f"{cpu_name()}, family {family}, model {model}" if family else cpu_name(),
        "instructions": instruction_set.of_processor(),
        "used": ", ".join(f"{library} {widest}" for library, widest in used.items()),
    }


class DeviceLost(RuntimeError):
    """An error after which nothing runs on the device in this process; its row is written."""


class Rows:
    """The rows of one table. `out` is appended to; what it or `known` has of this environment is not measured again."""

    def __init__(self, out: Path, environment: dict, known: Iterable[Path] = ()):
        self.out, self.environment = out, environment
        everything = [row for path in dict.fromkeys((*known, out)) for row in read(path)]
        self._found = [row for row in everything if all(row.get(key) == environment[key] for key in SAME)]

    def has(self, **key) -> bool:
        return any(all(row.get(name) == value for name, value in key.items()) for row in self._found)

    def all(self) -> list[dict]:
        return self._found

    def add(self, **row) -> dict:
        row = {**self.environment, **row}
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with self.out.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._found.append(row)
        if "CUDA error" in row.get("note", ""):
            raise DeviceLost(row["note"])
        return row


def reason(error: Exception) -> str:
    """What a row says in place of a figure."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
        return "does not fit memory"
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__


def cpu_name() -> str:
    return _of_cpu("model name") or platform.processor() or platform.machine()


def _of_cpu(field: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def _commit() -> str:
    """HEAD, with a + where the code differs; DPFAST_COMMIT says it where the sources came without their history."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "dpfast", "kernels"]).returncode != 0
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("DPFAST_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if changed else "")


def _nvidia_smi(field: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
