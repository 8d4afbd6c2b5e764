"""A model's card, from the records of its conversion, training and evaluation and nothing else."""

import json
import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCardData
from huggingface_hub.errors import StrictDataclassError

from moh_llm.claims import ModelRecords, claims_of
from moh_llm.claims.evaluation import warnings
from moh_llm.errors import UserError
from moh_llm.evaluation.rendering import Safe, address, code, escape, facts, markdown_templates, plain, visible
from moh_llm.evaluation.run_tables import held_out_note, held_out_table, receipt, recipe
from moh_llm.evaluation.runs import Record, TrainingRun
from moh_llm.evaluation.tables import inferred_metrics, long_context_tables, score_note, score_table
from moh_llm.files import write_text
from moh_llm.hub import sections
from moh_llm.hub.checks import CARD, scrub
from moh_llm.hub.evaluated import Evaluated, eval_results, find_evaluated
from moh_llm.hub.licences import LLAMA, Licence, check_name, duties, find_licence, lacks_text, recorded_licences
from moh_llm.hub.lineage import Lineage, is_hub_id, read_lineage
from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.model import read_moh_config
from moh_llm.records.seal import add_to_seal

TAGS = ["mixture-of-head", "moh"]
# Rows of a table of sources, and of one of scores; the records hold all of them.
_SOURCES, _SCORES = 40, 12
_LEAD = ("origin", "heads_asked", "heads_read", "heads_read_in_training", "heads_read_on_prompts")  # claims
_LIMITS = ("faults_of_the_base", "untuned", "other_text_may_differ", "no_benchmark", "longest_text")  # claims


