"""What ``python -m dpfast`` does: info, explain, bench, demo (docs/commands.md).

Imports ``report``, ``modes`` and below; nothing imports it but ``dpfast/__main__.py``.
"""

from dpfast.commands.line import main

__all__ = ["main"]
