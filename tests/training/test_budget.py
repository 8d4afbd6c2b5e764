"""The budget of keys: what the loss adds, how the multiplier follows, and the thresholds at the end of a run."""

import copy
import json
from pathlib import Path

import forks
import pytest
import torch
from trained import read_log, unfinish
from transformers import Trainer, TrainingArguments
from ways import DDP, ROOT

from moh_llm.errors import UserError
from moh_llm.flops import distant_keys, share_of_keys
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.balance import HeadBalanceMixin
from moh_llm.training.budget import (
    CORRECTION,
    MEMORY,
    KeyBudget,
    Thresholds,
    distant_keys_read,
    make_budget,
    measure_thresholds,
    planned_share,
    set_thresholds,
)
from moh_llm.training.loop import train
from moh_llm.training.parallel import make_accelerator
from moh_llm.training.step import TrainingStep, accumulate_gradients

WINDOW, SINKS, START = 4, 1, 8


@pytest.fixture(params=["head", "kv_group"])
def network(request, base_folder: Path) -> MoHLlamaForCausalLM:
    """A default model with random scores, and windows so short that a sequence of 32 tokens has distant keys."""
    plan = {"router_type": "threshold", "router_score": "quantized", "head_fallback": "local", "num_active_heads": 2}
    plan |= {"num_shared_heads": 1 if request.param == "head" else 0, "routing_granularity": request.param}
    seen = {"local_window": WINDOW, "local_sinks": SINKS, "local_start": START}
    torch.manual_seed(0)
    network = MoHLlamaForCausalLM(MoHLlamaConfig.from_pretrained(base_folder, **plan, **seen)).train()
    with torch.no_grad():
        for router in network.routers:
            router.routed.weight.normal_(std=0.3)
            router.routed.bias.normal_(std=0.3)
    return network


def batch_of(rows: int, length: int = 32) -> dict[str, torch.Tensor]:
    """Random sequences; the second document of each begins at another token."""
    ids = torch.randint(5, 200, (rows, length), generator=torch.Generator().manual_seed(rows))
    starts = torch.arange(rows) % 3 * 5
    places = torch.arange(length).expand(rows, -1)
    positions = torch.where(places < starts[:, None], places, places - starts[:, None])
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def test_distant_keys_read_are_those_of_a_loop(network) -> None:
    batch, routers = batch_of(3), network.routers
    gates: list[torch.Tensor] = []  # of all heads, by which attention chooses
    for router in routers:
        router.register_forward_hook(lambda module, inputs, output: gates.append(output[1]))
    logits = network.model(
        batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, output_router_logits=True
    ).router_logits
    logits = [scores.detach().requires_grad_() for scores in logits]
    read, slope = distant_keys_read(logits, routers, distant_keys(network.config, batch["position_ids"]))
    wanted, change, heads = 0.0, 0.0, network.config.num_attention_heads * len(routers)
    for row in range(3):
        for token, position in enumerate(batch["position_ids"][row].tolist()):
            beyond = position + 1 - WINDOW - SINKS if position >= START else 0
            for layer, router in enumerate(routers):
                scores = logits[layer][row, token].detach().double()
                wanted += beyond * int(gates[layer][row, token].sum())
                soft = 1 / (1 + torch.exp(-scores))
                change += beyond * router.group_size * float((soft * (1 - soft)).sum())
    assert wanted > 0
    assert float(read.detach()) == pytest.approx(wanted / heads, rel=1e-6)
    assert float(slope) == pytest.approx(change / heads, rel=1e-5)
    # Straight-through: the gradient of the sum is that of the sigmoids.
    gradients = torch.autograd.grad(read, logits)
    assert float(sum(gradient.sum() for gradient in gradients)) == pytest.approx(float(slope), rel=1e-5)


