"""What a model costs against its dense base (in the form of Tab. 7), as charts and rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from moh_llm.reporting.document import Chart, Table
from moh_llm.reporting.web.charts import Axis, line_chart

Record = dict[str, Any]


def head_table(analyses: Mapping[str, Record]) -> Table:
    """Per model: its name, heads on per layer, their mean share, measured device and dtype."""
    rows = []
    for label, found in analyses.items():
        on, heads = found["num_active"], found["heads"]
        spread = str(on[0]) if len(set(on)) == 1 else f"{min(on)} to {max(on)}"
        share = sum(on) / (heads * len(on))
        rows.append([label, f"{spread} of {heads}", f"{share:.1%}", f"{found['device']}, {found['dtype']}"])
    return Table(["model", "heads on per layer", "of all", "measured on"], rows, text=4)


def cost_charts(analyses: Mapping[str, Record], order: Sequence[str]) -> list[Chart]:
    """Theoretical FLOPs and measured seconds of one forward pass, as ratios to the dense base and as they are.

    ``order``: the report's models, which have the same colours in all of its charts.
    """
    length = Axis("tokens", log=2)
    kinds = {
        "flops": (
            "Theoretical FLOPs of a forward pass",
            "FLOPs",
            "Of heads that are off what can be skipped is not counted.",
        ),
        "seconds": (
            "Measured time of a forward pass",
            "seconds",
            "Model and base, the same weights through its own attention, take turns on the same device. A model "
            "whose heads are all computed and then masked is no faster than its base.",
        ),
    }
    charts = []
    for key, (title, unit, note) in kinds.items():
        ratios = {label: [(c["length"], c["moh"] / c["dense"]) for c in a[key]] for label, a in analyses.items()}
        values = {label: [(cost["length"], cost["moh"]) for cost in a[key]] for label, a in analyses.items()}
        dense = {label: [(cost["length"], cost["dense"]) for cost in a[key]] for label, a in analyses.items()}
        one = all(costs == next(iter(dense.values())) for costs in dense.values())
        values |= {"dense base" if one else f"{label}'s dense base": costs for label, costs in dense.items()}
        if any(ratios.values()):
            charts += [
                line_chart(
                    f"{key}-ratio",
                    f"{title}, ratio to the base's",
                    ratios,
                    length,
                    Axis("ratio"),
                    note,
                    reference=1,
                    order=order,
                ),
                line_chart(key, title, values, length, Axis(unit, log=10), order=order),
            ]
    return charts
