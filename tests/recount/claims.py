"""What each claim about a model should state: the figures of its fields, from what was computed again.

A claim is known by its name. One that is new needs a checker here: in `OF_A_CARD` if `claims_of` makes it, else in
`ON_THEIR_OWN`.
"""

import inspect
import json
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import moh_llm.claims
from moh_llm.claims import Claim, ModelRecords
from moh_llm.claims import conversion as made
from moh_llm.claims import training as trained
from recount import analysis, conversion, costs, evaluation, hashes, run_record
from recount.evaluation import Evaluation
from recount.leaves import TIME, Near
from recount.models import CONTEXT, SEQUENCE
from recount.prompts import items

Figures = dict[str, Any]


@dataclass
class Facts:
    """A model as converted, or tuned: its records as they should be.

    Attributes:
        found: the recount of its folders.
        tuned: whether it is the tuned model, with its run and its evaluation, or the converted one with neither.
    """

    found: Evaluation
    tuned: bool

    @cached_property
    def records(self) -> dict[str, Any]:
        run = self.found.run
        known: dict[str, Any] = {"conversion": conversion.expected_conversion(run.recount)}
        known["config"] = json.loads((run.recount.model.tuned / "config.json").read_text())
        if self.tuned:
            known |= {"run": run_record.expected_run(run), "log": run.log}
            known["evaluation"] = evaluation.expected_report(self.found)
        return known

    def take(self, *paths: str) -> Figures:
        """The figures of fields, by path."""
        return {path: self.at(path) for path in paths}

    def below(self, path: str, record: str = "") -> Figures:
        """All fields below a path; ``record``: what the path begins at, if not at the model's records."""
        return _leaves(path, self.at(f"{record}{path}"))

    def at(self, path: str) -> Any:
        value: Any = self.records
        for name in path.split("."):
            value = value[name]
        return value

    @property
    def has_calibration(self) -> bool:
        return "calibration" in self.records["conversion"]

    @cached_property
    def dense_kept(self) -> bool:
        model = self.found.model
        return hashes.weight_hashes(model.converted)["dense"] == hashes.weight_hashes(model.tuned)["dense"]


def _leaves(path: str, value: Any) -> Figures:
    if not isinstance(value, dict):
        return {path: value}
    return {key: leaf for name, part in value.items() for key, leaf in _leaves(f"{path}.{name}", part).items()}


_PROOF, _SAVED = "conversion.verification", "run.evaluation"


def _asked(facts: Facts) -> Figures:
    active = costs.per_layer(facts.records["config"], "num_active_heads")
    found = {"config.num_active_heads": float(sum(active) / len(active)), "config.num_attention_heads": 8}
    return found | {"config.all_heads_until": costs.all_heads_until(facts.records["config"])}


def _read(facts: Facts) -> Figures:
    loads = conversion.head_load(facts.found.run.recount.converted)
    # Of shares that the record rounds to four digits.
    return {f"{_PROOF}.heads_read": Near(float(loads.sum(-1).mean()), 8 * 5.1e-5)}


def _read_in_training(facts: Facts) -> Figures | None:
    if not facts.tuned:
        return None
    line = [line for line in facts.records["log"] if "routing" in line][-1]
    return {"log.step": line["step"], "log.routing.heads_read": line["routing"]["heads_read"]}


def _read_on_prompts(facts: Facts) -> Figures | None:
    if not facts.tuned:
        return None
    load = facts.at("evaluation.analysis.model.head_load")
    read = sum(map(sum, load["load"])) / len(load["load"])
    return {"evaluation.analysis.head_load.load": read, "evaluation.analysis.head_load.tokens": load["tokens"]}


def _on_prompts(facts: Facts) -> Figures | None:
    """The benchmarks whose texts are all of first tokens that have all heads on."""
    start = costs.all_heads_until(facts.records["config"])
    if not facts.tuned or not start:
        return None
    load = facts.at("evaluation.analysis.model.head_load_by_text.load")
    names = [name for name, shares in load.items() if all(share == 1 for share in shares)]
    figures = {"analysis.model.all_heads_until": start, "analysis.model.head_load_by_text.load": names}
    return figures if names else None


