"""Doctests of docstrings as code on the site: an extension of griffe, which reads the docstrings for mkdocstrings."""

import re
import textwrap
from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Puts a docstring's first run of prompts under the heading that makes it an example."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^>>> .*?(?=\n\n|\Z)",
                lambda found: "Examples:\n" + textwrap.indent(found[0], "    "),
                obj.docstring.value,
                count=1,
                flags=re.MULTILINE | re.DOTALL,
            )
