"""`pytest tests/faults --fault-table` prints what callers got in every fault of Redis, when, and how it healed."""

import pytest

from faults.fault_table import FaultTable

__all__ = ["fault_table"]

_TABLE = FaultTable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-table", action="store_true", help="print the table of faults of Redis")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--fault-table", default=False):
        for line in _TABLE.lines():
            terminalreporter.write_line(line)


@pytest.fixture
def fault_table() -> FaultTable:
    """The table that the tests of this run fill."""
    return _TABLE
