"""A model's card, from the records of its conversion, training and evaluation and nothing else.

`templates/card.md` has the card's text; this module reads the records for it, and makes the metadata for the Hub.
"""

import contextlib
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment

from moh_llm import claims
from moh_llm.errors import UserError
from moh_llm.evaluation import runs, tables
from moh_llm.evaluation.rendering import Safe, address, facts, markdown_templates, plain, visible
from moh_llm.evaluation.runs import TrainingRun
from moh_llm.files import write_text
from moh_llm.hub.checks import CARD
from moh_llm.hub.lineage import Licence, Lineage, check_terms, find_licence, is_hub_id, read_lineage
from moh_llm.intervals import show_documents, show_figure, show_interval
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import REFERENCES, RunEntry
from moh_llm.records.evaluation import EvaluationRecord, Row, read_evaluation
from moh_llm.records.identity import identify
from moh_llm.records.model import read_moh_config
from moh_llm.records.seal import add_to_seal
from moh_llm.records.tokens import read_tokens

FEWEST_ITEMS = 100  # a score on fewer items is no result


def build_card(
    folder: Path,
    repo_id: str | None,
    evaluation: Path | None = None,
    licence: str | None = None,
    revision: str | None = None,
) -> str:
    """The card of a converted, tuned or trained model: metadata for the Hub, then Markdown.

    No path on this machine is printed. A card without ``repo_id`` may lack the licence; a published one is refused.

    Args:
        folder: the model's folder.
        repo_id: the repository that it goes to; None: it stays in ``folder``.
        evaluation: the folder that `moh-llm evaluate` wrote, or its ``report.json``.
        licence: id of the licence, where the files of model and base do not name it.
        revision: the branch that it goes to, if not the main one.

    Raises:
        UserError: ``folder`` holds no MoH model, or a record cannot be read or describes another model. Of a published
            card: the licence is unknown, or asks for another name or for its own text.
    """
    fields, lineage = read_moh_config(folder), read_lineage(folder)
    config = MoHLlamaConfig(**{key: value for key, value in fields.items() if key != "model_type"})
    found: Licence | None = None
    if repo_id is not None:
        found = find_licence(lineage, licence)
        check_terms(found, repo_id, folder)
    else:
        with contextlib.suppress(UserError):
            found = find_licence(lineage)
    name = lineage.name if repo_id is None else repo_id.rpartition("/")[2]
    report, label = read_scores(evaluation, folder) if evaluation else (None, "")
    scored = [row for row in report.benchmarks if label in row.scores] if report else []
    body = (
        _templates()
        .get_template("card.md")
        .render(
            repo_id=repo_id,
            revision=revision,
            name=name,
            config=config,
            lineage=lineage,
            conversion=lineage.conversion,
            run=lineage.run,
            routes=config.router_type != "none" and any(map(config.routed_heads, range(config.num_hidden_layers))),
            never_on=_heads_never_on(config),
            licence=found,
            report=report,
            label=label,
            no_results=[row for row in scored if not _is_result(row, report)],
            fewest_items=FEWEST_ITEMS,
            compared_length=_longest_compared(lineage),
            versions=_versions(lineage),
        )
    )
    metadata = _metadata(name, lineage, found, report, label)
    return f"---\n{metadata.to_yaml()}\n---\n\n{body.strip()}\n"


def write_local_card(folder: Path) -> None:
    """Write the README.md of a model that is not published (yet), in place of one that is there.

    Args:
        folder: a converted model's, or RUN/model of a training run.

    Raises:
        UserError: ``folder`` holds no MoH model, a record cannot be read, or the disk refuses.
    """
    write_text(folder / CARD, build_card(folder, None))
    add_to_seal(folder, CARD)


