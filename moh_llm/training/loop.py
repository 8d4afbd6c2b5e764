"""The training loop: explicit, on Accelerate, every quantity of a step a function of its number.

Steps are numbered from 1. Step s reads sequences (s - 1) * batch_size onwards, uses learning rate, active heads and
random seed of s - 1 steps made, and writes one line of the log. A resumed run therefore needs nothing but weights and
moments to go on exactly as if it had never stopped.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from moh_llm.claims import held_out_scores
from moh_llm.data.shards import Tokens, tokens_for
from moh_llm.data.stream import SequenceStream, make_receipt
from moh_llm.data.windows import validation_batches
from moh_llm.devices import name_device
from moh_llm.errors import UserError
from moh_llm.files import check_place
from moh_llm.flops import share_of_keys
from moh_llm.locking import lock_folder
from moh_llm.metrics import Batch
from moh_llm.records.identity import hash_model
from moh_llm.records.run import LogLine, RunRecord
from moh_llm.records.seal import SEAL, mark_files
from moh_llm.terminal import say
from moh_llm.training import networks
from moh_llm.training.budget import Thresholds, make_budget, measure_thresholds
from moh_llm.training.checkpoints import CheckpointWriter, checkpoint_folder, load_checkpoint, newest_checkpoint
from moh_llm.training.config import TrainConfig
from moh_llm.training.log import ProgressLine, check_trackers, start_trackers, step_line, track
from moh_llm.training.losses import StepLosses, balance_coefficient
from moh_llm.training.parallel import catch_signals, divides_weights, from_main, main_first, make_accelerator
from moh_llm.training.preflight import check_agreement, check_documents, check_model, decide_precision
from moh_llm.training.reference import Reference, agreed_starting_point, expected_reference
from moh_llm.training.runs import Run, check_data, describe_data, mark_model
from moh_llm.training.saving import is_finished, save_network
from moh_llm.training.scoring import evaluate, score_saved
from moh_llm.training.sharding import build_networks
from moh_llm.training.step import MOST_DROPPED, accumulate_gradients, seed_step, set_learning_rates, why_dropped
from moh_llm.training.zero import by_deepspeed

# Thresholds are set on so much of the training text, and on a quarter of it at most: it is read twice or three times.
THRESHOLD_TOKENS = 2**16


def train(
    config: TrainConfig,
    overwrite: bool = False,
    say: Callable[[str], None] = say,
    on_finish: Callable[[RunRecord], None] = lambda record: None,
    kind: "type[Training] | None" = None,
) -> RunRecord:
    """Carry out a run, or what is left of it, and return its record (`OUTPUT/run.json`).

    Args:
        overwrite: start anew where ``config.output_dir`` holds a run.
        on_finish: called on the main process with the record of a finished run, also of one that was finished before,
            while the folder is locked.
        kind: what is trained; default: a language model.

    Raises:
        UserError: an input cannot be used, another process writes to ``config.output_dir``, the loss is not finite, or
            the disk refuses.
    """
    check_trackers(config.report_to)
    kind = kind or Training
    config = decide_precision(config, overwrite)
    accelerator = make_accelerator(config)
    check_agreement(accelerator, config)
    main = accelerator.is_main_process
    with contextlib.ExitStack() as held:
        # Only now that the processes are connected, so that all of them hear of a refusal.
        from_main(accelerator, lambda: check_place(Path(config.output_dir), "output_dir"))
        from_main(accelerator, lambda: held.enter_context(lock_folder(Path(config.output_dir))))
        mark = from_main(accelerator, lambda: kind.mark(config))
        run = main_first(accelerator, lambda: Run(config, overwrite, writes=main, mark=mark))
        training = kind(config, accelerator, run, say if main else lambda _: None)
        if from_main(accelerator, lambda: is_finished(run, say)):
            training.check_again()
            training.say(f"{run.folder} holds this run, finished after {config.max_steps} steps; nothing to do")
        else:
            training.prepare()
            training.begin_or_resume()
            if training.take_steps():
                training.save_tuned_model()
        accelerator.end_training()
        if main and run.record.status == "finished":
            on_finish(run.record)
        return run.record


class Training:
    """The phases of a run, in the order in which `train` calls them; attributes are what earlier phases found.

    `moh_llm.training.images` replaces what reads tokens.
    """

    mark = staticmethod(mark_model)  # what identifies the model that the run begins with

    def __init__(self, config: TrainConfig, accelerator: Accelerator, run: Run, say: Callable[[str], None]):
        self.config, self.accelerator, self.run, self.say = config, accelerator, run, say
        self.done, self.updates, self.seconds = 0, 0, 0.0  # steps made, updates of the weights, time of the steps
        self.dropped = 0  # the last steps whose loss or gradient was not finite, one after the other

    # ---- what the run begins with

    def check_again(self) -> None:
        """Check that a finished run's base and text are still the same."""
        if self.config.base is not None:
            from_main(self.accelerator, lambda: expected_reference(self.config))
        self._open_data()

    def prepare(self) -> None:
        """Check the job, find model, reference and text, and build the networks."""
        config, accelerator, data = self.config, self.accelerator, self.config.data
        if beyond := from_main(accelerator, lambda: check_model(config, divides_weights(accelerator))):
            self.say(f"warning: {beyond}")
        self.start = agreed_starting_point(config, accelerator, self.run.record.reference)
        self.reference: Reference | None = self.start.reference
        for line in self.start.records.lines(f"model={config.model}"):
            self.say(line)
        if self.reference is not None:
            role = "teacher" if config.objective.has_teacher else "compared with"
            self.say(f"{role}: {self.reference.described}")
        self._open_data()
        self.stream = SequenceStream(self.tokens.sources, data.sequence_length, config.seed)
        if short := check_documents(config, self.stream):
            self.say(f"warning: {short}")
        self.held_out = validation_batches(
            self.tokens.sources, data.sequence_length, config.evaluation.max_tokens, data.micro_batch_size
        )
        self.networks = build_networks(config, accelerator, self.reference, self.say)
        self.balance_coefficient = balance_coefficient(config.objective, self.networks.network)
        self.plan = self.networks.network.config
        self.budget = make_budget(config, self.networks.network, accelerator.device)

    def _open_data(self) -> None:
        """Open the recipe's text as tokens; a resumed run reads the text that it began with."""
        self.tokenizer = networks.load_tokenizer(Path(self.config.model))
        rows = networks.embedding_rows(Path(self.config.model))

        def read() -> Tokens:
            tokens = tokens_for(self.config.data.mixture, self.tokenizer, rows)
            check_data(self.run.folder, self.run.record, describe_data(tokens.sources))
            return tokens

        self.tokens = main_first(self.accelerator, read)

    def facts(self) -> dict[str, Any]:
        """What the run's record says of its text, its reference and its budget."""
        self.start = replace(self.start, mixture=self.tokens.name)
        return {
            "data": describe_data(self.tokens.sources),
            "mixture": self.tokens.name,
            "tokens_in": self.tokens.folder,
            "reference": self.reference and self.reference.kind,
            "keys_asked": self.budget and round(self._share_of_keys(self.budget.target), 6),
        }

    def begin_or_resume(self) -> None:
        """Write the run's record, and load the newest checkpoint, if any."""
        config, accelerator, run, nets = self.config, self.accelerator, self.run, self.networks
        run.begin(
            device=str(accelerator.device),
            device_name=name_device(accelerator.device),
            compute_dtype=str(networks.reference_dtype(config)).removeprefix("torch."),
            processes=accelerator.num_processes,
            parameters=nets.counts,
            balance_coefficient=self.balance_coefficient,
            **self.facts(),
        )
        found = from_main(accelerator, lambda: newest_checkpoint(run.checkpoints, self.say))
        if found is not None:
            folder, state = found
            self.updates = load_checkpoint(folder, accelerator, nets.model, nets.optimizer, nets.weights)
            self.done, self.seconds = state.step, state.seconds
            if self.budget is not None and state.budget is not None:
                self.budget.multiplier, self.budget.average = state.budget
            self.say(f"resumed from {folder}, {config.max_steps - self.done} steps to go")
        self.checkpoints = CheckpointWriter(
            run.checkpoints, accelerator, nets.model, nets.optimizer, nets.weights, config.checkpoint
        )
        for line in run.trim_log(self.done if found else -1):
            self.dropped = self.dropped + 1 if line.dropped else 0
        start_trackers(accelerator, config, self.done, run.record.tracked_as or run.folder.name)
        self.say(
            f"{nets.counts['trained']:,} of {nets.counts['total']:,} weights are trained on "
            f"{accelerator.num_processes} x {accelerator.device.type} in {run.record.compute_dtype}"
        )
        parts = accelerator.gradient_accumulation_steps
        self.say(f"{config.max_steps} steps x {self.of_step()}, {parts} micro-batches per step")

    def of_step(self) -> str:
        """What a step reads, in words."""
        config = self.config
        read = f"{config.data.batch_size} sequences x {config.data.sequence_length} tokens"
        return f"{read} = {config.max_steps * config.tokens_per_step:,} tokens"

    # ---- steps

    def receipt(self, step: int) -> dict[str, Any]:
        """What was read of each source until after this step."""
        return make_receipt(self.stream, step * self.config.data.batch_size)

    def score(self, line: LogLine) -> None:
        """Put the scores of what is set aside into a line of the log."""
        line.validation, line.routing = evaluate(self.accelerator, self.networks.model, self.held_out)

    def gradients(self, batch: Batch) -> tuple[StepLosses, float]:
        """The losses of a step on what this process reads, and the norm of their gradient, which is set."""
        beta = self.balance_coefficient or 0.0
        return accumulate_gradients(self.accelerator, self.networks.model, batch, self.config, beta, self.budget)

    def take_steps(self) -> bool:
        """Take the remaining steps and save checkpoints; False where a signal stopped the run."""
        config, accelerator = self.config, self.accelerator
        size = config.data.batch_size
        steps = range(self.done + 1, config.max_steps + 1)
        batches = self.stream.read_steps(steps, size, accelerator.process_index, accelerator.num_processes)
        shown = contextlib.nullcontext()
        if accelerator.is_main_process:
            shown = ProgressLine(self.done, config.max_steps, *config.step_size)
        with shown as progress, catch_signals() as signals, contextlib.closing(self.checkpoints):

            def report(line: LogLine) -> None:
                self.run.log(line)
                track(accelerator, line)
                if progress:
                    progress.step(line)

            if config.evaluation.eval_steps and not self.done:
                self.score(line := LogLine(step=0))
                report(line)
            for step, batch in zip(steps, batches, strict=True):
                line = self._take_step(step, batch)
                if receipt := self.receipt(step):
                    line.tokens_of_source = {name: entry["tokens"] for name, entry in receipt.items()}
                self.seconds += line.timing.seconds
                if config.evaluation.eval_steps and step % config.evaluation.eval_steps == 0:
                    self.score(line)
                report(line)

                # Only one of the processes may have a signal, or a disk that refuses.
                written = self.checkpoints.written
                failed = written.done() and written.exception() is not None
                flags = torch.tensor([float(bool(signals)), float(failed)], device=accelerator.device)
                stop, failed = (count > 0 for count in accelerator.reduce(flags).tolist())
                stop = stop and step < config.max_steps
                if failed:
                    self.checkpoints.wait()
                if stop or step % config.checkpoint.save_steps == 0 or step == config.max_steps:
                    facts = {"updates": self.updates, "seconds": round(self.seconds, 3), "data": receipt}
                    if self.budget is not None:
                        facts["budget"] = [self.budget.multiplier, self.budget.average]
                    self.checkpoints.begin(step, facts)
                if stop:
                    self.checkpoints.wait()
                    way = "again, without --overwrite," if self.run.overwrite else "again"
                    self.say(f"stopped by a signal after step {step}, which is saved; give the command {way} to go on")
                    return False
        return True

    def _take_step(self, step: int, batch: Batch) -> LogLine:
        """Compute the gradients of a step and update the weights, unless the step is dropped; return its log line."""
        began = time.perf_counter()
        config, nets, beta = self.config, self.networks, self.balance_coefficient
        # Everything that varies is a function of the number of steps made.
        seed_step(config, step, self.accelerator.process_index)
        rates = set_learning_rates(nets.optimizer, config, step - 1)
        losses, norm = self.gradients(batch)
        multiplier = None if self.budget is None else self.budget.multiplier
        fault = why_dropped(losses.total(beta or 0.0, multiplier or 0.0), norm)
        self.dropped = self.dropped + 1 if fault else 0
        # DeepSpeed leaves out a step whose gradient is not finite, but looks at no loss.
        is_applied = by_deepspeed(self.accelerator) and not nets.optimizer.step_was_skipped
        if fault and (self.dropped == MOST_DROPPED or is_applied):
            times = f", the {self.dropped}th time in a row" if self.dropped > 1 else ""
            raise UserError(f"step {step}: {fault}{times}; lower optimizer.learning_rate and pass --overwrite")
        self.checkpoints.copied.result()  # before the weights change
        if fault is None:
            nets.optimizer.step()
            self.updates += 1
            if self.budget is not None:
                self.budget.update(losses.distant_read, losses.distant_slope)
        nets.optimizer.zero_grad()
        line = step_line(step, losses, beta, rates, norm, config, began, multiplier)
        if multiplier is not None:
            line.keys_multiplier = multiplier
            if losses.distant_slope > 0:  # scores are finite, and the text has distant keys
                line.keys_read = round(self._share_of_keys(losses.distant_read), 6)
        if fault:  # the log has the field for dropped steps alone
            line.dropped = fault
        return line

    def _share_of_keys(self, share: float) -> float:
        """Share of all keys of a sequence, given that of the distant ones."""
        return share_of_keys(self.plan, share, self.config.data.sequence_length)

    # ---- the tuned model

    def save_tuned_model(self) -> None:
        """Save the tuned model, score it as it was saved, and finish the run's record."""
        config, accelerator, run = self.config, self.accelerator, self.run
        receipt = self.receipt(config.max_steps)
        self.checkpoints.wait()
        thresholds = self._measure_thresholds()
        del self.checkpoints, self.networks  # memory for the model that is scored
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        files, made, scores = {}, None, None
        if accelerator.is_main_process:
            last = checkpoint_folder(run.checkpoints, config.max_steps)
            save_network(config, last, self.tokenizer, run.model, self.start, config.max_steps, thresholds)
            files, made = mark_files(run.model), hash_model(run.model)
            files.pop(SEAL)  # it covers the card, which is written when the run is finished
            scores = score_saved(config, run.model, accelerator.device, self.held_out, self.reference)
            self.say(f"{run.model}: {held_out_scores(scores)}")
        facts = {"seconds": round(self.seconds, 3), "data_read": receipt}
        if thresholds is not None:
            facts["keys_calibrated"] = round(self._share_of_keys(thresholds.distant_read), 6)
        run.finish(files, **facts, made=made, evaluation=scores)

    def _measure_thresholds(self) -> Thresholds | None:
        """The thresholds at which the tuned model reads its budget of the first sequences of the training text."""
        if self.budget is None:
            return None
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        rows = self.config.data.micro_batch_size
        # Those of whole steps, which any number of processes can share.
        steps = max(1, min(THRESHOLD_TOKENS // self.config.tokens_per_step, self.config.max_steps // 4))
        rounds = range(steps * self.accelerator.gradient_accumulation_steps)
        batches = [self.stream.batch((number * world + rank) * rows, rows) for number in rounds]
        return measure_thresholds(self.accelerator, self.networks.model, batches, self.budget.target)
