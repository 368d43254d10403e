"""``python -m dpfast info``: what is there and which backend "auto" takes."""

from __future__ import annotations

import argparse

from dpfast.report import info


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dpfast", description="Per-sample gradients for PyTorch")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and the backend that auto takes on each, and why")
    parser.parse_args()
    report = info()
    width = max(map(len, report))
    for name, value in report.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
