"""The benchmarks' own code, on a CPU with tiny shapes: a lent GPU's minutes are not for its mistakes."""

import argparse
import copy
import gc
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import contenders
import gpu
import in_turns
import kernel_report
import kernel_table
import layers
import legs
import loops
import loops_report
import pytest
import report
import rows
import step
import torch
import triton
import workloads

BF16, FP32 = torch.bfloat16, torch.float32
CEILINGS = {"copy": 4e12, "bf16": 800e12, "fp32": 50e12}
TINY = (
    layers.Layer("GPT-2 up", 3, 20, 24, 40, BF16),
    layers.Layer("GPT-2 up, fp32", 2, 20, 24, 40, FP32),
    layers.Layer("LoRA A × 64", 2, 20, 40, 8, BF16, factors=3),
    layers.Layer("GPT-2 tokens", 2, 20, 24, 300, BF16, lookup=True),
)

RIGHT_INTERPRETER = pytest.mark.skipif(
    triton.__version__.startswith("3.4."),
    reason="its interpreter wants a descriptor's strides in entries, not in bytes, to be multiples of 16",
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def collects_nothing(monkeypatch):
    """Between legs, and half a second each: the tests' process holds much."""
    own = types.SimpleNamespace(collect=lambda: 0, enable=gc.enable, disable=gc.disable)
    for module in (step, kernel_table):
        monkeypatch.setattr(module, "gc", own)


def never():
    return False


def table(path, **different):
    return rows.Rows(path, {**rows.environment("cpu"), **different})


@pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="the expressions are Opacus's")
def test_the_peer_called_opacus_computes_what_opacus_does():
    from opacus.grad_sample import linear

    a, b = torch.randn(3, 7, 5), torch.randn(3, 7, 4)
    layer = torch.nn.Linear(5, 4)
    grad_sample = linear.compute_linear_grad_sample(layer, [a], b)[layer.weight]
    norm = linear.compute_linear_norm_sample(layer, [a], b)[layer.weight]
    assert torch.equal(contenders.CONTENDERS["grad_sample"]["Opacus"](a, b, None), grad_sample)
    assert torch.equal(contenders.CONTENDERS["Gram norm"]["Opacus"](a, b, None).sqrt(), norm)


@RIGHT_INTERPRETER
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_contender_agrees_with_fp64(dtype):
    for verb, named in contenders.CONTENDERS.items():
        inputs = replace(TINY[0], dtype=dtype, lookup=verb == "lookup norm").inputs("cpu")
        expected = contenders.exact(verb, *inputs)
        for name, contender in named.items():
            assert contenders.error(verb, contender(*inputs), expected) <= contenders.TOLERANCE[name]


def test_an_error_is_that_of_norms_and_nan_stays_nan():
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert contenders.error("Gram norm", torch.tensor([9.0, 16.0]), expected) == 0
    assert contenders.error("grad_sample", torch.tensor([3.0, 9.0]), expected) == pytest.approx(1.0)
    assert not contenders.error("direct norm", torch.tensor([9.0, float("nan")]), expected) <= 1e9


def test_the_kernel_table_writes_every_cell_once(tmp_path):
    found = table(tmp_path / "kernels.jsonl")
    assert kernel_table.measure(found, CEILINGS, "cpu", never, TINY)
    expected = {(layer.name, verb, name) for layer in TINY for verb, name in kernel_table.cells(layer)}
    assert {(row["layer"], row["verb"], row["contender"]) for row in found.all()} == expected
    assert all(row["ms"] > 0 for row in found.all())
    assert all(row["tile"] for row in found.all() if row["contender"] == "dpfast")

    again = table(tmp_path / "kernels.jsonl")
    assert kernel_table.measure(again, CEILINGS, "cpu", lambda: True, TINY)  # nothing is left to measure
    other = table(tmp_path / "kernels.jsonl", commit="another")
    assert not kernel_table.measure(other, CEILINGS, "cpu", lambda: True, TINY)
    assert other.all() == []


