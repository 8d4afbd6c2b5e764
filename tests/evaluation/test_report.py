"""`moh-llm report`: figures and refusals, on runs written by hand and on one that was trained."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import read, report

from moh_llm.cli import main
from moh_llm.evaluation.run_tables import recipe
from moh_llm.evaluation.runs import read_runs
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.run import LogLine

MakeRun = Callable[..., Path]
LogLines = Callable[[int, int, float], list[dict[str, Any]]]


@pytest.mark.usefixtures("unrendered")
def test_one_run_gets_its_report_in_its_folder(make_run: MakeRun) -> None:
    saved = {"tokens": 512, "perplexity": 22.0, "reference_perplexity": 20.0, "kl": 0.05, "top1_agreement": 0.9}
    saved |= {"documents": 12, "ratio_interval": [1.0812, 1.1234], "kl_interval": [0.041, 0.062]}
    run = make_run("run", scale=0.3, record={"evaluation": saved})
    assert report(run) == 0
    (found,) = read(run / "report")["runs"]
    assert {key: found[key] for key in ("name", "status", "model", "mixture", "seed", "device")} == {
        "name": "run",
        "status": "finished",
        "model": "out/moh",
        "mixture": "tiny.yaml",
        "seed": 0,
        "device": "cpu",
    }
    assert (found["steps"], found["max_steps"], found["tokens"]) == (6, 6, 6 * 32)
    assert found["seconds"] == pytest.approx(0.25 * 21)
    assert found["tokens_per_second"] == pytest.approx(103.5)
    assert found["loss"]["first"] == {"step": 1, "loss": pytest.approx(0.3 / 2 + 0.01)}
    assert found["loss"]["last"] == found["loss"]["lowest"] == {"step": 6, "loss": pytest.approx(0.3 / 7 + 0.01)}
    assert [score["tokens"] for score in found["scores"]] == [0, 96, 192]
    assert [score["ratio"] for score in found["scores"]] == pytest.approx([1.3, 1 + 0.3 / 4, 1 + 0.3 / 7])
    assert [score["kl"] for score in found["scores"]] == pytest.approx([0.15, 0.06, 0.3 / 8])
    assert found["saved_model"]["ratio"] == pytest.approx(1.1)
    page = (run / "report" / "report.md").read_text()
    assert "| 96 | 12 | 21.500 | 20.000 | 1.0750 (1.0650 to 1.0950) | 0.0600 | 99.25 |" in page
    ratio, kl = "1.1000 (1.0812 to 1.1234)", "0.0500 (0.0410 to 0.0620)"
    assert f"| 192 (saved model) | 12 | 22.000 | 20.000 | {ratio} | {kl} | 90.00 |" in page
    html = (run / "report" / "report.html").read_text()
    assert f'<td class="number">{ratio}</td>' in html and f'<td class="number">{kl}</td>' in html


@pytest.mark.usefixtures("unrendered")
def test_a_running_run_with_half_a_line(make_run: MakeRun, log_lines: LogLines) -> None:
    run = make_run("run", steps=4, tail='{"step": 5, "lo', record={"status": "running"})
    assert report(run) == 0
    (found,) = read(run / "report")["runs"]
    assert (found["steps"], found["tokens"], found["last_log_line_cut"]) == (4, 128, True)
    page = (run / "report" / "report.md").read_text()
    assert (
        "| steps | 4 of 6, each 2 sequences of 16 tokens |" in page
        and "running: not finished" in page
        and "cut short" in page
    )
    # Its own report is replaced while training goes on.
    with (run / "log.jsonl").open("w") as file:
        file.write("".join(json.dumps(line) + "\n" for line in log_lines(5, 3, 0.3)))
    assert report(run) == 0
    assert read(run / "report")["runs"][0]["steps"] == 5


@pytest.mark.usefixtures("unrendered")
def test_a_run_that_has_only_begun(make_run: MakeRun) -> None:
    run = make_run("run", steps=0)
    assert report(run) == 0
    found = read(run / "report")
    assert found["runs"][0]["loss"] is None and found["runs"][0]["tokens_per_second"] is None


@pytest.mark.usefixtures("unrendered")
def test_dropped_steps_do_not_count(make_run: MakeRun, log_lines: LogLines) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[2] |= {"dropped": "the loss is not finite", "loss": None, "gradient_norm": None}
    lines[6] |= {"dropped": "the loss jumped", "loss": 0.001}
    run = make_run("run", lines=lines)
    assert report(run) == 0
    (found,) = read(run / "report")["runs"]
    assert found["dropped"] == [
        {"step": 2, "tokens": 64, "reason": "the loss is not finite"},
        {"step": 6, "tokens": 192, "reason": "the loss jumped"},
    ]
    assert found["loss"]["last"] == found["loss"]["lowest"] == {"step": 5, "loss": pytest.approx(0.06)}
    assert "| 2 (2: the loss is not finite; 6: the loss jumped) |" in (run / "report" / "report.md").read_text()


@pytest.mark.usefixtures("unrendered")
def test_router_health(make_run: MakeRun, log_lines: LogLines, routing: Callable[..., Any]) -> None:
    lines = log_lines(6, 3, 0.3)
    lines[0]["routing"] = routing([[0.5, 0.5, 1.0], [], [0.0, 1.0]], None)
    lines[3]["routing"] = routing([[0.0, 1.0, 0.0], [], [0.0, 1.0]], [0.5, 0.0, 0.25])
    run = make_run("run", lines=lines)
    assert report(run) == 0
    found = read(run / "report")
    first, middle, last = (score["routing"] for score in found["runs"][0]["scores"])
    health = {"routed_heads": 5, "lowest_entropy": pytest.approx(0.7), "heads_read": None}
    assert first == health | {"dead_heads": 1, "changed": None}
    # The layer without routed heads has nothing that could change.
    assert middle == health | {"dead_heads": 3, "changed": 0.375}
    assert last is None
    assert "| 3 of 5 | 0.700 | 37.50 |" in (run / "report" / "report.md").read_text()


@pytest.mark.usefixtures("unrendered")
def test_a_run_without_a_base_to_compare_with(make_run: MakeRun, log_lines: LogLines) -> None:
    lines = log_lines(6, 3, 0.3)
    for line in lines:
        line.pop("kl", None)
        if "validation" in line:
            line["validation"] = {"tokens": 512, "documents": 12, "perplexity": 30.0 - line["step"]}
    run = make_run("run", lines=lines)
    assert report(run) == 0
    (found,) = read(run / "report")["runs"]
    assert [score["perplexity"] for score in found["scores"]] == [30.0, 27.0, 24.0]
    assert {score["ratio"] for score in found["scores"]} == {None}
    assert (
        "| tokens | documents | perplexity |\n| ---: | ---: | ---: |\n| 0 | 12 | 30.000 |\n| 96 | 12 | 27.000 |"
        in (run / "report" / "report.md").read_text()
    )


@pytest.fixture
def trained(tmp_path: Path, make_model: Callable[..., Path], river: Path) -> Path:
    """A run that training made: 4 steps of a random model of 2 layers, scored every second step."""
    model = make_model(MoHLlamaConfig, vectors=False, num_shared_heads=1, num_active_heads=2, router_type="linear")
    mixture = {"name": "tiny", "sources": {"river": {"weight": 1.0, "files": str(river)}}}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    recipe = {
        "model": str(model),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 4,
        "data": {"mixture": str(tmp_path / "mixture.yaml"), "sequence_length": 32, "batch_size": 2},
        "evaluation": {"eval_steps": 2, "max_tokens": 256},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_a_run_that_was_trained(trained: Path) -> None:
    assert report(trained) == 0
    record = json.loads((trained / "run.json").read_text())
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    (found,) = read(trained / "report")["runs"]
    assert (found["steps"], found["tokens"]) == (record["steps"], record["tokens"]) == (4, 4 * 64)
    assert found["seconds"] == pytest.approx(record["seconds"], abs=0.01)
    losses = [line["loss"] for line in log if "loss" in line]
    assert len(losses) == 4
    assert [found["loss"][which]["loss"] for which in ("first", "last", "lowest")] == [
        losses[0],
        losses[-1],
        min(losses),
    ]
    validations = [line["validation"] for line in log if "validation" in line]
    assert len(validations) == 3
    for score, expected in zip(found["scores"], validations, strict=True):
        assert math.log(score["ratio"]) == pytest.approx(
            math.log(expected["perplexity"]) - math.log(expected["reference_perplexity"])
        )
        assert (score["kl"], score["top1_agreement"]) == (expected["kl"], expected["top1_agreement"])
    healths = [line["routing"] for line in log if "validation" in line]
    for score, health in zip(found["scores"], healths, strict=True):
        assert score["routing"]["dead_heads"] == sum(health["dead_heads"])
        assert score["routing"]["routed_heads"] == 2 * 3  # layers of 4 heads, of which one is shared
        assert score["routing"]["lowest_entropy"] == min(health["entropy"])
    files = sorted(path.name for path in (trained / "report").iterdir())
    assert files == ["report.html", "report.json", "report.md"]
    assert "Charts in `report.html`: Held-out perplexity; " in (trained / "report" / "report.md").read_text()
    assert found["saved_model"]["perplexity"] == record["evaluation"]["perplexity"]


def test_names_are_as_short_as_they_can_be(make_run: MakeRun) -> None:
    folders = [make_run(name) for name in ("one/run", "two/run", "two/more")]
    assert [run.name for run in read_runs(folders)] == ["one/run", "two/run", "two/more"]
    assert [run.name for run in read_runs(folders[1:])] == ["run", "more"]
    (run,) = read_runs(folders[:1])
    assert run.tokens_of(LogLine(step=3)) == 3 * 32  # a line of an older log


def write_bad_line(run: Path) -> None:
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join([lines[0], lines[1][:9] + "\n", *lines[2:]]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: (run / "run.json").unlink(), "run holds no run.json; name a folder that moh-llm train made"),
        (lambda run: (run / "run.json").write_text('{"plan": 1}'), "run.json lacks status"),
        (lambda run: (run / "log.jsonl").unlink(), "log.jsonl does not exist; wait for the run's first step"),
        (lambda run: (run / "log.jsonl").write_text(""), "log.jsonl holds no step yet"),
        (lambda run: (run / "log.jsonl").write_text('{"step": 0'), "log.jsonl holds no step yet"),
        (write_bad_line, "log.jsonl: line 2 cannot be read as JSON"),
    ],
)
def test_what_is_no_run_is_refused(make_run: MakeRun, capsys, damage: Callable[[Path], Any], message: str) -> None:
    run = make_run("run")
    damage(run)
    assert report(run) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (run / "report").exists()


@pytest.mark.usefixtures("unrendered")
def test_places_that_cannot_be_used_are_refused(make_run: MakeRun, tmp_path: Path, capsys) -> None:
    one, two = make_run("one"), make_run("two")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (one / "report").mkdir()
    (one / "report" / "mine.txt").write_text("mine")
    for arguments, message in (
        ([tmp_path / "none"], "none is not a folder; name one that moh-llm train made"),
        ([one / "run.json"], "run.json is not a folder"),
        ([one, two], "2 folders have no common place for the report; name one with --output"),
        ([one, tmp_path / "full" / ".." / "one", "--output", tmp_path / "new"], "one is named twice"),
        ([one, "--output", tmp_path / "full"], "is not empty; pass --overwrite"),
        ([one], "report exists and is not empty; pass --overwrite"),
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


@pytest.mark.parametrize(
    ("trained", "highest", "final"),
    [
        ({"base": 5}, "5e-05", "5e-06"),
        ({"fallbacks": 5}, "0.001 of fallbacks", "0.0001 of fallbacks"),
        ({"adapters": 5, "routers": 5, "fallbacks": 5}, "5e-05, 0.001 of routers and", "5e-06, 0.0001 of routers and"),
    ],
)
def test_rates_are_those_of_the_weights_that_are_trained(make_run: MakeRun, trained, highest: str, final: str) -> None:
    """Of routers and fallbacks also at the end of the schedule, where the log has them in the same ratio."""
    kinds = dict.fromkeys(("base", "adapters", "routers", "fallbacks"), 0) | trained
    parameters = {f"trained_{kind}": count for kind, count in kinds.items()}
    (run,) = read_runs([make_run("run", record={"parameters": parameters})])
    found = dict(recipe(run))
    assert found["highest learning rate"].startswith(highest)
    assert f"then cosine to {final}" in found["schedule"]
