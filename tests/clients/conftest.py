"""The table of docs/clients.md, which `make test-clients` writes from what its tests saw."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- clients: written by make test-clients -->", "<!-- end of clients -->"


@pytest.fixture(scope="session")
def _rows(request: pytest.FixtureRequest) -> Iterator[list[tuple[str, str, str]]]:
    rows: list[tuple[str, str, str]] = []
    yield rows
    if os.environ.get("MOH_WRITE_CLIENTS") and not request.session.testsfailed:
        lines = ["| client | what ran | result |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
        table = "\n".join([BEGIN, *lines, END])
        PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, PAGE.read_text(), flags=re.DOTALL))


@pytest.fixture
def record(_rows: list[tuple[str, str, str]]) -> Callable[[str, str, str], None]:
    """`record(client, what, result)`: a row of the table, given at the end of a test."""
    return lambda client, what, result: _rows.append((client, what, result))
