"""Where a model comes from, by the files beside it: conversion, training runs, base, and the base's licence."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from moh_llm.errors import UserError
from moh_llm.evaluation.runs import TrainingRun, read_run, run_behind
from moh_llm.files import check_links
from moh_llm.reading import YAML_BYTES, expand_home, parse_yaml, read_text
from moh_llm.records.conversion import Chain, Conversion, ConversionEntry
from moh_llm.records.identity import identify, read_records

_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")  # ISO 639, and two values that the Hub adds
_META = "https://github.com/meta-llama"
_LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True)
class Lineage:
    """The records of a model's folder.

    Attributes:
        folder: the model's folder.
        conversion: its ``conversion.json``, if it has one.
        run: the training run that wrote the model, if its folder was found.
        chain: its ``lineage.json``.
        changed: why these records do not describe the model in the folder; then only the base's name is left of them.
    """

    folder: Path
    conversion: Conversion | None
    run: TrainingRun | None
    chain: Chain = field(default_factory=lambda: Chain(entries=[]))
    changed: str | None = None

    @property
    def name(self) -> str:
        """The model's default name: its folder's name, or RUN for RUN/model."""
        folder = self.folder.resolve()
        made_there = self.run is not None and folder == (self.run.folder / "model").resolve()
        return folder.parent.name if made_there else folder.name

    @property
    def from_scratch(self) -> bool:
        """Whether the model was trained with cross-entropy and without a conversion; False without a run."""
        trained = self.run is not None and self.run.recipe["objective"]["kind"] == "cross_entropy"
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
    def dense_of_base(self) -> bool:
        """Whether the dense weights have the SHA-256 of the base that the conversion names."""
        conversion, entries = self.conversion, self.chain.entries
        made = entries[-1].made if entries else conversion and conversion.made
        return bool(conversion and made) and conversion.base.dense_sha256 == made.dense

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

    @property
    def languages(self) -> list[str]:
        """Language codes of the first card in `places` that names any; empty if none does."""
        for _, place in self.places:
            given = _front_matter(place).get("language")
            codes = [str(code).lower() for code in (given if isinstance(given, list) else [given])]
            if known := [code for code in codes if _LANGUAGE.fullmatch(code)]:
                return known
        return []


def read_lineage(folder: Path, run: Path | None = None) -> Lineage:
    """Read the records of a model's folder.

    Args:
        folder: the model's folder.
        run: the folder of the training run that wrote it (default: the parent of ``folder``, if that is a run).

    Raises:
        UserError: a record cannot be read or is malformed, or ``folder`` is the model that ``run`` started from.
    """
    records = read_records(folder)
    place = run_behind(folder.resolve()) if run is None else run
    trained = read_run(place) if place else None
    if run is not None and (made_there := run / "model").resolve() != folder.resolve():
        began_with = trained.record.model
        if began_with.sha256 == identify(str(folder)).sha256:
            raise UserError(
                f"{folder} is the model that the run in {run} started from, not its result; name {made_there}"
            )
    changed = records.changed
    if trained and not changed and (made := trained.record.made) and (part := made.difference(records.model)):
        changed = f"it has {part} other than the model that the run in {trained.folder} made"
    if changed:
        return Lineage(folder, records.without_figures(changed).conversion, None, changed=changed)
    return Lineage(folder, records.conversion, trained, records.chain)


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a repository's id on the Hub."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _front_matter(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's ``README.md``; empty if it is missing or cannot be parsed."""
    try:
        found = REGEX_YAML_BLOCK.search(read_text(folder / "README.md", YAML_BYTES))
        metadata = parse_yaml(found[2], str(folder / "README.md")) if found else None
    except UserError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


# ---- the licence


@dataclass(frozen=True)
class LlamaTerms:
    """The conditions of a Llama licence for passing on a model that is made from a Llama: its section 1.b.

    Attributes:
        model: what the licence calls the model.
        policy, text: addresses of the acceptable use policy (1.b.iv) and of the licence.
        begins: how the model's name must begin (1.b.i); None: no condition.
        closed: whether 1.b.v forbids improving other language models with the model or its outputs.
    """

    model: str
    policy: str
    text: str
    begins: str | None = "Llama"
    closed: bool = False

    @property
    def title(self) -> str:
        """What the licence calls itself."""
        return f"{self.model} Community License"

    @property
    def shown(self) -> str | None:
        """The words to display (1.b.i); None: none."""
        return f"Built with {self.model if self.closed else 'Llama'}" if self.begins else None

    @property
    def notice(self) -> str:
        """The content of the text file "Notice" (1.b.iii)."""
        title, sign = (self.title, "©") if self.begins else (self.title.replace("Llama", "LLAMA"), "(c)")
        return f"{self.model} is licensed under the {title}, Copyright {sign} Meta Platforms, Inc. All Rights Reserved."


def _later_terms(version: str, host: str) -> LlamaTerms:
    """The terms of Llama 3.1 and later, which differ only in their version."""
    name = f"llama{version.replace('.', '_')}"
    text = f"{_META}/llama-models/blob/main/models/{name}/LICENSE"
    return LlamaTerms(f"Llama {version}", f"https://{host}/{name}/use-policy", text)


