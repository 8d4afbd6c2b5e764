"""The tables of `benchmarks/scratch.py`, from its record."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from moh_llm.intervals import Interval, show_interval

RESAMPLES = 2000
LINE = "{:<30}{:>12}{:>14}{:>12}{:>10}{:>10}  {:<20}{:>8}{:>9}"


def key(name: str, seed: int, steps: int) -> str:
    """What a run is called in the record."""
    return f"{name}, seed {seed}, {steps} steps"


def difference_interval(tokens: np.ndarray, nats: np.ndarray, reference: np.ndarray) -> Interval | None:
    """95 % interval of the mean over seeds of loss - reference's, by bootstrap over documents and seeds.

    Args:
        tokens: of each document, `[D]`.
        nats, reference: of each seed and document, `[S, D]`; seeds are paired.

    Returns:
        Its two ends; None with fewer than two documents.
    """
    if len(tokens) < 2:
        return None
    generator, seeds = np.random.default_rng(0), len(nats)
    drawn = generator.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), RESAMPLES).astype(np.float64)
    differences = drawn @ (nats - reference).T / (drawn @ tokens)[:, None]
    weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    return np.percentile((differences * weights).sum(1), (2.5, 97.5)).tolist()


def make_table(
    record: dict[str, Any], names: Sequence[str], equal: str, seeds: int, reference: str = "dense"
) -> list[dict[str, Any]]:
    """A row for each method: losses of its runs at equal tokens or FLOPs, and their difference to the reference's."""
    tokens, settings = np.array(record["held_out"]["tokens_of_documents"]), record["settings"]

    def runs_of(name: str) -> list[dict[str, Any]]:
        return [record["runs"][key(name, seed, record["planned"][equal][name])] for seed in range(seeds)]

    compared, rows = np.array([each["nats"] for each in runs_of(reference)]), []
    for name in names:
        runs = runs_of(name)
        nats = np.array([each["nats"] for each in runs])
        losses = nats.sum(1) / tokens.sum()
        row = {
            "method": name,
            "tokens": record["planned"][equal][name] * settings["batch"] * settings["context"],
            "loss": losses.mean().item(),
            "losses": losses.tolist(),
            "seconds": sum(each["seconds"] for each in runs) / len(runs),
        }
        if name != reference:
            row["difference"] = ((nats - compared).sum(1) / tokens.sum()).mean().item()
            row["interval"] = difference_interval(tokens, nats, compared)
        rows.append(row)
    return rows


def table_lines(record: dict[str, Any], rows: Sequence[dict[str, Any]], reference: str = "dense") -> Iterator[str]:
    """The lines of a table: "seeds" is the standard deviation over seeds, seconds are of one run."""
    yield f"difference to {reference}, in nats per token"
    yield LINE.format("", "parameters", "FLOPs/token", "tokens", "loss", "difference", "95 %", "seeds", "seconds")
    for row in rows:
        method = record["methods"][row["method"]]
        sizes = f"{method['parameters']:,}", f"{method['flops_per_token']:,.0f}", f"{row['tokens']:,}"
        spread = f"{np.std(row['losses'], ddof=1):.4f}" if len(row["losses"]) > 1 else "-"
        difference = "-", ""
        if "difference" in row:
            difference = f"{row['difference']:+.4f}", show_interval(row["interval"], "+.4f")
        yield LINE.format(row["method"], *sizes, f"{row['loss']:.4f}", *difference, spread, f"{row['seconds']:.1f}")
