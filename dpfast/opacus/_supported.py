"""Is an Opacus here that dpfast knows? Imported before anything of Opacus is."""

from __future__ import annotations

from dpfast.errors import MissingDependencyError

OLDEST, NEWEST = (1, 5, 4), (1, 6)
"""The versions that tests/run_opacus_tests.py has been run with; a patch release of the newest is taken on trust."""


def check(version: str | None, reason: str = "it is not installed") -> None:
    """Raises MissingDependencyError where ``version`` (None: no Opacus) is not one that dpfast knows."""
    if version is not None:
        reason = f"{version} is installed"
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        if numbers >= OLDEST and numbers[:2] <= NEWEST:
            return
    raise MissingDependencyError(
        f"dpfast.opacus needs Opacus {'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}, and {reason}; "
        "install one with: pip install 'dpfast[opacus]'"
    )


try:
    import opacus
except ImportError as error:
    check(None, f"it cannot be imported ({error})")
else:
    check(opacus.__version__)
