"""The training loop: explicit, on Accelerate, every quantity of a step a function of its number.

Steps are numbered from 1. Step s reads sequences (s - 1) * batch_size onwards, uses learning rate,
active heads and random seed of s - 1 steps made, and writes one line of the log; a resumed run
therefore needs nothing but weights and moments to go on exactly as if it had never stopped.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from moh_llm.attention import choose_for
from moh_llm.claims.training import held_out_scores
from moh_llm.data.shards import TokenizedSource, tokens_for
from moh_llm.data.stream import SequenceStream, StepBatches, make_receipt, reading_processes, step_loader
from moh_llm.data.windows import validation_batches
from moh_llm.devices import name_device
from moh_llm.errors import UserError
from moh_llm.files import check_place
from moh_llm.locking import lock_folder
from moh_llm.metrics import Batch
from moh_llm.records.identity import hash_model
from moh_llm.records.run import CheckpointRecord, LogLine, RunRecord, Scores
from moh_llm.records.seal import NAME as SEAL
from moh_llm.records.seal import mark_files
from moh_llm.terminal import say
from moh_llm.training import networks
from moh_llm.training.checkpoint_writer import CheckpointWriter
from moh_llm.training.checkpoints import checkpoint_folder, is_to_be_finished_anew, load_checkpoint, newest_checkpoint
from moh_llm.training.config import TrainConfig
from moh_llm.training.log import ProgressLine, check_trackers, start_trackers, step_line, track
from moh_llm.training.milestones import is_milestone, keep_milestone
from moh_llm.training.optimizer import annealed_heads, set_learning_rates
from moh_llm.training.parallel import (
    Interruption,
    any_process,
    divides_weights,
    end_distribution,
    from_main,
    make_accelerator,
    peak_rate,
    seed_step,
    sum_over_processes,
)
from moh_llm.training.positions import check_positions
from moh_llm.training.precision import check_agreement, decide_precision, slow_precision
from moh_llm.training.preflight import check_machine, read_model_config
from moh_llm.training.reference import Reference, StartingPoint, agreed_starting_point, expected_reference
from moh_llm.training.runs import Run, describe_data, mark_model
from moh_llm.training.scoring import RoutingCounts, evaluate, measure_floor, score_saved
from moh_llm.training.sharding import Networks, build_networks
from moh_llm.training.shared_heads import set_temperature
from moh_llm.training.step import DivergenceWatch, accumulate_gradients


def train(
    config: TrainConfig,
    overwrite: bool = False,
    say: Callable[[str], None] = say,
    on_milestone: Callable[[Path], None] = lambda folder: None,
    on_finish: Callable[[RunRecord], None] = lambda record: None,
) -> RunRecord:
    """Carry out a run, or what is left of it, and return its record (`OUTPUT/run.json`).

    Args:
        config: the recipe.
        overwrite: start anew where ``config.output_dir`` holds a run.
        say: prints one line.
        on_milestone: gets, on the main process, the folder of each milestone that is there at the start, and of each
            that is saved (`moh_llm.training.milestones`); training goes on when it returns.
        on_finish: gets, on the main process, the record of a run that is finished, or was before, while nobody else can
            write to its folder.

    Raises:
        UserError: an input cannot be used, another process writes to ``config.output_dir``, the loss is not finite, or
            the disk refuses.
    """
    check_trackers(config.report_to)
    config = decide_precision(config, overwrite)
    accelerator = make_accelerator(config)
    check_agreement(accelerator, config)
    with contextlib.ExitStack() as held:
        # Not before the processes found each other: where the first one is refused, the others must hear of it.
        from_main(accelerator, lambda: check_place(Path(config.output_dir), "output_dir"))
        from_main(accelerator, lambda: held.enter_context(lock_folder(Path(config.output_dir))))
        record = _train(config, accelerator, overwrite, say, on_milestone)
        if accelerator.is_main_process and record.status == "finished":
            on_finish(record)
        return record


def _train(
    config: TrainConfig,
    accelerator: Accelerator,
    overwrite: bool,
    say: Callable[[str], None],
    on_milestone: Callable[[Path], None],
) -> RunRecord:
    main = accelerator.is_main_process
    say = say if main else lambda _: None
    mark = from_main(accelerator, lambda: mark_model(config))
    with accelerator.main_process_first():
        run = Run(config, overwrite and main, writes=main, mark=mark)
    if main:
        for milestone in sorted(run.milestones.glob("step-*")):
            on_milestone(milestone)
    training = _Training(config, accelerator, run, say, on_milestone)
    if run.record.status == "finished" and not from_main(accelerator, lambda: is_to_be_finished_anew(run, say)):
        if config.base is not None:  # it may be another checkpoint than the run's
            from_main(accelerator, lambda: expected_reference(config))
        training.open_data()
        say(f"{run.folder} holds this run, finished after {config.max_steps} steps; nothing to do")
        end_distribution(accelerator)
    else:
        divided = divides_weights(accelerator)
        if warning := from_main(accelerator, lambda: check_machine(config, accelerator.num_processes, divided)):
            say(f"warning: {warning.text}")
        if main and (slow := slow_precision(config, accelerator.device)):
            say(f"warning: {slow}")
        if main and (beyond := check_positions(config, read_model_config(config))):
            say(f"warning: {beyond.text}")
        training.find_starting_point()
        training.open_data()
        training.make_stream()
        training.build_networks()
        training.begin_or_resume()
        if training.take_steps():
            training.save_tuned_model()
    accelerator.end_training()
    return run.record


class _Training:
    """The phases of a run, called by `_train` in their order; attributes are what earlier phases found."""

    starting_point: StartingPoint
    tokenizer: PreTrainedTokenizerBase
    token_folder: Path
    sources: list[TokenizedSource]
    stream: SequenceStream
    held_out: list[Batch]
    networks: Networks
    checkpoints: CheckpointWriter
    balance_coefficient: float | None
    watch: DivergenceWatch

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        run: Run,
        say: Callable[[str], None],
        on_milestone: Callable[[Path], None],
    ):
        self.config, self.accelerator, self.run, self.say = config, accelerator, run, say
        self.on_milestone, self._sum = on_milestone, partial(sum_over_processes, accelerator)
        self.done, self.updates, self.seconds = 0, 0, 0.0  # steps made, updates of the weights, time of the steps
        # What the model scores and its routers do before any step: later steps are compared with it, on resume too.
        self.start_scores: Scores | None = None
        self.start_routing: RoutingCounts | None = None
        self.floor: float | None = None

    @property
    def reference(self) -> Reference | None:
        """What the model is compared with, and taught by where the objective has a teacher."""
        return self.starting_point.reference

    def find_starting_point(self) -> None:
        """Find the model that training begins with, and its reference."""
        recorded = self.run.record.reference
        self.starting_point = agreed_starting_point(self.config, self.accelerator, recorded and recorded.kind)
        for line in self.starting_point.records.lines(f"model={self.config.model}"):
            self.say(line)
        if self.reference is not None:
            role = "teacher" if self.config.objective.has_teacher else "compared with"
            self.say(f"{role}: {self.reference.described}")

    def open_data(self) -> None:
        """Open the recipe's text as tokens, the text of the run where there is one."""
        self.tokenizer = networks.load_tokenizer(Path(self.config.model))
        rows = networks.embedding_rows(Path(self.config.model))
        with self.accelerator.main_process_first():
            found = tokens_for(self.config.data.mixture, self.tokenizer, self.say, rows)
        self.mixture, self.token_folder, self.sources = found
        self.run.check_data(describe_data(self.sources))

    def make_stream(self) -> None:
        """Make the stream of training sequences, and set held-out ones aside."""
        data, evaluation = self.config.data, self.config.evaluation
        self.stream = SequenceStream(self.sources, data.sequence_length, self.config.seed)
        self.stream.check_epochs(self.config.max_steps * data.batch_size)
        self.held_out = validation_batches(
            self.sources, data.sequence_length, evaluation.max_tokens, data.micro_batch_size
        )

    def build_networks(self) -> None:
        """Build student, teacher and optimizer, and distribute them."""
        self.networks = build_networks(self.config, self.accelerator, self.reference, self.say)
        beta, model = self.config.objective.balance_coefficient, self.networks.network
        chooses = model.config.router_type not in ("threshold", "none")
        has_loss = chooses and any(router.num_routed for router in model.routers)
        beta = model.config.head_balance_coef if beta is None else beta
        self.balance_coefficient = beta if has_loss else None

    def _attention_backend(self) -> str:
        size = self.networks.network.config.head_dim
        return choose_for(self.accelerator.device, networks.reference_dtype(self.config), size).name

    def begin_or_resume(self) -> None:
        """Write the run's record, score the model before any step, and load the newest checkpoint, if any."""
        config, accelerator, run = self.config, self.accelerator, self.run
        counts = self.networks.counts
        self.starting_point = replace(self.starting_point, mixture=self.mixture)
        run.begin(
            data=describe_data(self.sources),
            mixture=self.mixture,
            tokens_in=self.token_folder,
            device=str(accelerator.device),
            device_name=name_device(accelerator.device),
            compute_dtype=str(networks.reference_dtype(config)).removeprefix("torch."),
            attention_backend=self._attention_backend(),
            processes=accelerator.num_processes,
            parameters=counts,
            balance_coefficient=self.balance_coefficient,
            reference=self.reference and self.reference.mark(),
        )
        found = self._newest_checkpoint()
        if config.evaluation.eval_steps:
            self.floor = measure_floor(accelerator, self.networks.model, self.held_out)
            self.start_scores, self.start_routing = evaluate(accelerator, self.networks.model, self.held_out)
            if self.floor is not None:
                self.start_scores.floor = self.floor
        if found is not None:
            folder, state = found
            self._load(folder)
            self.done, self.seconds = state.step, state.seconds
            self.say(f"resumed from {folder}, {config.max_steps - self.done} steps to go")
        nets = self.networks
        self.checkpoints = CheckpointWriter(
            run.checkpoints, accelerator, nets.model, nets.optimizer, nets.weights, config.checkpoint
        )
        self.watch = DivergenceWatch(config.divergence, run.trim_log(self.done if found else -1))
        if found is not None and not (run.milestones / found[0].name).exists():
            self._keep(self.done, found[0])  # the run was stopped between the two
        start_trackers(accelerator, config, self.done)
        data = config.data
        self.say(
            f"{counts['trained']:,} of {counts['total']:,} weights are trained on {accelerator.num_processes} x "
            f"{accelerator.device.type} in {run.record.compute_dtype}; {config.max_steps} steps x "
            f"{data.batch_size} sequences x {data.sequence_length} tokens = "
            f"{config.max_steps * config.tokens_per_step:,} tokens, "
            f"{accelerator.gradient_accumulation_steps} micro-batches per step"
        )

    def take_steps(self) -> bool:
        """Take the steps that are left, and save checkpoints; False where a signal stopped the run."""
        config, accelerator, data = self.config, self.accelerator, self.config.data
        steps = range(self.done + 1, config.max_steps + 1)
        part = StepBatches(self.stream, data.batch_size, accelerator.process_index, accelerator.num_processes)
        batches = step_loader(part, steps, reading_processes(accelerator.device))
        fastest = peak_rate(accelerator, config, self.networks.network.config)
        line_of_progress = ProgressLine(self.done, config.max_steps)
        with (
            line_of_progress if accelerator.is_main_process else contextlib.nullcontext() as progress,
            Interruption() as interruption,
            contextlib.closing(self.checkpoints),
        ):

            def report(line: LogLine) -> None:
                self.run.log(line)
                track(accelerator, line)
                if progress:
                    progress.step(line)

            if self.start_routing is not None and not self.done:
                health = self.start_routing.health(None, self._sum)
                report(LogLine(step=0, validation=self.start_scores, routing=health))
            for step, batch in zip(steps, batches, strict=True):
                line = self._take_step(step, batch, fastest)
                receipt = make_receipt(self.stream, step * data.batch_size)
                line.tokens_of_source = {name: entry["tokens"] for name, entry in receipt.items()}
                self.seconds += line.timing.seconds
                if config.evaluation.eval_steps and step % config.evaluation.eval_steps == 0:
                    line.validation, routing = evaluate(accelerator, self.networks.model, self.held_out)
                    line.routing = routing.health(self.start_routing, self._sum)
                report(line)
                stop, failed = any_process(accelerator, interruption.received, self.checkpoints.failed)
                stop = stop and step < config.max_steps
                if stop or step % config.checkpoint.save_steps == 0 or step == config.max_steps:
                    self._save(step, receipt)
                elif failed:
                    self.checkpoints.wait()
                if stop:
                    self.checkpoints.wait()
                    self.say(
                        f"stopped by a signal after step {step}, which is saved; give the same command again to go on"
                    )
                    return False
        return True

    def _take_step(self, step: int, batch: Batch, fastest: float | None) -> LogLine:
        """Compute the gradients of a step and update the weights, unless the step is dropped; its line of the log."""
        began = time.perf_counter()
        config, accelerator, nets, beta = self.config, self.accelerator, self.networks, self.balance_coefficient
        plan = nets.network.config
        seed_step(config, step, accelerator.process_index)
        rates = set_learning_rates(nets.optimizer, config, step - 1)
        budgets, all_heads, anneal = plan.active_heads_per_layer, plan.num_attention_heads, config.schedule.anneal_steps
        heads = annealed_heads(budgets, all_heads, step - 1, anneal, plan.heads_per_group)
        nets.network.set_active_heads(heads)
        if config.shared_heads is not None:
            set_temperature(nets.network, step - 1, config.shared_heads.steps)
        losses, norm = accumulate_gradients(accelerator, nets.model, batch, config, beta or 0.0)
        # Judged before the weights are updated (DeepSpeed has updated them): checkpoints are of good steps only.
        fault = self.watch.judge(step, losses.total(beta or 0.0, config.objective.layer_coefficient), norm)
        self.checkpoints.hold()
        if fault is None:
            nets.optimizer.step()
            self.updates += 1
        elif config.divergence.action == "roll_back":
            self.checkpoints.wait()
            newest = self._newest_checkpoint()
            if newest is None:
                raise UserError(
                    f"step {step}: {fault}, and there is no checkpoint yet to go back to; lower "
                    "optimizer.learning_rate or checkpoint.save_steps and pass --overwrite"
                )
            self._load(newest[0])
        nets.optimizer.zero_grad()
        line = step_line(step, losses, beta, rates, norm, config, heads, began, fastest)
        if fault is not None:
            line.dropped = fault
        return line

    def save_tuned_model(self) -> None:
        """Save the tuned model, score it as it was saved, and finish the run's record."""
        config, accelerator, run = self.config, self.accelerator, self.run
        receipt = make_receipt(self.stream, config.max_steps * config.data.batch_size)
        self.checkpoints.wait()
        del self.checkpoints, self.networks  # memory for the model that is scored
        end_distribution(accelerator)
        tokens, files, made, scores = config.max_steps * config.tokens_per_step, {}, None, None
        if accelerator.is_main_process:
            last = checkpoint_folder(run.checkpoints, config.max_steps)
            networks.save_network(config, last, self.tokenizer, run.model, self.starting_point, config.max_steps)
            files, made = mark_files(run.model), hash_model(run.model)
            files.pop(SEAL)  # it takes in the card, which is written when the run is finished
            scores = score_saved(config, run.model, accelerator.device, self.held_out, self.reference)
            if self.floor is not None:
                scores.floor = self.floor
            self.say(f"{run.model}: {held_out_scores(scores).text}")
            self.say(f"{config.max_steps} steps, {tokens:,} tokens, {self.seconds:.0f} s of training")
        facts = {"steps": config.max_steps, "tokens": tokens, "seconds": round(self.seconds, 3), "data_read": receipt}
        run.finish(files, **facts, made=made, evaluation=scores)

    def _newest_checkpoint(self) -> tuple[Path, CheckpointRecord] | None:
        return from_main(self.accelerator, lambda: newest_checkpoint(self.run.checkpoints, self.say))

    def _load(self, checkpoint: Path) -> None:
        nets = self.networks
        self.updates = load_checkpoint(checkpoint, self.accelerator, nets.model, nets.optimizer, nets.weights)

    def _save(self, step: int, receipt: dict[str, Any]) -> None:
        """Begin to write a checkpoint; a milestone is made of the whole one."""
        facts = {"updates": self.updates, "seconds": round(self.seconds, 3), "data": receipt}
        saved = self.checkpoints.begin(step, facts)
        if is_milestone(self.config, step):
            self.checkpoints.wait()
            self._keep(step, saved)

    def _keep(self, step: int, checkpoint: Path) -> None:
        """Save the checkpoint's model as a milestone, if the recipe asks for it."""
        run, tokenizer, start = self.run, self.tokenizer, self.starting_point
        keep_milestone(self.config, run, self.accelerator, tokenizer, start, self.on_milestone, step, checkpoint)
