"""CONTRIBUTING.md and ARCHITECTURE.md name tests and modules that exist, and pages link to pages that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_every_promise_has_its_test():
    named = re.findall(r"^\|.*\| `(tests/[^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert len(named) > 20 and len(set(named)) == len(named)
    for name in named:
        file, _, test = name.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name


def test_the_architecture_names_modules_that_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    folder, named = "", 0
    for row in text.splitlines():
        for name in re.findall(r"`([a-z_/0-9]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder  # `data/stream.py`, `shards.py` are of one folder
            path = name if "/" in name else f"{folder}/{name}"
            assert any((root / path).is_file() for root in (ROOT / "moh_llm", ROOT)), name
            named += 1
    assert named > 25


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if not re.match(r"https?://", target):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"
