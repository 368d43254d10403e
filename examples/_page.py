"""Runs the examples, keeps what they print, and makes docs/examples.md of it.

python examples/_page.py [NAME ...]     # runs those that are named, all without a name; then writes the page
python examples/_page.py --page         # writes the page of what is kept
"""

import argparse
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUTPUTS = HERE / "outputs"
PAGE = HERE.parent / "docs" / "examples.md"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
COMMANDS = {  # name: what stands before the file, and behind it
    "plain_loop": ([], []),
    "opacus_engine": ([], []),
    "characters": ([], []),
    "per_layer": ([], []),
    "users": ([], []),
    "standardised_cnn": ([], []),
    "augmentation": ([], ["--seeds", "2"]),
    "compiled_step": ([], []),
    "trainer_lora": (
        [],
        ["--rounds", "1", "--steps", "4", "--d", "128", "--rank", "64", "--length", "16", "--sigma", "1.0"],
    ),
    "ddp": (TORCHRUN, ["--epochs", "2"]),
    "fsdp2": (TORCHRUN, ["--epochs", "2"]),
    "opacus_0_13": ([], []),
}
HEAD = """# Examples

One file and one command each, in `examples/`; what they print is below, as they printed it on a CPU. Times and memory
in it are of one run on a machine that had other work: [A training step](step.md) has those to go by. They need
`pip install '.[examples]'`; the Trainer's also transformers and peft. `make demo` runs the largest, `digits.py`, which
compares training with Opacus and with dpfast.

Two notebooks have stored in them what a run printed and drew:
[`examples/notebooks/getting_started.ipynb`](../examples/notebooks/getting_started.ipynb), of [that
page](getting-started.md), and [`examples/notebooks/explain.ipynb`](../examples/notebooks/explain.ipynb), of [what a
step costs, and why](explain.md).
"""


def run(name: str) -> str:
    """What it prints."""
    before, behind = COMMANDS[name]
    command = [sys.executable, *before, str(HERE / f"{name}.py"), *behind]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=env, cwd=OUTPUTS.parent)
    if done.returncode or "DpfastWarning" in done.stderr:  # none of them takes anything on trust
        raise SystemExit(f"{name}: {done.stderr[-3000:]}")
    return done.stdout


def form(output: str) -> str:
    """Without numbers, and without what models have written by themselves."""
    lines = [line for line in output.splitlines() if not line.startswith("    | ")]
    return re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", "\n".join(re.sub(r" +", " ", line) for line in lines))


def page() -> str:
    parts = [HEAD]
    for name, (before, behind) in COMMANDS.items():
        title, _, text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text("utf-8"))).partition("\n\n")
        text = "\n\n".join(part for part in text.split("\n\n") if "examples/" + name + ".py" not in part)
        start = "torchrun --nproc-per-node 2" if before else "python"
        command = " ".join([start, f"examples/{name}.py", *behind])
        output = (OUTPUTS / f"{name}.txt").read_text("utf-8")
        said = f"{title}\n\n{text}" if text else title
        parts.append(f"## {name}.py\n\n{said}\n\n```\n$ {command}\n{output.rstrip()}\n```\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(COMMANDS))
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    OUTPUTS.mkdir(exist_ok=True)
    for name in [] if options.page else options.names or COMMANDS:
        (OUTPUTS / f"{name}.txt").write_text(run(name), "utf-8")
        print(f"{name}: kept", flush=True)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
