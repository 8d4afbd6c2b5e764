"""What the log of a run should hold: its losses from the checkpoint before each step, its scores from that after."""

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from trained import read_checkpoint

from moh_llm.data.stream import SequenceStream
from moh_llm.data.windows import validation_batches
from recount import conversion, costs, network
from recount.conversion import Recount
from recount.leaves import TIME, Near
from recount.models import SEQUENCE, STEPS
from recount.text import Row, rows_of

BETAS = {"value": 0.01, "local": None}  # weight of the load-balance loss, which threshold routers do not have
# Rates of what is trained: the local model's base is frozen.
RATES = {"value": ["learning_rate", "router_learning_rate"], "local": ["router_learning_rate"]}


class Run(Recount):
    """A run's weights at each step, and the text that it reads."""

    @cached_property
    def held_out(self) -> list[Row]:
        return rows_of(validation_batches(self.sources, SEQUENCE, self.recipe["evaluation"]["max_tokens"], 1))

    @cached_property
    def stream(self) -> SequenceStream:
        return SequenceStream(self.sources, SEQUENCE, seed=0)

    def model_at(self, step: int) -> torch.nn.Module:
        """The model after so many steps."""
        model = network.load(self.converted)
        if step:
            weights = read_checkpoint(self.run / "checkpoints" / f"step-{step:06d}")
            weights = {name: weight for name, weight in weights.items() if not name.startswith("exp_avg")}
            assert not model.load_state_dict(weights, strict=False).unexpected_keys
        return model

    def sequences(self, step: int) -> list[tuple[str, Row]]:
        """The sequences that a step reads, with the names of their sources."""
        size = self.recipe["data"]["batch_size"]
        numbers = range((step - 1) * size, step * size)
        names = [self.sources[self.stream.locate(number)[0]].name for number in numbers]
        return list(zip(names, rows_of([self.stream.batch(numbers[0], size)]), strict=True))

    @cached_property
    def scored(self) -> dict[int, network.Comparison]:
        """The model beside its base at the steps that are scored."""
        every = self.recipe["evaluation"]["eval_steps"]
        return {
            step: network.compare(self.model_at(step), self.base_network, self.held_out)
            for step in range(0, STEPS + 1, every)
        }

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """All lines of `log.jsonl` as they should be."""
        return _log(self)

    @cached_property
    def saved(self) -> dict[str, Any]:
        """Scores of the saved model beside the base, as it is and with all heads on."""
        saved = network.load(self.tuned)
        compared = network.compare(saved, self.base_network, self.held_out)
        found = scores(compared) | _held_out_keys(self, compared.passes, saved.config.to_dict())
        saved.set_active_heads(8)
        dense = conversion.figures(network.compare(saved, self.base_network, self.held_out))
        on = torch.cat([heads_on(one) for one in compared.passes])
        return found | {"dtype": "float32", "heads_read": Near(float(on.mean()), 6e-7), "all_heads_kl": dense["kl"]}


def _log(run: Run) -> list[dict[str, Any]]:
    lines, read = [{"step": 0} | _held_out(run, 0)], {source.name: 0 for source in run.sources}
    average, multiplier = 0.0, 0.0
    for step in range(1, STEPS + 1):
        sequences = run.sequences(step)
        for source, _ in sequences:
            read[source] += SEQUENCE
        line: dict[str, Any] = {"step": step, "tokens": sum(read.values()), "tokens_of_source": dict(read)}
        losses, found, share = _losses(run, step, [row for _, row in sequences], multiplier)
        line |= losses | _rates(run, step) | {"timing": TIME}
        if run.kind == "local":
            line["keys_multiplier"] = Near(multiplier, 1e-6 + 1e-3 * abs(multiplier))
            line["keys_read"] = Near(keys_read(run.config, share), 1e-5)
            average = 0.9 * average + 0.1 * found if step > 1 else found
            excess = 3 * (share / planned(run.config) - 1)
            multiplier = average * max(0.0, 1 + (excess if average > 0 else -excess))
        if step in run.scored:
            line |= _held_out(run, step)
        lines.append(line)
    return lines


