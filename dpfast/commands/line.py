"""The command line: what it takes, what it prints, and with which code it ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from dpfast.commands.bench import DTYPES, Bench, Shape
from dpfast.commands.demo import demo
from dpfast.commands.factory import made_by
from dpfast.commands.show import progress, table
from dpfast.errors import DpfastError, InputError
from dpfast.report import Run, explain, info

WRONG = 2
"""The exit code where what was asked for cannot be done; one line on stderr says why."""


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG, f"{self.prog}: {message} ({self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    """Of ``python -m dpfast``."""
    whole = _Parser(prog="python -m dpfast", description="Per-sample gradients for PyTorch")
    commands = whole.add_subparsers(dest="command", required=True, metavar="info | explain | bench | demo")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help[0].upper() + help[1:])
        one.add_argument("--json", action="store_true", help="print JSON")
        return one

    command("info", "versions, devices, and the backend that auto takes on each, and why")
    explained = command("explain", "which way each layer of a model goes and what it costs")
    explained.add_argument(
        "factory", metavar="package.module:factory", help="called without arguments; returns (model, batch) or more"
    )
    explained.add_argument("--html", type=Path, metavar="FILE", help="measure a step too, and draw it in a page")
    bench = command("bench", "every verb, way and backend on a linear layer of one's own shape")
    bench.add_argument(
        "--shape", type=Shape.of, required=True, metavar="N,T,D,P", help="samples, positions, in- and out-features"
    )
    bench.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    bench.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    command("demo", "a small private training step beside the plain one, and beside Opacus's where it is installed")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, or 2 where what was asked for cannot be done."""
    asked = parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _COMMANDS[asked.command](asked)
        sys.stdout.flush()
    except DpfastError as error:
        print(f"python -m dpfast {asked.command}: {_one_line(error)}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"python -m dpfast: {_one_line(message)}", file=sys.stderr)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def _print_json(found: Any) -> None:
    print(json.dumps(found, indent=1, default=str))


def _info(asked: argparse.Namespace) -> None:
    report = info()
    if asked.json:
        _print_json(report)
        return
    width = max(map(len, report))
    for name, value in report.items():
        print(f"{name:<{width}}  {value}")


def _check_file(path: Path) -> None:
    """Before anything is measured for it."""
    if path.is_dir():
        raise InputError(f"--html {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--html {path}: there is no folder {path.parent}")


def _explain(asked: argparse.Namespace) -> None:
    if asked.html is not None:
        _check_file(asked.html)
    made = made_by(asked.factory)
    explanation = made.run(lambda: explain(made.model, *made.args, **made.kwargs))
    if asked.html is not None:
        with progress(Run.STEPS, "measuring") as done:
            text = made.run(lambda: explanation.html(made.loss, done))
        try:
            asked.html.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--html {asked.html}: {error.strerror}") from error
    if asked.json:
        _print_json(explanation.as_dict())
    else:
        print(explanation)


def _bench(asked: argparse.Namespace) -> None:
    bench = Bench(asked.shape, asked.dtype, asked.device)
    with progress(bench.steps, "bench") as done:
        rows = bench.rows(done)
    if asked.json:
        _print_json(bench.as_dict(rows))
        return
    cells: list[tuple[str, ...]] = []
    for row, before in zip(rows, [None, *rows], strict=False):
        if before is not None and before.verb != row.verb:
            cells.append(())
        cells.append(row.cells())
    table(("verb", "way", "by", "ms", "% of the limit", "error", ""), cells, bench.title)
    for line in bench.notes:
        print(line)


def _demo(asked: argparse.Namespace) -> None:
    with progress(demo.steps, "demo") as done:
        found = demo.run(done)
    if asked.json:
        _print_json(found)
        return
    demo.show(found)


_COMMANDS = {"info": _info, "explain": _explain, "bench": _bench, "demo": _demo}