def test_a_step_minimises_task_and_budget_together(configure, network) -> None:
    batch, found = batch_of(4), []
    batch["position_ids"][0] %= START - 1  # micro-batches of one sequence: the first has no distant keys
    for rows, recomputes, multiplier in ((1, False, 0.0), (1, False, 2.0), (2, True, 2.0), (4, False, 2.0)):
        keys = {"objective.kind": "cross_entropy", "optimizer.max_grad_norm": None, "data.micro_batch_size": rows}
        config = configure(**keys, gradient_checkpointing=recomputes)
        accelerator, step = make_accelerator(config), TrainingStep(network, None, config.objective).train()
        if recomputes:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        budget = KeyBudget(network, accelerator.device, target=0.5)
        budget.multiplier = multiplier
        network.zero_grad()
        losses, _ = accumulate_gradients(accelerator, accelerator.prepare(step), batch, config, 0.0, budget)
        network.gradient_checkpointing_disable()
        biases = [router.routed.bias.grad for router in network.routers]
        # A shift of all scores is a shift of all biases.
        assert budget.slope == pytest.approx(float(sum(gradient.sum() for gradient in biases)), rel=1e-4)
        found.append((losses, budget.slope))
    (alone, slope), (both, with_budget), *others = found
    assert alone == both  # the multiplier weighs the keys, and changes no loss
    assert 0 < alone.distant_read < 1 and alone.distant_slope > 0
    assert both.total(0.0, 2.0) == pytest.approx(alone.task + 2 * alone.distant_read)
    # About twice the slope of the keys, which also change the scores of later layers.
    assert with_budget - slope == pytest.approx(2 * alone.distant_slope, rel=0.1)
    for losses, again in others:
        assert losses == pytest.approx(both, rel=1e-5) and again == pytest.approx(with_budget, rel=1e-4)


def test_multiplier_is_the_slope_of_the_task_over_that_of_the_keys(network) -> None:
    budget = KeyBudget(network, torch.device("cpu"), target=0.4)
    budget.slope = -0.3  # more heads lower the task's loss by 0.3 for each unit of the shift
    budget.update(read=0.4, read_slope=0.1)
    assert budget.multiplier == pytest.approx(3.0)
    budget.slope = -0.1 + budget.multiplier * 0.1  # the task's part is -0.1
    budget.update(read=0.44, read_slope=0.1)
    average = MEMORY * 3.0 + (1 - MEMORY) * 1.0
    assert budget.multiplier == pytest.approx(average * (1 + CORRECTION * 0.1))  # it reads a tenth too much
    before = budget.multiplier
    budget.update(read=0.0, read_slope=0.0)  # no token has distant keys
    assert budget.multiplier == before
    budget.update(read=0.2, read_slope=0.1)  # it reads half: more heads can come by themselves
    assert budget.multiplier == 0.0
    # The task alone would turn heads off, and the multiplier turns them on: more so the fewer keys are read.
    for read, factor in ((0.4, 1.0), (0.36, 1.3), (0.44, 0.7), (0.6, 0.0)):
        budget.multiplier, budget.average, budget.slope = 0.0, -1.0, 0.1
        budget.update(read, read_slope=0.1)
        assert budget.multiplier == pytest.approx(-factor)