def planned(config: dict[str, Any]) -> float:
    """Share of the distant keys that a plan reads."""
    heads = costs.per_layer(config, "num_active_heads")
    return sum(heads) / (len(heads) * config["num_attention_heads"])


def keys_read(config: dict[str, Any], share: float) -> float:
    """Share of all keys of a sequence, given that of the distant ones."""
    on, off = costs.keys_of(config, SEQUENCE)
    return float((off.sum() + share * (on - off).sum()) / on.sum())


def distant_keys(config: dict[str, Any], passes: list[network.Pass]) -> tuple[torch.Tensor, float, float]:
    """Distant keys that are read, with the gradient of sigmoids, mean over heads; their derivative; all of them."""
    shared, count = costs.shared_heads(config), config["num_attention_heads"] * config["num_hidden_layers"]
    read, slope, total = torch.zeros(()), 0.0, 0.0
    for one in passes:
        on, off = costs.keys_of(config, len(one.logits))
        weights = torch.from_numpy(on - off).float()
        total += float(weights.sum())
        for layer, found in enumerate(one.scores):
            soft = found.sigmoid()
            gates = (found > 0).float() + soft - soft.detach()
            read = read + (weights * (gates.sum(-1) + len(shared[layer]))).sum() / count
            slope += float((weights * (soft * (1 - soft)).detach().sum(-1)).sum()) / count
    return read, slope, total


def _held_out(run: Run, step: int) -> dict[str, Any]:
    found = run.scored[step]
    return {"validation": scores(found) | _held_out_keys(run, found.passes, run.config), "routing": _routing(run, step)}


def _held_out_keys(run: Run, passes: list[network.Pass], config: dict[str, Any]) -> dict[str, Near]:
    """The share of keys that is read of held-out text, for threshold routers."""
    if run.kind != "local":
        return {}
    read, _, total = distant_keys(config, passes)
    return {"keys_read": Near(keys_read(config, float(read) / total), 1e-5)}


def scores(found: network.Comparison) -> dict[str, Any]:
    """A model's scores on held-out text, against the base."""
    figures = conversion.figures(found)
    about = {"tokens": int(found.sums[:, 0].sum()), "documents": len(found.sums)}
    del figures["perplexity_ratio"]
    return about | figures | {"reference": "base", "reference_perplexity": math.exp(found.means[2])}


def _rates(run: Run, step: int) -> dict[str, float]:
    """Learning rates of a step: up in a line from the first one, then down a half cosine to the last one."""
    schedule, optimizer = run.recipe["schedule"], run.recipe["optimizer"]
    highest, warmup = optimizer["learning_rate"], schedule["warmup_steps"]
    first, last = 1e-5, schedule["final_learning_rate"]
    points = [first + (highest - first) * done / warmup for done in range(warmup)]
    curve = (1 + np.cos(np.linspace(0, np.pi, STEPS - warmup))) / 2
    rate = float([*points, *(last + (highest - last) * curve)][step - 1])
    rates = {"learning_rate": rate, "router_learning_rate": rate * optimizer["router_learning_rate"] / highest}
    return {name: rates[name] for name in RATES[run.kind]}


def chosen(run: Run, layer: int, scores: torch.Tensor, active: int) -> torch.Tensor:
    """Which of its routed heads a token has on by the router's scores `[T, U]`, bool."""
    if run.kind == "local":
        return scores > 0
    number = active - len(costs.shared_heads(run.config)[layer])
    return torch.zeros_like(scores).scatter(-1, scores.topk(number).indices, 1.0).bool()


