"""Runs the notebooks from top to bottom and keeps what they print and draw.

python examples/_notebooks.py [NAME ...]     # all without a name
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent / "notebooks"


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def run(name: str) -> nbformat.NotebookNode:
    """It with the outputs of a run in a kernel of its own, one thread. A cell that fails raises."""
    notebook = read(name)
    options = {"timeout": 300, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
    client = NotebookClient(notebook, **options)
    client.execute(cwd=str(FOLDER), env={**os.environ, "OMP_NUM_THREADS": "1"})
    notebook.metadata.pop("language_info", None)  # of the Python that happened to be here, as are paths in warnings
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    """What its cells print, pictures and pages left out."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    for name in parser.parse_args().names or names:
        nbformat.write(run(name), FOLDER / f"{name}.ipynb")
        print(f"{name}: kept", flush=True)


if __name__ == "__main__":
    main()
