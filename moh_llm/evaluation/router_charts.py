"""Charts and tables of one model's routers; `moh_llm.analysis` defines each figure."""

from typing import Any

from moh_llm.evaluation.charts import Axis, Interval, heat_map, interval_chart, line_chart
from moh_llm.evaluation.document import Block, Chart, Charts, Heading, Table

Record = dict[str, Any]
_LAYER = Axis("layer")


def router_blocks(number: int, found: Record) -> list[Block]:
    """Charts and tables of the ``number``-th model, from the record of its analysis."""
    name = f"m{number}"
    by_text, tokens = found["head_load_by_text"], found["token_heads"]
    charts = [_load(name, found), _load_by_text(name, by_text)]
    charts += _scores(name, found["routing_scores"])
    if "routing_scores_by_text" in found:  # older records lack it
        quantiles = found["routing_scores"]["quantiles"]
        charts.append(_scores_by_text(name, quantiles, found["routing_scores_by_text"]))
    charts += [*_similarity(name, found), _rank(name, found["feature_rank"])]
    blocks: list[Block] = [Charts(charts)]
    if similar := _similarity_rows(found["similarity"]):
        blocks += [Heading("Similarity of heads, mean over layers (Tab. B)")]
        blocks += [Table(["", "MoH", "all heads on"], similar)]
    heads, shared = range(len(tokens["on"][-1][0])), by_text["shared_heads"]
    rows = [
        [token, *("shared" if head in shared else "on" if on[head] else "off" for head in heads)]
        for token, on in zip(tokens["tokens"], tokens["on"][-1], strict=True)
    ]
    blocks.append(Heading(f"Heads that each token has on, layer {tokens['layers'][-1]}"))
    return [*blocks, Table(["token", *map(str, heads)], rows, kind="tokens")]


def _load(name: str, found: Record) -> Chart:
    load = found["head_load"]["load"]
    first = found.get("all_heads_until", 0)  # older records lack it
    all_on = f" A document's first {first:,} tokens have all heads on, and are counted." if first else ""
    return heat_map(
        f"{name}-load",
        "Head load in each layer",
        [str(layer) for layer in range(len(load))],
        [str(head) for head in range(found["heads"])],
        load,
        ("head", "layer"),
        "share of tokens that have the head on",
        f"Activations / tokens over {found['head_load']['tokens']:,} tokens of the benchmarks' prompts (in the form "
        f"of the paper's Fig. 3). Shared heads are always on.{all_on}",
    )


def _load_by_text(name: str, found: Record) -> Chart:
    heads = len(next(iter(found["load"].values())))
    shared = ", ".join(map(str, found["shared_heads"])) or "none"
    return heat_map(
        f"{name}-texts",
        f"Head load of layer {found['layer']} on each benchmark",
        list(found["load"]),
        [str(head) for head in range(heads)],
        list(found["load"].values()),
        ("head", ""),
        "share of tokens that have the head on",
        f"The last layer with routed heads (the paper's Fig. 3 and B). Shared heads: {shared}.",
    )


def _scores(name: str, found: Record) -> list[Chart]:
    places = found["quantiles"]
    low, middle, high = (places.index(share) for share in (0.25, 0.5, 0.75))
    kinds = [kind for kind in ("shared", "routed", "selected") if any(layer[kind] for layer in found["layers"])]
    known = {kind: [(n, layer[kind]) for n, layer in enumerate(found["layers"]) if layer[kind]] for kind in kinds}
    medians = {kind: [(n, scores["quantiles"][middle]) for n, scores in known[kind]] for kind in kinds}
    bands = {
        kind: [(n, scores["quantiles"][low], scores["quantiles"][high]) for n, scores in known[kind]] for kind in kinds
    }
    totals: dict[str, list[int]] = {}
    for kind in kinds:
        totals[kind] = [sum(counts) for counts in zip(*(s["histogram"] for _, s in known[kind]), strict=True)]
    histograms = {
        kind: [((place + 0.5) / len(counts), count / sum(counts)) for place, count in enumerate(counts)]
        for kind, counts in totals.items()
    }
    return [
        line_chart(
            f"{name}-scores",
            "Routing scores in each layer",
            medians,
            _LAYER,
            Axis("score"),
            "Median and middle half of the scores g_i before quantisation: of all routed heads, of those that are "
            "on, and of shared heads where the router scores them.",
            bands=bands,
        ),
        line_chart(
            f"{name}-histogram",
            "Distribution of routing scores, all layers",
            histograms,
            Axis("score"),
            Axis("share of scores"),
        ),
    ]


def _scores_by_text(name: str, places: list[float], found: Record) -> Chart:
    middle, low, high = (places.index(share) for share in (0.5, 0.25, 0.75))
    texts = found["texts"]

    def middle_half(scores: Record | None) -> Interval | None:
        return (scores["quantiles"][middle], scores["quantiles"][low], scores["quantiles"][high]) if scores else None

    kinds = [kind for kind in ("shared", "routed", "selected") if any(scores[kind] for scores in texts.values())]
    return interval_chart(
        f"{name}-scores-texts",
        f"Routing scores of layer {found['layer']} on each benchmark",
        list(texts),
        {kind: [middle_half(scores[kind]) for scores in texts.values()] for kind in kinds},
        "score",
        "Median and middle half of the scores g_i before quantisation (the paper's Fig. C to E); the last layer with "
        "routed heads.",
    )


def _similarity(name: str, found: Record) -> list[Chart]:
    kinds = {"patterns": "attention patterns", "outputs": "head outputs"}
    note = {
        "patterns": "1 - 0.5 E|A - A'|_1 over pairs of heads of a layer (Tab. B); 1: all alike.",
        "outputs": "Mean cosine between two heads that a token has on (Tab. B); 1: all alike.",
    }
    charts = []
    for key, title in kinds.items():
        series = {
            shown: [(layer, value) for layer, value in enumerate(found["similarity"][which][key]) if value is not None]
            for which, shown in (("moh", "MoH"), ("all_heads", "all heads on"))
        }
        if any(series.values()):
            heading = f"Similarity of {title}"
            charts.append(line_chart(f"{name}-{key}", heading, series, _LAYER, Axis("similarity"), note[key]))
    return charts


def _similarity_rows(found: Record) -> list[list[str]]:
    rows = []
    for key, title in (("mean_patterns", "attention patterns"), ("mean_outputs", "head outputs")):
        if found["moh"][key] is not None and found["all_heads"][key] is not None:
            rows.append([title, f"{found['moh'][key]:.3f}", f"{found['all_heads'][key]:.3f}"])
    return rows


def _rank(name: str, found: Record) -> Chart:
    kinds = ("shared", "routed")
    series = {
        f"{kind} heads": [(layer, r["energy"] / r["width"]) for layer, r in enumerate(found[kind]) if r["width"]]
        for kind in kinds
    }
    widest = max(r["width"] for kind in kinds for r in found[kind])
    bounded = " Too few tokens for so wide features: they bound the rank." if found["tokens"] < 4 * widest else ""
    return line_chart(
        f"{name}-rank",
        "Feature rank of shared and routed heads",
        {kind: points for kind, points in series.items() if points},
        _LAYER,
        Axis("rank / width"),
        f"How many singular values hold 99 % of the squared norm of what the heads of a layer give, over their width; "
        f"{found['tokens']:,} tokens. A routed head that is off gives its fallback, or zeros.{bounded}",
    )
