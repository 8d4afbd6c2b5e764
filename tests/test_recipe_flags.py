"""Recipes of `convert` and `evaluate`: the same as their flags, and as strict."""

from pathlib import Path

import pytest
import yaml

from moh_llm.cli import main
from moh_llm.commands import convert, evaluate
from moh_llm.commands.recipe_flags import expand_recipe

ROOT = Path(__file__).parents[1]
SHIPPED = {"convert": (convert, "convert_llama3_8b"), "evaluate": (evaluate, "evaluate_paper")}


def parser_of(module):
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    module.add_arguments(parser)
    return parser


@pytest.mark.parametrize("command", SHIPPED)
def test_shipped_recipes_are_read_and_explain_every_key(command) -> None:
    module, name = SHIPPED[command]
    path = ROOT / "recipes" / f"{name}.yaml"
    parser = parser_of(module)
    args = vars(parser.parse_args(expand_recipe(parser, [str(path)])))
    for key, value in yaml.safe_load(path.read_text()).items():
        # A flag that takes several values makes a list of one; a path is one.
        found = [str(item) for item in (args[key] if isinstance(args[key], list) else [args[key]])]
        assert value is None or found == [str(item) for item in (value if isinstance(value, list) else [value])], key
    lines = path.read_text().splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        assert not line or line.startswith(("#", "  ")) or above.startswith("#"), f"no comment above {line!r}"


def test_flags_override_the_recipe(tmp_path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("base: b\noutput: o\nnum_active_heads: 7\ncalibration: [a.txt, b.txt]\noverwrite: true\n")
    parser = parser_of(convert)
    args = parser.parse_args(expand_recipe(parser, [str(path), "--num_active_heads", "6", "--output=x"]))
    assert (args.base, args.output, args.num_active_heads, args.overwrite) == ("b", Path("x"), 6, True)
    assert args.calibration == ["a.txt", "b.txt"]


@pytest.mark.parametrize("word", ["12e4567", "010", "0o10", "1:30", "no", "2024-01-01", "1_000", "1e-5"])
def test_values_are_the_words_of_the_recipe(tmp_path, word) -> None:
    """A commit's hash can look like a number."""
    (tmp_path / "r.yaml").write_text(f"base: {word}\noutput: o\ntokenizer: {word}\ncalibration: [{word}, a]\n")
    args = (parser := parser_of(convert)).parse_args(expand_recipe(parser, [str(tmp_path / "r.yaml")]))
    assert (args.base, args.tokenizer, args.calibration) == (word, word, [word, "a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bases: b\n", "unknown key 'bases'; the nearest known key is 'base'"),
        ("overwrite: 3\n", "overwrite=3 must be true or false"),
        ("num_active_heads: true\n", "num_active_heads=True must be a value"),
        ("num_active_heads: [6, 7]\n", "num_active_heads takes one value, not 2"),
        ("- 3\n", "must hold `key: value` lines"),
        (None, "does not exist"),
    ],
)
def test_a_bad_recipe_ends_in_one_line(tmp_path, capsys, text, message) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["convert", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and message in told and "bad.yaml" in told


@pytest.mark.parametrize("flag", convert.REMOVED)
def test_an_option_that_was_removed_names_what_does_its_work(tmp_path, capsys, flag) -> None:
    assert main(["convert", "base", "--output", str(tmp_path / "out"), f"{flag}=1"]) == 2
    told = capsys.readouterr().err
    assert told == f"error: {flag} was removed: {convert.REMOVED[flag]}\n"
    key = flag.removeprefix("--").replace("-", "_")
    (tmp_path / "r.yaml").write_text(f"base: b\n{key}: true\n")
    assert main(["convert", str(tmp_path / "r.yaml")]) == 2
    told = capsys.readouterr().err
    assert told == f"error: recipe {tmp_path}/r.yaml: {key} was removed: {convert.REMOVED[flag]}\n"


@pytest.mark.parametrize(
    "words", [["--shared", "importance"], ["--budgets=even"], ["--local_sinks", "2"], ["--budg=even"]]
)
def test_an_option_of_recipes_alone_is_no_flag(tmp_path, capsys, words) -> None:
    assert main(["convert", "base", "--output", str(tmp_path / "out"), *words]) == 2
    (key,) = (key for key in ("shared", "budgets", "local_sinks") if key.startswith(words[0][2:6]))
    flag = f"--{key.replace('_', '-')}"
    told = capsys.readouterr().err
    assert told == f"error: {flag} was removed: write {key} into a recipe, or pass it to the Python API\n"
    (tmp_path / "r.yaml").write_text("base: b\noutput: o\nshared: importance\nbudgets: even\nlocal_sinks: 2\n")
    args = (parser := parser_of(convert)).parse_args(expand_recipe(parser, [str(tmp_path / "r.yaml")]))
    assert (args.shared, args.budgets, args.local_sinks) == ("importance", "even", 2)


def test_a_recipe_converts_like_its_flags(make_llama, river, tmp_path) -> None:
    base = make_llama()
    flags = ["--calibration", str(river), "--calibration-tokens", "512", "--heldout-tokens", "0"]
    flags += ["--num-active-heads", "3"]
    assert main(["convert", str(base), "--output", str(tmp_path / "one"), *flags]) == 0
    recipe = {"base": str(base), "output": str(tmp_path / "two"), "calibration": [str(river)]}
    recipe |= {"calibration_tokens": 512, "heldout_tokens": 0, "num_active_heads": 4}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["convert", str(tmp_path / "r.yaml"), "--num_active_heads", "3"]) == 0
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).glob("*.safetensors")} for name in ("one", "two"))
    assert one == two and one