def read_scores(evaluation: Path, folder: Path) -> tuple[EvaluationRecord, str]:
    """The part of an evaluation that is about the model in ``folder`` and its base, and the model's name in it.

    Args:
        evaluation: the folder that `moh-llm evaluate` wrote, or its ``report.json``.
        folder: the model's folder, which is recognised by its weights and head plan.

    Raises:
        UserError: it is not an evaluation, or no model in it is this folder's.
    """
    record = read_evaluation(evaluation.parent if evaluation.name == "report.json" else evaluation)
    own = identify(str(folder))
    alike = [name for name, about in record.models.items() if about.weights_sha256 == own.weights]
    label = next((name for name in alike if record.models[name].plan_sha256 == own.plan), None)
    if label is None:
        other = f"the weights in {folder} with another head plan" if alike else f"other weights than those in {folder}"
        scored = ", ".join(about.model for about in record.models.values())
        raise UserError(f"{evaluation} scored {other} ({scored}); evaluate {folder}")
    kept = [label, "base"] if record.models[label].compared else [label]
    record.models = {name: about for name, about in record.models.items() if name in kept}
    for row in record.benchmarks:
        row.scores = {name: figures for name, figures in row.scores.items() if name in kept}
    record.errors = [error for error in record.errors if error.model in kept]
    record.analysis = {name: found for name, found in record.analysis.items() if name == label}
    return record, label


# ---- metadata


def _metadata(
    name: str, lineage: Lineage, licence: Licence | None, report: EvaluationRecord | None, label: str
) -> ModelCardData:
    results = _eval_results(report, label) if report else []
    related = {"base_model_relation": "finetune"} if lineage.base_id else {}
    if licence:
        related["license"] = licence.id
    if licence and licence.id == "other":  # the Hub wants a name and a link
        related["license_name"] = licence.name or "see-license-link"
        related["license_link"] = address(licence.link) or (licence.file.name if licence.file else None)
    return ModelCardData(
        base_model=lineage.base_id,
        datasets=_hub_datasets(lineage.run) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mixture-of-head", "moh"],
        model_name=name if results else None,
        eval_results=results or None,
        **related,
    )


def _eval_results(report: EvaluationRecord, label: str) -> list[EvalResult]:
    """The scores as the Hub's `model-index` holds them, in percent as in ``report.json``, unrounded."""
    results = [
        EvalResult(
            task_type="text-generation",
            task_name="Text Generation",
            dataset_type=_plain_name(row.dataset),
            dataset_name=_plain_name(row.name),
            dataset_config=None if row.dataset_config is None else _plain_name(row.dataset_config),
            dataset_split=_plain_name(row.eval_split),
            dataset_revision=row.revision,
            # "exact_match (strict-match)": the metric and the filter before it.
            metric_type=_plain_name(row.metric).split(" (")[0],
            metric_name=_plain_name(f"{row.metric}, {row.shots}-shot"),
            metric_value=row.scores[label].value,
            verified=False,
        )
        for row in report.benchmarks
        if label in row.scores and _is_result(row, report)
    ]
    of_dataset = Counter(result.unique_identifier for result in results)
    for result in results:
        # The Hub files several benchmarks of one dataset under the name of the first.
        if of_dataset[result.unique_identifier] > 1:
            result.metric_name = f"{result.dataset_name}: {result.metric_name}"
    return results


def _is_result(row: Row, report: EvaluationRecord) -> bool:
    """Whether the scores of a benchmark cover all of its items, and enough of them."""
    return report.limit is None and row.name not in report.partial_data and row.items_in_full >= FEWEST_ITEMS


def _plain_name(value: str) -> str:
    """A name without markup, since the Hub's pages may show it unescaped."""
    return " ".join(re.sub(r"[^\w .,:;()+/@=%-]", " ", plain(value)).split())[:100] or "-"


