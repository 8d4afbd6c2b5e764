"""The folder of a run: its record, and the log of its steps.

OUTPUT/run.json      recipe, model, data, versions; when finished also tokens, seconds, scores
       log.jsonl     one line per step; everything but ``timing`` repeats exactly on resume
       checkpoints/  see `moh_llm.training.checkpoints`
       model/        the tuned model
       tensorboard/  see `moh_llm.training.log`
       report.*      what `moh-llm report` makes
"""

import json
import platform
import re
import secrets
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moh_llm import __version__
from moh_llm.data.shards import TokenizedSource
from moh_llm.errors import UserError
from moh_llm.files import check_holds_none, check_place, write_text
from moh_llm.locking import INSIDE
from moh_llm.records.identity import identify
from moh_llm.records.model import is_image_model, read_config, read_moh_config
from moh_llm.records.run import LogLine, ModelMark, RunRecord, read_log
from moh_llm.records.seal import FileMark, find_fault
from moh_llm.training.config import TrainConfig, changed_options

RUN_RECORD, LOG, TRACKERS = "run.json", "log.jsonl", "tensorboard"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")


def read_run(config: TrainConfig, overwrite: bool = False) -> RunRecord | None:
    """The record of the run in ``config.output_dir``; None where the folder is new or empty, or with ``overwrite``.

    Raises:
        UserError: the folder cannot be used, or holds something other than a run with this recipe.
    """
    folder = Path(config.output_dir)
    check_place(folder, "output_dir")
    holds_run = (folder / RUN_RECORD).exists()
    if not holds_run and folder.exists() and any(path.name != INSIDE for path in folder.iterdir()):
        raise UserError(f"output_dir={folder} is not empty and holds no {RUN_RECORD}, so no run; name another folder")
    if overwrite or not holds_run:
        return None
    record = RunRecord.read(folder / RUN_RECORD)
    _refuse(folder, changed_options(record.config, _as_json(config), finished=record.status == "finished"))
    return record


