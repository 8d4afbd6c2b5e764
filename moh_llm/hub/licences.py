"""The licence that a model inherits from its base, and the conditions of Llama licences for passing a model on.

The conditions are those of section 1.b of ``LICENSE`` in github.com/meta-llama/llama (Llama 2) and
github.com/meta-llama/llama3, and of ``models/llama3_1/LICENSE`` to ``models/llama4/LICENSE`` in
github.com/meta-llama/llama-models.
"""

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import check_links
from moh_llm.hub.lineage import Lineage, front_matter

_LISTED = "https://huggingface.co/docs/hub/repositories-licenses"
# The ids of `_LISTED`. huggingface_hub has no list: the Hub's validator checks ids during an upload, and a wrong id
# must be reported before a model is trained. "unknown", which the Hub accepts, is left out.
_IDS = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl openmdw-1.0
openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 grok2-community gemma other
"""
IDS = frozenset(_IDS.split())


@dataclass(frozen=True)
class LlamaTerms:
    """The conditions of a Llama licence for passing on a model that is made from a Llama.

    Attributes:
        model, title: what the licence calls the model and itself.
        policy, text: addresses of the acceptable use policy (1.b.iv) and of the licence.
        begins: how the model's name must begin (last sentence of 1.b.i); None: no condition.
        closed: whether 1.b.v forbids to improve other language models with the model or its outputs.
    """

    model: str
    title: str
    policy: str
    text: str
    begins: str | None = "Llama"
    closed: bool = False

    @property
    def shown(self) -> str | None:
        """The words to display (1.b.i); None: none."""
        return f"Built with {self.model if self.closed else 'Llama'}" if self.begins else None

    @property
    def notice(self) -> str:
        """The content of the text file "Notice" (1.b.iii)."""
        title, sign = (self.title, "©") if self.begins else (self.title.replace("Llama", "LLAMA"), "(c)")
        return f"{self.model} is licensed under the {title}, Copyright {sign} Meta Platforms, Inc. All Rights Reserved."


def _later(version: str, host: str) -> LlamaTerms:
    """The terms of Llama 3.1 and later, which differ in their version only."""
    name = f"llama{version.replace('.', '_')}"
    text = f"https://github.com/meta-llama/llama-models/blob/main/models/{name}/LICENSE"
    policy = f"https://{host}/{name}/use-policy"
    return LlamaTerms(f"Llama {version}", f"Llama {version} Community License", policy, text)


LLAMA = {
    "llama2": LlamaTerms(
        "Llama 2",
        "Llama 2 Community License",
        "https://ai.meta.com/llama/use-policy",
        "https://github.com/meta-llama/llama/blob/main/LICENSE",
        begins=None,
        closed=True,
    ),
    "llama3": LlamaTerms(
        "Meta Llama 3",
        "Meta Llama 3 Community License",
        "https://llama.meta.com/llama3/use-policy",
        "https://github.com/meta-llama/llama3/blob/main/LICENSE",
        begins="Llama 3",
        closed=True,
    ),
    "llama3.1": _later("3.1", "llama.meta.com"),
    "llama3.2": _later("3.2", "www.llama.com"),
    "llama3.3": _later("3.3", "www.llama.com"),
    "llama4": _later("4", "www.llama.com"),
}


@dataclass(frozen=True)
class Licence:
    """A licence and where it was found.

    Attributes:
        id: one of `IDS`.
        source: what says so, without a path; of several the one nearest to the base.
        name, link: of a licence whose id is "other".
        file: its text; None if none lies with the model or its base.
    """

    id: str
    source: str
    name: str | None = None
    link: str | None = None
    file: Path | None = None


def recorded_licences(lineage: Lineage) -> list[Licence]:
    """The licences that files name for a model: none, one, or several that contradict each other.

    They are the `license` of a ``README.md`` and the first lines of a ``LICENSE`` file in the folders of the model, of
    the model that training began with, and of the base, if it is on this machine.
    """
    found = [licence for whose, place in lineage.places for licence in _found_in(place, whose)]
    ids = dict.fromkeys(licence.id for licence in found)
    return [_merged(chosen, [licence for licence in found if licence.id == chosen], lineage) for chosen in ids]


def find_licence(lineage: Lineage, given: str | None = None) -> Licence:
    """The licence under which a model may be published, with its text if that must be published with it.

    Args:
        lineage: the model's.
        given: the id that the user names, for a model whose files name none or several.

    Raises:
        UserError: no licence is found, or several; ``given`` is not an id of the Hub, or contradicts a Llama licence
            that is found; the text of a Llama's or an unlisted licence is missing.
    """
    if given is not None and given not in IDS:
        near = difflib.get_close_matches(given.lower(), IDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"see {_LISTED}"
        raise UserError(f"--licence {given} is no licence id of the Hub; {hint}")
    found = recorded_licences(lineage)
    same = [licence for licence in found if given in (None, licence.id)]
    llama = [licence for licence in found if licence.id in LLAMA]
    if llama and not same:
        raise UserError(
            f"--licence {given} contradicts {llama[0].source}, which says {llama[0].id}: a model made from a Llama "
            "keeps its licence; drop --licence"
        )
    if len(same) > 1:
        raise UserError(
            f"{lineage.folder}: licences contradict each other ({', '.join(f'{x.id} in {x.source}' for x in found)}); "
            "pass --licence ID with the right one"
        )
    if given is None and not found:
        raise UserError(
            f"{lineage.folder}: the base's licence is not known (no `license` in a README.md, no LICENSE that is "
            "recognised, there or with the base); pass --licence ID, such as apache-2.0, llama3.2 or other"
        )
    licence = same[0] if same else _merged(str(given), [], lineage)
    if lacks_text(licence):
        place = lineage.folder / "LICENSE"
        if terms := LLAMA.get(licence.id):
            raise UserError(
                f"{lineage.folder}: the {terms.title} (section 1.b.i) asks for a copy of it; put the text into "
                f"{place} ({terms.text})"
            )
        raise UserError(f"{lineage.folder}: licence `other` needs its text; put it into {place}")
    return licence


def lacks_text(licence: Licence) -> bool:
    """Whether the text of a licence that must be published with the model is missing."""
    return licence.file is None and (licence.id in LLAMA or (licence.id == "other" and not licence.link))


def check_name(repo_id: str, licence: str) -> None:
    """Raise UserError unless a repository's name begins as its licence asks (section 1.b.i of Llama 3 and later).

    The Hub allows no space in names, so "Llama 3" may be written Llama-3, Llama_3, Llama.3 or Llama3.
    """
    terms = LLAMA.get(licence)
    if terms is None or terms.begins is None:
        return
    owner, slash, name = repo_id.rpartition("/")
    pattern = re.escape(terms.begins).replace(r"\ ", "[-_.]?")
    if not re.match(pattern + r"(?!\d)", name):
        raise UserError(
            f"--repo-id {repo_id}: the {terms.title} (section 1.b.i) asks that the model's name begin with "
            f'"{terms.begins}"; rename it, for example to {owner}{slash}{terms.begins.replace(" ", "-")}-{name}'
        )


def notice(licence: str) -> str | None:
    """The text of the NOTICE file that a licence prescribes (section 1.b.iii of the Llama licences), if any does."""
    return LLAMA[licence].notice + "\n" if licence in LLAMA else None


def duties(licence: Licence) -> list[str]:
    """The licence's conditions for passing the model on, a sentence of Markdown each; empty for most licences."""
    terms = LLAMA.get(licence.id)
    if terms is None:
        return []
    copy = f", `{licence.file.name}`" if licence.file else ""
    asked = [f"Pass on a copy of the [{terms.title}]({terms.text}){copy} (section 1.b.i)."]
    if terms.begins:
        asked.append(f'Display "{terms.shown}" prominently where the model is offered or documented (1.b.i).')
        asked.append(f'Begin the name of any model made with this one with "{terms.begins}" (1.b.i).')
    asked.append("Pass on the attribution that it prescribes, in a text file `NOTICE` (1.b.iii).")
    asked.append(f"Follow the [acceptable use policy]({terms.policy}) (1.b.iv).")
    if terms.closed:
        asked.append(
            "Do not use the model or its outputs to improve a large language model other than "
            f"{terms.model} and its derivatives (1.b.v)."
        )
    return asked


