"""What a folder of results keeps of its settings, and the dtype that the commands compute in."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from moh_llm import devices
from moh_llm.errors import UserError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from command import add_compute_dtype, device_and_dtype, keep_settings


def test_a_folder_goes_on_with_its_own_settings_only(tmp_path):
    folder = tmp_path / "out" / "deep"
    keep_settings(folder, {"base": "a", "share": 0.5})
    keep_settings(folder, {"base": "a", "share": 0.5})
    with pytest.raises(UserError, match=r"holds results of another base, share \("):
        keep_settings(folder, {"base": "b", "share": 0.25})
    (folder / "settings.json").rename(folder / "model")
    with pytest.raises(UserError, match="is not empty, and nothing says what its results are of"):
        keep_settings(folder, {"base": "a", "share": 0.5})


def parsed(*words: str, **defaults: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_compute_dtype(parser, **defaults)
    return parser.parse_args(words)


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_the_devices_dtype_and_what_is_asked_for_is_taken(monkeypatch, fast):
    monkeypatch.delenv(devices.COMPUTE_DTYPE)
    monkeypatch.setattr(devices, "computes_bfloat16_fast", lambda device: fast)
    here = torch.bfloat16 if fast else torch.float32
    assert device_and_dtype(parsed()) == (devices.choose_device(), here, str(here).removeprefix("torch."))
    for name in ("bfloat16", "float32"):
        assert device_and_dtype(parsed("--compute-dtype", name))[1:] == (getattr(torch, name), name)
    assert device_and_dtype(parsed(default="float32", why="for accuracy"))[2] == "float32"
