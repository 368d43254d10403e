"""`--packages DIR` runs every row of the tables, with the packages that lie in DIR; without it, the fast ones.
`--write-models` writes docs/models.md from them when all have passed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the tests are not a package; their tables are imported by name

_alive = []


def pytest_addoption(parser):
    parser.addoption("--packages", help="folder with the packages of `make test-models`: runs all models")
    parser.addoption("--write-models", action="store_true", help="write docs/models.md when all models have passed")


def pytest_configure(config):
    folder = config.getoption("--packages", default=None)
    if folder:
        from torchvision_apart import import_torchvision

        sys.path.append(str(Path(folder).resolve()))
        _alive.append(import_torchvision())


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--write-models", default=False) and exitstatus == 0:
        import models_page

        models_page.PAGE.write_text(models_page.rendered())
