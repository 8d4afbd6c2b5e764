"""`moh-llm report` of training runs: figures, groups of seeds, and refusals, on folders written by hand."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import read, report

from moh_llm.evaluation.runs import group_runs, read_runs

MakeRun = Callable[..., Path]
LogLines = Callable[[int, int, float], list[dict[str, Any]]]


def markdown(folder: Path) -> str:
    return (folder / "report" / "report.md").read_text()


def test_one_run_gets_its_report_in_its_folder(make_run: MakeRun) -> None:
    saved = {"tokens": 512, "perplexity": 22.0, "reference_perplexity": 20.0, "kl": 0.05, "top1_agreement": 0.9}
    saved |= {"documents": 12, "ratio_interval": [1.0812, 1.1234], "kl_interval": [0.041, 0.062]}
    run = make_run("run", scale=0.3, record={"evaluation": saved})
    assert report(run) == 0
    (found,) = read(run / "report")["runs"]
    assert (found["name"], found["status"], found["seed"]) == ("run", "finished", 0)
    assert (found["steps"], found["tokens"]) == (6, 6 * 32)
    assert found["seconds"] == pytest.approx(0.25 * 21) and found["tokens_per_second"] == pytest.approx(103.5)
    assert found["loss"]["first"] == {"step": 1, "loss": pytest.approx(0.3 / 2 + 0.01)}
    assert found["loss"]["last"] == found["loss"]["lowest"] == {"step": 6, "loss": pytest.approx(0.3 / 7 + 0.01)}
    assert [(line["tokens"], line["ratio"]) for line in found["scores"]] == [
        (tokens, pytest.approx(1 + 0.3 / n)) for tokens, n in ((0, 1), (96, 4), (192, 7))
    ]
    assert found["saved_model"] == saved | {"ratio": pytest.approx(1.1)}
    page = markdown(run)
    assert "| 96 | 12 | 21.500 | 20.000 | 1.0750 (1.0650 to 1.0950) | 0.0600 | 99.25 |" in page
    ratio, kl = "1.1000 (1.0812 to 1.1234)", "0.0500 (0.0410 to 0.0620)"
    assert f"| 192 (saved model) | 12 | 22.000 | 20.000 | {ratio} | {kl} | 90.00 |" in page
    html = (run / "report" / "report.html").read_text()
    assert f'<td class="number">{ratio}</td>' in html and f'<td class="number">{kl}</td>' in html


def test_a_running_run_with_half_a_line(make_run: MakeRun, log_lines: LogLines) -> None:
    run = make_run("run", steps=4, tail='{"step": 5, "lo', record={"status": "running"})
    assert report(run) == 0
    page = markdown(run)
    for part in ("| steps | 4 of 6, each 2 sequences of 16 tokens |", "running: not finished", "cut short"):
        assert part in page
    # Its own report is replaced while training goes on.
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log_lines(5, 3, 0.3)))
    assert report(run) == 0
    assert read(run / "report")["runs"][0]["steps"] == 5


def test_dropped_steps_do_not_count(make_run: MakeRun, log_lines: LogLines) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[2] |= {"dropped": "the loss is not finite", "loss": None, "gradient_norm": None}
    lines[6] |= {"dropped": "the loss jumped", "loss": 0.001}
    run = make_run("run", lines=lines)
    assert report(run) == 0
    (found,) = read(run / "report")["runs"]
    assert found["loss"]["last"] == found["loss"]["lowest"] == {"step": 5, "loss": pytest.approx(0.06)}
    assert "| 2 (2: the loss is not finite; 6: the loss jumped) |" in markdown(run)


def test_router_health(make_run: MakeRun, log_lines: LogLines, routing: Callable[..., Any]) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[0]["routing"] = routing([[0.5, 0.5, 1.0], [], [0.0, 1.0]], None)
    # The layer without routed heads has nothing that could change.
    lines[3]["routing"] = routing([[0.0, 1.0, 0.0], [], [0.0, 1.0]], [0.5, 0.0, 0.25])
    run = make_run("run", lines=lines)
    assert report(run) == 0
    page = markdown(run)
    for line in ("| 1 of 5 | 0.700 | - |", "| 3 of 5 | 0.700 | 37.50 |", "| - | - | - |"):
        assert line in page


def test_seeds_of_one_recipe_are_a_group(make_run: MakeRun, tmp_path: Path) -> None:
    scales = {"plain-s0": 0.3, "plain-s1": 0.32, "plain-s2": 0.37}
    runs = [make_run(name, seed=seed, scale=scale) for seed, (name, scale) in enumerate(scales.items())]
    matched = {"objective": {"kind": "distillation", "layer_coefficient": 0.5}, "report_to": [], "max_steps": 8}
    runs.append(make_run("matched", seed=0, scale=0.2, steps=3, recipe=matched))
    assert report(*runs, "--output", tmp_path / "report") == 0
    found = read(tmp_path / "report")
    assert found["groups"] == {"plain": list(scales), "matched": ["matched"]}
    assert found["differences"] == {
        "max_steps": {"plain": 6, "matched": 8},
        "objective.layer_coefficient": {"plain": 0.0, "matched": 0.5},
    }
    assert [row["tokens"] for row in found["comparison"]] == [0, 96, 192]
    middle, end = found["comparison"][1]["groups"], found["comparison"][2]["groups"]
    ratios = [1 + scale / 4 for scale in scales.values()]
    mean, std = sum(ratios) / 3, statistics.stdev(ratios)
    assert middle["plain"]["n"] == 3
    assert middle["plain"]["ratio"] == {"mean": pytest.approx(mean), "std": pytest.approx(std)}
    assert middle["plain"]["kl"]["mean"] == pytest.approx(sum(scales.values()) / 15)
    assert middle["matched"]["ratio"] == {"mean": pytest.approx(1.05), "std": None}
    assert list(end) == ["plain"]  # the other run is not there yet
    page = (tmp_path / "report" / "report.md").read_text()
    assert f"| 96 | plain | 3 | 12 | {mean:.4f} ± {std:#.2g} |" in page


def test_groups_have_names_of_their_own(make_run: MakeRun) -> None:
    names = ("run-seed0", "run-seed1", "run-2", "run-3", "run", "0", "1")
    recipes = ({}, {}, {"max_steps": 7}, {"max_steps": 7}, {"max_steps": 8}, {"max_steps": 9}, {"max_steps": 9})
    folders = [
        make_run(name, seed=i % 2, recipe=recipe) for i, (name, recipe) in enumerate(zip(names, recipes, strict=True))
    ]
    groups = group_runs(read_runs(folders))
    assert [(group.name, len(group.runs)) for group in groups] == [("run", 2), ("run-2", 2), ("run (3)", 1), ("0", 2)]


def test_what_is_no_sample_of_one_recipe_is_another_group(make_run: MakeRun, tmp_path: Path) -> None:
    """The same seed again, another model, another text, or another reference."""
    runs = [
        make_run("first/run", seed=0),
        make_run("again/run", seed=0),
        make_run("second/run", seed=1, record={"model": {"sha256": "cd"}}),
        make_run("third/run", seed=2, record={"data": {"two": {"tokens": 5}}}),
        make_run("fourth/run", seed=3, record={"reference": "start"}),
    ]
    assert report(*runs, "--output", tmp_path / "report") == 0
    found = read(tmp_path / "report")
    assert list(found["groups"]) == ["first/run", "again/run", "second/run", "third/run", "fourth/run"]
    assert list(found["differences"]) == ["model", "data", "reference"]
    model, data, _ = found["differences"].values()
    assert model["first/run"] == model["third/run"] == "out/moh (ab)" and model["second/run"] == "out/moh (cd)"
    assert data["first/run"] == data["second/run"] != data["third/run"]
    page = (tmp_path / "report" / "report.md").read_text()
    assert "not scored on the same held-out text" in page and "KL: to the reference." in page


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", None, "run holds no run.json; name a folder that moh-llm train made"),
        ("run.json", '{"plan": 1}', "run.json lacks status"),
        ("log.jsonl", '{"step": 0}\n{"step": \n{"step": 2}\n', "log.jsonl: line 2 cannot be read as JSON"),
    ],
)
def test_what_is_no_run_is_refused(make_run: MakeRun, capsys, name: str, content: str | None, message: str) -> None:
    run = make_run("run")
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content)
    assert report(run) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (run / "report").exists()


def test_places_that_cannot_be_used_are_refused(make_run: MakeRun, tmp_path: Path, capsys) -> None:
    one, two = make_run("one"), make_run("two")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for arguments, message in (
        ([tmp_path / "none"], "none is not a folder"),
        ([one, two], "name one with --output"),
        ([one, "--output", tmp_path / "full"], "is not empty; pass --overwrite"),
        ([one, two, "--output", one, "--overwrite"], "would replace"),
        ([one, "--output", tmp_path, "--overwrite"], "would replace"),
    ):
        assert report(*arguments) == 2
        assert message in capsys.readouterr().err
    assert (one / "log.jsonl").exists() and (tmp_path / "full" / "mine.txt").exists()
    assert report(one, "--output", tmp_path / "full", "--overwrite") == 0
    assert (tmp_path / "full" / "report.md").exists() and not (tmp_path / "full" / "mine.txt").exists()


def test_matplotlib_is_asked_for_by_name(make_run: MakeRun) -> None:
    run = make_run("run")
    without = "import sys; sys.modules['matplotlib'] = None; from moh_llm.cli import main; sys.exit(main(sys.argv[1:]))"
    found = subprocess.run([sys.executable, "-c", without, "report", str(run)], capture_output=True, text=True)
    assert found.returncode == 2 and 'pip install "moh-llm[report]"' in found.stderr
    assert not (run / "report").exists()
