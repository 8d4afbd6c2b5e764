"""Options are declared once: recipes, flags and keyword arguments read them alike, and as strictly."""

import re
import runpy
from pathlib import Path

import pytest
import yaml

import moh_llm
from moh_llm.cli import main
from moh_llm.commands.recipes import KINDS, full_recipe
from moh_llm.conversion.config import ConversionConfig
from moh_llm.errors import UserError
from moh_llm.flags import OptionParser, options_from
from moh_llm.options import options_of
from moh_llm.recipe import differing, read_options, recipe_values
from moh_llm.training.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]


def parse(*words: str) -> ConversionConfig:
    """The options of a command line of convert."""
    parser = OptionParser()
    parser.add_words("BASE", ConversionConfig, "base")
    parser.add_options(ConversionConfig, hidden=["base", "shared"])
    return options_from(ConversionConfig, parser.parse_args(words), "base")


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_option_is_described(kind) -> None:
    for name, option in options_of(kind).items():
        assert re.match(r"[A-Z`]", option.meaning) and option.meaning.endswith("."), name
        assert len(option.summary) <= 110 and option.type_in_words, name


def test_help_is_short(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if re.match(r"  -", line)]
    assert len(lines) <= 40 and max(map(len, lines)) <= 80 and len(flags) <= 20
    assert len([option for option in options_of(TrainConfig).values() if not option.is_group]) <= 55


def test_flags_override_the_recipe(tmp_path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("base: b\noutput_dir: o\nnum_active_heads: 7\ncalibration: [a.txt, b.txt]\noverwrite: true\n")
    config = parse(str(path), "--num_active_heads", "6", "--output-dir=x")
    assert (config.base, config.output_dir, config.num_active_heads, config.overwrite) == ("b", Path("x"), 6, True)
    assert config.calibration == ("a.txt", "b.txt")
    assert parse("b", "--output-dir", "x", "--calibration", "a", "c", "--keys", "0.5").calibration == ("a", "c")


@pytest.mark.parametrize("word", ["12e4567", "010", "no"])
def test_texts_are_the_words_of_the_recipe(tmp_path, word) -> None:
    """A commit's hash can look like a number."""
    (tmp_path / "r.yaml").write_text(f"base: {word}\noutput_dir: o\ntokenizer: {word}\ncalibration: [{word}, a]\n")
    config = parse(str(tmp_path / "r.yaml"))
    assert (config.base, config.tokenizer, config.calibration) == (word, word, (word, "a"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bases: b\n", "unknown option 'bases'; the nearest one is 'base'"),
        ("num_active_heads: [6, 7]\n", "num_active_heads=[6, 7] must be a valid integer"),
        ("router: top_k\n", "router=top_k must be 'linear', 'threshold'"),
        ("keys: 50\n", "keys=50 must be at most 1 (for 50 % use 0.5)"),
        ("context: .nan\n", "context=nan must be"),
        ("base: {a: 1}\n", "must be a path or Hub id"),
        ('base: "a\\0b"\n', "must be a path in UTF-8 without NUL characters"),
        ("- 3\n", "must hold `option: value` lines"),
        ("", "base is missing: Folder or Hub id"),
        (None, "does not exist"),
    ],
)
def test_a_bad_recipe_ends_in_one_line(tmp_path, capsys, text, message) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text if not text or text[0] == "-" else f"output_dir: o\n{text}")
    assert main(["convert", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and message in told
    assert "bad.yaml" in told or "missing" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-active-head", "6"], "unknown option 'num_active_head'; the nearest one is 'num_active_heads'"),
        (["--shared", "importance"], "shared has no flag"),
        (["--keys"], "expected one argument"),
        (["other"], "'other' follows no --option"),
        (["--context", "many"], "command line: context=many must be a valid integer"),
    ],
)
def test_a_bad_flag_is_named(words, message) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        parse("b", "--output-dir", "o", *words)


def test_keyword_arguments_are_checked_likewise(tmp_path) -> None:
    for call, message in (
        (lambda: moh_llm.convert("b", tmp_path / "o", num_heads=3), "convert: unknown option 'num_heads'; the nearest"),
        (lambda: moh_llm.evaluate("b", output_dir=tmp_path / "o", limit=0), "evaluate: limit=0 must be greater than 0"),
        (lambda: ConversionConfig(base="b", output_dir="o", context="many"), "context=many must be a valid integer"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            call()
    assert not list(tmp_path.iterdir())


def test_the_reference_page_is_current() -> None:
    """`make reference` writes it."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    for kind in KINDS.values():
        assert all(f"| `{name}`" in page for name in options_of(kind))


@pytest.mark.parametrize("command", KINDS)
def test_a_recipe_in_full_is_read_as_the_defaults(command, tmp_path) -> None:
    required = {name: "3" for name, option in options_of(KINDS[command]).items() if option.is_required}
    required = {name: value for name, value in required.items() if "." not in name}
    (tmp_path / "r.yaml").write_text(full_recipe(command))
    given = [("test", *item) for item in required.items()]
    assert read_options(KINDS[command], [*recipe_values(tmp_path / "r.yaml"), *given]) == read_options(
        KINDS[command], given
    )
    assert all(f"{name.rpartition('.')[2]}:" in full_recipe(command) for name in options_of(KINDS[command]))


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_hold_what_differs_and_why(path) -> None:
    command = path.stem.partition("_")[0]
    kind = KINDS.get(command, TrainConfig)
    config = read_options(kind, recipe_values(path))
    assert names_in(yaml.safe_load(path.read_text())) == names_in(differing(config))
    header, _, *blocks = path.read_text().split("\n\n")
    assert header.startswith("# ") and all("# " in block for block in blocks)


def names_in(content: dict, prefix: str = "") -> set[str]:
    """Dotted names of the values in nested maps; of an empty one its own."""
    found = set()
    for name, value in content.items():
        found |= names_in(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return found
