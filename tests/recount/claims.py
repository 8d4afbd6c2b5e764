"""What the sentences of a model's card should state, from what was computed again.

A sentence is known by some of its words. One that is new, and has a number, needs an entry in `SAID`.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moh_llm.records.identity import hash_weights
from recount import conversion, costs, run_record
from recount.leaves import Near
from recount.training import Run

Expected = list[Any] | None  # numbers in the order of the sentence, and words that it has; None: it is not said

HEADS = 8
# What states no figure of the model: sections, and notes on the table of benchmarks.
_FIXED = ("How to load and serve",)
_NOTES = ("In percent; ± is one standard error", "Made with moh_llm", "in brackets 95 % intervals")
_NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")


@dataclass
class Facts:
    """A model as converted, or tuned: its records as they should be.

    Attributes:
        found: the recount of its folders.
        tuned: whether it is the tuned model, with its run and its evaluation, or the converted one with neither.
    """

    found: Run
    tuned: bool

    @cached_property
    def records(self) -> dict[str, Any]:
        found = self.found
        known: dict[str, Any] = {"conversion": conversion.expected_conversion(found)}
        known["config"] = found.read("run", "model", "config.json")
        if self.tuned:
            known |= {"run": run_record.expected_run(found), "log": found.log}
            known["evaluation"] = found.read("report", "report.json")
        return known

    def at(self, path: str) -> Any:
        value: Any = self.records
        for name in path.split("."):
            value = value[name]
        return value

    def take(self, path: str, *names: str) -> list[Any]:
        """Numbers below a path, with the ends of intervals one by one."""
        found = [self.at(f"{path}.{name}") for name in names]
        return [end for value in found for end in (value if isinstance(value, list) else [value])]

    @cached_property
    def start(self) -> list[int]:
        """First tokens of a document that have all heads on, if there are any."""
        return [number] if (number := costs.all_heads_until(self.records["config"])) else []

    @property
    def tokens(self) -> int:
        """Training tokens of the run."""
        return self.records["log"][-1]["tokens"]

    @cached_property
    def dense_kept(self) -> bool:
        return hash_weights(self.found.converted).dense == hash_weights(self.found.tuned).dense


_PROOF, _SAVED = "conversion.verification", "run.evaluation"


def _both(expected: Callable[[Facts, str], list[Any]]) -> Callable[[Facts], Expected]:
    """A row of the table: figures of the converted model and, of a tuned one, of both."""
    return lambda facts: [number for path in (_PROOF, _SAVED)[: 1 + facts.tuned] for number in expected(facts, path)]


def _keys(facts: Facts, path: str) -> list[Any]:
    if path == _PROOF:
        return [100 * _value(facts.at(f"{path}.keys_read")), 100 * _value(facts.at("conversion.plan.keys_read"))]
    learns = "keys_asked" in facts.records["run"]
    return [100 * _value(value) for value in facts.take("run", "evaluation.keys_read", "keys_asked")] if learns else []


def _heads(facts: Facts, path: str) -> list[Any]:
    active = costs.per_layer(facts.records["config"], "num_active_heads")
    planned = [sum(active) / len(active)]
    if path == _PROOF:
        return [conversion.heads_read(facts.found.proof.passes), *(planned if not facts.tuned else [])]
    return [_value(facts.at(f"{_SAVED}.heads_read")), *planned]


def _perplexity(facts: Facts, path: str) -> list[Any]:
    if path == _PROOF:
        return facts.take(f"{path}.converted", "perplexity", "perplexity_ratio", "ratio_interval")
    perplexity, reference = facts.take(path, "perplexity", "reference_perplexity")
    return [perplexity, perplexity / reference, *facts.take(path, "ratio_interval")]


def _of_base(facts: Facts) -> Expected:
    """Perplexity, the base's, and the KL of the model that the card is about."""
    path = _SAVED if facts.tuned else f"{_PROOF}.converted"
    base = f"{_SAVED}.reference_perplexity" if facts.tuned else f"{_PROOF}.base_perplexity"
    return [*facts.take(path, "perplexity"), facts.at(base), *facts.take(path, "kl", "kl_interval")]


def _figures(path: str) -> str:
    return f"{path}.converted" if path == _PROOF else path


def _held_out(facts: Facts, path: str) -> list[Any]:
    return facts.take(path, *(("held_out_tokens", "held_out_documents") if path == _PROOF else ("tokens", "documents")))


def _all_on_at_first(facts: Facts) -> Expected:
    return facts.start or None


def _fitted(facts: Facts) -> Expected:
    calibration = facts.records["conversion"]["calibration"]
    tokens = calibration["tokens"]
    return [tokens, *(100 * count / tokens for count in calibration["tokens_of_source"].values())]


def _verdict(facts: Facts) -> Expected:
    average = facts.at("evaluation.average")
    model, base = (average["scores"][label] for label in ("model", "base"))
    recovery, kept = model["recovery"], model["margin_kept"]
    of_average = [recovery["share"], model["value"], base["value"], *_spread(recovery), average["over"]]
    of_margin = [kept["share"], *_spread(kept)] if kept["share"] is not None else []
    over = [kept["over"]] if kept["over"] not in (0, average["over"]) else []
    return [*of_average, *of_margin, *over]


def _spread(share: dict[str, Any]) -> list[Any]:
    """The ends of an interval or, where the base is too close to zero for one, by how many standard errors."""
    return [share["base_errors"]] if share.get("base_errors") is not None else list(share["interval"])


def _off(facts: Facts) -> Expected:
    config = facts.records["config"]
    return [config["local_sinks"], config["local_window"]] if config["head_fallback"] == "local" else []


