"""Evaluations in a report: what they are called, and the training runs that their models came from."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.records.evaluation import EvaluationRecord


def names_of(folders: Sequence[Path]) -> list[str]:
    """Each folder by the end of its path that sets it apart. Raises UserError for one that is named twice."""
    places = [folder.resolve() for folder in folders]
    for index, place in enumerate(places):
        if place in places[:index]:
            raise UserError(f"{folders[index]} is named twice; name each folder once")
    length = 1
    while len({place.parts[-length:] for place in places}) < len(places):
        length += 1
    return ["/".join(place.parts[-length:]) for place in places]


def models_of(record: EvaluationRecord) -> list[str]:
    """Folders or Hub ids of an evaluation's models, but for those whose records are not of them."""
    return [about.model for about in record.models.values() if not about.changed]


def runs_behind(models: Iterable[str], known: Sequence[Path] = ()) -> list[Path]:
    """Folders of the training runs that made some of the models, as far as they lie on this machine.

    Args:
        models: folders or Hub ids; a run keeps its tuned model in RUN/model.
        known: runs that are left out.
    """
    taken = {folder.resolve() for folder in known}
    found: dict[Path, Path] = {}
    for model in models:
        run = Path(model).resolve().parent
        begun = (run / "run.json").is_file() and (run / "log.jsonl").is_file()
        if Path(model).name == "model" and begun and run not in taken:
            found[run] = Path(model).parent
    return list(found.values())
