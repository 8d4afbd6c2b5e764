"""The table of promises in CONTRIBUTING.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_promise_has_its_test():
    named = re.findall(r"^\|.*\| `(tests/[^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(named) > 20 and len(set(named)) == len(named)
    for name in named:
        file, _, test = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
