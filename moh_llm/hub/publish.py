"""Publishing a model: check its files, prove that they load anywhere, write the card, upload."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import write_text
from moh_llm.hub.card import build_card
from moh_llm.hub.checks import CARD, Problem, check_files, check_secrets, list_files, other_code
from moh_llm.hub.licences import Licence, check_name, find_licence, notice
from moh_llm.hub.lineage import Lineage, read_lineage
from moh_llm.hub.proof import Proof, prove
from moh_llm.hub.upload import Stage, StagedFile, check_repo_id, describe, find_token, push, staged
from moh_llm.records.model import read_config


@dataclass(frozen=True)
class PublishOptions:
    """One publication.

    Attributes:
        folder: the model.
        repo_id: ``ORG/NAME`` on the Hub.
        private, revision: see `push`.
        dry_run: do everything but send; nothing is asked of the Hub.
        force: go on where a check or the proof fails, and say so in the card. A secret stops it all
            the same; files that are no part of a model are left behind.
        run: folder of the training run, for the card and its record.
        evaluation: folder of an evaluation, for the card and its record.
        licence: the Hub's id of the model's licence, where the card cannot tell it.
        allow_other_code: run and publish Python files that are not this version's own, and say so in the card.
    """

    folder: Path
    repo_id: str
    private: bool = False
    revision: str | None = None
    dry_run: bool = False
    force: bool = False
    run: Path | None = None
    evaluation: Path | None = None
    licence: str | None = None
    allow_other_code: bool = False


@dataclass(frozen=True)
class Publication:
    """What was published, or would be.

    Attributes:
        files: all of it.
        scrubbed: files in which paths of this machine were cut to their last component.
        problems: what the checks found.
        proof: how loading went; None where the checks stopped the publication before.
        stopped: why nothing was sent, None where nothing speaks against it.
        card: where the card of a dry run can be read.
        url: where it lies, if it was sent.
    """

    files: list[StagedFile]
    scrubbed: list[str]
    problems: list[Problem]
    proof: Proof | None
    stopped: str | None
    card: Path | None = None
    url: str | None = None


def check_publishable(repo_id: str, lineage: Lineage, licence: str | None = None) -> None:
    """Find out before a model is made what would keep it from being published, as far as this machine knows.

    Args:
        repo_id: where it is to go.
        lineage: of the model; its folder may be that of the model it will be made from.
        licence: the user's word.

    Raises:
        UserError: no such repository can be, there is no token, the licence is not known or lacks its text, or it asks
            for another name.
    """
    check_repo_id(repo_id)
    find_token()
    check_name(repo_id, find_licence(lineage, licence).id)


def publish(options: PublishOptions, say: Callable[[str], None] = print) -> Publication:
    """Check, prove and upload a model's folder, which itself stays as it is.

    A dry run goes through checks and proof to the end, whatever they find. Code that is not this version's own is
    never run, unless that is asked for: without, the proof is left out.

    Raises:
        UserError: no such model; the card cannot be made; no token; the upload fails.
    """
    check_repo_id(options.repo_id)
    _check_model(options.folder)
    token = None if options.dry_run else find_token()
    files, unlisted = list_files(options.folder)
    # Before anything is rewritten, and in the card that lies there, which another one replaces.
    first = unlisted + check_secrets(options.folder, files)
    lineage = read_lineage(options.folder, options.run)
    licence = find_licence(lineage, options.licence)
    with staged(options.folder, files, _added(options, files, lineage, licence)) as stage:
        say(f"checking {options.folder}")
        _write_notice(stage, licence)
        _write_card(stage, options, forced=[])
        problems = list(dict.fromkeys(first + check_files(stage.folder)))
        others = other_code(stage.folder)
        refused = [] if options.allow_other_code else others
        stopped = _stop(refused + problems, None, options.force)
        proof = None
        if not refused and (stopped is None or options.dry_run):
            say("loading it in a clean process, without moh_llm")
            proof = prove(stage.folder, options.folder)
            stopped = stopped or _stop(problems, proof, options.force)
        problems = others + problems
        if options.force or (others and options.allow_other_code):
            # What is no part of the model is left behind, so the card has nothing to say of it.
            forced = [f"check: {problem.file} {problem.what}" for problem in problems if problem not in unlisted]
            forced += [f"proof: {proof.failure}"] if proof is not None and proof.failure else []
            _write_card(stage, options, forced)
        published = describe(stage.folder)
        url, card = None, None
        if options.dry_run:
            card = _keep_card(stage, options.folder)
        elif token is not None and stopped is None:
            url = push(stage.folder, published, options.repo_id, token, options.private, options.revision, say=say)
        return Publication(published, stage.scrubbed, problems, proof, stopped, card, url)


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "model" / "config.json").is_file():
            raise UserError(f"{folder} is a training run; publish {folder / 'model'}, with --run {folder}")
        raise UserError(f"{folder} holds no config.json; name a folder that moh-llm convert or train made")
    kind = read_config(folder).get("model_type")
    if kind != "moh_llama":
        raise UserError(f"{folder} has model_type={kind}, not moh_llama; convert it first (moh-llm convert)")


def _added(options: PublishOptions, files: list[str], lineage: Lineage, licence: Licence) -> dict[str, Path]:
    """What goes along with the model's own files, by the name that it gets: records, and the base's licence."""
    added = {}
    if licence.file is not None and licence.file.name not in files:
        added[licence.file.name] = licence.file
    if lineage.run is not None:
        added["run.json"] = lineage.run.folder / "run.json"
    if (evaluation := options.evaluation) is not None:
        added["evaluation.json"] = evaluation / "report.json" if evaluation.is_dir() else evaluation
        if not added["evaluation.json"].is_file():
            raise UserError(f"--evaluation {evaluation} holds no report.json; name a folder that moh-llm evaluate made")
    return added


def _write_notice(stage: Stage, licence: Licence) -> None:
    """Put the notice that the licence prescribes into NOTICE, unless it is there."""
    wanted = notice(licence.id)
    if wanted is None:
        return
    place = stage.folder / "NOTICE"
    present = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
    if " ".join(wanted.split()) not in " ".join(present.split()):
        write_text(place, f"{present.rstrip()}\n\n{wanted}".lstrip())


def _write_card(stage: Stage, options: PublishOptions, forced: list[str]) -> None:
    run, evaluation, licence, revision = options.run, options.evaluation, options.licence, options.revision
    card = build_card(
        options.folder, options.repo_id, run, evaluation, forced=forced, licence=licence, revision=revision
    )
    stage.write_card(card)


def _stop(problems: list[Problem], proof: Proof | None, force: bool) -> str | None:
    """Why nothing must be sent, None where nothing speaks against it."""
    stopping = [problem for problem in problems if not (force and problem.forceable)]
    if stopping:
        more = f" (and {len(stopping) - 1} more)" if len(stopping) > 1 else ""
        return f"{stopping[0]}{more}"
    if proof is not None and proof.failure and not force:
        return f"the proof failed: {proof.failure}; put it right, or pass --force, which the card will tell"
    return None


def _keep_card(stage: Stage, folder: Path) -> Path:
    """Leave the card of a dry run beside the model's folder, which stays as it is."""
    place = folder.resolve().with_name(f"{folder.resolve().name}.card.md")
    write_text(place, (stage.folder / CARD).read_text(encoding="utf-8"))
    return place
