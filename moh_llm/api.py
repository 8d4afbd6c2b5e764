"""The Python API: `moh_llm.convert`, `to_dense`, `train`, `evaluate` and `publish`.

    import moh_llm

    conversion = moh_llm.convert("HuggingFaceTB/SmolLM2-135M", "out/moh", num_active_heads=7)
    print(conversion.verification.converted.perplexity_ratio)
    moh_llm.train("recipes/smollm2_recovery.yaml", model="out/moh", output_dir="out/recovery")
    moh_llm.evaluate("out/recovery/model", base="HuggingFaceTB/SmolLM2-135M", suite="smoke", output="out/report")
    moh_llm.publish("out/recovery/model", "ORG/NAME", evaluation="out/report", dry_run=True)

The commands of `moh-llm` call these functions with the values of their flags. Bad input raises
`moh_llm.errors.UserError`, a message of one line. Imports happen in the functions, so that `import moh_llm` is fast.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from moh_llm.conversion.convert import Restored
    from moh_llm.evaluation.evaluate import Evaluation
    from moh_llm.hub.publish import Publication
    from moh_llm.records.conversion import Conversion
    from moh_llm.records.run import RunRecord
    from moh_llm.training.config import TrainConfig

PathLike = str | os.PathLike[str]
_Options = TypeVar("_Options")


def _options(kind: type[_Options], given: Mapping[str, Any], **others: Any) -> _Options:
    """The dataclass made of the arguments of its fields' names, ``others`` in place of ``given`` ones."""
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: given[name] for name in fields if name in given} | others)


def convert(
    base: PathLike,
    output: PathLike,
    *,
    preset: Literal["paper"] | None = None,
    num_shared_heads: int | None = None,
    num_active_heads: int | None = None,
    keys: float | None = None,
    shared: Literal["first", "importance"] = "first",
    router: Literal["linear", "threshold", "query_norm", "none"] | None = None,
    routing_granularity: Literal["head", "kv_group"] | None = None,
    budgets: Literal["uneven", "even"] | None = None,
    fallback: Literal["value", "local", "none"] | None = None,
    local_window: int | None = None,
    local_sinks: int = 4,
    local_start: int | None = None,
    calibration: PathLike | Sequence[PathLike] | None = None,
    context: int = 8192,
    calibration_tokens: int = 24576,
    heldout_tokens: int | None = None,
    tokenizer: PathLike | None = None,
    dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    overwrite: bool = False,
) -> "Conversion":
    """Convert a pretrained LLaMA checkpoint into an MoH one, and verify it.

    Args:
        base: folder, Hub id or Hub id@revision of a checkpoint in safetensors, dense or MoH.
        output: folder to make.
        preset: "paper" for the paper's layer: half of the heads shared, 3/4 active, heads selected by query norm.
        num_shared_heads: heads of each layer that are always on (default: 1/8 of them, at least 1).
        num_active_heads: mean number of heads per token and layer, shared ones included (default: 3/4 of them).
        keys: the same as a share of the keys that the base's attention reads at ``context`` tokens.
        shared: which heads are shared: the first, or those that cost most to drop.
        router: how a token selects heads; "threshold": as many as score above zero; "none": the same heads are on for
            all tokens (default: "threshold" with local fallbacks, else "linear").
        routing_granularity: what is on or off as one: a head (default), or all heads that share keys and values.
        budgets: active heads per layer: by what each layer loses (default), or equal.
        fallback: what replaces a head that is off (default: "local" from 2,048 tokens of context on, else "value").
        local_window: how many last tokens a head that is off attends to, with fallback "local" (default: 256, and
            below 2,048 tokens of context a sixteenth of it).
        local_sinks: how many first tokens it attends to besides.
        local_start: how many first tokens of a document have all heads on, with fallback "local" (default: an eighth
            of the context, 1,024 at most).
        calibration: text files, or one mixture (.yaml), to fit and verify on (default: what Python itself ships).
        context: tokens in a sequence of the text, at most what the base was made for.
        calibration_tokens: tokens to fit on.
        heldout_tokens: tokens to verify on, the first ones of each document; 0 verifies nothing (default: those of 64
            documents).
        tokenizer: folder or Hub id of a tokenizer that has the base's tokens, with their ids, and new ones (default:
            the base's own).
        dtype: dtype of the written weights (default: the base's own).
        compute_dtype: dtype that the base is run in; "auto": bfloat16 where this device computes it fast, else
            float32.
        overwrite: replace ``output`` if it is not empty.

    Returns:
        The content of ``output/conversion.json``.

    Raises:
        UserError: bad input; ``output`` is then as before.
    """
    given = locals()
    from moh_llm.conversion.config import ConversionConfig
    from moh_llm.conversion.convert import convert as convert_checkpoint
    from moh_llm.hub.card import write_local_card
    from moh_llm.locking import lock_folder

    config = _options(ConversionConfig, given, routing_granularity=routing_granularity or "head")
    record = convert_checkpoint(config)
    with lock_folder(config.output):
        write_local_card(config.output)
    return record


def to_dense(
    model: PathLike,
    output: PathLike,
    *,
    overwrite: bool = False,
) -> "Restored":
    """Write the dense checkpoint inside an MoH model, byte for byte, without routers and fallbacks.

    Args:
        model: folder, Hub id or Hub id@revision of the MoH model.
        output: folder to make.
        overwrite: as for `convert`.

    Returns:
        The model's type, how many tensors were dropped, and the time it took.

    Raises:
        UserError: ``model`` is no MoH model, weighs heads by their scores, or cannot be read.
    """
    from moh_llm.conversion.convert import restore_dense
    from moh_llm.reading import expand_home

    return restore_dense(expand_home(model), Path(expand_home(output)), overwrite)