def build_card(
    folder: Path,
    repo_id: str | None,
    run: Path | None = None,
    evaluation: Path | None = None,
    forced: Sequence[str] = (),
    licence: str | None = None,
    revision: str | None = None,
) -> str:
    """The card of a converted, tuned or trained model: metadata for the Hub, then Markdown.

    Paths on this machine are not printed. A card without ``repo_id`` names no repository, and states what is unknown
    about the licence, for which a published card is refused.

    Args:
        folder: the model's.
        repo_id: the repository that it goes to; None: it stays in ``folder``.
        run: the training run that made it; None looks behind ``folder``, at RUN of RUN/model.
        evaluation: the folder that `moh-llm evaluate` wrote, or its ``report.json``.
        forced: what the user published it in spite of, a sentence each.
        licence: id of the licence of a published card, where the files of model and base do not name it.
        revision: the branch that it goes to, if not the main one.

    Raises:
        UserError: ``folder`` holds no MoH model, a record cannot be read or is of another model; of a card
            that is published, the licence is unknown, or it asks for another name or for its own text.
    """
    if repo_id is not None and not is_hub_id(repo_id):
        raise UserError(f"--repo-id {repo_id} is no repository's id; give OWNER/NAME")
    config, lineage = _read_config(folder), read_lineage(folder, run)
    if repo_id is None:
        name, licences = lineage.name, recorded_licences(lineage)
    else:
        name, licences = repo_id.rpartition("/")[2], [find_licence(lineage, licence)]
        check_name(repo_id, licences[0].id)
    evaluated = find_evaluated(evaluation, folder) if evaluation else None
    metadata = _metadata(name, lineage, licences, evaluated)
    claims = claims_of(model_records(config, lineage, evaluated))
    templates = markdown_templates("moh_llm.hub", plain)
    # Commands and Python are copied as they stand, so nothing in them is escaped as Markdown's.
    templates.filters["shell"] = lambda value: Safe(shlex.quote(visible(value)))
    templates.filters["string_literal"] = lambda value: Safe(json.dumps(visible(value), ensure_ascii=False))
    template = templates.get_template("card.md")
    body = template.render(
        repo_id=Safe(repo_id) if repo_id else None,
        revision=Safe(revision) if revision else None,
        name=name,
        forced=forced,
        **_about(config, lineage),
        licence=_licence(licences),
        evaluated=_shown(evaluated) if evaluated else None,
        claims=defaultdict(str, {name: claim.text for name, claim in claims.items()}),
        lead=" ".join(claims[name].text for name in _LEAD if name in claims),
        limits=[claims[name].text for name in _LIMITS if name in claims],
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{body.strip()}\n"


def write_local_card(folder: Path) -> None:
    """Write the README.md of a model that is not published (yet), in place of one that is there.

    Args:
        folder: a converted model's, or RUN/model of a training run.

    Raises:
        UserError: ``folder`` holds no MoH model, a record cannot be read, or the disk refuses.
    """
    write_text(folder / CARD, scrub(build_card(folder, None)))
    add_to_seal(folder, CARD)


def _read_config(folder: Path) -> MoHLlamaConfig:
    fields = read_moh_config(folder)
    try:
        return MoHLlamaConfig(**{key: value for key, value in fields.items() if key != "model_type"})
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise UserError(f"{folder / 'config.json'} makes no model ({' '.join(str(error).split())})") from error


def _metadata(name: str, lineage: Lineage, licences: list[Licence], evaluated: Evaluated | None) -> ModelCardData:
    results = eval_results(evaluated) if evaluated else []
    related = {"base_model_relation": "finetune"} if lineage.base_id else {}
    if len(licences) == 1:
        licence = licences[0]
        related |= {"license": licence.id, "license_name": licence.name, "license_link": address(licence.link)}
    return ModelCardData(
        base_model=lineage.base_id,
        datasets=sections.hub_datasets(lineage.run) or None,
        language=lineage.languages or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=TAGS,
        model_name=name if results else None,
        eval_results=results or None,
        **related,
    )


def _about(config: MoHLlamaConfig, lineage: Lineage) -> Record:
    """Values of the template from the records, without licence, evaluation and claims."""
    conversion, run = lineage.conversion, lineage.run
    versions = {"MoH-LLM": conversion.moh_llm, **(conversion.versions or {})} if conversion else {}
    if run and run.record.versions:
        made_with = run.record.versions
        versions = {"MoH-LLM": made_with.get("moh_llm")} | {k: v for k, v in made_with.items() if k != "moh_llm"}
    files = [code(file.name) for file in sorted(lineage.folder.glob("*.py"))]
    proof = conversion and conversion.verification
    context = conversion and conversion.plan and conversion.plan.context
    return {
        "base": {
            "id": lineage.base_id,
            "label": lineage.base_label,
            "link": _base_link(lineage),
            "commit": lineage.base_commit,
            "fingerprint": conversion and conversion.base.fingerprint,
        },
        "from_scratch": lineage.from_scratch,
        "plan": sections.head_plan(config, conversion),
        "routes": sections.routes(config),
        "proof": proof,
        "proof_table": sections.proof(proof) if proof else None,
        "context": context,
        "long_context": long_context_tables(proof.by_position, proof.retrieval) if proof else [],
        "runs": len(lineage.chain.runs),
        "history": sections.history(lineage),
        "training": None if run is None else _training(run),
        "costs": sections.costs(config, context),
        "local": config.head_fallback == "local",
        "files": Safe(f" ({', '.join(files)})" if files else ""),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def model_records(config: MoHLlamaConfig, lineage: Lineage, evaluated: Evaluated | None = None) -> ModelRecords:
    """The records that a model's claims are made of."""
    run = lineage.run
    return ModelRecords(
        config=config,
        conversion=lineage.conversion,
        chain=lineage.chain,
        run=run and run.record,
        log=run.lines if run else (),
        recipe=run.recipe if run else {},
        evaluation=evaluated and evaluated.record,
        label=evaluated.label if evaluated else "",
        changed=lineage.changed,
    )


def _base_link(lineage: Lineage) -> Safe | None:
    if lineage.base_id:
        return Safe(f"[{escape(lineage.base_id)}](https://huggingface.co/{lineage.base_id})")
    return code(lineage.base_label) if lineage.base_label else None


def _licence(licences: list[Licence]) -> Record:
    """Values of the template about the licence: one, none, or several that contradict each other."""
    if len(licences) != 1:
        named = [f"{licence.id} in {licence.source}" for licence in licences]
        return {"label": None, "contradicting": named, "shown": None, "duties": []}
    licence = licences[0]
    return {
        "label": _licence_label(licence),
        "source": licence.source,
        "shown": LLAMA[licence.id].shown if licence.id in LLAMA else None,
        "lacks_text": lacks_text(licence),
        "duties": [Safe(duty) for duty in duties(licence)],
    }


def _licence_label(licence: Licence) -> Safe:
    """The licence, linked to its text where the address is known."""
    label = code(licence.name or licence.id)
    link = LLAMA[licence.id].text if licence.id in LLAMA else address(licence.link)
    return Safe(f"[{label}]({link})") if link else label


def _training(run: TrainingRun) -> Record:
    return {
        "recipe": facts(recipe(run)),
        "receipt": receipt(run, most=_SOURCES),
        "held_out": held_out_table(run, most=_SCORES),
        "held_out_note": held_out_note(run),
    }


def _shown(evaluated: Evaluated) -> Record:
    """Values of the template about an evaluation."""
    record, label, base = evaluated.record, evaluated.label, evaluated.base
    names = {label: "this model"} | ({base: "base"} if base else {})
    return {
        "warnings": [claim.text for claim in warnings(record)],
        "scores": score_table(record, names),
        "note": score_note(record),
        "inferred": inferred_metrics(record),
        "seconds": sections.measured_costs(record.analysis.get(label, {})),
    }
