"""Publishing a model: check its files, load it in a clean process, write its card, upload it in one commit.

The model of a training run is checked before the run begins, and published at its end.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moh_llm.errors import UserError
from moh_llm.files import check_links, write_text
from moh_llm.hub.card import build_card, write_local_card
from moh_llm.hub.checks import CARD, REPLACED, check_files, list_files, redact, upload_copy
from moh_llm.hub.config import PublishConfig
from moh_llm.hub.lineage import Licence, Lineage, check_terms, find_licence, read_lineage
from moh_llm.hub.proof import Proof, prove
from moh_llm.records.identity import hash_model
from moh_llm.records.model import is_moh, read_config, read_moh_config
from moh_llm.records.seal import write_seal
from moh_llm.terminal import say
from moh_llm.training.config import TrainConfig
from moh_llm.training.runs import check_converted

_RESUME = "run the same command again to resume"


@dataclass(frozen=True)
class Publication:
    """What was published, or would be after a dry run.

    Attributes:
        repo_id: the repository.
        url: its address, with the branch if one was named; None after a dry run.
        commit: the commit of the upload; None after a dry run.
        files: sizes in bytes of the uploaded files, by name.
        proof: the result of loading the files in a clean process.
        card: after a dry run, where the card is.
    """

    repo_id: str
    url: str | None
    commit: str | None
    files: dict[str, int]
    proof: Proof
    card: Path | None = None


def publish(options: PublishConfig, say: Callable[[str], None] = say) -> Publication:
    """Check a model's folder, load it in a clean process, and upload it with its card. The folder is not changed.

    ``say`` gets one line for each step and result.

    Raises:
        UserError: a check or the proof failed, the folder holds no MoH model, the card cannot be made, or there is no
            token, and nothing was uploaded; or the upload failed.
    """
    folder = options.folder
    check_repo_id(options.repo_id)
    is_dit = "_class_name" in read_moh_config(folder)
    token = None if options.dry_run else find_token()
    files, problems = list_files(folder)
    check_links(folder, [folder / name for name in files])
    lineage = read_lineage(folder)
    licence = find_licence(lineage, options.licence)
    with upload_copy(folder, files, _added_files(options, files, lineage, licence)) as copy:
        say(f"checking {folder}")
        _write_notice(copy, licence)
        card = build_card(folder, options.repo_id, options.evaluation, options.licence, options.revision)
        write_text(copy / CARD, card)
        # Before the proof, which runs the code in the folder.
        if problems := [*problems, *check_files(copy)]:
            for problem in problems:
                say(f"  {problem}")
            more = f" (and {len(problems) - 1} more, see above)" if len(problems) > 1 else ""
            raise UserError(f"{folder} is not published: {problems[0]}{more}")
        say(f"loading it in a clean process, {'with' if is_dit else 'without'} moh_llm")
        proof = prove(copy, folder)
        if proof.failure:
            raise UserError(f"{folder} is not published: the proof failed: {proof.failure}")
        write_seal(copy, hash_model(copy))
        paths = sorted(path for path in copy.rglob("*") if path.is_file())
        uploaded = {path.relative_to(copy).as_posix(): path.stat().st_size for path in paths}
        width, seen = max(map(len, uploaded)), proof.record
        for name, size in uploaded.items():
            say(f"{name:<{width}}  {size:>14,} bytes")
        say("checks: passed")
        say(
            f"proof: in a clean process, {seen['compared']} equal the local model's bit for bit "
            f"({seen['dtype']}, transformers {seen['versions']['transformers']}, {seen['seconds']} s)"
        )
        if token is None:
            place = folder.resolve().with_name(f"{folder.resolve().name}.card.md")
            write_text(place, card)
            say(f"nothing was sent; the card is {place}")
            return Publication(options.repo_id, None, None, uploaded, proof, place)
        size = sum(uploaded.values())
        say(f"uploading {len(uploaded)} files, {size / 1e6:,.1f} MB, to {options.repo_id}")
        url, commit = push(copy, options.repo_id, token, options.private, options.revision)
        say(f"published: {url}")
        return Publication(options.repo_id, url, commit, uploaded, proof)


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


# ---- the model of a training run


def check_hub(config: TrainConfig) -> None:
    """Raise UserError for what would prevent publishing the run's model; the Hub is not contacted."""
    if config.hub is None:
        return
    start = Path(config.model)
    (check_converted if config.images is None else read_moh_config)(start)
    try:
        check_repo_id(config.hub.repo_id)
        find_token()
        # The tuned model inherits the conversion's record, not that of an earlier run.
        licence = find_licence(Lineage(start, read_lineage(start).conversion, None))
        check_terms(licence, config.hub.repo_id, start)
    except UserError as error:
        way_out = "leave out hub, and publish the tuned model by moh-llm publish --licence ID"
        message = str(error).replace("pass --licence ID", way_out).replace("--repo-id", "--hub.repo_id")
        raise UserError(message) from error


def finish_run(config: TrainConfig) -> None:
    """Write the card of a finished run's model, unless it has one, and publish the model if the recipe says so.

    Dense models, which runs on images may train, have no card. A card that cannot be written is printed. Raises
    UserError, with the command that tries again, for a model that cannot be published.
    """
    model = Path(config.output_dir) / "model"
    if is_moh(read_config(model)) and not (model / CARD).exists():
        try:
            write_local_card(model)
        except UserError as error:
            say(f"{model / CARD} was not written: {error}")
    if config.hub is None:
        return
    try:
        publish(PublishConfig(model, config.hub.repo_id))
    except UserError as error:
        again = shlex.join(["moh-llm", "publish", str(model), "--repo-id", config.hub.repo_id])
        raise UserError(
            f"training is finished, its model is {model}; publishing it failed: {error}; try again with `{again}`"
        ) from error


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
    other files stay. With ``private`` a repository that is public already is refused. ``revision`` is a branch
    (default: main).

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
        stale = filter_repo_objects(api.list_repo_files(repo_id, revision=revision), allow_patterns=REPLACED)
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
    if status == 401:
        return f"the Hub does not accept the token, or {repo_id} does not exist ({message}); run `hf auth login`"
    if status in (403, 404):
        return f"the token may not write to {repo_id} ({message}); use one that may, or name another owner"
    if status is not None and (status == 429 or status >= 500):
        return f"the Hub cannot answer now ({message}); {_RESUME} later"
    return f"the Hub refuses {repo_id}: {message}"
