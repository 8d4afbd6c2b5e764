"""Runs side by side: which are a group, and how they compare."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from records import read, report

from moh_llm.evaluation.groups import group_runs
from moh_llm.evaluation.runs import read_runs

MakeRun = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("unrendered")


def test_seeds_of_one_recipe_are_a_group(make_run: MakeRun, tmp_path: Path) -> None:
    scales = {"plain-s0": 0.3, "plain-s1": 0.32, "plain-s2": 0.37}
    runs = [make_run(name, seed=seed, scale=scale) for seed, (name, scale) in enumerate(scales.items())]
    matched = {"objective": {"kind": "distillation", "layer_coefficient": 0.5}, "report_to": [], "max_steps": 8}
    runs.append(make_run("matched", seed=0, scale=0.2, steps=3, recipe=matched))
    assert report(*runs, "--output", tmp_path / "report") == 0
    found = read(tmp_path / "report")
    assert found["groups"] == [
        {"name": "plain", "runs": list(scales), "seeds": [0, 1, 2]},
        {"name": "matched", "runs": ["matched"], "seeds": [0]},
    ]
    assert found["differences"] == {
        "max_steps": {"plain": 6, "matched": 8},
        "objective.layer_coefficient": {"plain": 0.0, "matched": 0.5},
    }
    assert [row["tokens"] for row in found["comparison"]] == [0, 96, 192]
    middle, end = found["comparison"][1]["groups"], found["comparison"][2]["groups"]
    ratios = [1 + scale / 4 for scale in scales.values()]
    assert middle["plain"]["n"] == 3
    assert middle["plain"]["ratio"]["mean"] == pytest.approx(sum(ratios) / 3)
    assert middle["plain"]["ratio"]["std"] == pytest.approx(statistics.stdev(ratios))
    assert middle["plain"]["kl"]["mean"] == pytest.approx(sum(scales.values()) / 15)
    assert middle["matched"]["n"] == 1
    assert middle["matched"]["ratio"] == {"mean": pytest.approx(1.05), "std": None}
    assert list(end) == ["plain"]  # the other run is not there yet
    page = (tmp_path / "report" / "report.md").read_text()
    assert "| group | runs | seeds | max_steps | objective.layer_coefficient |" in page
    assert "| 96 | matched | 1 | 12 | 1.0500 (1.0400 to 1.0700) |" in page  # the interval of its documents
    assert f"| 96 | plain | 3 | 12 | {sum(ratios) / 3:.4f} ± {statistics.stdev(ratios):#.2g} |" in page
    assert "same held-out text" not in page


def test_groups_have_names_of_their_own(make_run: MakeRun) -> None:
    names = ("run-seed0", "run-seed1", "run-2", "run-3", "run", "0", "1")
    recipes = ({}, {}, {"max_steps": 7}, {"max_steps": 7}, {"max_steps": 8}, {"max_steps": 9}, {"max_steps": 9})
    folders = [
        make_run(name, seed=i % 2, recipe=recipe) for i, (name, recipe) in enumerate(zip(names, recipes, strict=True))
    ]
    groups = group_runs(read_runs(folders))
    assert [(group.name, len(group.runs)) for group in groups] == [("run", 2), ("run-2", 2), ("run (3)", 1), ("0", 2)]


def test_runs_that_share_their_seed_are_no_sample(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(name, seed=7) for name in ("a", "b")]
    assert report(*runs, "--output", tmp_path / "report") == 0
    found = read(tmp_path / "report")
    assert [group["runs"] for group in found["groups"]] == [["a"], ["b"]]
    assert found["differences"] == {}
    assert {name: row["n"] for name, row in found["comparison"][0]["groups"].items()} == {"a": 1, "b": 1}


def test_other_model_or_text_is_another_group(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [
        make_run("first/run", seed=0),
        make_run("second/run", seed=1, record={"model": {"sha256": "cd"}}),
        make_run("third/run", seed=2, record={"data": {"two": {"tokens": 5}}}),
    ]
    assert report(*runs, "--output", tmp_path / "report") == 0
    found = read(tmp_path / "report")
    assert [group["name"] for group in found["groups"]] == ["first/run", "second/run", "third/run"]
    assert list(found["differences"]) == ["model", "data"]
    model, data = found["differences"].values()
    assert model["first/run"] == model["third/run"] == "out/moh (ab)" != model["second/run"]
    assert data["first/run"] == data["second/run"] != data["third/run"]
    assert "not scored on the same held-out text" in (tmp_path / "report" / "report.md").read_text()
