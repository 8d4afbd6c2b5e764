"""Publishing a model: check its files, load it in a clean process, write its card, upload it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import check_links, write_json, write_text
from moh_llm.hub.card import build_card
from moh_llm.hub.checks import (
    CARD,
    RECORDS,
    Problem,
    check_files,
    check_secrets,
    list_files,
    other_code,
    scrub,
    scrub_json,
)
from moh_llm.hub.config import PublishConfig
from moh_llm.hub.licences import Licence, check_name, find_licence, notice
from moh_llm.hub.lineage import Lineage, read_lineage
from moh_llm.hub.proof import Proof, prove
from moh_llm.hub.upload import UploadedFile, check_repo_id, describe, find_token, push, upload_copy
from moh_llm.records.conversion import NAME as CONVERSION
from moh_llm.records.identity import hash_model
from moh_llm.records.model import read_moh_config
from moh_llm.records.seal import NAME as SEAL
from moh_llm.records.seal import write_seal
from moh_llm.terminal import say


@dataclass(frozen=True)
class Publication:
    """What was published or, after a dry run, would be.

    Attributes:
        repo_id: the repository.
        url: its address, with the branch if one was named; None after a dry run.
        commit: the commit of the upload; None after a dry run.
        files: the uploaded files.
        scrubbed: names of the files in which local paths were cut to their last component.
        problems: what the checks found and `force` or `allow_other_code` let pass.
        proof: the result of loading the files in a clean process.
        card: after a dry run, where the card is.
    """

    repo_id: str
    url: str | None
    commit: str | None
    files: list[UploadedFile]
    scrubbed: list[str]
    problems: list[Problem]
    proof: Proof
    card: Path | None = None


def check_publishable(repo_id: str, lineage: Lineage, licence: str | None = None) -> None:
    """Check, before a model is made, what would prevent its publication; the Hub is not contacted.

    Args:
        repo_id: the repository.
        lineage: the model's; its folder may be that of the model that it will be made from.
        licence: the licence that the user names.

    Raises:
        UserError: the repository's name is invalid or not one that the licence allows, there is no token, or the
            licence or its text is not known.
    """
    check_repo_id(repo_id)
    find_token()
    check_name(repo_id, find_licence(lineage, licence).id)


def publish(options: PublishConfig, say: Callable[[str], None] = say) -> Publication:
    """Check a model's folder, load it in a clean process, and upload it with its card. The folder is not changed.

    Code that is not this version's own is not run unless `allow_other_code` is set; without it the proof is skipped.
    A dry run goes on to the proof after a failed check.

    Args:
        options: what to publish, and where.
        say: gets one line for each step and result.

    Raises:
        UserError: a check or the proof failed, the folder holds no such model, the card cannot be made, there is no
            token, or the upload fails. Nothing is uploaded in the first four cases.
    """
    check_repo_id(options.repo_id)
    _check_model(options.folder)
    token = None if options.dry_run else find_token()
    files, unlisted = list_files(options.folder)
    check_links(options.folder, [options.folder / name for name in files])
    # Also in the card and in the paths that the copy below does not have.
    secrets = check_secrets(options.folder, files)
    lineage = read_lineage(options.folder, options.run)
    if lineage.changed and not options.drop_records:
        raise UserError(
            f"{options.folder} is not what its records describe: {lineage.changed}; restore it, or pass --drop-records "
            "to publish it without the figures of these records"
        )
    files = [name for name in files if name != SEAL and not (lineage.changed and name in RECORDS)]
    licence = find_licence(lineage, options.licence)
    with upload_copy(options.folder, files, _added(options, files, lineage, licence)) as (copy, scrubbed):
        say(f"checking {options.folder}" + (f"; {lineage.note}" if lineage.note else ""))
        _write_notice(copy, licence)
        if lineage.changed and lineage.conversion:
            write_json(copy / CONVERSION, scrub_json(lineage.conversion.content()))
        dropped = [f"records: {lineage.changed}; the figures of these records are left out"] if lineage.changed else []
        _write_card(copy, options, dropped)
        problems = list(dict.fromkeys(unlisted + secrets + check_files(copy)))
        others = other_code(copy)
        refused = [] if options.allow_other_code else others
        fault = _fault(refused + problems, options.force)
        proof = None
        if not refused and (fault is None or options.dry_run):
            say("loading it in a clean process, without moh_llm")
            proof = prove(copy, options.folder)
            if proof.failure and not options.force:
                fault = fault or f"the proof failed: {proof.failure}; fix it, or pass --force (the card then says so)"
        problems = others + problems
        if options.force or (others and options.allow_other_code):
            # Files that are not part of the model are not uploaded, so the card does not mention them.
            forced = [f"check: {problem.file} {problem.what}" for problem in problems if problem not in unlisted]
            forced += [f"proof: {proof.failure}"] if proof is not None and proof.failure else []
            _write_card(copy, options, dropped + forced)
        if copy.is_dir():  # `describe` tells who removed it
            write_seal(copy, hash_model(copy))
        uploaded = describe(copy)
        for line in _report(uploaded, scrubbed, problems, proof):
            say(line)
        if fault is not None or proof is None:
            raise UserError(f"{options.folder} {'would not be' if options.dry_run else 'is not'} published: {fault}")
        url = commit = card = None
        if token is None:
            card = options.folder.resolve().with_name(f"{options.folder.resolve().name}.card.md")
            write_text(card, (copy / CARD).read_text(encoding="utf-8"))
            say(f"nothing was sent; the card is {card}")
        else:
            url, commit = push(copy, uploaded, options.repo_id, token, options.private, options.revision, say)
            say(f"published: {url}")
        return Publication(options.repo_id, url, commit, uploaded, scrubbed, problems, proof, card)


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "model" / "config.json").is_file():
            raise UserError(f"{folder} is a training run; publish {folder / 'model'}, with --run {folder}")
        raise UserError(f"{folder} holds no config.json; name a folder that moh-llm convert or train made")
    read_moh_config(folder)


def _added(options: PublishConfig, files: list[str], lineage: Lineage, licence: Licence) -> dict[str, Path]:
    """Files to upload beside the model's own, by the name that they get: records, and the base's licence."""
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


def _write_notice(copy: Path, licence: Licence) -> None:
    """Add the notice that the licence prescribes to NOTICE, unless it is there."""
    place, wanted = copy / "NOTICE", notice(licence.id)
    present = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
    if wanted and " ".join(wanted.split()) not in " ".join(present.split()):
        write_text(place, f"{present.rstrip()}\n\n{wanted}".lstrip())


def _write_card(copy: Path, options: PublishConfig, forced: list[str]) -> None:
    card = build_card(
        options.folder,
        options.repo_id,
        options.run,
        options.evaluation,
        forced=forced,
        licence=options.licence,
        revision=options.revision,
    )
    write_text(copy / CARD, scrub(card))


def _fault(problems: list[Problem], force: bool) -> str | None:
    """Why the checks refuse the publication; None if they do not."""
    stopping = [problem for problem in problems if not (force and problem.forceable)]
    more = f" (and {len(stopping) - 1} more)" if len(stopping) > 1 else ""
    return f"{stopping[0]}{more}" if stopping else None


def _report(files: list[UploadedFile], scrubbed: list[str], problems: list[Problem], proof: Proof | None) -> list[str]:
    """The files and the results of checks and proof, as lines to print."""
    width, digits = max(len(file.name) for file in files), max(len(f"{file.size:,}") for file in files)
    lines = [f"{'file':<{width}}  {'bytes':>{digits}}  SHA-256"]
    lines += [f"{file.name:<{width}}  {file.size:>{digits},}  {file.sha256[:12]}" for file in files]
    if scrubbed:
        lines.append(f"local paths cut to their last component: {', '.join(scrubbed)}")
    lines.append(f"checks: {f'{len(problems)} failed' if problems else 'passed'}")
    lines += [f"  {problem}" for problem in problems]
    if proof is None:
        return [*lines, "proof: not run, because a check failed"]
    if proof.failure:
        return [*lines, f"proof: FAILED, {proof.failure}"]
    seen = proof.record
    return [
        *lines,
        f"proof: in a clean process, the logits of {seen['texts']} texts ({seen['tokens']} tokens) and the generated "
        f"tokens equal the local model's bit for bit ({seen['dtype']}, transformers "
        f"{seen['versions']['transformers']}, {seen['seconds']} s)",
        f"  generated: {seen['generated'][0]!r}",
    ]
