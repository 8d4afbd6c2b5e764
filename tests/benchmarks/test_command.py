"""What a folder of results keeps of its settings."""

import sys
from pathlib import Path

import pytest

from moh_llm.errors import UserError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from command import keep_settings, mixture_settings


def test_a_folder_goes_on_with_its_own_settings_only(tmp_path):
    folder = tmp_path / "out" / "deep"
    keep_settings(folder, {"base": "a", "share": 0.5})
    keep_settings(folder, {"base": "a", "share": 0.5})
    with pytest.raises(UserError, match=r"holds results of another base, share \("):
        keep_settings(folder, {"base": "b", "share": 0.25})
    (folder / "settings.json").rename(folder / "model")
    with pytest.raises(UserError, match="is not empty, and nothing says what its results are of"):
        keep_settings(folder, {"base": "a", "share": 0.5})


def test_a_mixture_is_its_name_and_what_is_in_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("one")
    before = mixture_settings(str(path))
    path.write_text("two")
    after = mixture_settings(str(path))
    assert before != after and before["mixture"] == after["mixture"] == str(path)
    assert mixture_settings("embedded") == {"mixture": "embedded"}
