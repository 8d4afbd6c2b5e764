"""What `convert`, `train` and `evaluate` leave on a terminal: at most 15 lines of 80 columns, the next command last."""

import math
import random
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from records import make_report

from moh_llm.commands import convert, evaluate, train
from moh_llm.evaluation.evaluate import Evaluation
from moh_llm.flags import OptionParser
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import Conversion
from moh_llm.records.run import LogLine, Routing, RunRecord, Scores, Timing
from moh_llm.training.config import TrainConfig
from moh_llm.training.log import ProgressLine

FIGURES = {"perplexity": 1398.953, "perplexity_ratio": 1.0058, "ratio_interval": [0.97106, 1.03823]}
FIGURES |= {"kl": 0.0106, "kl_interval": [0.0078, 0.0159], "top1_agreement": 0.9132}


def check_lines(said: str, next_command: bool = True) -> None:
    """Count as a terminal of 80 columns shows them; the last command is one that `moh-llm` understands."""
    lines = said.splitlines()
    assert sum(max(1, math.ceil(len(line) / 80)) for line in lines) <= 15, said
    if next_command:
        _, program, command, *words = shlex.split(lines[-1])
        assert lines[-1].startswith("next: ") and program == "moh-llm"
        parser = OptionParser()
        import_module(f"moh_llm.commands.{command}").add_arguments(parser)
        parser.parse_args(words)


def test_convert_with_all_that_it_can_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    active = [8 + layer % 24 for layer in range(32)]
    plan = {"num_shared_heads": 1, "num_active_heads": active, "router_type": "threshold", "head_fallback": "local"}
    MoHLlamaConfig(num_hidden_layers=32, **plan).save_pretrained(tmp_path)
    figures = {"asked": 120, "base": 96, "converted": 48, "nats": -1.25}
    retrieval = [{"task": task} | figures for task in ("copying", "uuid")]
    by_position = [{"start": start, "tokens": 10_000, "kl": 0.0123} for start in (0, 512, 2048)]
    proof = {"dtype": "bfloat16", "all_heads_active": {"equals_base": True, "tokens": 2048}, "base_perplexity": 1396.6}
    proof |= {"held_out_tokens": 1_184_400, "held_out_documents": 1111, "heads_read": 24.024, "keys_read": 0.4832}
    content = {
        "base": {"name": "some-organisation/A-Model-With-A-Long-Name-8B", "revision": "0" * 40, "dense_sha256": "0"},
        "plan": {"preset": None, "context": 8192, "keys_read": 0.4912},
        "vocabulary": {"tokenizer": "a", "new_tokens": 4096},
        "calibration": {"tokens": 24_576, "tokens_of_source": {"a": 12_288, "b": 12_288}},
        "verification": proof | {"converted": FIGURES, "by_position": by_position, "retrieval": retrieval},
        "device": "NVIDIA H200",
        "compute_dtype": "bfloat16",
        "seconds": 1234.5,
    }
    convert.print_conversion(Conversion.parse(content, "record"), tmp_path)
    said = capsys.readouterr().out.replace(str(tmp_path), "out/moh")
    check_lines(said)
    assert "planned: 17.5 of 32 heads on after the first 260 tokens, 8 to 31 by layer" in said
    assert "  reads 49.1% of the base's keys in 8,192 tokens" in said
    assert "  24.02 of 32 heads on, reads 48.3% of the base's keys" in said
    assert "  retrieval, nats over the base's: copying -1.25, uuid -1.25" in said


@pytest.mark.parametrize(
    ("context", "router", "recipe"),
    [(512, "threshold", "routers"), (8192, "threshold", "smollm2_long"), (8192, "query_norm", "smollm2_recovery")],
)
def test_the_next_recipe_fits_the_context(
    context: int, router: str, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fallback = "local" if router == "threshold" else "none"
    MoHLlamaConfig(router_type=router, head_fallback=fallback, num_active_heads=24).save_pretrained(tmp_path)
    content = {"base": {"name": "a", "revision": None, "dense_sha256": "0"}, "plan": {"preset": None}}
    content["plan"] |= {"context": context, "keys_read": 0.5}
    content |= {"device": "cpu", "compute_dtype": "float32", "seconds": 1.0}
    convert.print_conversion(Conversion.parse(content, "record"), tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    assert f" recipes/{recipe}.yaml " in last and last.endswith(f"--data.sequence_length {context}")
    MoHLlamaConfig(router_type=router, head_fallback=fallback, num_active_heads=32).save_pretrained(tmp_path)
    convert.print_conversion(Conversion.parse(content, "record"), tmp_path)
    assert "every head is on" in (last := capsys.readouterr().out.splitlines()[-1]) and "next:" not in last


def test_train_with_many_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal, where steps take lines, too; two lines before and three behind them are not counted here."""
    scores = Scores(tokens=1, documents=9, reference="base", perplexity=1391.4, reference_perplexity=1396.6, kl=0.01)
    scores.kl_interval = [0.0067, 0.014]
    with ProgressLine(0, 1000, 4096, "tokens") as progress:
        for step in range(1001):
            line = LogLine(step=step, validation=scores, routing=Routing(load=[[0.5]], dead_heads=[0]))
            progress.step(line)
            if step:
                progress.step(LogLine(step=step, loss=0.01, timing=Timing(seconds=1.0, tokens_per_second=9.0)))
    said = capsys.readouterr().out
    check_lines(said, next_command=False)
    assert said.count("KL 0.0100 (0.0067 to 0.0140)") == 6 and "step 1000/1000, 4,096,000 tokens" in said
    config = TrainConfig(model="out/moh", max_steps=20, output_dir=str(tmp_path / "run"))
    (tmp_path / "run" / "model").mkdir(parents=True)
    train.print_next(config, RunRecord(status="finished", config={}, model={"sha256": "0"}, seconds=9.0))
    said = capsys.readouterr().out
    check_lines(said)
    assert said.startswith(f"trained on {config.max_steps * config.tokens_per_step:,} tokens in 9 s\n")


def test_a_base_that_has_moved_is_named_by_its_new_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    content = {"base": {"name": "old/place", "revision": None, "dense_sha256": "0"}}
    Conversion.parse(content, "record").write(tmp_path / "model" / "conversion.json")
    for base, place in ((None, "old/place"), ("new/place", "new/place")):
        config = TrainConfig(model="out/moh", max_steps=20, output_dir=str(tmp_path), base=base)
        train.print_next(config, RunRecord(status="finished", config={}, model={"sha256": "0"}))
        assert f" --base {place} " in capsys.readouterr().out.splitlines()[-1]


def test_evaluate_with_as_many_benchmarks_as_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    scores = {
        label: {f"Benchmark{n}": [float(draw.random() < 0.5) for _ in range(100)] for n in range(14)}
        for label in ("base", "model")
    }
    report = make_report(scores)
    report.models["model"].heads = {"num_attention_heads": 8}
    evaluate.print_evaluation(Evaluation(report, Path("out/report"), None))
    said = capsys.readouterr().out
    check_lines(said)
    assert "base: Benchmark0 " in said and "model scores " in said and "out/report" in said.splitlines()[-1]