def test_the_limit_is_the_slower_of_bytes_and_flops():
    wide = layers.Layer("wide", 4, 2048, 8192, 8192)
    found = kernel_table.limit("direct norm", wide, CEILINGS)
    assert found["limit_ms"] == pytest.approx(1e3 * 2 * 4 * 2048 * 8192**2 / 800e12)
    thin = layers.Layer("thin", 16, 1024, 4096, 8, factors=64)
    found = kernel_table.limit("direct norm", thin, CEILINGS)
    assert found["limit_ms"] == pytest.approx(1e3 * 64 * (16 * 1024 * 4104 * 2 + 16 * 4) / 4e12)


@RIGHT_INTERPRETER
def test_a_wrong_answer_is_not_timed_and_a_failure_is_noted(monkeypatch, tmp_path):
    monkeypatch.setitem(contenders.CONTENDERS["grad_sample"], "cuBLAS", lambda a, b, c: 1.1 * (b.mT @ a).float())

    def too_large(a, b, c):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setitem(contenders.CONTENDERS["grad_sample"], "Opacus", too_large)
    found = table(tmp_path / "kernels.jsonl")
    kernel_table.measure(found, CEILINGS, "cpu", never, TINY[:1])
    notes = {row["contender"]: row.get("note") for row in found.all() if row["verb"] == "grad_sample"}
    assert notes == {
        "dpfast": None,
        "cuBLAS": "wrong: not timed",
        "Opacus": "does not fit memory",
        "float hook": None,
    }
    assert all("ms" not in row for row in found.all() if "note" in row)


@RIGHT_INTERPRETER
def test_a_lost_device_leaves_a_row_that_is_not_tried_again(monkeypatch, tmp_path):
    def lost(a, b, c):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(contenders.CONTENDERS["grad_sample"], "dpfast", lost)
    found = table(tmp_path / "kernels.jsonl")
    with pytest.raises(rows.DeviceLost):
        kernel_table.measure(found, CEILINGS, "cpu", never, TINY[:1])
    assert kernel_table.measure(found, CEILINGS, "cpu", never, TINY[:1])
    assert sum("note" in row for row in found.all()) == 1


def test_the_parts_run(monkeypatch, tmp_path):
    tiny = workloads.gpt("tiny", n=4, t=8, d=16, blocks=1, vocabulary=20, check=4, dtype=BF16)
    monkeypatch.setattr(step, "WORKLOADS", {"tiny": tiny})
    assert gpu.run("steps", tmp_path, "cpu", 600.0) == 0
    assert gpu.run("ceilings", tmp_path, "cpu", 600.0) == 0
    found = rows.read(tmp_path / "step.jsonl")
    assert {row["leg"] for row in found} == set(legs.LEGS)
    assert all(row["ms"] > 0 for row in found if row["leg"].startswith(("plain", "dpfast")))
    (ceilings,) = rows.read(tmp_path / "ceilings.jsonl")
    assert min(ceilings[name] for name in ("copy", "bf16", "fp32")) > 0


def test_what_is_worth_most_comes_first_and_is_not_measured_again(monkeypatch, tmp_path):
    tiny = workloads.gpt("llama-1b", n=4, t=8, d=16, blocks=1, vocabulary=20, check=4, dtype=BF16)
    monkeypatch.setattr(step, "WORKLOADS", {"llama-1b": tiny, "other": replace(tiny, name="other")})
    monkeypatch.setattr(layers, "LAYERS", TINY)
    assert gpu.run("first-kernels", tmp_path, "cpu", 600.0) == gpu.run("first-steps", tmp_path, "cpu", 600.0) == 0
    kernels, steps = (rows.read(tmp_path / f"{name}.jsonl") for name in ("kernels", "step"))
    assert {(row["layer"], row["contender"]) for row in kernels} == {
        *((layer.name, name) for layer in TINY[:2] for name in ("dpfast", "cuBLAS")),
        *(("GPT-2 tokens", name) for name in ("dpfast", "torch")),
    }
    for row in kernels:
        if row["contender"] == "dpfast":
            assert row["compared_with"]["torch" if row["verb"] == "lookup norm" else "cuBLAS"] > 0
    assert [(row["workload"], row["leg"]) for row in steps] == [("llama-1b", leg) for leg in gpu.FIRST_LEGS]

    assert gpu.run("kernels", tmp_path, "cpu", 600.0) == gpu.run("steps", tmp_path, "cpu", 600.0) == 0
    cells = [(row["layer"], row["verb"], row["contender"]) for row in rows.read(tmp_path / "kernels.jsonl")]
    assert len(set(cells)) == len(cells) == sum(len(list(kernel_table.cells(layer))) for layer in TINY)
    own = [row["leg"] for row in rows.read(tmp_path / "step.jsonl") if row["workload"] == "llama-1b"]
    assert set(own) == set(legs.LEGS) and own.count("dpfast one-pass") == 1