def _counts_of_items(facts: Facts) -> Expected:
    return [100, *(row["items_in_full"] for row in facts.at("evaluation.benchmarks"))]


def _all_on_prompts(facts: Facts) -> Expected:
    """The benchmarks whose texts are no longer than the first tokens that have all heads on."""
    if not facts.start:
        return None
    load = facts.at("evaluation.analysis.model.head_load_by_text.load")
    names = [name for name, shares in load.items() if all(share == 1 for share in shares)]
    return [*facts.start, *names] if names else None


def _changed(facts: Facts) -> Expected:
    entry = run_record.expected_lineage(facts.found)["entries"][-1]
    same = [entry["began_with"][part] == entry["made"][part] for part in ("dense", "routing")]
    told = " | ".join("kept" if kept else "changed" for kept in same)
    return [2, entry["tokens"], entry["steps"], entry["seed"], f"| {told} |"]


def _trained(facts: Facts) -> Expected:
    counts = facts.take("run.parameters", *(f"trained_{kind}" for kind in ("base", "adapters", "routers", "fallbacks")))
    return [*(count for count in counts if count), facts.found.recipe["optimizer"]["learning_rate"]]


def _only(tuned: bool, expected: Callable[[Facts], Expected] = lambda facts: []) -> Callable[[Facts], Expected]:
    return lambda facts: expected(facts) if facts.tuned == tuned else None


SAID: dict[str, Callable[[Facts], Expected]] = {
    "made from base": lambda facts: [2025],
    "| keys read (planned)": _both(_keys),
    "| heads on (planned), of": lambda facts: [HEADS, *_both(_heads)(facts)],
    "| perplexity |": _both(_perplexity),
    "| KL to the base |": _both(lambda facts, path: facts.take(_figures(path), "kl", "kl_interval")),
    "| KL with all heads on |": _only(True, lambda facts: facts.take(_SAVED, "all_heads_kl")),
    "| same top-1 token, % |": _both(lambda facts, path: [100 * _value(facts.at(f"{_figures(path)}.top1_agreement"))]),
    "| held-out text |": _both(_held_out),
    "heads in each of": lambda facts: [HEADS, facts.records["config"]["num_hidden_layers"]],
    "tokens of a document have all heads on": _all_on_at_first,
    "A head that is off": _off,
    "On held-out text: perplexity": _of_base,
    "This model ": _only(True, _verdict),
    "No benchmark was run beyond a smoke test": _only(True),  # its suite
    "equalled the base's bit for bit": lambda facts: facts.take(f"{_PROOF}.all_heads_active", "tokens"),
    "did not equal its base": lambda facts: None,
    "Training left the dense weights": _only(True, lambda facts: [] if facts.dense_kept else None),
    "Training has since changed the dense weights": _only(True, lambda facts: None if facts.dense_kept else []),
    "How close the model is to its base": lambda facts: None,
    "training tokens in all": _only(True, lambda facts: [facts.tokens]),
    "what was done to the weights before": lambda facts: None,
    "No training run is on record": _only(False),
    "The conversion was fitted to": _fitted,
    "The run has not finished": lambda facts: None,
    "In the last layer with a router": _only(True, _all_on_prompts),
    **dict.fromkeys(("NOT COMPARABLE", "FAILED", "NOT ANALYSED", "CHANGED", "NOT ITS BASE"), lambda facts: None),
    "Left out of the card's model-index": _only(True, _counts_of_items),
    "The faults of its base": lambda facts: [],
    "No training since its conversion": _only(False),
    "No benchmark of quality": lambda facts: [],
    "Its config allows": lambda facts: [1024],
    "The last run trained": _only(True, _trained),
    "| 2 | distillation": _only(True, _changed),
}


def faults(sections: dict[str, str], facts: Facts) -> Iterator[str]:
    """What a card says and should not, or does not say, one line a sentence; sections that state no figure aside."""
    lines = [line for title, body in sections.items() if title not in _FIXED for line in body.split("\n")]
    said = [one for line in lines for one in ([line] if line.startswith("|") else re.split(r"(?<=\.)\s+", line))]
    for words, expect in SAID.items():
        expected, found = expect(facts), [one for one in said if words in one]
        if (expected is None) != (not found):
            yield f"{words!r} is {'not said' if expected is not None else f'said: {found[0]}'}"
        for one in found if expected is not None else []:
            if not _states(one, expected):
                yield f"{one!r} should state {expected}"
    for one in said:
        if not one.startswith("|") and _numbers(one) and not any(words in one for words in (*SAID, *_NOTES)):
            yield f"{one!r} is unknown"


def _numbers(sentence: str) -> list[str]:
    return _NUMBER.findall(re.sub("95 %|`[0-9a-f]{64}`", "", sentence))


def _states(sentence: str, expected: list[Any]) -> bool:
    words = [value for value in expected if isinstance(value, str)]
    numbers = [value for value in expected if not isinstance(value, str)]
    found = _numbers(sentence)
    same = len(found) == len(numbers) and all(map(_is_near, found, numbers))
    return same and all(word in sentence for word in words)


def _value(expected: Any) -> float:
    return expected.value if isinstance(expected, Near) else expected


def _is_near(printed: str, expected: Any) -> bool:
    """Whether a printed number is the expected one, to its last digit."""
    digits, _, exponent = printed.replace(",", "").partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    by = expected.by if isinstance(expected, Near) else 0
    return abs(float(printed.replace(",", "")) - _value(expected)) <= 0.51 * last + by + 2e-5 * abs(_value(expected))
