"""The Python API: `moh_llm.convert`, `to_dense`, `train`, `evaluate` and `publish`.

    import moh_llm

    conversion = moh_llm.convert("HuggingFaceTB/SmolLM2-135M", "out/moh", num_active_heads=7)
    print(conversion.verification.converted.perplexity_ratio)
    moh_llm.train("recipes/smollm2_recovery.yaml", model="out/moh", output_dir="out/recovery")
    moh_llm.evaluate("out/recovery/model", base="HuggingFaceTB/SmolLM2-135M", suite="smoke", output_dir="out/report")
    moh_llm.publish("out/recovery/model", "ORG/NAME", evaluation="out/report", dry_run=True)

The keyword arguments are the fields of `ConversionConfig`, `TrainConfig`, `EvaluationConfig` and `PublishConfig`, which
docs/reference.md lists. Bad input raises `moh_llm.errors.UserError`, a message of one line. Imports happen in the
functions, so that `import moh_llm` is fast.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moh_llm.hub.publish import Publication
    from moh_llm.records.conversion import Conversion
    from moh_llm.records.run import RunRecord
    from moh_llm.training.config import TrainConfig

PathLike = str | os.PathLike[str]


def convert(base: PathLike, output_dir: PathLike, **options: Any) -> "Conversion":
    """Convert a pretrained LLaMA checkpoint, ViT, DeiT, DINOv2 or DiT into an MoH one, and verify it.

    Args:
        base: folder, Hub id or Hub id@revision of a checkpoint in safetensors, dense or MoH.
        output_dir: folder to make.
        options: other fields of `moh_llm.conversion.config.ConversionConfig`, such as ``keys=0.75``.

    Returns:
        The content of ``output_dir/conversion.json``.

    Raises:
        UserError: bad input; ``output_dir`` is then as before.
    """
    from moh_llm.conversion.base import holds_image_model
    from moh_llm.conversion.config import ConversionConfig
    from moh_llm.conversion.convert import convert as convert_checkpoint
    from moh_llm.hub.card import write_local_card
    from moh_llm.locking import lock_folder
    from moh_llm.recipe import keyword_options

    config = keyword_options(ConversionConfig, "convert", base=base, output_dir=output_dir, **options)
    if holds_image_model(config.base):
        from moh_llm.conversion.images import convert_images as convert_checkpoint
    record = convert_checkpoint(config)
    with lock_folder(config.output_dir):
        write_local_card(config.output_dir)
    return record


def to_dense(model: PathLike, output_dir: PathLike, *, overwrite: bool = False) -> None:
    """Write the dense checkpoint inside an MoH model, byte for byte, without routers and fallbacks.

    Args:
        model: folder, Hub id or Hub id@revision of the MoH model.
        output_dir: folder to make.
        overwrite: replace ``output_dir`` if it is not empty.

    Raises:
        UserError: ``model`` is no MoH model, weighs heads by their scores, or cannot be read.
    """
    from moh_llm.conversion.base import holds_image_model, open_base
    from moh_llm.conversion.convert import restore_dense
    from moh_llm.reading import expand_home

    if holds_image_model(name := expand_home(model)):
        from moh_llm.conversion.images import open_image_base as open_base
    restore_dense(open_base(name), Path(expand_home(output_dir)), overwrite)


def train(recipe: "PathLike | TrainConfig", *, overwrite: bool = False, **options: Any) -> "RunRecord":
    """Tune a converted model as a recipe says, or resume the run that ``output_dir`` holds.

    With a ``hub`` group in the recipe, the tuned model is published at the end.

    Args:
        recipe: a YAML file, or a `TrainConfig`.
        overwrite: start anew where ``output_dir`` holds a run.
        options: fields of `moh_llm.training.config.TrainConfig` that replace those of the recipe, such as
            ``max_steps=20`` or ``**{"optimizer.learning_rate": 1e-4}``.

    Returns:
        The content of ``output_dir/run.json``.

    Raises:
        UserError: bad input, or the run or its publication failed.
    """
    from moh_llm.recipe import read_options, recipe_values
    from moh_llm.training.config import TrainConfig

    is_made = isinstance(recipe, TrainConfig)
    values = [("recipe", *item) for item in asdict(recipe).items()] if is_made else recipe_values(recipe)
    config = read_options(TrainConfig, [*values, *(("train", *item) for item in options.items())])
    from moh_llm.hub.publish import check_hub, finish_run  # after the checks: importing torch takes seconds
    from moh_llm.training.loop import train as train_model

    kind = None
    if config.images is not None:
        from moh_llm.training.images import ImageTraining as kind
    if os.environ.get("RANK", "0") == "0":  # the first process publishes
        check_hub(config)
    return train_model(config, overwrite, on_finish=lambda _: finish_run(config), kind=kind)


def evaluate(models: PathLike | Sequence[PathLike], *, command_line: str = "", **options: Any) -> Any:
    """Score models and their base on a suite of benchmarks with lm-eval, and write a report.

    Finished benchmarks are kept until the report is written, so that the same call resumes an interrupted evaluation.
    Under `accelerate launch` or torchrun every process calls this.

    Args:
        models: folder or Hub id of a model, or several.
        command_line: the command that repeats the evaluation, for the record.
        options: other fields of `moh_llm.evaluation.config.EvaluationConfig`, such as ``base`` and ``suite``.

    Returns:
        The record, and what failed: a benchmark that fails does not raise. Of models of images the content of
        ``output_dir/report.json``.

    Raises:
        UserError: a model, the suite, the data or the output folder cannot be used.
    """
    from moh_llm.evaluation.config import EvaluationConfig
    from moh_llm.evaluation.suite import load_suite
    from moh_llm.recipe import keyword_options
    from moh_llm.records.model import CONFIG, read_config

    config = keyword_options(EvaluationConfig, "evaluate", models=models, **options)
    suite = load_suite(config.suite)
    for folder in map(Path, (*config.models, config.base or config.models[0])):
        if (folder / CONFIG).is_file() and (context := read_config(folder).get("max_position_embeddings")):
            suite.within(context)
    from moh_llm.conversion.base import holds_image_model  # after the checks: importing torch takes seconds
    from moh_llm.evaluation.evaluate import evaluate as evaluate_models

    if holds_image_model(config.models[0]):
        from moh_llm.evaluation.images import evaluate as evaluate_images

        return evaluate_images(config, command_line)
    # lm-eval draws a bar for each task's prompts, 57 of them for MMLU; the bars over requests stay.
    os.environ.setdefault("TQDM_DISABLE", "1")
    return evaluate_models(config, command_line=command_line)


def publish(folder: PathLike, repo_id: str, **options: Any) -> "Publication":
    """Check a model, verify that it loads without this package, and upload it with its card.

    Args:
        folder: model that `convert` or `train` made.
        repo_id: ``ORG/NAME`` on the Hub; made if absent.
        options: other fields of `moh_llm.hub.config.PublishConfig`, such as ``dry_run=True``.

    Returns:
        What was uploaded, or would be, and what the checks found, which is also printed.

    Raises:
        UserError: bad input, a check failed, or the Hub refused.
    """
    from moh_llm.hub.config import PublishConfig
    from moh_llm.hub.publish import publish as publish_folder
    from moh_llm.recipe import keyword_options

    return publish_folder(keyword_options(PublishConfig, "publish", folder=folder, repo_id=repo_id, **options))
