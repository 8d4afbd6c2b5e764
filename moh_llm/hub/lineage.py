"""Provenance of a model's folder, from its records: conversion, training runs, base."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from moh_llm.errors import UserError
from moh_llm.evaluation.runs import TrainingRun, read_runs, runs_behind
from moh_llm.reading import YAML_BYTES, expand_home, parse_yaml, read_text
from moh_llm.records.conversion import Conversion, folder_name
from moh_llm.records.folder import read_records
from moh_llm.records.identity import identify
from moh_llm.records.lineage import Chain

# A language as the Hub's cards name it: an ISO 639 code, or one of its two special values.
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")


@dataclass(frozen=True)
class Lineage:
    """The records of a model's folder.

    Attributes:
        folder: the model's folder.
        conversion: its ``conversion.json``, if it has one.
        run: the training run that wrote the model, if its folder was found.
        chain: its ``lineage.json``.
        changed: why these records are not of the model in the folder; then no figure of them is here, nor a run.
        note: what else its reader should know (`moh_llm.records.folder`).
    """

    folder: Path
    conversion: Conversion | None
    run: TrainingRun | None
    chain: Chain = field(default_factory=lambda: Chain(entries=[]))
    changed: str | None = None
    note: str | None = None

    @property
    def name(self) -> str:
        """The model's default name: its folder's name, or that of RUN for RUN/model."""
        folder = self.folder.resolve()
        made_there = self.run is not None and folder == (self.run.folder / "model").resolve()
        return folder.parent.name if made_there else folder.name

    @property
    def from_scratch(self) -> bool:
        """Whether the model was trained with cross-entropy and has no conversion; False without a run."""
        trained = self.run is not None and self.run.recipe["objective"]["kind"] == "cross_entropy"
        return self.conversion is None and trained

    @property
    def base_id(self) -> str | None:
        """The base's id on the Hub; None for a local base.

        A conversion records a commit only for a base from the Hub. Without a commit a name such as ``out/base`` is a
        local folder, although it has the form of an id. ``_name_or_path`` in a base's config is not used: it names the
        checkpoint that the base was loaded from when it was saved.
        """
        base = self.conversion and self.conversion.base
        return base.name if base and base.revision and is_hub_id(base.name) else None

    @property
    def base_commit(self) -> str | None:
        """The commit of the base on the Hub; None for a local base."""
        return self.conversion.base.revision if self.conversion and self.base_id else None

    @property
    def base_label(self) -> str | None:
        """The base's display name: its id, or the name of its folder; None without a conversion."""
        return self.conversion and (self.base_id or folder_name(self.conversion.base.name))

    @property
    def tuned(self) -> bool:
        """Whether the records name a training run after the conversion."""
        return self.run is not None or bool(self.chain.runs)

    @property
    def places(self) -> list[tuple[str, Path]]:
        """Local folders that may hold licence and language, each with its owner: the model's first, the base's last."""
        found = [("the model", self.folder)]
        if self.run is not None:
            found.append(("the model that training began with", Path(self.run.recipe["model"])))
        if self.base_id:
            cached = try_to_load_from_cache(self.base_id, "config.json", revision=self.base_commit)
            found += [("the base", Path(cached).parent)] if isinstance(cached, str) else []
        elif self.conversion:
            found.append(("the base", Path(expand_home(self.conversion.base.name))))
        return [(whose, place) for whose, place in found if place.is_dir()]

    @property
    def languages(self) -> list[str]:
        """Language codes of the first card in `places` that names any; empty if none does."""
        for _, place in self.places:
            given = front_matter(place).get("language")
            codes = [str(code).lower() for code in (given if isinstance(given, list) else [given])]
            if known := [code for code in codes if _LANGUAGE.fullmatch(code)]:
                return known
        return []


def read_lineage(folder: Path, run: Path | None = None) -> Lineage:
    """Read the records of a model's folder.

    Args:
        folder: the model's folder.
        run: the folder of the training run that wrote it; None: the parent of ``folder``, if that is a run.

    Raises:
        UserError: a record cannot be read or is malformed, or ``folder`` is the model that ``run`` started from.
    """
    records = read_records(folder, licences=True)
    folders = runs_behind([str(folder.resolve())]) if run is None else [run]
    runs = read_runs(folders)
    if run is not None and (run / "model").resolve() != folder.resolve():
        began_with = runs[0].record.model
        if began_with.sha256 == identify(str(folder)).sha256:
            result = run / "model"
            raise UserError(f"{folder} is the model that the run in {run} started from, not its result; name {result}")
    changed = records.changed
    if runs and not changed and (made := runs[0].record.made) and (part := made.difference(records.model)):
        changed = f"it has {part} other than the model that the run in {runs[0].folder} made"
    if changed:
        return Lineage(folder, records.without_figures(changed).conversion, None, changed=changed, note=records.note)
    return Lineage(folder, records.conversion, runs[0] if runs else None, records.chain, note=records.note)


def front_matter(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's ``README.md``; empty if it is missing or cannot be parsed."""
    try:
        found = REGEX_YAML_BLOCK.search(read_text(folder / "README.md", YAML_BYTES))
        metadata = parse_yaml(found[2], str(folder / "README.md")) if found else None
    except UserError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository's id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
