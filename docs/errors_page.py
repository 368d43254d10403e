"""Writes docs/errors.md from dpfast/errors.py: `python docs/errors_page.py`. tests/test_errors.py holds it."""

import inspect
import re
from pathlib import Path

from dpfast import errors

PAGE = Path(__file__).resolve().parent / "errors.md"
HEAD = """# Errors

Every error that dpfast raises on purpose is a `dpfast.DpfastError`, names the layer, the shapes and the remedy, and
ends with its place on this page. The model, `p.grad` and the caller's tensors are left as they were. Each is also of
the built-in type that Opacus or torch raises in the same place, so `except` clauses of existing code go on working.
"""


def classes() -> list[type]:
    return [value for value in vars(errors).values() if isinstance(value, type)]


def page() -> str:
    parts = [HEAD]
    for cls in classes():
        said, *sections = re.split(r"\n+(Why|What to do):\n", inspect.getdoc(cls))
        types = [base.__name__ for base in cls.__bases__]
        part = f"## {cls.__name__}\n\n{said} Subclass of {' and '.join(f'`{name}`' for name in types)}.\n"
        for title, text in zip(sections[::2], sections[1::2], strict=True):
            part += f"\n**{title}:** {' '.join(text.split())}\n"
        parts.append(part)
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
