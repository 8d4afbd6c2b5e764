"""Where a model comes from, by the files beside it: conversion, training runs, base, and the base's licence."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from moh_llm.errors import UserError
from moh_llm.evaluation.runs import TrainingRun, read_run, run_behind
from moh_llm.reading import YAML_BYTES, expand_home, parse_yaml, read_text
from moh_llm.records.conversion import Chain, Conversion, ConversionEntry
from moh_llm.records.identity import read_records
from moh_llm.records.model import licence_texts

_META = "https://github.com/meta-llama"


@dataclass(frozen=True)
class Lineage:
    """The records of a model's folder.

    Attributes:
        folder: the model's folder.
        conversion: its ``conversion.json``, if it has one.
        run: the training run that wrote the model, if its folder was found.
        chain: its ``lineage.json``.
    """

    folder: Path
    conversion: Conversion | None
    run: TrainingRun | None
    chain: Chain = field(default_factory=lambda: Chain(entries=[]))

    @property
    def name(self) -> str:
        """The model's default name: its folder's name, or RUN for RUN/model."""
        folder = self.folder.resolve()
        made_there = self.run is not None and folder == (self.run.folder / "model").resolve()
        return folder.parent.name if made_there else folder.name

    @property
    def from_scratch(self) -> bool:
        """Whether the model was trained without a teacher and a conversion; False without a run."""
        trained = self.run is not None and self.run.recipe["objective"]["kind"] != "distillation"
        return self.conversion is None and trained

    @property
    def base_id(self) -> str | None:
        """The base's id on the Hub; None for a local base.

        A conversion records a commit only for a base from the Hub. Without one, a name such as ``out/base`` is a local
        folder that only looks like an id.
        """
        base = self.conversion and self.conversion.base
        return base.name if base and base.revision and is_hub_id(base.name) else None

    @property
    def trained_since(self) -> bool:
        """Whether a training run after the last conversion is on record."""
        entries = self.chain.entries
        return self.run is not None or bool(entries and not isinstance(entries[-1], ConversionEntry))

    @property
    def dense_kept(self) -> bool | None:
        """Whether the dense weights have the SHA-256 of what the conversion wrote; None if that is not on record."""
        made = [entry.made.dense for entry in self.chain.entries if isinstance(entry, ConversionEntry)]
        return self.chain.entries[-1].made.dense == made[-1] if made else None

    @property
    def places(self) -> list[tuple[str, Path]]:
        """Local folders that may state licence and language, from the model's to the base's, each with its owner."""
        found = [("the model", self.folder)]
        if self.run is not None:
            found.append(("the model that training began with", Path(self.run.recipe["model"])))
        if self.base_id:
            cached = try_to_load_from_cache(self.base_id, "config.json", revision=self.conversion.base.revision)
            found += [("the base", Path(cached).parent)] if isinstance(cached, str) else []
        elif self.conversion:
            found.append(("the base", Path(expand_home(self.conversion.base.name))))
        return [(owner, place) for owner, place in found if place.is_dir()]


def read_lineage(folder: Path) -> Lineage:
    """Read the records of a model's folder, and of the training run that holds it.

    Raises:
        UserError: a record cannot be read or is malformed, or the records describe another model.
    """
    records, place = read_records(folder), run_behind(folder.resolve())
    trained = read_run(place) if place else None
    changed = records.changed
    if trained and not changed and (made := trained.record.made) and (part := made.difference(records.model)):
        changed = f"it has {part} other than the model that the run in {trained.folder} made"
    if changed:
        raise UserError(
            f"{folder} is not what its records describe: {changed}; restore it, or move conversion.json, lineage.json "
            "and seal.json out of a copy of it to publish it without their figures"
        )
    return Lineage(folder, records.conversion, trained, records.chain)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository's id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


# ---- the licence


@dataclass(frozen=True)
class LlamaTerms:
    """What section 1.b of a Llama licence asks of whoever passes on a model that is made from a Llama.

    Attributes:
        model: what the licence calls the model.
        text: address of the licence.
        begins: how the model's name must begin (1.b.i); None: no condition.
        shown: the words to display (1.b.i); None: none.
    """

    model: str
    text: str
    begins: str | None = "Llama"
    shown: str | None = "Built with Llama"

    @property
    def title(self) -> str:
        """What the licence calls itself."""
        return f"{self.model} Community License"

    @property
    def notice(self) -> str:
        """The content of the text file "Notice" (1.b.iii)."""
        title, sign = (self.title, "©") if self.begins else (self.title.replace("Llama", "LLAMA"), "(c)")
        return f"{self.model} is licensed under the {title}, Copyright {sign} Meta Platforms, Inc. All Rights Reserved."


LLAMA = {
    "llama2": LlamaTerms("Llama 2", f"{_META}/llama/blob/main/LICENSE", begins=None, shown=None),
    "llama3": LlamaTerms("Meta Llama 3", f"{_META}/llama3/blob/main/LICENSE", "Llama 3", "Built with Meta Llama 3"),
    **{
        f"llama{version}": LlamaTerms(
            f"Llama {version}", f"{_META}/llama-models/blob/main/models/llama{version.replace('.', '_')}/LICENSE"
        )
        for version in ("3.1", "3.2", "3.3", "4")
    },
}


@dataclass(frozen=True)
class Licence:
    """A licence and where it was found.

    Attributes:
        id: the Hub's id, such as "apache-2.0".
        source: the file that names it.
        name, link: what the card of the base calls a licence whose id is "other".
        file: its text, if that lies with the model or its base.
    """

    id: str
    source: str
    name: str | None = None
    link: str | None = None
    file: Path | None = None

    @property
    def terms(self) -> LlamaTerms | None:
        """The conditions of a Llama licence."""
        return LLAMA.get(self.id)


def find_licence(lineage: Lineage, given: str | None = None) -> Licence:
    """The licence of a model, which is its base's.

    ``given`` is the id that the user names where the files of model and base name no licence, or several.

    Raises:
        UserError: no licence is found, or several; or ``given`` contradicts a Llama licence that is found.
    """
    named = [licence for owner, place in lineage.places for licence in _named_in(place, owner)]
    found = {licence.id: licence for licence in named}
    llama = next((licence for licence in named if licence.terms), None)
    if given is not None:
        if llama and given not in found:
            raise UserError(
                f"--licence {given} contradicts {llama.source}, which says {llama.id}: a model made from a Llama keeps "
                "its licence; drop --licence"
            )
        licence = found.get(given, Licence(given, "the publisher"))
    elif len(found) == 1:
        (licence,) = found.values()
    else:
        fault = "the licence is not known (no `license` in a README.md, no known LICENSE, there or with the base)"
        if found:
            named_in = ", ".join(f"{licence.id} in {licence.source}" for licence in found.values())
            fault = f"licences contradict each other ({named_in})"
        raise UserError(f"{lineage.folder}: {fault}; pass --licence ID, such as apache-2.0, llama3.2 or other")
    # A Llama's text must be recognised; that of another licence may be one that nobody knows.
    texts = [text for _, place in lineage.places for text in _texts(place)]
    fitting = [text for text in texts if _recognise(text) in ((licence.id,) if licence.terms else (licence.id, None))]
    return replace(licence, file=next(iter(fitting), None))


def check_terms(licence: Licence, repo_id: str, folder: Path) -> None:
    """Raise UserError unless text and name are as the licence asks (section 1.b.i of Llama's).

    The Hub allows no space in names, so "Llama 3" may be written Llama-3, Llama_3, Llama.3 or Llama3.
    """
    terms = licence.terms
    if licence.file is None and (terms or (licence.id == "other" and not licence.link)):
        asks = f"the {terms.title} (section 1.b.i)" if terms else "licence `other`"
        where = f" ({terms.text})" if terms else ""
        raise UserError(f"{folder}: {asks} asks for its text; put it into {folder / 'LICENSE'}{where}")
    owner, slash, name = repo_id.rpartition("/")
    if terms and terms.begins and not re.match(terms.begins.replace(" ", "[-_.]?") + r"(?!\d)", name):
        raise UserError(
            f"--repo-id {repo_id}: the {terms.title} (section 1.b.i) asks that the model's name begin with "
            f'"{terms.begins}"; rename it, for example to {owner}{slash}{terms.begins.replace(" ", "-")}-{name}'
        )


def _named_in(place: Path, owner: str) -> list[Licence]:
    """The licences that the card and the LICENSE files of a folder name."""
    metadata, found = _front_matter(place), []
    if isinstance(named := metadata.get("license"), str) and named != "unknown":
        name, link = (metadata.get(key) if named == "other" else None for key in ("license_name", "license_link"))
        found.append(Licence(named.lower(), f"the model card of {owner}", name and str(name), link and str(link)))
    known = {text: _recognise(text) for text in _texts(place)}
    return found + [Licence(name, f"{text.name} of {owner}") for text, name in known.items() if name]


def _front_matter(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's ``README.md``; empty if it is missing or cannot be parsed."""
    try:
        found = REGEX_YAML_BLOCK.search(read_text(folder / "README.md", YAML_BYTES))
        metadata = parse_yaml(found[2], str(folder / "README.md")) if found else None
    except UserError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _texts(place: Path) -> list[Path]:
    return [file for file in licence_texts(place) if file.name.startswith("LICEN")]


def _recognise(file: Path) -> str | None:
    """The licence whose title a file begins with."""
    top = " ".join(file.read_text(encoding="utf-8-sig", errors="replace")[:400].replace("*", " ").split())
    if llama := re.search(r"\bLLAMA (\d(?:\.\d)?) COMMUNITY LICENSE", top, re.IGNORECASE):
        name = f"llama{llama[1]}"
        return name if name in LLAMA else None
    if re.search(r"\bApache License,? Version 2\.0", top, re.IGNORECASE):
        return "apache-2.0"
    return "mit" if re.match(r"(?:The )?MIT License\b", top, re.IGNORECASE) else None
