"""A model's card, from the records of its conversion, training and evaluation and nothing else.

`templates/card.md` has the card's text; this module reads the records for it, and `metadata` makes what the Hub reads.
"""

import contextlib
import json
import shlex
from pathlib import Path
from typing import Any

from jinja2 import Template

from moh_llm import claims
from moh_llm.errors import UserError
from moh_llm.evaluation import runs, tables
from moh_llm.evaluation.rendering import Safe, Table, address, markdown_templates, plain, visible
from moh_llm.files import write_text
from moh_llm.hub.checks import CARD
from moh_llm.hub.lineage import Licence, Lineage, check_terms, find_licence, read_lineage
from moh_llm.hub.metadata import image_results, make_metadata, text_results
from moh_llm.intervals import show_documents, show_figure, show_number
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import REFERENCES, Conversion, RunEntry, last_component
from moh_llm.records.evaluation import FEWEST_ITEMS, EvaluationRecord, read_evaluation
from moh_llm.records.identity import identify
from moh_llm.records.model import is_image_model, read_moh_config
from moh_llm.records.run import Scores
from moh_llm.records.seal import add_to_seal

_Facts = tuple[dict[str, Any], dict[str, Any]]  # values of a card's template, and what its metadata say


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
    found: Licence | None = None
    if repo_id is not None:
        found = find_licence(lineage, licence)
        check_terms(found, repo_id, folder)
    else:
        with contextlib.suppress(UserError):
            found = find_licence(lineage)
    name = lineage.name if repo_id is None else repo_id.rpartition("/")[2]
    run, made, versions = lineage.run, lineage.conversion, {}
    if run:
        versions = run.record.versions or {}
    elif made:
        versions = {"moh_llm": made.moh_llm, **(made.versions or {})}
    of_images = is_image_model(fields)
    own, facts = (_describe_images if of_images else _describe_text)(fields, lineage, evaluation)
    body = _template("card_images.md" if of_images else "card.md").render(
        repo_id=repo_id,
        revision=revision,
        name=name,
        lineage=lineage,
        conversion=made,
        run=run,
        licence=found,
        unit="images" if of_images else "tokens",
        unrecorded=_unrecorded(lineage),
        versions=[f"{package} {version}" for package, version in versions.items() if version],
        **own,
    )
    metadata = make_metadata(name, lineage, found, **facts)
    return f"---\n{metadata.to_yaml()}\n---\n\n{body.strip()}\n"


def write_local_card(folder: Path) -> None:
    """Write the README.md of a converted model, or of a run's, that is not published (yet), in place of one there.

    Raises:
        UserError: ``folder`` holds no MoH model, a record cannot be read, or the disk refuses.
    """
    write_text(folder / CARD, build_card(folder, None))
    add_to_seal(folder, CARD)