def test_thresholds_read_the_budget_and_keep_outputs(configure, network, monkeypatch) -> None:
    config = configure()
    accelerator, batches = make_accelerator(config), [batch_of(2, 48), batch_of(3, 48)]
    step = TrainingStep(network, None, config.objective)
    with torch.no_grad():  # one group of the first layer is on for all tokens, one of the second for none
        network.routers[0].routed.bias[0] = 50.0
        network.routers[1].routed.bias[0] = -50.0
    kinds = network.config.shared_heads_per_layer, network.config.never_on_heads_per_layer
    few = measure_thresholds(accelerator, step, batches, target=0.6)
    assert few.always_on == few.never_on == [[], []]  # on a few hundred tokens all heads keep their routers
    monkeypatch.setattr(
        "moh_llm.training.budget.KIND_TOKENS", sum(int(b["position_ids"].ge(START).sum()) for b in batches)
    )
    found = measure_thresholds(accelerator, step, batches, target=0.6)
    assert found.distant_read == pytest.approx(0.6, abs=0.02)  # a few hundred scores have no finer quantile

    def outputs(network: MoHLlamaForCausalLM) -> tuple[torch.Tensor, float]:
        total, read = 0.0, 0.0
        hidden = []
        for batch in batches:
            named = {name: batch[name] for name in ("input_ids", "position_ids")}
            with torch.no_grad():
                output = network.model(**named, use_cache=False, output_router_logits=True)
            distant = distant_keys(network.config, batch["position_ids"])
            read += float(distant_keys_read(output.router_logits, network.routers, distant)[0])
            total += float(distant.sum())
            hidden.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(hidden), read / total

    with torch.no_grad():
        for router in network.routers:
            router.routed.bias += found.shift
    shifted, read = outputs(network)
    assert read == pytest.approx(found.distant_read, abs=1e-6)
    with torch.no_grad():
        for router in network.routers:
            router.routed.bias -= found.shift
    set_thresholds(network, found)
    assert (network.config.shared_heads_per_layer, network.config.never_on_heads_per_layer) != kinds
    assert 0 in network.config.shared_heads_per_layer[0] or kinds[0][0]
    saved = MoHLlamaForCausalLM(MoHLlamaConfig.from_dict(network.config.to_dict())).train()
    saved.load_state_dict(network.state_dict())
    changed, read = outputs(saved)
    assert read == pytest.approx(found.distant_read, abs=1e-6)
    torch.testing.assert_close(changed, shifted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("network", ["kv_group"], indirect=True)
def test_a_rounded_plan_leaves_routers_on(network) -> None:
    for means, active in (([1.9, 0.2], [2, 2]), ([0.2, 0.3], [0, 2]), ([1.2, 0.1], [2, 0]), ([1.9, 1.8], [2, 2])):
        set_thresholds(network, Thresholds(0.0, means, [[], []], [[], []], 0.0, 0.0))
        assert network.config.active_heads_per_layer == active  # of groups of two heads, and never all four
    set_thresholds(network, Thresholds(0.0, [2.0, 0.4], [[0, 1], []], [[], [0]], 0.0, 0.0))
    assert network.config.active_heads_per_layer == [4, 2]  # without routed heads, the first layer has all


def test_a_full_layer_stays_full(configure, network) -> None:
    config = configure()
    network.set_active_heads([4, 2])
    step = TrainingStep(network, None, config.objective)
    found = measure_thresholds(make_accelerator(config), step, [batch_of(3, 48)], target=0.8)
    set_thresholds(network, found)
    assert network.config.active_heads_per_layer[0] == len(network.config.shared_heads_per_layer[0]) == 4
    assert found.distant_read == pytest.approx(0.8, abs=0.02)


def test_a_run_holds_its_budget_and_records_it(configure, budget_folder, base_folder, read_tensors) -> None:
    config = configure(model=str(budget_folder), freeze_base=True, max_steps=4, **{"objective.keys": 0.7})
    record = train(config)
    lines = read_log(Path(config.output_dir))
    assert all(0 < line["keys_read"] <= 1 for line in lines if line["step"])
    assert lines[1]["keys_multiplier"] == 0 and lines[2]["keys_multiplier"] != 0
    assert record.keys_asked == pytest.approx(0.7, abs=1e-6)
    assert 0 < record.evaluation.keys_read <= 1
    saved = MoHLlamaConfig.from_pretrained(Path(config.output_dir) / "model")  # a next run has the same budget
    assert share_of_keys(saved, planned_share(saved), config.data.sequence_length) == pytest.approx(0.7)
    base, tuned = read_tensors(base_folder), read_tensors(Path(config.output_dir) / "model")
    assert all(torch.equal(tensor, tuned[name]) for name, tensor in base.items())
    started = read_tensors(budget_folder)
    routers = [name for name in started if ".router." in name and name in tuned]
    assert any(not torch.equal(started[name], tuned[name]) for name in routers)


def test_a_resumed_run_goes_on_with_its_multiplier(configure, budget_folder, tmp_path, read_tensors) -> None:
    whole, halves = (tmp_path / name for name in ("whole", "halves"))
    for run in (whole, halves):
        train(configure(model=str(budget_folder), output_dir=str(run)))
    unfinish(halves, 4)
    said: list[str] = []
    train(configure(model=str(budget_folder), output_dir=str(halves)), say=said.append)
    assert any("resumed from" in line for line in said)
    assert read_log(halves) == read_log(whole)
    ours, theirs = (read_tensors(run / "model") for run in (halves, whole))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_budget_that_routers_cannot_hold_is_refused(configure, network) -> None:
    def refuse(message: str, keys: float | None, **more: object) -> None:
        config = configure(**{"objective.keys": keys, "data.sequence_length": 32} | more)
        with pytest.raises(UserError, match=message):
            make_budget(config, network, torch.device("cpu"))

    def held(keys: float | None) -> float:
        config = configure(**{"objective.keys": keys, "data.sequence_length": 32})
        return make_budget(config, network, torch.device("cpu")).target

    refuse(r"objective\.keys=0\.01 must be above 0\.\d+, .* data\.sequence_length=32 .* at most 1\.000", 0.01)
    refuse(r"data\.sequence_length=8 tokens are read in full", 0.5, **{"data.sequence_length": 8})
    assert held(1) == 1 and held(None) == 0.5
    size = network.config.heads_per_group  # from now on a head or a group of each layer is never on
    set_thresholds(network, Thresholds(0.0, [1, 1], [[], []], [[0], [0]], 0.0, target=0.3))
    refuse(r"objective\.keys=0\.95 must be above 0\.\d+, .* at most 0\.\d+, ", 0.95)
    most = share_of_keys(network.config, 1 - size / 4, 32)
    assert held(most - 1e-6) == pytest.approx(1 - size / 4, abs=1e-5) and held(None) == 0.3
    network.config.keys_budget = sum(router.num_shared for router in network.routers) / 8
    refuse(r"the plan of model=.* must be above 0\.\d+, ", None)
    network.requires_grad_(False)
    refuse(r"objective\.keys=0\.6 has no effect: no router of .*\(router_type=threshold, ", 0.6)
    with pytest.raises(UserError, match="has no effect"):
        train(configure(**{"objective.keys": 0.5}))  # of a model with linear routers


def test_routers_without_a_gate_gradient_stay(configure, budget_folder, read_tensors) -> None:
    config = configure(model=str(budget_folder), gate_gradient="none", max_steps=1)
    record = train(config)
    assert record.keys_asked is None
    started, tuned = read_tensors(budget_folder), read_tensors(Path(config.output_dir) / "model")
    assert all(torch.equal(tensor, tuned[name]) for name, tensor in started.items() if ".router." in name)


def rows_of(network: MoHLlamaForCausalLM, way: str = "packed") -> tuple[list[dict[str, torch.Tensor]], dict[str, int]]:
    """Six steps of the same documents, packed or padded, and the sizes that a Trainer reads them with.

    A token's label is what the model with all heads on predicts, so that heads that are on lower the loss.
    """
    documents = torch.randint(5, 200, (12, 40), generator=torch.Generator().manual_seed(0)).split((24, 16), dim=-1)
    pieces = []
    for ids in documents:
        with torch.no_grad(), network.all_heads_active():
            labels = network(ids, use_cache=False).logits.argmax(-1).roll(1, -1)
        labels[:, 0] = -100
        places = torch.arange(ids.shape[1]).expand_as(ids)
        pieces.append({"input_ids": ids, "position_ids": places, "labels": labels})
    if way.startswith("packed"):
        steps = 2 if way.endswith("micro-batches") else 1
        sizes = {"per_device_train_batch_size": 2 // steps, "gradient_accumulation_steps": steps}
        return [{name: torch.cat([piece[name][i] for piece in pieces]) for name in pieces[0]} for i in range(12)], sizes
    for piece in pieces:
        edges = (24 - piece.pop("position_ids").shape[1], 0)[:: 1 if way == "padded left" else -1]
        piece["attention_mask"] = torch.ones_like(piece["labels"])
        for name, value in {"input_ids": 7, "labels": -100, "attention_mask": 0}.items():
            piece[name] = torch.nn.functional.pad(piece[name], edges, value=value)
    # Of the four rows of a step, two are long and two short.
    steps = torch.arange(12).split(2)
    rows = [{name: piece[name][i] for name in piece} for step in steps for piece in pieces for i in step]
    return rows, {"per_device_train_batch_size": 4}


class Unshuffled(HeadBalanceMixin, Trainer):
    """Reads the rows in their order."""

    def _get_train_sampler(self, dataset: object = None) -> None:
        return None


def trainer_of(network: torch.nn.Module, rows: list, folder: Path, **arguments: object) -> Unshuffled:
    network.config.use_cache = False  # with a cache, packed documents see one another
    given = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    given |= {"max_steps": 6, "logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    return Unshuffled(network, TrainingArguments(folder, **given | arguments), train_dataset=rows)


@pytest.mark.parametrize("way", ["packed", "packed, micro-batches", "padded left", "padded right"])
def test_a_trainer_with_the_mixin_takes_the_steps_of_a_run(configure, network, tmp_path, way: str) -> None:
    own, (packed, _) = copy.deepcopy(network), rows_of(network)
    rows, sizes = rows_of(network, way)
    trainer = trainer_of(network, rows, tmp_path, **sizes)
    trainer.train()
    config = configure(**{"objective.kind": "cross_entropy", "optimizer.max_grad_norm": None, "data.batch_size": 2})
    accelerator, step = make_accelerator(config), TrainingStep(own, None, config.objective).train()
    budget = KeyBudget(own, accelerator.device, planned_share(own.config))
    for number, line in enumerate(trainer.state.log_history[:6]):
        own.zero_grad()
        batch = {name: torch.stack([row[name] for row in packed[2 * number :][:2]]) for name in packed[0]}
        losses, _ = accumulate_gradients(accelerator, step, batch, config, 0.0, budget)
        assert line["keys_multiplier"] == pytest.approx(budget.multiplier, rel=1e-4)
        assert line["loss"] == pytest.approx(losses.total(0.0, budget.multiplier), rel=1e-4)
        far = float(distant_keys(own.config, batch["position_ids"]).sum() / (batch["position_ids"] + 1).sum())
        for name, share in (("keys_read", losses.distant_read), ("keys_asked", budget.target)):
            assert line[name] == pytest.approx(1 - far * (1 - share), rel=1e-4)
        with torch.no_grad():
            for weight in own.parameters():
                weight -= 0 if weight.grad is None else weight.grad
        budget.update(losses.distant_read, losses.distant_slope)
        assert budget.multiplier > 0.1
    for name, weight in own.named_parameters():
        torch.testing.assert_close(network.get_parameter(name), weight, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("network", ["head"], indirect=True)
def test_a_trainer_resumes_with_its_multiplier(network, tmp_path) -> None:
    rows, sizes = rows_of(network)
    whole = trainer_of(network, rows, tmp_path, save_steps=3, **sizes)
    whole.train()
    resumed = trainer_of(network, rows, tmp_path, save_steps=3, **sizes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    names = ("step", "loss", "keys_read", "keys_multiplier")
    ours, theirs = ([[line.get(n) for n in names] for line in t.state.log_history[:6]] for t in (resumed, whole))
    assert ours == theirs and ours[3][3] > 0


@pytest.mark.parametrize("network", ["head"], indirect=True)
def test_a_trainer_leaves_frozen_routers_alone(network, tmp_path) -> None:
    for router in network.routers:
        router.requires_grad_(False)
    rows, sizes = rows_of(network)
    trainer = trainer_of(network, rows, tmp_path, **sizes | {"max_steps": 1})
    trainer.train()
    assert "keys_multiplier" not in trainer.state.log_history[0]


BOTH = """
import json
import sys
import torch
from moh_llm.modeling import MoHLlamaForCausalLM
from tests.training.test_budget import trainer_of
network = MoHLlamaForCausalLM.from_pretrained(sys.argv[1])
trainer = trainer_of(network, torch.load(sys.argv[2]), sys.argv[1], per_device_train_batch_size=2)
trainer.train()
print(json.dumps(trainer.state.log_history[:6]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", ["head"], indirect=True)
def test_two_processes_of_a_trainer_have_the_multiplier_of_one(network, tmp_path) -> None:
    network.save_pretrained(tmp_path)
    rows, sizes = rows_of(network, "padded right")
    torch.save(rows, tmp_path / "rows")
    trainer = trainer_of(network, rows, tmp_path, **sizes)
    trainer.train()
    words = ("-c", BOTH, tmp_path, tmp_path / "rows")
    done = forks.run(*words, folder=ROOT, environment=DDP | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}, processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    of_both = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(of_both) == 2 and all(line["keys_multiplier"] > 0.1 for line in of_both[0][1:])
    for lines in of_both:
        for line, wanted in zip(lines, trainer.state.log_history, strict=False):
            for name in ("keys_multiplier", "keys_read", "keys_asked"):
                assert line[name] == pytest.approx(wanted[name], rel=1e-4)


STORIES = "data/checkpoints/stories260K-hf"


@pytest.mark.slow
def test_routers_learn_within_their_budget(shared, tmp_path, configure) -> None:
    """Turns red when the multiplier, its sign or the straight-through gradient is wrong (about a minute)."""
    from moh_llm.api import convert

    texts = [str(path) for path in sorted((shared / "data/corpora/redpajama_arxiv").glob("train-*.jsonl"))]
    made, mixture = tmp_path / "moh", tmp_path / "arxiv.yaml"
    amounts = {"calibration_tokens": 16384, "heldout_tokens": 0}  # of Python's documentation, and not of papers
    convert(str(shared / STORIES), output_dir=str(made), context=512, keys=0.33, **amounts)
    mixture.write_text(json.dumps({"name": "arxiv", "sources": {"arxiv": {"weight": 1, "files": texts}}}))
    config = configure(
        model=str(made),
        freeze_base=True,
        max_steps=24,
        **{
            "data.mixture": str(mixture),
            "data.sequence_length": 512,
            "data.batch_size": 4,
            "data.micro_batch_size": 4,
            "optimizer.learning_rate": 1e-2,
            "optimizer.router_learning_rate": 1e-2,
            "schedule.warmup_steps": 4,
            "schedule.final_learning_rate": 1e-6,
            "evaluation.eval_steps": 24,
            "evaluation.max_tokens": 8192,
            "checkpoint.save_steps": 24,
        },
    )
    record = train(config)
    before = read_log(Path(config.output_dir))[0]["validation"]
    assert record.evaluation.kl < 0.5 * before["kl"]
    assert record.keys_calibrated == pytest.approx(record.keys_asked, rel=1e-3)
    assert record.evaluation.keys_read < 1.05 * record.keys_asked  # of other papers than the thresholds
    assert read_log(Path(config.output_dir))[-1]["keys_read"] < 1.05 * record.keys_asked  # also before they were set
