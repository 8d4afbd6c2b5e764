"""Tables of a conversion's verification at long context, for cards and reports."""

from collections.abc import Sequence

from moh_llm.records.conversion import PositionFigures, RetrievalFigures
from moh_llm.reporting.document import Inline, Table


def long_context_tables(by_position: Sequence[PositionFigures], retrieval: Sequence[RetrievalFigures]) -> list[Table]:
    """The converted model by position, and what it finds out of its fallbacks' sight; no table without figures."""
    tables = []
    if by_position:
        rows: list[list[Inline]] = [
            [f"from {part.start}", f"{part.tokens:,}", f"{part.perplexity_ratio:#.5g}", f"{part.kl:#.3g}"]
            for part in by_position
        ]
        tables.append(Table(["position in the document", "tokens", "ratio to base's", "KL to base, nats"], rows))
    if retrieval:
        rows = [[one.task, str(one.asked), str(one.base), str(one.converted)] for one in retrieval]
        tables.append(
            Table(["out of the fallbacks' sight", "asked", "the base finds", "the converted model finds"], rows)
        )
    return tables
