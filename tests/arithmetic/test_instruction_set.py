"""Which library multiplies follows from what each of the two may use."""

import os
import subprocess
import sys

import pytest
import torch

from dpfast.arithmetic import instruction_set, products
from dpfast.arithmetic.instruction_set import AVX2, AVX512, AVX512_IN_HALVES, UNKNOWN

WIDE = "fma avx2 avx512f avx512bw avx512dq avx512vl"


@pytest.fixture
def machine(monkeypatch):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.delenv(name, raising=False)

    def pretend(vendor, flags, family="26"):
        said = {"vendor_id": vendor, "flags": flags, "cpu family": family}
        monkeypatch.setattr(instruction_set, "_cpuinfo", said.get)
        instruction_set.of_processor.cache_clear()
        products.onednn_is_faster.cache_clear()

    yield pretend
    instruction_set.of_processor.cache_clear()
    products.onednn_is_faster.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "flags", "onednn", "mkl"),
    [
        ("AuthenticAMD", WIDE, AVX512, AVX2),
        ("GenuineIntel", WIDE, AVX512, AVX512),
        ("AuthenticAMD", "fma avx2", AVX2, AVX2),
        ("GenuineIntel", "fma avx2 avx512f", AVX2, AVX2),
        ("", "asimd", UNKNOWN, UNKNOWN),
        ("", "", UNKNOWN, UNKNOWN),
    ],
)
def test_by_processor(machine, vendor, flags, onednn, mkl):
    machine(vendor, flags)
    assert (instruction_set.of_onednn(), instruction_set.of_mkl()) == (onednn, mkl)


@pytest.mark.parametrize(
    ("variable", "value", "onednn", "mkl"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", AVX2, AVX512),
        ("ONEDNN_MAX_CPU_ISA", "avx2_vnni", AVX2, AVX512),
        ("DNNL_MAX_CPU_ISA", "SSE41", UNKNOWN, AVX512),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", AVX512, AVX512),
        ("ONEDNN_MAX_CPU_ISA", "ALL", AVX512, AVX512),
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2", AVX512, AVX2),
        ("MKL_ENABLE_INSTRUCTIONS", "SSE4_2", AVX512, UNKNOWN),
    ],
)
def test_by_environment(machine, monkeypatch, variable, value, onednn, mkl):
    machine("GenuineIntel", WIDE)
    monkeypatch.setenv(variable, value)
    assert (instruction_set.of_onednn(), instruction_set.of_mkl()) == (onednn, mkl)


def test_avx512_in_halves_has_a_name_of_its_own(machine, monkeypatch):
    machine("AuthenticAMD", WIDE, family="25")
    assert (instruction_set.of_onednn(), instruction_set.of_mkl()) == (AVX512_IN_HALVES, AVX2)
    assert not products.onednn_is_faster()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert instruction_set.of_onednn() == AVX2
    machine("AuthenticAMD", "fma avx2", family="25")
    assert instruction_set.of_processor() == AVX2


def test_onednn_only_where_a_row_shows_that_it_is_faster(machine, monkeypatch):
    machine("AuthenticAMD", WIDE)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not products.onednn_is_faster()
    machine("GenuineIntel", WIDE)
    assert not products.onednn_is_faster()
    machine("", "")
    assert not products.onednn_is_faster()


def test_a_small_machine_imitated():
    """The whole choice in a process of its own, as a user with such a processor has it."""
    code = (
        "import torch; from dpfast.arithmetic import instruction_set, products, ops\n"
        "a, b = torch.randn(3, 128, 256), torch.randn(3, 128, 256)\n"
        "assert not products.by_onednn(256, 128, 1024, a)\n"
        "whole = ops.grad_sample(a, b); exact = torch.einsum('ntp,ntd->npd', b.double(), a.double())\n"
        "assert (whole - exact).norm() <= 1e-6 * exact.norm()\n"
        "assert all(torch.equal(ops.grad_sample(a[i:i+1], b[i:i+1])[0], whole[i]) for i in range(3))\n"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd="/")


@pytest.mark.parametrize(
    ("vendor", "flags", "who"),
    [
        ("AuthenticAMD", WIDE, "oneDNN AVX-512"),
        ("GenuineIntel", WIDE, "MKL AVX-512"),
        ("GenuineIntel", "fma avx2", "MKL AVX2"),
        ("", "asimd", UNKNOWN),
    ],
)
def test_who_multiplies_has_a_name(machine, vendor, flags, who):
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        pytest.skip("this torch lacks one of the two")
    machine(vendor, flags)
    assert products.multiplier() == who
