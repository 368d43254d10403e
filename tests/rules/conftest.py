"""`--write-table` writes docs/layers.md from the tests that passed."""

import layers_table


def pytest_addoption(parser):
    parser.addoption("--write-table", action="store_true", help="write docs/layers.md from the tests that passed")


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--write-table", default=False) and exitstatus == 0:
        layers_table.write()
