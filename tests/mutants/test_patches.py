"""`make mutants` tries what is written here: each patch applies, to code that Python reads, and names tests."""

import ast
import importlib.util
from pathlib import Path

import jinja2
import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("patches", Path(__file__).parent / "patches.py")
patches = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(patches)


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.name)
def test_a_patch_still_applies(patch):
    text = (ROOT / patch.file).read_text()
    assert text.count(patch.old) == 1
    changed = text.replace(patch.old, patch.new)
    if patch.file.endswith(".py"):
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    else:  # the card's template
        jinja2.Environment().parse(changed)
    assert patch.tests and all((ROOT / test.partition("::")[0]).is_file() for test in patch.tests)