def read_scores(evaluation: Path, folder: Path) -> tuple[EvaluationRecord, str]:
    """The part of an evaluation that is about the model in ``folder`` and its base, and the model's name in it.

    ``evaluation`` is the folder that `moh-llm evaluate` wrote, or its ``report.json``. The model is recognised by its
    weights and head plan.

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


# ---- values of the template, and what metadata say of a kind of model


def _describe_text(fields: dict[str, Any], lineage: Lineage, evaluation: Path | None) -> _Facts:
    config = MoHLlamaConfig(**{key: value for key, value in fields.items() if key != "model_type"})
    made = lineage.conversion
    report, label = read_scores(evaluation, lineage.folder) if evaluation else (None, "")
    scored = [row for row in report.benchmarks if label in row.scores] if report else []
    routed = any(map(config.routed_heads, range(config.num_hidden_layers)))
    as_made = None if lineage.trained_since else made and _verified(made)
    values = {
        "config": config,
        "scores": lineage.run.record.evaluation if lineage.run else as_made,
        "kept": _kept(config, lineage),
        "routes": config.router_type != "none" and routed,
        "report": report,
        "label": label,
        "no_results": [row for row in scored if row not in report.results(label)],
    }
    results = text_results(report, label) if report else []
    return values, {"eval_results": results, "library_name": "transformers", "pipeline_tag": "text-generation"}


def _describe_images(fields: dict[str, Any], lineage: Lineage, evaluation: Path | None) -> _Facts:
    from moh_llm.conversion.images import describe_figures, describe_plan  # need a newer transformers than text
    from moh_llm.evaluation.images import read_scores as read_image_scores
    from moh_llm.vision import model_class

    report, label = read_image_scores(evaluation, lineage.folder) if evaluation else (None, "")
    results = image_results(report, label) if report else []
    made, architecture = lineage.conversion, model_class(lineage.folder).__name__
    values = {
        "config": fields,
        "architecture": architecture,
        "plan": describe_plan(fields),
        "figures": describe_figures(made.images) if made and made.images else [],
        "has_processor": (lineage.folder / "preprocessor_config.json").is_file(),
        "report": report,
        "label": label,
        "in_index": bool(results),
    }
    if "_class_name" in fields:
        return values, {"eval_results": results, "library_name": "diffusers"}
    task = "image-classification" if "Classification" in architecture else "image-feature-extraction"
    return values, {"eval_results": results, "library_name": "transformers", "pipeline_tag": task}


def _kept(config: MoHLlamaConfig, lineage: Lineage) -> Table:
    """Keys, heads, and figures against the base, of the model as it was converted and as it was tuned."""
    columns, heads = {}, f" ({sum(config.active_heads_per_layer) / config.num_hidden_layers:.4g})"

    def add(name: str, length: int | None, keys: float | None, scores: Scores | None, heads: str) -> dict[str, str]:
        read, planned = (show_number(share, ".1f", 100) for share in (scores and scores.keys_read, keys))
        on = show_number(scores and scores.heads_read, ".4g")
        cells = columns[f"{name}, {show_number(length, ',')} tokens"] = {
            "keys read (planned), % of the base's": "-" if read == planned == "-" else f"{read} ({planned})",
            f"heads on (planned), of {config.num_attention_heads}": f"{on}{heads}",
        }
        if scores:
            ratio = show_figure(scores.ratio, scores.ratio_interval, "#.5g")
            times = "" if scores.ratio is None else f", {ratio} times the base's"
            cells["perplexity"] = f"{scores.perplexity:#.5g}{times}"
            cells["KL to the base"] = show_figure(scores.kl, scores.kl_interval, "#.3g")
            cells["KL with all heads on"] = show_number(scores.all_heads_kl, ".3g")
            cells["same top-1 token, %"] = show_number(scores.top1_agreement, ".2f", 100)
            cells["held-out text"] = f"{scores.tokens:,} tokens, {show_documents(scores.documents)}"
        return cells

    if (made := lineage.conversion) and (plan := made.plan):
        # Training may change the planned heads, and the config has the last ones.
        first = "" if lineage.trained_since else heads
        figures = add("as converted", plan.context, plan.keys_read, _verified(made), first)
        for part in made.verification.retrieval if made.verification else []:
            figures[f"{part.task}, right of {part.asked}"] = f"{part.converted}; the base {part.base}"
    if run := lineage.run:
        length = run.recipe["data"]["sequence_length"]
        add("tuned", length, run.record.keys_asked, run.record.evaluation, heads)
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns.values())] for name in names]
    return Table(["", *columns], [row for row in rows if {*row[1:]} != {"-"}])


def _verified(made: Conversion) -> Scores | None:
    """The scores of a model as it was converted."""
    proof = made.verification
    return proof and Scores(
        tokens=proof.held_out_tokens,
        documents=proof.held_out_documents,
        reference="base",
        reference_perplexity=proof.base_perplexity,
        keys_read=proof.keys_read,
        heads_read=proof.heads_read,
        **proof.converted.model_dump(exclude={"perplexity_ratio"}),
    )


def _unrecorded(lineage: Lineage) -> list[str]:
    """The entries of a lineage before which something was done to the weights that is not on record."""
    gaps, entries = lineage.chain.unrecorded(), lineage.chain.entries
    if lineage.conversion and entries and isinstance(entries[0], RunEntry):
        gaps = [0, *gaps]  # the entry of the conversion is missing
    return [f"entry {gap + 1}" for gap in gaps]


def _template(name: str) -> Template:
    templates = markdown_templates("moh_llm.hub", plain)
    templates.filters |= {
        "form": format,
        "last_component": last_component,
        "figure": lambda found: Safe(show_figure(found["value"], found["interval"], ".4f")),
        "one_line": lambda paragraph: " ".join(paragraph.split()),
        "address": lambda value: Safe(found) if (found := address(value)) else None,
        # Commands and Python are copied as they stand, so nothing in them is escaped.
        "shell": lambda value: Safe(shlex.quote(visible(value))),
        "string_literal": lambda value: Safe(json.dumps(visible(value), ensure_ascii=False)),
    }
    templates.globals |= {"claims": claims, "references": REFERENCES, "tables": tables, "runs": runs}
    templates.globals["fewest_items"] = FEWEST_ITEMS
    return templates.get_template(name)
