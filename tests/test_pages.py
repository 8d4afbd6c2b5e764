"""The commands and programs of README and docs, as they stand there, on a tiny base and without a network."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tiny import save_model
from tiny_images import write_idx

from moh_llm.cli import main

ROOT = Path(__file__).resolve().parents[1]
# In the order of docs/contents.md: a page may use what an earlier one made. Models of images have tests of their own.
PAGES = [f"docs/{name}.md" for name in ("start", "conversion", "data", "training", "scaling", "trainers", "evaluation",
    "publishing", "serving", "efficiency")]  # fmt: skip
NEEDS = re.compile(r"#.*\bneeds? ")  # in the comment of a command that is not run here
README_NEEDS = ("make ", "source ", "pip ", "moh-llm serve ")  # an environment, and a process that does not end


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Language and text of each block of commands or Python; continued lines are joined."""
    for language, text in re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.M):
        yield language, text.replace("\\\n", " ")


def commands(text: str) -> list[list[str]]:
    """The words of the commands that are run here."""
    lines = [line for line in text.splitlines() if line and not NEEDS.search(line)]
    return [shlex.split(line, comments=True) for line in lines if not line.startswith((*README_NEEDS, "export "))]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if words[0] == "python":
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr[-2000:])
        return
    assert words[0] == "moh-llm", words
    status = main(words[1:])
    said = capsys.readouterr()
    assert status == 0, (words, said.err[-2000:])
    assert "nothing to do" not in said.out + said.err, words


LISTS = ("contents", "reference", "api")
READ = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.stem not in LISTS)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1200


@pytest.mark.parametrize("page", READ)
def test_a_page_says_what_one_has_at_its_end_and_is_short(page):
    text = (ROOT / page).read_text()
    assert re.match(r"# .*\n\n(In ten minutes|At the end) ", text) and text.count("\n") <= 150


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_each_command_says_what_runs_it(page):
    for language, block in blocks(page):
        for words in commands(block) if language == "bash" else ():
            assert words[0] == "moh-llm" or (words[0] == "python" and (ROOT / words[1]).is_file()), words


def test_no_page_names_an_index_that_has_the_package():
    for page in ("README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))):
        assert not re.search(r"pip install[^\n`]* ['\"]?moh[-_]llm", (ROOT / page).read_text()), page


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """What the pages read: a base, text, recipes, and the clone's scripts."""
    monkeypatch.chdir(tmp_path)
    for name in ("recipes", "data_mixtures", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Nine heads, as SmolLM2 has: the head counts of the pages are then possible.
    from transformers import LlamaConfig

    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "vectors": False}
    save_model(tmp_path / "BASE", LlamaConfig, **heads, max_position_embeddings=512)
    (tmp_path / "BASE" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n\nA base.\n")
    text = "The river was high that spring, and the boats lay tied to the poplars below the mill. " * 8
    records = "".join(json.dumps({"text": f"{number}. {text}"}) + "\n" for number in range(64))
    for name in ("a.jsonl", "b.jsonl"):
        Path(name).write_text(records)
    Path("c.txt").write_text(text)
    import zstandard

    Path("b.jsonl.zst").write_bytes(zstandard.compress(records.encode()))
    for source in re.findall(r"\$CORPORA/(\w+)/", Path("data_mixtures/paper_local.yaml").read_text()):
        (tmp_path / "corpora" / source).mkdir(parents=True)
        (tmp_path / "corpora" / source / "train.jsonl").write_text(records)
    monkeypatch.setenv("CORPORA", str(tmp_path / "corpora"))
    return tmp_path


def run_pages(pages: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    """Run what the pages have, in order; returns how much that was."""
    ran = 0
    for page in pages:
        for language, text in blocks(page):
            if language == "bash":
                for words in commands(text):
                    run(words, capsys)
                    ran += 1
            elif not NEEDS.search(text) and "ORG/NAME" not in text:
                exec(compile(text, page, "exec"), {"__name__": "__main__"})
                ran += 1
    return ran


@pytest.mark.slow
def test_what_readme_says_runs(folder, capsys, one_thread):
    pytest.importorskip("lm_eval")
    assert run_pages(["README.md"], capsys) == 6
    assert (
        Path("out/half/config.json").is_file()
        and Path("out/report/report.html").is_file()
        and Path("out/heads.html").is_file()
    )


@pytest.mark.slow
def test_what_the_pages_say_runs_one_after_the_other(folder, capsys, one_thread):
    for module in ("lm_eval", "trl", "bitsandbytes"):
        pytest.importorskip(module)
    assert run_pages(PAGES, capsys) > 25


@pytest.mark.slow
def test_what_the_page_of_images_says_runs(folder, capsys, one_thread):
    """On a tiny DINOv2 and a toy of the published plan; Python there has no images, and is not run."""
    from transformers import BitImageProcessorPil, Dinov2Config, Dinov2Model

    base = Path("out/vision/dinov2-small")
    size = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**size, initializer_range=0.3)).save_pretrained(base)
    BitImageProcessorPil(size={"shortest_edge": 28}, crop_size=28).save_pretrained(base)
    (images := Path("out/vision/fashion-mnist")).mkdir()
    for split in ("train", "t10k"):
        for path in write_idx(folder / split, 40).parent.iterdir():
            (images / f"{split}-{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    plan = yaml.safe_load(Path("recipes/architectures/moh_vit_s_75.yaml").read_text())
    toy = {"hidden_size": 24, "intermediate_size": 32, "image_size": 32, "num_labels": 2}
    Path("moh_vit.yaml").write_text(yaml.safe_dump(plan | toy))
    for name in ("train/cat/1", "train/cat/2", "train/dog/1", "train/dog/2", "test/cat/1", "test/dog/1"):
        (path := Path(f"photos/{name}.png")).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 36), "red" if "cat" in name else "blue").save(path)
    words = [line for language, text in blocks("docs/vision.md") if language == "bash" for line in commands(text)]
    for line in words:
        run(line, capsys)
    assert [line[1] for line in words] == ["convert", "convert", "train", "init", "train", "evaluate", "publish"]
    assert json.loads(Path("out/moh_vit/model/config.json").read_text())["id2label"] == {"0": "cat", "1": "dog"}