def _all_heads_on(facts: Facts) -> Figures:
    proof = facts.take(f"{_PROOF}.all_heads_active.equals_base", f"{_PROOF}.all_heads_active.tokens", f"{_PROOF}.dtype")
    if not facts.tuned:
        return proof
    after = {} if facts.dense_kept else facts.take(f"{_SAVED}.all_heads.kl", f"{_SAVED}.tokens")
    return proof | {"chain.dense_kept": facts.dense_kept} | after


def _as_converted(facts: Facts) -> Figures | None:
    if facts.tuned:
        return None
    names = ("converted.perplexity_ratio", "converted.ratio_interval", "held_out_documents")
    return facts.take(*(f"{_PROOF}.{name}" for name in names))


def _tuned(facts: Facts) -> Figures | None:
    if not facts.tuned:
        return None
    names = ("perplexity", "reference_perplexity", "ratio_interval", "documents")
    return facts.take(*(f"{_SAVED}.{name}" for name in names)) | {"chain.tokens": facts.at("run.tokens")}


def _text_of_training(facts: Facts) -> Figures:
    if not facts.tuned:
        model = facts.found.model
        dense = [hashes.weight_hashes(folder)["dense"] for folder in (model.base, model.converted)]
        return {"chain.runs": 0, "chain.dense_of_base": dense[0] == dense[1]}
    return {"log.tokens": facts.at("run.tokens"), "recipe.data.sequence_length": SEQUENCE}


def _calibration(facts: Facts) -> Figures:
    if not facts.has_calibration:
        return {}
    return facts.take("conversion.calibration.tokens", "conversion.calibration.tokens_of_source")


def _verdict(facts: Facts) -> Figures | None:
    if not facts.tuned:
        return None
    average = "average.scores.model"
    paths = ["average.over", "average.total", f"{average}.value", f"{average}.stderr", "average.scores.base.value"]
    found = {path: facts.at(f"evaluation.{path}") for path in paths}
    for name in ("recovery", "margin_kept"):
        found |= facts.below(f"{average}.{name}", "evaluation.")
    return found


def _without_spread(facts: Facts) -> Figures | None:
    """The benchmarks on which all items have one score."""
    if not facts.tuned:
        return None
    alike = {
        name: [label for label, scores in of_models.items() if len(set(scores.tolist())) == 1]
        for name, of_models in facts.found.scores.items()
    }
    alike = {name: labels for name, labels in alike.items() if labels}
    return {"benchmarks.stderr": alike} if alike else None


def _times(facts: Facts) -> Figures | None:
    if not facts.tuned:
        return None
    return {f"evaluation.analysis.seconds.{length}": TIME for length in analysis.LENGTHS}


def _not_results(facts: Facts) -> Figures | None:
    """Benchmarks of fewer than 100 items."""
    if not facts.tuned:
        return None
    return {"evaluation.benchmarks.items": {name: len(found) for name, found in items().items()}}


def _longest(facts: Facts) -> Figures:
    longest = max(CONTEXT, SEQUENCE) if facts.tuned else CONTEXT
    return {"config.max_position_embeddings": 1024, "conversion.plan.context": longest}


def _if_tuned(facts: Facts, figures: Callable[[], Figures]) -> Figures | None:
    return figures() if facts.tuned else None


def _never(facts: Facts) -> None:
    """Of a claim that none of these models supports."""