def train(recipe: "PathLike | TrainConfig", *, overwrite: bool = False, **overrides: Any) -> "RunRecord":
    """Tune a converted model as a recipe says, or resume the run that ``output_dir`` holds.

    With a ``hub`` group in the recipe, milestones are published during training and the tuned model at the end.

    Args:
        recipe: a YAML file, or its content as a `TrainConfig`.
        overwrite: start anew where ``output_dir`` holds a run.
        overrides: keys of the recipe with other values, such as ``max_steps=20`` or
            ``**{"optimizer.learning_rate": 1e-4}``.

    Returns:
        The content of ``output_dir/run.json``.

    Raises:
        UserError: bad input, or the run or its publication failed.
    """
    from moh_llm.hub.pushes import MilestonePushes, check_hub, publish_run, write_run_card
    from moh_llm.reading import expand_home
    from moh_llm.training.loop import train as train_model
    from moh_llm.training.recipe import load_config

    if isinstance(recipe, str | os.PathLike):
        arguments = [word for key, value in overrides.items() for word in (f"--{key}", str(value))]
        config = load_config(expand_home(recipe), arguments)
    else:
        config = recipe
    # The first process publishes.
    if config.hub is None or os.environ.get("RANK", "0") != "0":
        return train_model(config, overwrite, on_finish=lambda _: write_run_card(config))
    check_hub(config)
    with contextlib.closing(MilestonePushes(config.hub)) as pushes:
        return train_model(config, overwrite, on_milestone=pushes.add, on_finish=lambda _: publish_run(config, pushes))


def evaluate(
    models: PathLike | Sequence[PathLike],
    *,
    base: PathLike | None = None,
    suite: PathLike = "paper",
    output: PathLike = "out/report",
    data_dir: PathLike | None = None,
    limit: int | None = None,
    batch_size: int | Literal["auto"] = 8,
    compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto",
    device: str | None = None,
    share_prefixes: bool = False,
    log_samples: bool = False,
    analysis: bool = True,
    overwrite: bool = False,
    command_line: str = "",
) -> "Evaluation":
    """Score models and their base on a suite of benchmarks with lm-eval, and write a report.

    Finished benchmarks are kept until the report is written, so that the same call resumes an interrupted evaluation.
    Under `accelerate launch` or torchrun every process calls this.

    Args:
        models: folder or Hub id of a model, or several.
        base: folder or Hub id of the base, scored in the same run.
        suite: "paper", "paper_stage1", "scratch", "smoke", or a YAML file.
        output: folder of ``report.html``, ``report.md`` and ``report.json``.
        data_dir: local data, ``<dataset, / as __>/<config>/<split>.jsonl`` (default: the Hub).
        limit: items of each task to score (default: all).
        batch_size: sequences in a forward pass, on each process.
        compute_dtype: what all models are computed in; "auto" is bfloat16 where the device computes it fast, else
            float32.
        device: torch device (default: the accelerator if there is one).
        share_prefixes: compute common beginnings of prompts once.
        log_samples: write each item's prompt, responses and score.
        analysis: whether the report says what the heads did on the benchmarks' text.
        overwrite: replace ``output`` if it is not empty.
        command_line: the command that repeats the evaluation, for the record.

    Returns:
        The record, and what failed: a benchmark that fails does not raise.

    Raises:
        UserError: a model, the suite, the data or ``output`` cannot be used.
    """
    given = locals()
    from moh_llm.evaluation.config import EvaluationConfig
    from moh_llm.evaluation.evaluate import evaluate as evaluate_models

    # lm-eval draws a bar for each task's prompts, 57 of them for MMLU; the bars over requests stay.
    os.environ.setdefault("TQDM_DISABLE", "1")
    return evaluate_models(_options(EvaluationConfig, given), command_line=command_line)


def publish(
    folder: PathLike,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    run: PathLike | None = None,
    evaluation: PathLike | None = None,
    licence: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    allow_other_code: bool = False,
    drop_records: bool = False,
) -> "Publication":
    """Check a model, verify that it loads without this package, and upload it with its card.

    Args:
        folder: model that `convert` or `train` made.
        repo_id: ``ORG/NAME`` on the Hub; made if absent.
        private: make the repository private; one that is public already is refused.
        revision: branch to upload to, made if absent (default: main).
        run: folder of the training run, for the card (default: that beside ``folder``).
        evaluation: folder that `evaluate` wrote, for the card.
        licence: the Hub's id of the licence (default: the base's).
        dry_run: do everything but upload; the Hub is not contacted.
        force: publish although a check or the proof fails, and say so in the card; files with secrets are still
            refused, and files that are not part of a model are left out.
        allow_other_code: run and publish Python files that are not this version's own, and say so in the card.
        drop_records: publish a model that is not what the records in its folder describe, without the figures of these
            records, and say so in the card.

    Returns:
        What was uploaded, or would be, and what the checks found, which is also printed.

    Raises:
        UserError: bad input, a check failed, or the Hub refused.
    """
    given = locals()
    from moh_llm.hub.config import PublishConfig
    from moh_llm.hub.publish import publish as publish_folder

    return publish_folder(_options(PublishConfig, given))
