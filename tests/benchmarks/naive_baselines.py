"""The baselines' attention as loops over tokens, heads and experts, written from the papers' equations.

Matrix products are `@` of one row with one matrix, so that they can be counted; all else is elementwise. Each function
takes a row's inputs `[T, C]` and the layer's weights by name, and returns the output `[T, C]`, and per token what
the auxiliary losses are made of: probabilities and the selected experts (and MoA's logits).
"""

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary embedding of one head's vector `[1, D]`: entries i and i + D/2 turn by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=x.dtype) * 2 / x.shape[-1])
    first, second = x[:, :half], x[:, half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query `[1, D]` over the keys and values up to its own."""
    scores = query @ torch.cat(keys).T / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ torch.cat(values)


def part(weight: Tensor, number: int, size: int) -> Tensor:
    """Of a projection `[heads * size, C]` that of one head, `[C, size]`."""
    return weight[number * size : (number + 1) * size].T


def moa(x: Tensor, w: Weights, size: int, active: int, theta: float) -> tuple[Tensor, list]:
    keys, values, outputs, routing = [], [], [], []
    for position, token in enumerate(x.split(1)):
        keys.append(rotated(token @ w["k_proj"].T, position, theta))
        values.append(token @ w["v_proj"].T)
        logits = token @ w["router"].T
        probabilities = logits.softmax(-1)[0]
        selected = sorted(range(len(probabilities)), key=lambda e: -probabilities[e].item())[:active]
        total = sum(probabilities[expert].item() for expert in selected)  # a number: no gradient
        output = torch.zeros_like(token)
        for expert in selected:
            query = rotated(token @ part(w["q_proj"], expert, size), position, theta)
            head = attention(query, keys, values)
            output = output + probabilities[expert] / total * (head @ part(w["o_proj"].T, expert, size).T)
        outputs.append(output)
        routing.append((probabilities, selected, logits[0]))
    return torch.cat(outputs), routing


def moa_loss(routing: list) -> Tensor:
    """0.01 N sum f P + 0.001 z, over the tokens of all rows."""
    experts, tokens = len(routing[0][0]), len(routing)
    counts = [sum(expert in selected for _, selected, _ in routing) for expert in range(experts)]
    totals = [sum(probabilities[expert] for probabilities, _, _ in routing) for expert in range(experts)]
    balance = sum(count / sum(counts) * total / sum(totals) for count, total in zip(counts, totals, strict=True))
    z = sum(torch.log(logits.exp().sum()) ** 2 for _, _, logits in routing) / tokens
    return 0.01 * experts * balance + 0.001 * z


def switchhead(x: Tensor, w: Weights, size: int, heads: int, active: int, theta: float) -> tuple[Tensor, list]:
    experts = len(w["v_router"]) // heads
    keys: list[list[Tensor]] = [[] for _ in range(heads)]
    values: list[list[Tensor]] = [[] for _ in range(heads)]
    outputs = []
    for position, token in enumerate(x.split(1)):
        output = torch.zeros_like(token)
        for head in range(heads):
            keys[head].append(rotated(token @ part(w["k_proj"], head, size), position, theta))
            chosen = {}
            for side in ("v", "o"):
                scores = torch.sigmoid(token @ part(w[f"{side}_router"], head, experts))[0]
                best = sorted(range(experts), key=lambda e, s=scores: -s[e].item())[:active]
                chosen[side] = {expert: scores[expert] for expert in best}
            value = torch.zeros(1, size, dtype=x.dtype)
            for expert, score in chosen["v"].items():
                value = value + score * (token @ part(w["v_proj"], head * experts + expert, size))
            values[head].append(value)
            query = rotated(token @ part(w["q_proj"], head, size), position, theta)
            result = attention(query, keys[head], values[head])
            for expert, score in chosen["o"].items():
                output = output + score * (result @ part(w["o_proj"].T, head * experts + expert, size).T)
        outputs.append(output)
    return torch.cat(outputs), []


def static(x: Tensor, w: Weights, size: int, heads: int, theta: float, weight: float = 1) -> tuple[Tensor, list]:
    keys: list[list[Tensor]] = [[] for _ in range(heads)]
    values: list[list[Tensor]] = [[] for _ in range(heads)]
    outputs = []
    for position, token in enumerate(x.split(1)):
        output = torch.zeros_like(token)
        for head in range(heads):
            keys[head].append(rotated(token @ part(w["k_proj"], head, size), position, theta))
            values[head].append(token @ part(w["v_proj"], head, size))
            query = rotated(token @ part(w["q_proj"], head, size), position, theta)
            found = attention(query, keys[head], values[head]) @ part(w["o_proj"].T, head, size).T
            output = output + weight * found
        outputs.append(output)
    return torch.cat(outputs), []