def steps_of(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints in a folder, complete or not."""
    numbers = [path.name.removeprefix("step-") for path in checkpoints.glob("step-*") if path.is_dir()]
    return [int(number) for number in numbers if number.isdigit()]


class Run:
    """A run's folder, ``config.output_dir``, opened anew or to resume.

    With ``overwrite``, `begin` removes what an earlier run wrote there, and nothing else. Of several processes one
    ``writes``.

    Raises:
        UserError: the folder cannot be used (`read_run`), or holds a run of another model.
    """

    def __init__(
        self, config: TrainConfig, overwrite: bool = False, writes: bool = True, mark: ModelMark | None = None
    ):
        self._writes, self.overwrite = writes, overwrite
        self.folder = Path(config.output_dir)
        self.model = self.folder / "model"
        self.checkpoints = self.folder / "checkpoints"
        self._record_path, self._log_path = self.folder / RUN_RECORD, self.folder / LOG
        mark = mark or mark_model(config)
        if overwrite:  # `--model RUN/model --output-dir RUN` would remove the model before it is read
            check_holds_none(self.folder, [config.model])
        record = read_run(config, overwrite)
        if record is None:
            name = re.sub(r"[^\w.-]", "-", self.folder.resolve().name)[:64]  # W&B refuses other characters
            record = RunRecord(status="new", config={}, model=mark, tracked_as=f"{name}-{secrets.token_hex(4)}")
        if record.model != mark:
            _refuse(self.folder, ["model (other config, tokenizer or weights)"])
        record.config = _as_json(config)
        self.record = record

    def begin(self, **facts: Any) -> None:
        """Record the start, and facts such as data and device. What is overwritten goes now that nothing is missing."""
        versions = {"moh_llm": __version__, "python": platform.python_version()}
        versions |= {name: version(name) for name in PACKAGES}
        if self._writes:
            if self.overwrite:
                for path in (self.model, self.checkpoints, self.folder / TRACKERS):
                    shutil.rmtree(path, ignore_errors=True)
                # The record goes last: an interrupted removal still reads as a run.
                for name in ("report.html", "report.md", LOG, RUN_RECORD):
                    (self.folder / name).unlink(missing_ok=True)
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = f"cannot make output_dir={self.folder}: {error.strerror}"
                raise UserError(f"{reason}; name another folder") from error
        self._update(status="running", versions=versions, **facts)

    def finish(self, model_files: dict[str, FileMark], **facts: Any) -> None:
        """Record the end, after reading the model back.

        ``model_files`` are marks of the model's files, taken when they were written (`mark_files`); empty on processes
        that write nothing.

        Raises:
            UserError: the model on disk is not what was written.
        """
        if self._writes and (fault := find_fault(self.model, model_files)):
            raise UserError(f"{self.model} is not what was written: {fault}; give the same command again")
        self._update(status="finished", model_files=model_files, **facts)

    def _update(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.record, name, value)
        if self._writes:
            self.record.write(self._record_path)

    def trim_log(self, step: int) -> list[LogLine]:
        """Drop the log's lines past ``step``, since those steps are made again, and return the others.

        Raises:
            UserError: a line is malformed. A last line that a kill cut short is dropped.
        """
        way_out = "restore the log, or pass --overwrite to start anew"
        lines = read_log(self._log_path, way_out)[0] if self._log_path.exists() else []
        kept = [line for line in lines if line.step <= step]
        if self._writes:
            write_text(self._log_path, "".join(json.dumps(line.content()) + "\n" for line in kept))
        return kept

    def log(self, line: LogLine) -> None:
        """Append one line to the log."""
        if not self._writes:
            return
        try:
            with self._log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line.content(), allow_nan=False) + "\n")
        except OSError as error:
            why = f"cannot write {self._log_path}: {error.strerror}; free some space and start again"
            raise UserError(why) from error


def _as_json(config: TrainConfig) -> dict[str, Any]:
    """A recipe with JSON's types: lists in place of tuples."""
    return json.loads(json.dumps(asdict(config)))


def _refuse(folder: Path, changed: list[str]) -> None:
    if changed:
        raise UserError(
            f"output_dir={folder} holds a run with another recipe; different: {', '.join(changed)}. Put them back to "
            "resume, name a new --output-dir, or pass --overwrite to start anew"
        )


def mark_model(config: TrainConfig) -> ModelMark:
    """Hash the model of a recipe. Raises UserError where it is no MoH model."""
    check_converted(Path(config.model))
    return ModelMark(sha256=identify(config.model).sha256)


def check_converted(folder: Path) -> None:
    """Raise UserError unless a folder holds a MoH model's config."""
    if not folder.is_dir():
        raise UserError(f"model={folder} is not a folder; name one that moh-llm convert made")
    if is_image_model(read_config(folder)):
        raise UserError(f"model={folder} is a model of images; name them as images.train, and an objective.kind")
    read_moh_config(folder, f"model={folder}")


def check_data(folder: Path, record: RunRecord, data: dict[str, Any]) -> None:
    """Raise UserError unless the run of a folder began with the same tokens, which ``data`` identifies."""
    # The order of the sources decides which of them a sequence is from.
    if record.data is None or list(record.data.items()) == list(data.items()):
        return
    images, mixture = record.config["images"], record.config["data"]["mixture"]
    what = f"images.train={images['train']}" if images else f"the text of data.mixture={mixture}"
    if record.data == data:
        what = f"the order of the sources in data.mixture={mixture}"
    raise UserError(
        f"{what} is not what the run in {folder} began with; restore it, name a new --output-dir, or pass --overwrite "
        "to start anew"
    )


def describe_data(sources: list[TokenizedSource]) -> dict[str, object]:
    """What identifies the training text: weight, numbers of tokens and hash of the shards of each source."""
    return {
        source.name: {
            "weight": source.weight,
            "tokens": len(source.train),
            "held_out_tokens": len(source.validation),
            "sha256": source.sha256,
        }
        for source in sources
    }
