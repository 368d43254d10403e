"""The package as a user gets it, and who may import whom."""

import ast
import copy
import graphlib
import importlib
import inspect
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import dpfast

ROOT = Path(__file__).resolve().parents[1]

# Downward only: a wing may import those below it in this list. What stands at the top of dpfast/ may import all.
WINGS = [
    ["commands"],
    ["opacus", "report"],
    ["compiled"],
    ["modes"],
    ["distributed"],
    ["looks", "rules"],
    ["trials"],
    ["taps"],
    ["factors"],
    ["arithmetic"],
]
RANK = {wing: len(WINGS) - i for i, wings in enumerate(WINGS) for wing in wings}
TOP = {"__init__", "__main__", "errors", "former_names", "testing"}
REGISTERS_BY_BEING_IMPORTED = {"rules"}


def sources():
    """(wing or "", module, path) of every file."""
    for path in sorted((ROOT / "dpfast").rglob("*.py")):
        *wing, module = path.relative_to(ROOT / "dpfast").with_suffix("").parts
        yield ".".join(wing), module, path


def imports(path):
    """(module, name) of everything of dpfast that a file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.partition(".")[0] == "dpfast")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dpfast":
            yield from ((node.module, alias.name) for alias in node.names)


def face(wing):
    return importlib.import_module(f"dpfast.{wing}").__all__


def test_ls_shows_the_wings_and_little_else():
    assert {wing for wing, _, _ in sources()} == {"", *RANK}
    assert {module for wing, module, _ in sources() if not wing} == TOP


@pytest.mark.parametrize(("wing", "module", "path"), list(sources()), ids=lambda x: x if isinstance(x, str) else "")
def test_imports_go_downward_and_through_the_faces(wing, module, path):
    for target, name in imports(path):
        where = f"{path.relative_to(ROOT)} imports {name or ''} of {target}"
        assert not target.startswith("dpfast.kernels"), f"{where}; only kernel_norms.py does, lazily"
        if target in ("dpfast.errors", "dpfast.former_names") or target == f"dpfast.{wing}":
            continue
        if target == "dpfast":
            assert not wing, f"{where}, which stands above it"
            continue
        room = target.split(".")[1]
        assert room in RANK, f"{where}, which is in no wing"
        if room != wing:
            assert not wing or RANK[room] < RANK[wing], f"{where}, which is not below it"
            assert target == f"dpfast.{room}", f"{where} past the face of {room}"
            assert name in face(room), f"{where}, which {room} does not show"


@pytest.mark.parametrize("wing", RANK)
def test_no_circles_within_a_wing(wing):
    graph = {}
    for of, module, path in sources():
        if of == wing and module != "__init__":
            inner = {t if n is None or t != f"dpfast.{wing}" else f"{t}.{n}" for t, n in imports(path)}
            graph[module] = {t.split(".")[2] for t in inner if t.startswith(f"dpfast.{wing}.")}
    assert list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("wing", sorted(RANK.keys() - {"opacus"}))
def test_a_face_shows_what_others_use(wing):
    """Opacus's face is the public one; nobody else may need it."""
    used = {
        name for of, _, path in sources() if of != wing for target, name in imports(path) if target == f"dpfast.{wing}"
    }
    files = {module for of, module, _ in sources() if of == wing}
    unused = set(face(wing)) - used
    assert unused <= (files if wing in REGISTERS_BY_BEING_IMPORTED else set())
    assert inspect.getdoc(importlib.import_module(f"dpfast.{wing}"))


def test_tests_mirror_the_wings():
    for wing in RANK:
        assert list((ROOT / "tests" / wing).glob("test_*.py")), f"no tests of {wing}"


def test_make_check_leaves_out_some_tests_of_a_folder_but_never_all():
    listed = re.search(r"^SLOW := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)[1]
    slow = set(re.findall(r"tests/\S+", listed))
    for name in slow:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name
    for folder in (*RANK, "kernels"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / folder).glob("test_*.py")}
        assert files - slow, f"no tests of {folder}"


def test_former_names_import_what_they_did():
    """In a process of its own, as a user's code does."""
    code = "import dpfast.ops, dpfast.autograd_grad_sample, dpfast.registry; from dpfast.ops import grad_sample"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_a_wrapped_model_pickled_by_the_first_version_works():
    """Written by dpfast 0.1.0 before its modules stood in wings, after one step."""
    wrapped = pickle.loads((ROOT / "tests" / "data" / "wrapped_by_0.1.0.pkl").read_bytes())
    x = torch.arange(15.0).view(5, 3) / 10
    fresh = dpfast.GradSampleModuleFastGradientClipping(
        copy.deepcopy(wrapped).to_standard_module(), norm_clipper=dpfast.ConstantFlatClipper(0.5)
    )
    for model in (wrapped, fresh):
        model.zero_grad(set_to_none=True)
        model(x).square().sum(1).mean().backward()
    assert torch.equal(wrapped.get_norm_sample(), fresh.get_norm_sample())
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(wrapped.parameters(), fresh.parameters(), strict=True))


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


def test_kernels_are_found_from_within_the_repository_too():
    """Where an installed dpfast is not editable, Python started in the repository imports the sources past it."""
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]; "
        "import dpfast; kernels, problem = dpfast.arithmetic.kernel_norms.import_kernels(); "
        "print(dpfast.__file__, problem or kernels.__file__, sep='\\n')"
    )
    found = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).splitlines()
    assert found == [str(ROOT / "dpfast" / "__init__.py"), str(ROOT / "kernels" / "__init__.py")]


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