def _merged(chosen: str, same: list[Licence], lineage: Lineage) -> Licence:
    """One licence of what several files say of it (``same``: the model's own first, the base's last)."""
    texts = [licence.file for licence in same if licence.file]
    if not texts and chosen not in LLAMA:  # a Llama's text must be recognised
        texts = [text for _, place in lineage.places for text in _texts(place) if _recognise(text) in (None, chosen)]
    licence = Licence(
        chosen,
        same[-1].source if same else "the publisher",
        next((licence.name for licence in same if licence.name), None),
        next((licence.link for licence in same if licence.link), None),
        texts[0] if texts else None,
    )
    if chosen == "other" and not lacks_text(licence):  # the Hub wants a name and a link
        link = licence.link or (licence.file.name if licence.file else None)
        return replace(licence, name=licence.name or "see-license-link", link=link)
    return licence


def _found_in(place: Path, whose: str) -> list[Licence]:
    """The licences that the card and the licence files of a folder name; ``whose`` folder it is."""
    metadata, found = front_matter(place), []
    given = metadata.get("license")
    given = given[0] if isinstance(given, list) and len(given) == 1 else given
    if isinstance(given, str):
        name, link = (str(metadata[key]) if metadata.get(key) else None for key in ("license_name", "license_link"))
        # Before the Hub listed them, Llama 3 was "other" with its id as the name.
        chosen = name if given.lower() == "other" and name in IDS else given.lower()
        if chosen in IDS:
            named = (name, link) if chosen == "other" else (None, None)
            found.append(Licence(chosen, f"the model card of {whose}", *named))
    texts = [(text, _recognise(text)) for text in _texts(place)]
    return found + [Licence(known, f"{text.name} of {whose}", file=text) for text, known in texts if known]


def _texts(place: Path) -> list[Path]:
    texts = sorted(file for file in place.glob("LICEN[CS]E*") if file.is_file())
    check_links(place, texts)  # what they lead to would be published
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
