"""Publishing a model: check its files, load it in a clean process, write its card, upload it in one commit."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import check_links, sha256, write_json, write_text
from moh_llm.hub.card import build_card
from moh_llm.hub.checks import (
    CARD,
    RECORDS,
    Problem,
    check_files,
    check_secrets,
    list_files,
    other_code,
    upload_copy,
)
from moh_llm.hub.config import PublishConfig
from moh_llm.hub.lineage import Licence, Lineage, find_licence, read_lineage
from moh_llm.hub.proof import Proof, prove
from moh_llm.hub.secrets import redact, scrub, scrub_json
from moh_llm.records.conversion import CONVERSION
from moh_llm.records.identity import hash_model
from moh_llm.records.model import read_moh_config
from moh_llm.records.seal import SEAL, write_seal
from moh_llm.terminal import say

# Files of an earlier upload that would be loaded beside, or instead of, the new ones.
_REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]
_RESUME = "run the same command again to resume"


@dataclass(frozen=True)
class UploadedFile:
    """A file of an upload: its size in bytes and the SHA-256 of its content in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Publication:
    """What was published, or would be after a dry run.

    Attributes:
        repo_id: the repository.
        url: its address, with the branch if one was named; None after a dry run.
        commit: the commit of the upload; None after a dry run.
        files: the uploaded files.
        scrubbed: names of the files in which local paths were cut to their last component.
        problems: what the checks found, and `force` or `allow_other_code` let pass.
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


def publish(options: PublishConfig, say: Callable[[str], None] = say) -> Publication:
    """Check a model's folder, load it in a clean process, and upload it with its card. The folder is not changed.

    A dry run goes on to the proof after a failed check. Code that is not this version's own is never run, and the
    proof therefore skipped, unless `allow_other_code` is set.

    Args:
        options: what to publish, and where.
        say: gets one line for each step and result.

    Raises:
        UserError: a check or the proof failed, the folder holds no MoH model, the card cannot be made, or there is no
            token, and nothing was uploaded; or the upload failed.
    """
    check_repo_id(options.repo_id)
    _check_model(options.folder)
    token = None if options.dry_run else find_token()
    files, unlisted = list_files(options.folder)
    check_links(options.folder, [options.folder / name for name in files])
    # In the folder itself, whose own card and paths the copy below does not have.
    secrets = check_secrets(options.folder, files)
    lineage = read_lineage(options.folder, options.run)
    if lineage.changed and not options.drop_records:
        raise UserError(
            f"{options.folder} is not what its records describe: {lineage.changed}; restore it, or pass --drop-records "
            "to publish it without the figures of these records"
        )
    files = [name for name in files if name != SEAL and not (lineage.changed and name in RECORDS)]
    licence = find_licence(lineage, options.licence)
    with upload_copy(options.folder, files, _added_files(options, files, lineage, licence)) as (copy, scrubbed):
        say(f"checking {options.folder}")
        _write_notice(copy, licence)
        reservations = []
        if lineage.changed:
            reservations = [f"records: {lineage.changed}; the figures of these records are left out"]
            if lineage.conversion:  # only the base's name is left of it
                write_json(copy / CONVERSION, scrub_json(lineage.conversion.content()))
        _write_card(copy, options, reservations)
        problems = list(dict.fromkeys(unlisted + secrets + check_files(copy)))
        others = other_code(copy)
        refused = [] if options.allow_other_code else others
        fault = _first_fault(refused + problems, options.force)
        proof = None
        if not refused and (fault is None or options.dry_run):
            say("loading it in a clean process, without moh_llm")
            proof = prove(copy, options.folder)
            if proof.failure and not options.force:
                fault = fault or f"the proof failed: {proof.failure}; fix it, or pass --force (the card then says so)"
        problems = others + problems
        if options.force or (others and options.allow_other_code):
            # Files that are not part of the model are not uploaded, so the card does not mention them.
            reservations += [f"check: {problem.file} {problem.what}" for problem in problems if problem not in unlisted]
            reservations += [f"proof: {proof.failure}"] if proof and proof.failure else []
            _write_card(copy, options, reservations)
        uploaded = _seal(copy)
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
            size = sum(file.size for file in uploaded)
            say(f"uploading {len(uploaded)} files, {size / 1e6:,.1f} MB, to {options.repo_id}")
            url, commit = push(copy, options.repo_id, token, options.private, options.revision)
            say(f"published: {url}")
        return Publication(options.repo_id, url, commit, uploaded, scrubbed, problems, proof, card)


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        if (folder / "model" / "config.json").is_file():
            raise UserError(f"{folder} is a training run; publish {folder / 'model'}, with --run {folder}")
        raise UserError(f"{folder} holds no config.json; name a folder that moh-llm convert or train made")
    read_moh_config(folder)


def _added_files(options: PublishConfig, files: list[str], lineage: Lineage, licence: Licence) -> dict[str, Path]:
    """Files to upload beside the model's own, by the name that they get: records and the base's licence."""
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
    """Add the notice that a Llama licence prescribes to NOTICE, unless it is there."""
    if licence.terms is None:
        return
    place, wanted = copy / "NOTICE", f"{licence.terms.notice}\n"
    present = place.read_text(encoding="utf-8", errors="replace") if place.is_file() else ""
    if " ".join(wanted.split()) not in " ".join(present.split()):
        write_text(place, f"{present.rstrip()}\n\n{wanted}".lstrip())


def _write_card(copy: Path, options: PublishConfig, reservations: list[str]) -> None:
    card = build_card(
        options.folder,
        options.repo_id,
        options.run,
        options.evaluation,
        forced=reservations,
        licence=options.licence,
        revision=options.revision,
    )
    write_text(copy / CARD, scrub(card))


def _first_fault(problems: list[Problem], force: bool) -> str | None:
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


def _seal(copy: Path) -> list[UploadedFile]:
    """Write the seal of the copy, and describe its files."""
    write_seal(copy, hash_model(copy))
    paths = sorted(path for path in copy.rglob("*") if path.is_file())
    return [UploadedFile(path.relative_to(copy).as_posix(), path.stat().st_size, sha256(path)) for path in paths]


# ---- the Hub; no message holds the token


def check_repo_id(repo_id: str) -> None:
    """Raise UserError unless a name has the form ``ORG/NAME`` that the Hub accepts."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{repo_id} cannot be a repository: {' '.join(str(error).split())}") from error
    if "/" not in repo_id:
        raise UserError(f"{repo_id} cannot be a repository: it needs an owner, ORG/NAME")


