"""The training loop: explicit, on Accelerate, every quantity of a step a function of its number.

Steps are numbered from 1. Step s reads sequences (s - 1) * batch_size onwards, uses learning rate,
active heads and random seed of s - 1 steps made, and writes one line of the log; a resumed run
therefore needs nothing but weights and moments to go on exactly as if it had never stopped.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from moh_llm.data.shards import TokenizedSource, tokens_for
from moh_llm.data.stream import SequenceStream, StepBatches, make_receipt, step_loader
from moh_llm.data.windows import validation_batches
from moh_llm.errors import UserError
from moh_llm.locking import lock_folder
from moh_llm.records.run import LogLine, RunRecord
from moh_llm.training import networks
from moh_llm.training.checkpoint_writer import CheckpointWriter
from moh_llm.training.checkpoints import checkpoint_folder, is_to_be_finished_anew, load_checkpoint, newest_checkpoint
from moh_llm.training.config import TrainConfig
from moh_llm.training.log import ProgressLine, check_trackers, show_scores, start_trackers, step_line, track
from moh_llm.training.milestones import is_milestone, keep_milestone
from moh_llm.training.optimizer import annealed_heads, set_learning_rates
from moh_llm.training.parallel import (
    Interruption,
    any_process,
    end_distribution,
    from_main,
    make_accelerator,
    peak_rate,
    seed_step,
    sum_over_processes,
)
from moh_llm.training.preflight import check_machine
from moh_llm.training.reference import agreed_starting_point, expected_reference
from moh_llm.training.runs import Run, mark_files, mark_model
from moh_llm.training.scoring import evaluate, measure_floor, score_saved
from moh_llm.training.sharding import distribute
from moh_llm.training.step import DivergenceWatch, TrainingStep, accumulate_gradients


def train(
    config: TrainConfig,
    overwrite: bool = False,
    say: Callable[[str], None] = print,
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
    accelerator = make_accelerator(config)
    with contextlib.ExitStack() as held:
        # Not before the processes found each other: where the first one is refused, the others must hear of it.
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
    if run.record.status == "finished" and not from_main(accelerator, lambda: is_to_be_finished_anew(run, say)):
        if config.base is not None:  # it may be another checkpoint than the run's
            from_main(accelerator, lambda: expected_reference(config))
        _open_data(config, run, accelerator, say)
        say(f"{run.folder} holds this run, finished after {config.max_steps} steps; nothing to do")
        end_distribution(accelerator)
        accelerator.end_training()
        return run.record
    from_main(accelerator, lambda: check_machine(config, accelerator.num_processes))

    # ---- what it begins with
    starting_point = agreed_starting_point(config, accelerator, run.record.reference and run.record.reference.kind)
    reference = starting_point.reference
    if reference is not None:
        say(f"{'teacher' if config.objective.has_teacher else 'compared with'}: {reference.described}")

    # ---- data
    data = config.data
    tokenizer, token_folder, sources = _open_data(config, run, accelerator, say)
    stream = SequenceStream(sources, data.sequence_length, config.seed)
    stream.check_epochs(config.max_steps * data.batch_size)
    held_out = validation_batches(
        sources, data.sequence_length, config.evaluation.max_tokens, config.evaluation.batch_size
    )

    # ---- networks
    if accelerator.num_processes > 1:  # all would refuse
        from_main(accelerator, lambda: networks.check_network(Path(config.model)))
    seed_step(config, 0, 0)  # of adapters, alike on all processes: each keeps its part of the same draw
    empty = accelerator.is_fsdp2
    student = networks.make_student(config, accelerator.device, empty)
    if config.quantization is not None:
        teacher_too = config.objective.has_teacher and reference is not None and reference.own
        say(
            f"the layers' linear maps are quantized to {config.quantization} in training"
            f"{', for the teacher, too' if teacher_too else ''}; adapters are merged into {config.model}"
        )
    teacher = networks.make_teacher(config, reference, accelerator.device, empty)
    beta = config.objective.balance_coefficient
    if beta is None:
        beta = student.config.head_balance_coef
    counts = {
        "trained": sum(networks.full_shape(w).numel() for w in networks.trained_weights(student).values()),
        "total": sum(networks.full_shape(weight).numel() for weight in student.parameters()),
    }
    step_module = TrainingStep(student, teacher, config.objective, reference)
    model, optimizer = distribute(accelerator, step_module, config)
    model.train()
    weights = networks.trained_weights(accelerator.unwrap_model(model).student)
    network = accelerator.unwrap_model(model).network
    budgets, group_size = network.config.active_heads_per_layer, network.config.heads_per_group
    all_heads = network.config.num_attention_heads
    fastest = peak_rate(accelerator, config, network.config)

    # ---- where to begin
    run.begin(
        data=describe_data(sources),
        tokens_in=token_folder,
        device=str(accelerator.device),
        processes=accelerator.num_processes,
        parameters=counts,
        reference=reference and reference.mark(),
    )
    done, updates, seconds = 0, 0, 0.0
    found = from_main(accelerator, lambda: newest_checkpoint(run.checkpoints, say))
    # What the routers do before any step is what later changes are measured by, on resume too.
    start_scores, start_routing, floor = None, None, None
    if config.evaluation.eval_steps:
        floor = measure_floor(accelerator, model, held_out)
        start_scores, start_routing = evaluate(accelerator, model, held_out)
        if floor is not None:
            start_scores.floor = floor
    if found:
        folder, state = found
        updates = load_checkpoint(folder, accelerator, model, optimizer, weights)
        done, seconds = state.step, state.seconds
        say(f"resumed from {folder}, {config.max_steps - done} steps to go")
    checkpoints = CheckpointWriter(run.checkpoints, accelerator, model, optimizer, weights, config.checkpoint)
    keep = partial(keep_milestone, config, run, accelerator, tokenizer, starting_point, on_milestone)
    reduce = partial(sum_over_processes, accelerator)
    watch = DivergenceWatch(config.divergence, run.trim_log(done if found else -1))
    if found and not (run.milestones / found[0].name).exists():
        keep(done, found[0])  # the run was stopped between the two
    start_trackers(accelerator, config, done)
    say(
        f"{counts['trained']:,} of {counts['total']:,} weights are trained on {accelerator.num_processes} x "
        f"{accelerator.device.type}; {config.max_steps} steps x {data.batch_size} sequences x "
        f"{data.sequence_length} tokens = {config.max_steps * config.tokens_per_step:,} tokens, "
        f"{accelerator.gradient_accumulation_steps} micro-batches per step"
    )

    # ---- steps
    steps = range(done + 1, config.max_steps + 1)
    part = StepBatches(stream, data.batch_size, accelerator.process_index, accelerator.num_processes)
    batches = step_loader(part, steps, data.dataloader_num_workers)
    line_of_progress = ProgressLine(done, config.max_steps) if main else contextlib.nullcontext()
    with line_of_progress as progress, Interruption() as interruption, contextlib.closing(checkpoints):

        def report(line: LogLine) -> None:
            run.log(line)
            track(accelerator, line)
            if progress:
                progress.step(line)

        if start_routing is not None and not found:
            report(LogLine(step=0, validation=start_scores, routing=start_routing.health(None, reduce)))
        for step, batch in zip(steps, batches, strict=True):
            began = time.perf_counter()
            seed_step(config, step, accelerator.process_index)
            rates = set_learning_rates(optimizer, config, step - 1)
            heads = annealed_heads(budgets, all_heads, step - 1, config.schedule.anneal_steps, group_size)
            network.set_active_heads(heads)
            losses, norm = accumulate_gradients(accelerator, model, batch, config, beta)
            # Judged before the weights are updated (DeepSpeed has updated them): checkpoints are of good steps only.
            fault = watch.judge(step, losses.total(beta, config.objective.layer_coefficient), norm)
            checkpoints.hold()
            if fault is None:
                optimizer.step()
                updates += 1
            elif config.divergence.action == "roll_back":
                checkpoints.wait()
                newest = from_main(accelerator, lambda: newest_checkpoint(run.checkpoints, say))
                if newest is None:
                    raise UserError(
                        f"step {step}: {fault}, and there is no checkpoint yet to go back to; lower "
                        "optimizer.learning_rate or checkpoint.save_steps and pass --overwrite"
                    )
                updates = load_checkpoint(newest[0], accelerator, model, optimizer, weights)
            optimizer.zero_grad()
            line = step_line(step, losses, beta, rates, norm, config, heads, began, fastest)
            if fault is not None:
                line.dropped = fault
            receipt = make_receipt(stream, step * data.batch_size)
            line.tokens_of_source = {name: entry["tokens"] for name, entry in receipt.items()}
            seconds += line.timing.seconds
            if config.evaluation.eval_steps and step % config.evaluation.eval_steps == 0:
                line.validation, routing = evaluate(accelerator, model, held_out)
                line.routing = routing.health(start_routing, reduce)
            report(line)
            stop, failed = any_process(accelerator, interruption.received, checkpoints.failed)
            stop = stop and step < config.max_steps
            if stop or step % config.checkpoint.save_steps == 0 or step == config.max_steps:
                facts = {"updates": updates, "seconds": round(seconds, 3), "data": receipt}
                saved = checkpoints.begin(step, facts)
                if is_milestone(config, step):
                    checkpoints.wait()
                    keep(step, saved)
            elif failed:
                checkpoints.wait()
            if stop:
                checkpoints.wait()
                say(f"stopped by a signal after step {step}, which is saved; give the same command again to go on")
                accelerator.end_training()
                return run.record

    # ---- the tuned model
    receipt = make_receipt(stream, config.max_steps * data.batch_size)
    checkpoints.wait()
    del checkpoints, model, step_module, student, network, optimizer, weights, teacher
    end_distribution(accelerator)
    tokens, files, scores = config.max_steps * config.tokens_per_step, {}, None
    if main:
        last = checkpoint_folder(run.checkpoints, config.max_steps)
        networks.save_network(config, last, tokenizer, run.model, starting_point, config.max_steps)
        files = mark_files(run.model)
        scores = score_saved(config, run.model, accelerator.device, held_out, reference)
        if floor is not None:
            scores.floor = floor
        say(f"{run.model}: {show_scores(scores)}")
        say(f"{config.max_steps} steps, {tokens:,} tokens, {seconds:.0f} s of training")
    facts = {"steps": config.max_steps, "tokens": tokens, "seconds": round(seconds, 3), "data_read": receipt}
    run.finish(files, **facts, evaluation=scores)
    accelerator.end_training()
    return run.record


def _open_data(
    config: TrainConfig, run: Run, accelerator: Accelerator, say: Callable[[str], None]
) -> tuple[Any, str, list[TokenizedSource]]:
    """The tokenizer, the folder of the tokens and its sources; UserError unless they are what the run began with."""
    tokenizer = networks.load_tokenizer(Path(config.model))
    with accelerator.main_process_first():
        _, folder, sources = tokens_for(config.data.mixture, tokenizer, say)
    run.check_data(describe_data(sources))
    return tokenizer, folder, sources


def describe_data(sources: list[TokenizedSource]) -> dict[str, object]:
    """What identifies the training text: per source its weight, number of tokens and the hash of its shards."""
    return {
        source.name: {
            "weight": source.weight,
            "tokens": len(source.train),
            "held_out_tokens": len(source.validation),
            "sha256": source.sha256,
        }
        for source in sources
    }