def test_one_call_takes_the_parts_in_order_within_one_budget(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(
        gpu, "run_alone", lambda part, options, seconds: given.append((part, seconds)) or part == "steps"
    )
    options = argparse.Namespace(budget_seconds=100.0, out=tmp_path, device="cpu")
    assert gpu.run_all(options) == 1
    assert [part for part, _ in given] == list(gpu.PARTS)
    assert given[0][1] <= 30 and given[1][1] <= 50 and given[2][1] <= 100
    assert gpu.run_all(argparse.Namespace(budget_seconds=0.0)) == 0


def test_smoke_runs_every_kernel(capsys):
    gpu.smoke("cpu", [BF16])
    said = capsys.readouterr().out
    assert all(f"{verb}: relative error" in said for verb in layers.KERNEL)


def results(folder, **row):
    """Pages with marked sections, and kernel rows of an invented device."""
    (folder / "docs").mkdir()
    pages = {
        "performance": ("steps", "scaling", "gpu"),
        "bounds": ("watch",),
        "compiled": ("compiled",),
        "layouts": ("looks",),
        "migration": ("install",),
    }
    for page, names in pages.items():
        marks = (f"<!-- {name}: made by benchmarks/report.py -->\nold\n<!-- /{name} -->\n" for name in names)
        (folder / "docs" / f"{page}.md").write_text("".join(marks))
    with (folder / "kernels.jsonl").open("w") as file:
        for layer in layers.LAYERS[:3]:
            for verb, name in kernel_table.cells(layer):
                cell = {"layer": layer.name, "verb": verb, "contender": name, "ms": 2.0, "error": 1e-6, "tile": "64×64"}
                sizes = {size: getattr(layer, size) for size in ("N", "T", "D", "P", "factors")}
                limits = {**kernel_table.limit(verb, layer, CEILINGS), "limit_ms": 1.5, "ceilings": CEILINGS}
                environment = {**rows.environment("cpu"), "machine": "a device", "commit": "c0ffee"}
                file.write(json.dumps({**environment, **sizes, **cell, **limits, **row}) + "\n")


def test_the_report_writes_tables_and_a_roofline(tmp_path):
    results(tmp_path)
    made = report.documents(tmp_path, tmp_path)
    summary = made[tmp_path / "docs" / "performance.md"]
    assert "old" not in summary
    assert "| GPT-2 qkv (8, 1024, 768, 2304) | 75 % | 75 % | 75 % | 75 % | – |" in summary
    assert "nothing has been measured" not in summary
    assert "1.5 | 75 % | 2 (1e-06) |" in made[tmp_path / "docs" / "kernels.md"]
    assert set(report.stale(tmp_path, tmp_path)) == set(made)
    for path, text in made.items():
        path.write_text(text)
    assert report.stale(tmp_path, tmp_path) == []

    kernel_report.roofline(kernel_report.newest(tmp_path), tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_without_rows_the_report_says_that_nothing_was_measured(tmp_path):
    results(tmp_path)
    (tmp_path / "kernels.jsonl").unlink()
    made = report.documents(tmp_path, tmp_path)
    assert "nothing has been measured yet" in made[tmp_path / "docs" / "performance.md"]
    assert all(
        "Nothing has been measured yet." in made[tmp_path / "docs" / f"{p}.md"] for p in ("compiled", "migration")
    )
    assert tmp_path / "docs" / "kernels.md" not in made


def test_the_published_tables_are_what_the_rows_say():
    assert report.stale() == [], "run `python benchmarks/report.py`"


def test_rounds_come_from_processes_of_their_own(tmp_path):
    """In a process without threads, as the benchmark runs: threads do not survive the forks."""
    code = (
        "import json, step, workloads\n"
        "step.SLOW = 1e9\n"
        "tiny = workloads.gpt('gpt', n=4, t=8, d=16, blocks=1, vocabulary=20, check=4)\n"
        "errors = step.gradient_errors(tiny, ['plain', 'plain+noise', 'dpfast one-pass'])\n"
        "errors['opacus hooks'] = {'note': 'wrong gradient: not timed'}\n"
        "print(json.dumps([step.measure_in_turns(tiny, errors, 2, n, a) for n, a in ((1, 'default'), (2, 'tuned'))]))\n"
    )
    here = Path(step.__file__).parent
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # threads that spin would wait for each other's core
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (answer,) = (line for line in done.stdout.splitlines() if line.startswith("[["))
    for measured, clock in zip(json.loads(answer), ("cpu", "wall"), strict=True):
        by_leg = {row["leg"]: row for row in measured}
        assert "ms" not in by_leg.pop("opacus hooks")
        assert by_leg["dpfast one-pass"]["error"] <= 1e-3
        for row in by_leg.values():
            assert row["clock"] == clock and row["rounds"] == 2 * step.GENERATIONS
            assert min(row[name] for name in ("ms", "ratio_plain", "peak_mb", "code_mb", "tensors_mb")) > 0
            assert row["faults"] >= 0


def test_a_process_that_dies_leaves_a_note():
    def dies():
        os._exit(1)

    turns = in_turns.Turns({"dead": (dies, None), "raises": (lambda: 1 / 0, None)}, 1, in_turns.AS_IT_IS)
    assert "ended" in turns.ask("dead", "step")["note"]
    assert "ZeroDivisionError" in turns.ask("raises", "step")["note"]
    turns.close()


def test_tables_of_several_machines(tmp_path):
    known = {"torch": "2", "commit": "c0ffee", "date": "today", "workload": "mlp", "faults": 3, "quartiles": [1.0, 1.1]}
    figures = {"ms": 50.0, "ratio_plain": 1.0, "ratio_noise": 0.9, "peak_mb": 80.0, "tensors_mb": 35.0}
    old = {"machine": "AMD EPYC", "leg": "plain", **known, **figures}
    rows_ = [old]
    for instructions, ratio in (("AVX-512", 1.25), ("AVX2", 1.5)):
        cpu = {"machine": "a CPU", "cpu": "a CPU", "instructions": instructions, "used": report.of_all(instructions)}
        for threads in (1, 2):
            where = {**cpu, **known, **figures, "threads": threads, "allocator": "glibc 2.36"}
            rows_ += [{**where, "leg": "plain"}]
            rows_ += [{**where, "leg": "dpfast one-pass", "ratio_plain": ratio + threads, "error": 1e-4}]
    (tmp_path / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    latest = report.latest_rows(tmp_path)
    assert len(latest) == 4
    text = report.markdown(latest)
    assert "AMD EPYC" not in text
    assert "| dpfast one-pass | 2.25 | 3.25 | 2.50 | 3.50 |" in text
    assert "| a CPU, AVX2, 2 threads (1 thread) |" in (lines := "\n".join(report.summary_of_steps(latest, cuda=False)))
    assert f"| {workloads.WORKLOADS['mlp'].title} | – | 3.50 (2.50) | – | – | – |" in lines


def test_the_one_pass_leg_is_readmes():
    """The same classes with the same arguments, in the same order."""
    readme = (rows.ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    workload = workloads.Workload(
        "readme",
        "README's",
        lambda: torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)),
        lambda: (torch.randn(32, 20), torch.randint(0, 3, (32,))),
        workloads.class_losses,
        4,
    )
    torch.manual_seed(0)
    model = workload.build()
    start, batch = copy.deepcopy(model.state_dict()), workload.batch()
    own = legs.build("dpfast one-pass", model, workload, 1.0)
    torch.manual_seed(1)
    own(*batch)
    code = readme.replace("net = torch.nn.Sequential", "_ = torch.nn.Sequential").replace("x, y = ", "_ = ")
    code = code.replace("lr=0.1", f"lr={legs.LEARNING_RATE}")
    net = workload.build()
    net.load_state_dict(start)
    # Weights and batch are given; what is drawn after them is the noise.
    before = code.split("optimizer.step()")[0] + "torch.manual_seed(1)\noptimizer.step()"
    exec(before, {"net": net, "x": batch[0], "y": batch[1]})
    for p, q in zip(model.parameters(), net.parameters(), strict=True):
        assert torch.equal(p, q)


def test_loops_over_samples_are_counted_and_reported(tmp_path, monkeypatch):
    tiny = replace(
        step.TINY, build=lambda: torch.nn.Linear(2048, 5), batch=lambda: (torch.randn(9, 20, 2048), torch.zeros(9))
    )
    tiny = replace(tiny, losses=lambda model, x, y: model(x).square().mean((1, 2)))
    monkeypatch.setitem(loops.WORKLOADS, "tiny", tiny)
    found = {row["loop"]: row for row in loops.measure("tiny")}
    assert found.keys() == loops_report.LOOPS.keys()
    assert found["narrow products"]["calls"] == 3 and found["oneDNN's products"]["calls"] == 0
    assert found["noise"]["calls"] == 2 and all(0 <= row["share"] < 1 for row in found.values())
    row = {**found["noise"], "multiplier": "MKL AVX2", "cpu": "a CPU", "torch": "2"}
    (tmp_path / "loops.jsonl").write_text(json.dumps(row))
    told = "\n".join(loops_report.lines(tmp_path))
    assert f"2: {100 * row['share']:.1f} %" in told and "| tiny, MKL AVX2 |" in told


def test_other_peoples_models_have_a_line_each():
    """The newest rows count, a leg that could not run says why."""
    common = {"machine": "CPU", "title": "a model", "workload": "a", "commit": "abc", "rounds": 6, "ms": 100.0}
    rows = [
        {**common, "leg": "plain", "ratio_plain": 1.0, "ratio_noise": 0.9},
        {**common, "leg": "plain+noise", "ratio_plain": 1.1, "ratio_noise": 1.0},
        {**common, "leg": "dpfast one-pass", "ratio_plain": 9.0, "ratio_noise": 8.0, "error": 1e-4},
        {**common, "leg": "dpfast one-pass", "ratio_plain": 1.21, "ratio_noise": 1.1, "error": 1e-4},
        {**common, "leg": "opacus hooks", "note": "RuntimeError: no"},
    ]
    *_, line = report.medium(rows)
    assert line == "| a model | 100 | 1.10 | RuntimeError: no | 1.21 (1.10) | 0.0001 | abc, 6 |"


@pytest.mark.parametrize("path", sorted(rows.ROOT.glob("benchmarks/*.py")), ids=lambda path: path.stem)
def test_every_benchmark_imports_what_there_is(path):
    importlib.import_module(path.stem)


@pytest.mark.on_cpu
def test_a_leg_is_measured_in_a_process_of_its_own():
    rows = {row["leg"]: row for row in gpu._in_a_process("mlp", ["plain", "plain+noise"])}
    assert rows["plain"]["ratio_plain"] == 1.0 and rows["plain+noise"]["rounds"] == 9


def test_a_table_names_the_commits_of_all_its_rows():
    row = {"ms": 1.0, "ratio_plain": 1.0, "ratio_noise": 1.0, "quartiles": [1.0, 1.0], "torch": "2", "date": "today"}
    legs = {leg: {**row, "leg": leg, "commit": commit} for leg, commit in (("plain", "aaa"), ("plain+noise", "bbb"))}
    assert "a GPU, torch 2, commits aaa, bbb, today:" in list(report._lines({("a GPU", "mlp", None, None): legs}))
