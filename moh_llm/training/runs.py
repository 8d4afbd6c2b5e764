"""The folder of a run: who may write there, what is recorded, and the log of its steps.

OUTPUT/run.json      recipe, model, data, versions; when finished also tokens, seconds, scores
       log.jsonl     one line per step; everything but ``timing`` repeats exactly on resume
       checkpoints/  see `moh_llm.training.checkpoints`
       milestones/   see `moh_llm.training.checkpoints`
       model/        the tuned model
       tensorboard/  see `moh_llm.training.log`
       report/       what `moh-llm report` makes
"""

import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moh_llm import __version__
from moh_llm.errors import UserError
from moh_llm.files import check_holds_none, sha256, write_json, write_text
from moh_llm.locking import INSIDE
from moh_llm.reading import parse_json
from moh_llm.records.model import identify, read_config
from moh_llm.records.run import LogLine, RunRecord
from moh_llm.training.config import TrainConfig, changed_keys

RECORD, TRACKERS = "run.json", "tensorboard"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")


class Run:
    """A run's folder, opened anew or to resume.

    Args:
        config: the recipe; ``config.output_dir`` is the folder.
        overwrite: start anew, removing what an earlier run wrote there (and nothing else).
        writes: whether this process is the one that writes; of several only one does.

    Raises:
        UserError: the folder cannot be used, holds something that is no run, or holds a run with
            another recipe or another model.
    """

    def __init__(self, config: TrainConfig, overwrite: bool = False, writes: bool = True):
        self._writes = writes
        self.folder = Path(config.output_dir)
        self.model = self.folder / "model"
        self.checkpoints, self.milestones = self.folder / "checkpoints", self.folder / "milestones"
        self._record_path, self._log_path = self.folder / RECORD, self.folder / "log.jsonl"
        check_converted(Path(config.model))
        identity = identify(config.model).sha256
        # Through JSON, so that a fresh recipe compares equal to a recorded one (tuples, lists).
        recipe = json.loads(json.dumps(asdict(config)))

        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"output_dir={self.folder} is a file; name a folder")
        if overwrite:
            # `--model RUN/model --output_dir RUN` would remove the model before it is read.
            check_holds_none(self.folder, [config.model])
            self._remove()
        if self._record_path.exists():
            self.record: dict[str, Any] = RunRecord.read(self._record_path).content()
            self._check_same(recipe, identity)
            self.record["config"] = recipe
            return
        if self.folder.exists() and any(path.name != INSIDE for path in self.folder.iterdir()):
            raise UserError(
                f"output_dir={self.folder} is not empty and holds no run.json to resume; "
                "name another folder or pass --overwrite"
            )
        self.record = {"status": "new", "config": recipe, "model": {"sha256": identity}}

    @property
    def finished(self) -> bool:
        """Whether the run was already carried to its end, by its record; see `model_fault`."""
        return self.record["status"] == "finished"

    def model_fault(self) -> str | None:
        """Which file of a finished run's model is missing or has other bytes; None where it is whole."""
        files = self.record.get("model_files")
        if files is None:
            return f"{RECORD} does not say which files it has"
        return find_fault(self.model, files)

    def begin(self, data: dict[str, Any], facts: dict[str, Any]) -> None:
        """Record the start, or check on resume that the data are those of the start.

        Args:
            data: what identifies the tokenised mixture.
            facts: anything else worth recording (device, parameter counts).

        Raises:
            UserError: the data are not those that the run began with, or the disk refuses.
        """
        if self.record.get("data", data) != data:
            raise UserError(
                f"the text of data.mixture={self.record['config']['data']['mixture']} is not what the run in "
                f"{self.folder} began with; restore it, name a new --output_dir, or pass --overwrite to start anew"
            )
        versions = {"moh_llm": __version__, "python": platform.python_version()}
        versions |= {name: version(name) for name in PACKAGES}
        self.record |= {"status": "running", "data": data, "versions": versions} | facts
        if not self._writes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make output_dir={self.folder}: {error.strerror}; name another folder") from error
        write_json(self._record_path, self.record)

    def finish(self, facts: dict[str, Any], model_files: dict[str, Any]) -> None:
        """Record the end, after reading the model back.

        Args:
            facts: what to record.
            model_files: marks of the model's files, taken when they were written (`mark_files`); none on processes
                that write nothing.

        Raises:
            UserError: the model on disk is not what was written.
        """
        if self._writes and (fault := find_fault(self.model, model_files)):
            raise UserError(f"{self.model} is not what was written: {fault}; give the same command again")
        self.record |= {"status": "finished", "model_files": model_files} | facts
        if self._writes:
            write_json(self._record_path, self.record)

    def trim_log(self, step: int) -> list[dict[str, Any]]:
        """Drop the log's lines past ``step``, since those steps are made again, and return the others.

        Raises:
            UserError: a line is no line of a log, other than a last one that a kill cut short.
        """
        kept = [line for line in self._read_log() if line["step"] <= step]
        if self._writes:
            write_text(self._log_path, "".join(json.dumps(line) + "\n" for line in kept))
        return kept

    def _read_log(self) -> Iterator[dict[str, Any]]:
        lines = self._log_path.read_bytes().splitlines(keepends=True) if self._log_path.exists() else []
        for number, text in enumerate(lines, start=1):
            if not text.endswith(b"\n"):
                return  # cut short by a kill
            where = f"{self._log_path} line {number}"
            try:
                yield LogLine.of(parse_json(text.decode("utf-8", "replace"), where), where).content()
            except UserError as error:
                raise UserError(f"{error}; restore the log, or pass --overwrite to start anew") from error

    def log(self, line: dict[str, Any]) -> None:
        """Append one line to the log; it is out of this process's hands when this returns."""
        if not self._writes:
            return
        try:
            with self._log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {self._log_path}: {error.strerror}; free some space and start again"
            ) from error

    def _check_same(self, recipe: dict[str, Any], identity: str) -> None:
        try:
            changed = changed_keys(self.record["config"], recipe)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{self._record_path}: its config is no recipe ({error}); change --output_dir") from error
        if self.record["model"]["sha256"] != identity:
            changed.insert(0, "model (other config, tokenizer or weights)")
        if changed:
            raise UserError(
                f"output_dir={self.folder} holds a run with another recipe; different: {', '.join(changed)}. "
                "Put them back to resume, name a new --output_dir, or pass --overwrite to start anew"
            )

    def _remove(self) -> None:
        # The record goes last: an interrupted removal still reads as a run.
        for path in (self.model, self.checkpoints, self.milestones, self.folder / TRACKERS, self.folder / "report"):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self._log_path, self._record_path):
            path.unlink(missing_ok=True)


def mark_files(folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of each file of a folder, by name."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}


def find_fault(folder: Path, files: Mapping[str, Any]) -> str | None:
    """Which of ``files``, as `mark_files` gave them, is missing or has other bytes; None: they are as they were."""
    for name, mark in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != mark["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {mark['bytes']} were written"
        if sha256(path) != mark["sha256"]:
            return f"the bytes of {name} are not those that were written"
    return None


def check_converted(folder: Path) -> None:
    """Raise UserError unless a folder's config is a MoH model's."""
    if not folder.is_dir():
        raise UserError(f"model={folder} is not a folder; name one that moh-llm convert made")
    if not (folder / "config.json").is_file():
        raise UserError(f"model={folder} holds no config.json; name a folder that moh-llm convert made")
    kind = read_config(folder).get("model_type")
    if kind != "moh_llama":
        raise UserError(f"model={folder} has model_type={kind}, not moh_llama; convert it first (moh-llm convert)")