def _losses(run: Run, step: int, sequences: list[Row], multiplier: float) -> tuple[dict[str, Any], float, float]:
    """Losses of a step and the norm of its gradient, by autograd of the model before it.

    With local fallbacks also the multiplier that its gradients tell, and the share of the distant keys that it read.
    """
    model, heads = run.model_at(step - 1), costs.per_layer(run.config, "num_active_heads")
    for name, weight in model.named_parameters():
        weight.requires_grad_(is_trained(run, name))
    sums = dict.fromkeys(("cross_entropy", "kl", "balance_loss"), torch.zeros(()))
    tokens, on, every = 0, [], []
    for row in sequences:
        passes: list[network.Pass] = []
        for _, ids in row:
            own = network.run(model, ids)
            passes.append(own)
            on.append(heads_on(own))
            with torch.no_grad():
                other = network.run(run.base_network, ids)
            p, q = own.logits[:-1].log_softmax(-1), other.logits[:-1].log_softmax(-1)
            tokens += len(p)
            sums["cross_entropy"] = sums["cross_entropy"] - p[torch.arange(len(p)), torch.from_numpy(ids)[1:]].sum()
            sums["kl"] = sums["kl"] + (q.exp() * (q - p)).sum()
        sums["balance_loss"] = sums["balance_loss"] + _balance(run, passes, heads)
        every += passes
    means = {name: total / (len(sequences) if name == "balance_loss" else tokens) for name, total in sums.items()}
    loss = means["kl"] + (BETAS[run.kind] or 0) * means["balance_loss"]
    read, slope, total = distant_keys(run.config, every)
    if run.kind == "local":
        loss = loss + multiplier * read / total
    loss.backward()
    shift, found = 0.0, 0.0
    if run.kind == "local":  # a shift of all scores is one of all biases
        names = [name for name, _ in model.named_parameters() if name.endswith("router.routed.bias")]
        shift = sum(float(model.get_parameter(name).grad.sum()) for name in names)
        found = multiplier - shift / (slope / total)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    left_out = {"balance_loss"} if BETAS[run.kind] is None else set()
    numbers = {
        "loss": _rounded(loss),
        **{name: _rounded(mean) for name, mean in means.items() if name not in left_out},
        "gradient_norm": Near(norm, 1e-5 + 1e-3 * norm),  # of a bend that rounding passes on either side, too
        "heads_read": Near(float(torch.cat(on).mean()), 1e-5),
    }
    return numbers, found, float(read.detach()) / total


def heads_on(one: network.Pass) -> torch.Tensor:
    """How many heads each token has on, mean over layers, `[T]`."""
    return torch.stack(one.gates).double().sum(-1).mean(0)


def _rounded(value: torch.Tensor) -> Near:
    """A sum in float32 of terms that partly cancel."""
    return Near(value.item(), 2e-6 + 1e-4 * abs(value.item()))


def is_trained(run: Run, name: str) -> bool:
    if run.kind == "local":  # its base is frozen
        return ".fallback." in name or ".router." in name
    return True


def _balance(run: Run, passes: list[network.Pass], heads: list[int]) -> torch.Tensor:
    """Eq. 7 on one sequence: the sum over routed heads of mean score times share of tokens, mean over layers."""
    if run.kind == "local":
        return torch.zeros(())
    losses = []
    for layer, active in enumerate(heads):
        scores = torch.cat([one.scores[layer] for one in passes])
        share = chosen(run, layer, scores, active).float().mean(0)
        losses.append((scores.softmax(-1).mean(0) * share).sum())
    return torch.stack(losses).mean()


def _routing(run: Run, step: int) -> dict[str, Any]:
    """What the routers do on the held-out text."""
    loads = []
    passes = run.scored[step].passes
    for layer, active in enumerate(costs.per_layer(run.config, "num_active_heads")):
        if active == 8 or not costs.routed(run.config, layer):  # the same heads for all tokens
            loads.append([])
            continue
        now = torch.cat([one.scores[layer] for one in passes])
        on = chosen(run, layer, now, active)
        loads.append([Near(share, 6e-7) for share in on.double().mean(0).tolist()])
    return {
        "load": loads,
        "dead_heads": [sum(share.value == 0 for share in layer) for layer in loads],
        "heads_read": Near(float(torch.cat([heads_on(one) for one in passes]).mean()), 6e-7),
    }
