"""The package as a user gets it, and who may import whom."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dpfast

ROOT = Path(__file__).resolve().parents[1]

# Downward only: a module may import those below it in this list (the rooms are described in ARCHITECTURE.md).
ORDER = [
    ["__main__", "opacus.engine", "autograd_grad_sample", "testing", "explain"],
    ["opacus.losses", "opacus.optimizers", "opacus.samplers", "opacus._supported"],
    ["opacus.backward"],
    ["info", "fast_gradient_clipping", "per_sample_gradient_clipper"],
    ["grad_sample_module"],
    ["tapped_model", "clipping"],
    ["rules.opacus_layers"],
    ["broadcast", "rules.attention", "rules.copies", "rules.huggingface", "rules.recurrent"],
    [
        *("tap", "rules.convolution", "rules.embedding", "rules.functorch", "rules.linear", "rules.normalization"),
        *("rules.refused", "scalar_loss"),
    ],
    ["registry", "merge", "reshaped", "waiting"],
    ["factors"],
    ["ops"],
    ["reference", "cost", "kernel_norms"],
    ["products"],
    ["bounds", "accumulation", "buffers", "detached", "dropped"],
    ["errors"],
]
RANK = {name: len(ORDER) - i for i, names in enumerate(ORDER) for name in names}


def modules():
    for path in sorted((ROOT / "dpfast").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "dpfast").with_suffix("").parts)
        if not name.endswith("__init__"):
            yield name, path


def imported(path):
    """The modules of dpfast that a file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dpfast."))
        elif isinstance(node, ast.ImportFrom) and node.module == "dpfast":
            yield from (f"dpfast.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dpfast."):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (f if f.removeprefix("dpfast.") in RANK else node.module for f in full)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda x: x if isinstance(x, str) else "")
def test_imports_go_downward(name, path):
    assert name in RANK, f"say in ORDER where {name} stands"
    for target in imported(path):
        target = target.removeprefix("dpfast.")
        assert not target.startswith("kernels"), f"{name} imports kernels; only kernel_norms.py does, lazily"
        if target != name:
            assert RANK[target] < RANK[name], f"{name} imports {target}, which is not below it"


def test_kernels_import_only_torch_triton_and_themselves():
    for path in (ROOT / "kernels").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                assert top in {"torch", "triton"} | sys.stdlib_module_names, f"{path.name} imports {name}"


def test_importing_dpfast_imports_neither_triton_nor_opacus():
    code = "import sys, dpfast; print(sorted({'triton', 'opacus', 'dpfast.kernels'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd="/").strip() == "[]"


def test_root_folder_kernels_is_not_importable_by_that_name():
    with pytest.raises(ImportError):
        __import__("kernels")
    assert Path(__import__("dpfast.kernels").kernels.__file__).parent == ROOT / "kernels"


def test_wheel_holds_every_source_file(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", str(tmp_path)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in (("dpfast", "dpfast"), ("kernels", "dpfast/kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in inside
    assert "dpfast/py.typed" in inside
    assert not any(name.startswith("kernels/") for name in inside)


def test_no_source_file_is_longer_than_400_lines():
    long = [
        f"{path.relative_to(ROOT)}: {n}"
        for folder in ("dpfast", "kernels", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if (n := len(path.read_text().splitlines())) > 400
    ]
    assert not long


def test_public_names_are_there():
    for name in dpfast.__all__:
        assert getattr(dpfast, name) is not None


def test_info_command_says_which_backend_and_why():
    out = subprocess.check_output([sys.executable, "-m", "dpfast", "info"], text=True)
    assert "torch" in out
    assert "backend" in out
    assert "because" in out