# Of what `claims_of` makes, by name: the figures that a claim should state; None where there should be no claim.
OF_A_CARD: dict[str, Callable[[Facts], Figures | None]] = {
    "origin": lambda facts: {"conversion.base.name": "base"},
    "heads_asked": _asked,
    "heads_read": _read,
    "heads_read_in_training": _read_in_training,
    "heads_read_on_prompts": _read_on_prompts,
    "closeness_tuned": _tuned,
    "closeness_as_converted": _as_converted,
    "verdict": _verdict,
    "all_heads_on": _all_heads_on,
    "held_out_text": lambda facts: facts.take(
        f"{_PROOF}.held_out_tokens", f"{_PROOF}.held_out_documents", f"{_PROOF}.base_perplexity"
    ),
    "not_proven": _never,
    "trained_tokens": lambda facts: _if_tuned(facts, lambda: {"chain.tokens": facts.at("run.tokens")}),
    "unrecorded_changes": _never,
    "text_of_training": _text_of_training,
    "calibration_text": _calibration,
    "unfinished": _never,
    **dict.fromkeys(("limited", "part_of_data", "failed", "not_analysed"), _never),
    **dict.fromkeys(("not_what_was_made", "not_its_base", "cut_prompts"), _never),
    "all_heads_on_prompts": _on_prompts,
    "without_spread": _without_spread,
    "not_results": _not_results,
    "theoretical_cost": _asked,
    "measured_time": _times,
    "untimed": lambda facts: None if facts.tuned else {"evaluation.analysis.seconds": None},
    "faults_of_the_base": lambda facts: {"conversion.base.name": "base"},
    "untuned": lambda facts: None if facts.tuned else {"chain.runs": 0},
    "other_text_may_differ": lambda facts: _if_tuned(facts, lambda: facts.take(f"{_SAVED}.tokens")),
    "no_benchmark": lambda facts: None if facts.tuned else {"evaluation": None},
    "longest_text": _longest,
}


def _weights_changed(facts: Facts) -> Figures | None:
    if not facts.tuned:
        return None
    entry = run_record.expected_lineage(facts.found.run)["entries"][-1]
    return {
        f"chain.entries.{when}.{part}": entry[when][part]
        for when in ("began_with", "made")
        for part in ("dense", "routing")
    } | facts.take("run.parameters.trained_routers", "run.parameters.trained_fallbacks")


def _saved(facts: Facts) -> Figures | None:
    return _if_tuned(facts, lambda: facts.take(f"{_SAVED}.dtype", f"{_SAVED}.all_heads.kl"))


def _trained(facts: Facts) -> Figures | None:
    kinds = ("base", "adapters", "routers", "fallbacks")
    return _if_tuned(facts, lambda: facts.take(*(f"run.parameters.trained_{kind}" for kind in kinds)))


def _floor(facts: Facts) -> Figures | None:
    floor = facts.found.run.saved.get("floor")
    return None if floor is None or not facts.tuned else {"validation.floor": floor}


# Of the other claims, by name: what makes it of a model's records, and the figures that it should state.
Maker = Callable[[ModelRecords], Claim | None]
ON_THEIR_OWN: dict[str, tuple[Maker, Callable[[Facts], Figures | None]]] = {
    "parameters_added": (
        lambda records: made.parameters_added(records.conversion.arithmetic.parameters),
        lambda facts: facts.below("conversion.arithmetic.parameters"),
    ),
    "conversion_took": (
        lambda records: made.conversion_took(records.conversion),
        lambda facts: facts.take(
            *(f"conversion.{name}" for name in ("seconds", "device", "compute_dtype", "peak_memory_mib"))
        ),
    ),
    "weights_changed": (
        lambda records: records.run and trained.weights_changed(records.chain.runs[-1], records.run.parameters),
        _weights_changed,
    ),
    "weights_trained": (
        lambda records: records.run and trained.weights_trained(records.run.parameters, records.recipe),
        _trained,
    ),
    "held_out_scores": (
        lambda records: records.run and trained.held_out_scores(records.run.evaluation),
        lambda facts: _if_tuned(facts, lambda: {"validation": facts.at(_SAVED)}),
    ),
    "scored_text": (
        lambda records: records.run and trained.scored_text(records.run.evaluation),
        lambda facts: _if_tuned(facts, lambda: {"validation.tokens": facts.at(f"{_SAVED}.tokens")}),
    ),
    "floor_of_kl": (lambda records: records.run and trained.floor_of_kl(records.run.evaluation.floor), _floor),
    "saved_model": (
        lambda records: trained.saved_model(records.run and records.run.evaluation, records.reference),
        _saved,
    ),
}


def makers() -> set[str]:
    """Names of all functions of `moh_llm.claims` that make a claim."""
    found = set()
    for module in pkgutil.iter_modules(moh_llm.claims.__path__, "moh_llm.claims."):
        for name, function in inspect.getmembers(import_module(module.name), inspect.isfunction):
            made = inspect.signature(function).return_annotation
            if not name.startswith("_") and made in (Claim, Claim | None):
                found.add(name)
    return found
