import re
from pathlib import Path

import pytest
from trained import load_config

from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.training.config import LoraConfig, changed_options

RECIPES = sorted(
    path
    for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml")
    if not path.stem.startswith(("convert_", "evaluate_")) and "\nimages:" not in path.read_text()
)


def test_overrides_come_after_the_recipe(recipe: Path) -> None:
    config = load_config(recipe, ["--max-steps", "9", "--optimizer.learning_rate=1e-2", "--data.mixture", "12"])
    assert (config.max_steps, config.optimizer.learning_rate, config.data.mixture) == (9, 1e-2, "12")
    assert config.data.sequence_length == 32  # the rest of the group is the recipe's


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "0o10", 8),
        ("output_dir", "1:30", "1:30"),
        ("lora", "{target_modules: [no]}", LoraConfig(target_modules=("no",))),
        ("seed", "1_000", None),
        ("gradient_checkpointing", "no", None),
    ],
)
def test_values_are_those_of_yaml_1_2(recipe: Path, name: str, text: str, value: object) -> None:
    """On the command line and in a file; None: refused."""
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith(f"{name}:")]
    (recipe.parent / "other.yaml").write_text("\n".join([*lines, f"{name}: {text}\n"]))
    for path, overrides in ((recipe.parent / "other.yaml", []), (recipe, [f"--{name}", text])):
        if value is None:
            with pytest.raises(UserError, match=re.escape(f"{name}={text} must be")):
                load_config(path, overrides)
        else:
            assert getattr(load_config(path, overrides), name) == value


def test_lora_is_switched_on_and_off(recipe: Path) -> None:
    assert load_config(recipe).lora is None
    assert load_config(recipe, ["--lora.rank", "4"]).lora == LoraConfig(rank=4)
    assert load_config(recipe, ["--lora", "{rank: 4}"]).lora == LoraConfig(rank=4)
    assert load_config(recipe, ["--lora", "{}"]).lora == LoraConfig()
    assert load_config(recipe, ["--lora.rank", "4", "--lora=null", "--lora.alpha=2"]).lora == LoraConfig(alpha=2.0)
    content = recipe.read_text()
    for text, wanted in (("lora:\n  # rank: 4\nhub: ~\nbase:\nimages: null\n", LoraConfig()), ("lora: null\n", None)):
        recipe.write_text(content + text)
        config = load_config(recipe)
        assert (config.lora, config.hub, config.base) == (wanted, None, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rate", "3"], "unknown option 'learning_rate'; the nearest one is 'optimizer.learning_rate'"),
        (["--max_steps", "0"], "max_steps=0 must be greater than 0"),
        (["--optimizer.learning_rate", ".nan"], "optimizer.learning_rate=nan must be a finite number"),
        (["--seed", "a\nb"], "seed=a b must be a valid integer"),
        (["--data", "3"], "data=3 must be a group of options"),
        (["--lora.class_path", "os.path"], "unknown option 'lora.class_path'"),
        (["--config", str(RECIPES[0])], "unknown option 'config'"),
        (["--data.batch_size", "3"], "data.batch_size=3 must be a multiple of data.micro_batch_size=2"),
        (["--schedule.warmup_steps", "7"], "schedule.warmup_steps=7 must not exceed max_steps=6"),
        (["--optimizer.learning_rate", "1e-5"], "must not exceed optimizer.learning_rate=1e-05"),
        (["--lora.target_modules", "[]"], "lora.target_modules is empty"),
        (["--objective.kind", "noise"], "objective.kind=noise is for a DiT and its images"),
    ],
)
def test_bad_overrides_name_key_value_and_rule(recipe: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(recipe, arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_changed_options_are_those_that_change_the_curve() -> None:
    old = {"model": "a", "data": {"batch_size": 4}, "lora": None, "evaluation": {"eval_steps": 1}}
    new = {"model": "b", "data": {"batch_size": 8}, "lora": {"rank": 4}, "evaluation": {"eval_steps": 2}}
    assert changed_options(old, new) == ["data.batch_size", "lora"]
    assert changed_options(old, new, finished=True) == ["data.batch_size", "evaluation.eval_steps", "lora"]


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_makes_its_first_step_at_toy_size(path: Path, model_folder, mixture_file, tmp_path) -> None:
    small = {"model": model_folder, "output_dir": tmp_path / "run", "max_steps": 1, "mixed_precision": "no"}
    small |= {"data.mixture": mixture_file, "data.sequence_length": 32}
    small |= {"data.batch_size": 4, "data.micro_batch_size": 2}
    small |= {"schedule.warmup_steps": 0, "evaluation.max_tokens": 128}
    assert main(["train", str(path), *(f"--{name}={value}" for name, value in small.items())]) == 0
    assert (tmp_path / "run" / "model" / "config.json").is_file()