def _hub_datasets(run: TrainingRun | None) -> list[str]:
    """Ids of the Hub datasets that training read, if the record of its tokens is on this machine."""
    if run is None or not run.record.tokens_in:
        return []
    try:
        sources = read_tokens(Path(run.record.tokens_in)).sources
    except UserError:
        return []
    read = [name for name, entry in (run.record.data_read or {}).items() if entry["tokens"] and name in sources]
    files = [part.file for name in read for part in sources[name].text]
    found = [re.match(r"hf://datasets/([^/@]+/[^/@]+)", file) for file in files]
    return list(dict.fromkeys(match[1] for match in found if match and is_hub_id(match[1])))


# ---- values of the template


def _versions(lineage: Lineage) -> list[str]:
    """Packages and versions that the last run, or else the conversion, was made with."""
    found: dict[str, str | None] = {}
    if lineage.run and lineage.run.record.versions:
        found = dict(lineage.run.record.versions)
    elif lineage.conversion:
        found = {"moh_llm": lineage.conversion.moh_llm, **(lineage.conversion.versions or {})}
    return [f"{name.replace('moh_llm', 'MoH-LLM')} {version}" for name, version in found.items() if version]


def _heads_never_on(config: MoHLlamaConfig) -> list[int]:
    """Number of heads per layer that are off for all tokens after the first ones."""
    if config.router_type == "none":
        return [config.num_attention_heads - len(shared) for shared in config.shared_heads_per_layer]
    return [len(heads) for heads in config.never_on_heads_per_layer]


def _longest_compared(lineage: Lineage) -> int | None:
    """Length in tokens of the longest sequences that the model was compared with its reference on."""
    conversion, run, lengths = lineage.conversion, lineage.run, []
    if conversion and conversion.verification and conversion.plan and conversion.plan.context:
        lengths.append(conversion.plan.context)
    if run and run.record.evaluation and run.record.evaluation.kl is not None:
        lengths.append(run.recipe["data"]["sequence_length"])
    return max(lengths, default=None)


def _entry_names(lineage: Lineage) -> list[str]:
    """What to call each entry of a lineage: "conversion", "run 1", "run 2"..."""
    numbers = itertools.count(1)
    return [f"run {next(numbers)}" if isinstance(entry, RunEntry) else "conversion" for entry in lineage.chain.entries]


def _unrecorded(lineage: Lineage) -> list[str]:
    """The entries of a lineage before which something was done to the weights that is not on record."""
    gaps, entries = lineage.chain.unrecorded(), lineage.chain.entries
    if lineage.conversion and entries and isinstance(entries[0], RunEntry):
        gaps = [0, *gaps]  # the entry of the conversion is missing
    return [_entry_names(lineage)[gap] for gap in gaps]


def _by_layer(values: Sequence[int]) -> str:
    """``9 in each layer``, or ``layers 0 to 2: 9; layer 3: 7``."""
    if len(set(values)) == 1:
        return f"{values[0]} in each layer"
    parts, start = [], 0
    for value, group in itertools.groupby(values):
        end = start + len(list(group)) - 1
        parts.append(f"{f'layer {start}' if start == end else f'layers {start} to {end}'}: {value}")
        start = end + 1
    return "; ".join(parts)


def _templates() -> Environment:
    templates = markdown_templates("moh_llm.hub", plain)
    templates.filters |= {
        "form": format,
        "figure": show_figure,
        "interval": show_interval,
        "documents": show_documents,
        "by_layer": _by_layer,
        "one_line": lambda paragraph: " ".join(paragraph.split()),
        "address": lambda value: Safe(found) if (found := address(value)) else None,
        # Commands and Python are copied as they stand, so nothing in them is escaped.
        "shell": lambda value: Safe(shlex.quote(visible(value))),
        "string_literal": lambda value: Safe(json.dumps(visible(value), ensure_ascii=False)),
    }
    templates.globals |= {
        "claims": claims,
        "references": REFERENCES,
        "entry_names": _entry_names,
        "unrecorded": _unrecorded,
        "tables": tables,
        "runs": runs,
        "facts": facts,
    }
    return templates