LLAMA = {
    "llama2": LlamaTerms(
        "Llama 2", "https://ai.meta.com/llama/use-policy", f"{_META}/llama/blob/main/LICENSE", begins=None, closed=True
    ),
    "llama3": LlamaTerms(
        "Meta Llama 3",
        "https://llama.meta.com/llama3/use-policy",
        f"{_META}/llama3/blob/main/LICENSE",
        begins="Llama 3",
        closed=True,
    ),
    "llama3.1": _later_terms("3.1", "llama.meta.com"),
    "llama3.2": _later_terms("3.2", "www.llama.com"),
    "llama3.3": _later_terms("3.3", "www.llama.com"),
    "llama4": _later_terms("4", "www.llama.com"),
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

    @property
    def lacks_text(self) -> bool:
        """Whether its text must be published with the model, and is missing."""
        return self.file is None and (self.id in LLAMA or (self.id == "other" and not self.link))


def recorded_licences(lineage: Lineage) -> list[Licence]:
    """The licences that cards and LICENSE files of model and base name: none, one, or several that contradict."""
    found = [licence for owner, place in lineage.places for licence in _named_in(place, owner)]
    return [_with_text(licence, lineage) for licence in {licence.id: licence for licence in found}.values()]


def find_licence(lineage: Lineage, given: str | None = None) -> Licence:
    """The licence under which a model may be published.

    Args:
        lineage: the model's.
        given: the id that the user names, where the files of model and base name no licence, or several.

    Raises:
        UserError: no licence is found, or several; ``given`` is no id, or contradicts a Llama licence that is found; a
            text that must be published with the model is missing.
    """
    if given is not None and not _LICENCE_ID.fullmatch(given):
        raise UserError(f"--licence {given} is no id of https://huggingface.co/docs/hub/repositories-licenses")
    found = recorded_licences(lineage)
    matching = [licence for licence in found if given in (None, licence.id)]
    llama = next((licence for licence in found if licence.terms), None)
    if llama and not matching:
        raise UserError(
            f"--licence {given} contradicts {llama.source}, which says {llama.id}: a model made from a Llama keeps its "
            "licence; drop --licence"
        )
    if len(matching) > 1:
        named = ", ".join(f"{licence.id} in {licence.source}" for licence in found)
        raise UserError(
            f"{lineage.folder}: licences contradict each other ({named}); pass --licence ID with the right one"
        )
    if given is None and not found:
        raise UserError(
            f"{lineage.folder}: the base's licence is not known (no `license` in a README.md, no known LICENSE, there "
            "or with the base); pass --licence ID, such as apache-2.0, llama3.2 or other"
        )
    licence = matching[0] if matching else _with_text(Licence(str(given), "the publisher"), lineage)
    if licence.lacks_text:
        asks = f"the {licence.terms.title} (section 1.b.i)" if licence.terms else "licence `other`"
        where = f" ({licence.terms.text})" if licence.terms else ""
        raise UserError(f"{lineage.folder}: {asks} asks for its text; put it into {lineage.folder / 'LICENSE'}{where}")
    return licence


def check_name(repo_id: str, licence: Licence) -> None:
    """Raise UserError unless a repository's name begins as its licence asks (section 1.b.i of Llama 3 and later).

    The Hub allows no space in names, so "Llama 3" may be written Llama-3, Llama_3, Llama.3 or Llama3.
    """
    if licence.terms is None or licence.terms.begins is None:
        return
    begins = licence.terms.begins
    owner, slash, name = repo_id.rpartition("/")
    if not re.match(re.escape(begins).replace(r"\ ", "[-_.]?") + r"(?!\d)", name):
        raise UserError(
            f"--repo-id {repo_id}: the {licence.terms.title} (section 1.b.i) asks that the model's name begin with "
            f'"{begins}"; rename it, for example to {owner}{slash}{begins.replace(" ", "-")}-{name}'
        )


def _named_in(place: Path, owner: str) -> list[Licence]:
    """The licences that the card and the LICENSE files of a folder name."""
    metadata, found = _front_matter(place), []
    given = metadata.get("license")
    given = given[0] if isinstance(given, list) and len(given) == 1 else given
    if isinstance(given, str):
        name, link = (str(metadata[key]) if metadata.get(key) else None for key in ("license_name", "license_link"))
        # Llama 3 was "other" before the Hub listed it.
        chosen = str(name) if name in LLAMA and given.lower() == "other" else given.lower()
        if chosen != "unknown" and _LICENCE_ID.fullmatch(chosen):
            named = (name, link) if chosen == "other" else (None, None)
            found.append(Licence(chosen, f"the model card of {owner}", *named))
    known = {text: _recognise(text) for text in _texts(place)}
    return found + [Licence(name, f"{text.name} of {owner}") for text, name in known.items() if name]


def _with_text(licence: Licence, lineage: Lineage) -> Licence:
    """The licence with its text, if one of the folders has it. A Llama's text must be recognised."""
    texts = {text: _recognise(text) for _, place in lineage.places for text in _texts(place)}
    recognised = [text for text, known in texts.items() if known == licence.id]
    unknown = [] if licence.terms else [text for text, known in texts.items() if known is None]
    file = next(iter(recognised + unknown), None)
    name, link = licence.name, licence.link
    if licence.id == "other" and (link or file):  # the Hub wants a name and a link
        name, link = name or "see-license-link", link or file.name
    return Licence(licence.id, licence.source, name, link, file)


def _texts(place: Path) -> list[Path]:
    texts = sorted(file for file in place.glob("LICEN[CS]E*") if file.is_file())
    check_links(place, texts)  # what a link leads to would be published
    return texts


def _recognise(file: Path) -> str | None:
    """The licence whose title a file begins with."""
    top = " ".join(file.read_text(encoding="utf-8-sig", errors="replace")[:400].replace("*", " ").split())
    if llama := re.search(r"\bLLAMA (\d(?:\.\d)?) COMMUNITY LICENSE", top, re.IGNORECASE):
        name = f"llama{llama[1]}"
        return name if name in LLAMA else None
    if re.search(r"\bApache License,? Version 2\.0", top, re.IGNORECASE):
        return "apache-2.0"
    return "mit" if re.match(r"(?:The )?MIT License\b", top, re.IGNORECASE) else None