def find_token() -> str:
    """The user's token for the Hub. Raises UserError if there is none, or if HF_HUB_OFFLINE is set."""
    from huggingface_hub import get_token, is_offline_mode

    if is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it")
    token = get_token()
    if token is None:
        raise UserError("there is no token for the Hub; run `hf auth login`, or set HF_TOKEN to one with write access")
    return token


def push(folder: Path, repo_id: str, token: str, private: bool = False, revision: str | None = None) -> tuple[str, str]:
    """Upload a folder in one commit; create repository and branch if absent.

    The commit comes last, so an interrupted upload changes nothing that the repository shows; repeated, it sends only
    the weights that the Hub lacks. Weights and code that the folder does not have are deleted in the same commit;
    other files stay.

    Args:
        folder: the files to upload.
        repo_id: ``ORG/NAME``.
        token: the user's.
        private: make the repository private; one that is public already is refused.
        revision: branch (default: main).

    Returns:
        The address of the upload, and the commit.

    Raises:
        UserError: the Hub refuses, or the connection breaks.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import filter_repo_objects

    api = HfApi(token=token)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    try:
        url = str(api.create_repo(repo_id, private=private or None, exist_ok=True))
        if private and not api.repo_info(repo_id).private:
            raise UserError(f"{repo_id} is public already; make it private on the Hub, or drop --private")
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # Not `upload_folder`, which may make several commits.
        stale = filter_repo_objects(api.list_repo_files(repo_id, revision=revision), allow_patterns=_REPLACED)
        operations = [CommitOperationAdd(name, folder / name) for name in names]
        operations += [CommitOperationDelete(name) for name in stale if name not in names]
        message = "Upload a Mixture-of-Head model"
        commit = api.create_commit(repo_id, operations, commit_message=message, revision=revision)
    # hf_xet reports a refused token as PermissionError; ValueError is a card that the Hub's validator refuses.
    except (HTTPError, ConnectionError, TimeoutError, PermissionError, RuntimeError, ValueError) as error:
        raise UserError(_refusal(repo_id, error)) from error
    return (f"{url}/tree/{revision}" if revision else url), commit.oid


def _refusal(repo_id: str, error: BaseException) -> str:
    """What the Hub answered, in one line without the token, and what to do about it."""
    from huggingface_hub.errors import HfHubHTTPError

    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    answer = next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)
    status = answer.response.status_code if answer else 403 if isinstance(error, PermissionError) else None
    text = (answer and answer.server_message) or ": ".join(dict.fromkeys(filter(None, map(str, causes))))
    message = redact(" ".join(text.split()))[:300]
    if status is None and not isinstance(error, ValueError):
        return f"the connection to the Hub broke ({message}); {_RESUME}"
    if status in (402, 413, 507):
        return f"the Hub has no space for {repo_id} ({message}); free some, or name another owner; {_RESUME}"
    if status == 401:
        return f"the Hub does not accept the token, or {repo_id} does not exist ({message}); run `hf auth login`"
    if status in (403, 404):
        return f"the token may not write to {repo_id} ({message}); use one that may, or name another owner"
    if status is not None and (status == 429 or status >= 500):
        return f"the Hub cannot answer now ({message}); {_RESUME} later"
    return f"the Hub refuses {repo_id}: {message}"
