"""Runs Opacus's own unit tests as it is, with dpfast installed in it, and with dpfast's two module classes in the
place of its own, and compares.

    make test-opacus                                    # or:
    python tests/run_opacus_tests.py [--opacus DIR] [--torchvision DIR] [-k EXPRESSION]

A test that passes without dpfast must pass with it, except those in EXPECTED, each with its reason (some draw their
cases at random, so they may pass too). Fails otherwise. The tests are those of the Opacus that is installed (they are
inside its wheel), or of the one under DIR.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent

SUBJECTS = [
    "grad_samples",
    "grad_sample_module_test.py",
    "grad_sample_hooks_test.py",
    "grad_sample_module_fast_gradient_clipping_test.py",
    "grad_sample_hooks_fast_gradient_clipping_test.py",
    "per_sample_gradients_utils_test.py",
    "gradient_accumulation_test.py",
    "mixed_precision_test.py",
    "batch_memory_manager_test.py",
    "privacy_engine_test.py",
    "privacy_engine_validation_test.py",
    "module_validator_test.py",
    "dp_layers",
    "randomness_test.py",
    "schedulers",
]

LEGS = {
    "plain": "as it is",
    "installed": "with dpfast installed",
    "ours": "with dpfast's modules in the place of its own",
}
"""What ``support/opacus_tests_plugin.py`` makes of Opacus, and how it is called."""


class Expected(NamedTuple):
    """Tests that may fail in some legs with some versions of Opacus though they pass without dpfast."""

    reason: str
    legs: tuple[str, ...]
    tests: tuple[str, ...]
    versions: tuple[str, ...] = ("1.5.4", "1.6.0")


EXPECTED = [
    Expected(
        "has a loss of shape (N, 1), which Opacus broadcasts with the factors to (N, N): an error with dpfast",
        legs=("installed", "ours"),
        tests=(
            "GradSampleModuleFastGradientClippingEmbeddingLayerTest::test_gradient_calculation",
            "GradSampleModuleFastGradientClippingEmbeddingLayerTest::test_norm_calculation",
        ),
    ),
    Expected(
        "wants a module with a buffer to be refused; dpfast refuses what mixes samples, and a buffer does not",
        legs=("ours",),
        tests=(
            "GradSampleModuleTest::test_standard_module_validation",
            "EWGradSampleModuleTest::test_standard_module_validation",
            "GradSampleModuleFastGradientClippingTest::test_standard_module_validation",
        ),
    ),
    Expected(
        "asks for the attribute in which Opacus keeps a function on layers without a sampler; dpfast leaves none there",
        legs=("ours",),
        tests=(
            "PrivacyEngineValidationTest::test_custom_linear_hooks",
            "PrivacyEngineValidationTest::test_extra_param_hooks_requires_grad",
            "PrivacyEngineValidationTest::test_unsupported_hooks",
        ),
    ),
    Expected(
        "wants gradients in the order of a packed sequence, longest sample first; dpfast's are in the order of the "
        "samples, as those of every other layer of the model",
        legs=("ours",),
        tests=("RNN_test::test_rnn",),
    ),
    Expected(
        "gives samples in the second dimension and does not say batch_first=False: Opacus clips positions for samples, "
        "dpfast refuses the model",
        legs=("ours",),
        tests=(
            "PrivacyEngineTextTest::test_make_private_with_epsilon",
            "PrivacyEngineTextTestFunctorch::test_make_private_with_epsilon",
        ),
    ),
    Expected(
        "wants norms to 1e-3 where a gradient cancels to zero; a Gram product in fp32 knows them to 1e-2, and dpfast "
        "gives the upper end with install() (Opacus 1.6 tests in fp64, where both agree)",
        legs=("installed", "ours"),
        tests=("GradSampleModuleFastGradientClippingTest::test_norm_calculation_fast_gradient_clipping",),
        versions=("1.5.4",),
    ),
]


def outcomes(tests: Path, path: list[Path], leg: str, expression: str) -> dict[str, str]:
    """{test: "passed", "skipped" or the first line of its failure} of one run.

    Args:
        tests: Opacus's. path: what is put before Python's own.
    """
    subjects = [str(tests / name) for name in SUBJECTS if (tests / name).exists()]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "OPACUS_TESTS_LEG": leg,
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "opacus_tests_plugin", "-p", "no:cacheprovider"]
        # No settings of a project in whose folder Opacus is installed.
        command += ["-c", os.devnull, "--import-mode=importlib", "-o", "python_files=*_test.py", "-W", "ignore"]
        command += [f"--rootdir={tests}", f"--junitxml={report}", "--tb=line", "-k", expression, *subjects]
        run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if not report.exists():
            sys.exit(f"pytest did not run:\n{run.stdout}\n{run.stderr}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, str] = {}
    for case in cases:
        result = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        name = f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}"
        if found.get(name, "passed") not in ("passed", "skipped"):
            continue  # the same test has failed from another file
        if result is None:
            found[name] = "passed"
        elif result.tag == "skipped":
            found[name] = "skipped"
        else:
            found[name] = (result.get("message") or "").strip().partition("\n")[0][:200] or "failed"
    return found


def expected_of(leg: str, version: str) -> dict[str, str]:
    """{test: the reason why it may fail}."""
    return {test: e.reason for e in EXPECTED if leg in e.legs and version in e.versions for test in e.tests}


def compare(plain: dict[str, str], other: dict[str, str], expected: dict[str, str], selected: bool) -> list[str]:
    """What is wrong, a line each."""
    wrong = []
    for name, before in plain.items():
        after = other.get(name, "not run")
        if before == "passed" and after != "passed" and name not in expected:
            wrong.append(f"{name}: passes without dpfast, with it: {after}")
    for name in expected:
        if name not in plain and not selected:
            wrong.append(f"{name}: is in EXPECTED and there is no such test")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opacus", type=Path, help="folder that holds the package opacus; default: the installed one")
    parser.add_argument("--torchvision", type=Path, help="folder that holds torchvision, where it is not installed")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as in pytest")
    options = parser.parse_args()
    spec = None if options.opacus else find_spec("opacus")
    if options.opacus is None and spec is None:
        sys.exit("Opacus is not installed: pip install 'dpfast[opacus]'")
    opacus = (options.opacus / "opacus" if options.opacus else Path(spec.origin).parent).resolve()
    path = [folder.resolve() for folder in (options.opacus, options.torchvision) if folder] + [HERE / "support"]

    version = re.search(r'__version__ = "(.*)"', (opacus / "version.py").read_text())[1]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(LEGS)) as pool:  # one thread each
        runs = [pool.submit(outcomes, opacus / "tests", path, leg, options.k) for leg in LEGS]
        results = {leg: run.result() for leg, run in zip(LEGS, runs, strict=True)}
    for leg, found in results.items():
        passed, skipped = (sum(outcome == kind for outcome in found.values()) for kind in ("passed", "skipped"))
        print(
            f"Opacus {version} {LEGS[leg]}: {passed} passed, {len(found) - passed - skipped} failed, {skipped} skipped"
        )
    print(f"{time.perf_counter() - start:.0f} s")
    plain = results["plain"]
    for name, outcome in plain.items():
        if outcome not in ("passed", "skipped"):
            print(f"fails without dpfast too: {name}: {outcome}")
    wrong = []
    for leg in list(LEGS)[1:]:
        expected = expected_of(leg, version)
        for name, reason in expected.items():
            print(f"{LEGS[leg]}, {results[leg].get(name, 'not run')}, may fail: {name}: {reason}")
        wrong += [f"{LEGS[leg]}: {line}" for line in compare(plain, results[leg], expected, bool(options.k))]
    print(
        "\n".join(wrong) if wrong else "every test that passes without dpfast passes with it, but those that may fail"
    )
    sys.exit(bool(wrong) or "passed" not in plain.values())


if __name__ == "__main__":
    main()
