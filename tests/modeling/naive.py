"""The MoH layer as plain loops in float64, written from the equations: the reference of the tests."""

import math
from typing import NamedTuple

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def route(
    config, weights: dict[str, np.ndarray], layer: int, x: np.ndarray, queries: np.ndarray
) -> tuple[np.ndarray, list[float | None]]:
    """Gate of every head for one token, and its score before selection (Eq. 5 and 6; None: it has none).

    `x` is the layer's input [C], `queries` [H, D] are those before rotary embedding.
    """
    heads = config.num_attention_heads
    shared = config.shared_heads_per_layer[layer]
    local = config.never_on_heads_per_layer[layer]
    routed = [head for head in range(heads) if head not in shared and head not in local]
    size = heads // config.num_key_value_heads if config.routing_granularity == "kv_group" else 1
    groups = [routed[first : first + size] for first in range(0, len(routed), size)]
    k = (config.active_heads_per_layer[layer] - len(shared)) // size
    by_score = config.router_type == "threshold" and config.active_heads_per_layer[layer] < heads
    prefix = f"model.layers.{layer}.self_attn.router."
    gate, scores = np.zeros(heads), [None] * heads
    gate[shared] = 1.0
    if config.router_score == "normalized":
        shared_groups = [shared[first : first + size] for first in range(0, len(shared), size)]
        return normalized_gate(heads, weights, prefix, x, shared_groups, groups, k), scores
    if not routed or config.router_type == "none":
        return gate, scores
    if config.router_type == "query_norm":
        norms = np.array([math.sqrt(sum((queries[head] ** 2).sum() for head in group)) for group in groups])
        logits = norms / norms.std(ddof=1) if len(groups) > 1 else norms
    else:
        logits = weights[prefix + "routed.weight"] @ x + weights.get(prefix + "routed.bias", 0)
    of_routed, of_shared = softmax(logits), [None] * len(shared)
    if config.router_type == "threshold":
        of_routed = 1 / (1 + np.exp(-logits))
    if config.router_type == "two_stage":
        a1, a2 = softmax(weights[prefix + "stage.weight"] @ x)
        of_shared = a1 * softmax(weights[prefix + "shared.weight"] @ x).repeat(size)
        of_routed = a2 * of_routed
    for head, score in zip([*shared, *routed], [*of_shared, *of_routed.repeat(size)], strict=True):
        scores[head] = score
    if by_score:
        k = int((logits > 0).sum())
    chosen = [head for i in np.argsort(-logits, kind="stable")[:k] for head in groups[i]]
    for head in [*shared, *chosen]:
        gate[head] = scores[head] if config.router_score == "weighted" and scores[head] is not None else 1.0
    return gate, scores


def normalized_gate(
    heads: int, weights: dict[str, np.ndarray], prefix: str, x: np.ndarray, shared: list, routed: list, k: int
) -> np.ndarray:
    """Gate of every head for one token as the authors' code has it; `shared` and `routed` hold groups of heads."""
    gate = np.zeros(heads)
    if shared:
        of_shared = softmax(weights[prefix + "shared.weight"] @ x) if len(shared) > 1 else [1 / len(shared)]
        for group, score in zip(shared, of_shared, strict=True):
            gate[group] = len(shared) * score
    if routed:
        p = softmax(weights[prefix + "routed.weight"] @ x)
        chosen = np.argsort(-p, kind="stable")[:k]
        for i in chosen:
            gate[routed[i]] = k * p[i] / sum(p[j] for j in chosen)
    if shared and routed:
        a1, a2 = softmax(weights[prefix + "stage.weight"] @ x)
        for group in shared:
            gate[group] *= 2 * a1
        for group in routed:
            gate[group] *= 2 * a2
    return gate


class Heads(NamedTuple):
    """What a layer's heads do on one row: `gates` [T, H], `scores` [T][H] as `route` gives them, attention
    `patterns` [T, H, T], and `outputs` [T, H, D], what is projected."""

    gates: np.ndarray
    scores: list[list[float | None]]
    patterns: np.ndarray
    outputs: np.ndarray


def heads_of(
    config, weights: dict[str, np.ndarray], layer: int, x: np.ndarray, positions=None, visible=None, bias=None
) -> Heads:
    """The heads of one layer on one row: input [T, C] after the norm.

    `visible` says which keys each query of a head sees, [H, T, T] or [T, T]; without, documents begin where positions
    are 0. `bias` is added to the scores. Windows, sinks and first tokens are counted among keys that are visible, up to
    the query itself; later ones, where visible, are seen by every head.
    """
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    prefix = f"model.layers.{layer}.self_attn."
    q, k, v = (
        (x @ weights[f"{prefix}{name}_proj.weight"].T).reshape(len(x), count, size)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    theta = config.rope_parameters["rope_theta"]
    routed = [head for head in range(heads) if head not in config.shared_heads_per_layer[layer]]
    positions = range(len(x)) if positions is None else positions
    if visible is None:
        visible = [[t - positions[t] <= s <= t for s in range(len(x))] for t in range(len(x))]
    visible = np.broadcast_to(np.asarray(visible), (heads, len(x), len(x)))
    bias = np.zeros((1, 1, 1)) if bias is None else bias
    bias = np.broadcast_to(bias, (heads, len(x), len(x)))

    def rotate(vector: np.ndarray, position: int) -> np.ndarray:
        half = size // 2
        angle = position / theta ** (np.arange(half) * 2 / size)
        a, b = vector[:half], vector[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    found = [route(config, weights, layer, x[t], q[t]) for t in range(len(x))]
    gates, scores = np.stack([gate for gate, _ in found]), [scores for _, scores in found]
    if config.head_fallback == "local":
        for t in range(len(x)):
            if visible[:, t, : t + 1].any(0).sum() <= max(config.local_start, config.local_window + config.local_sinks):
                gates[t] = 1
    patterns, outputs = np.zeros((len(x), heads, len(x))), np.zeros((len(x), heads, size))
    for t, position in enumerate(positions):
        for head in range(heads):
            document = [s for s in range(len(x)) if visible[head, t, s]]
            if not document:  # padding, which nothing reads
                continue
            group, query = head // (heads // kv_heads), rotate(q[t, head], position)
            products = [
                query @ rotate(k[s, group], positions[s]) / math.sqrt(size) + bias[head, t, s] for s in document
            ]
            patterns[t, head, document] = softmax(np.array(products))
            if gates[t, head] == 0 and config.head_fallback == "local":
                before = [s for s in document if s <= t]
                near = before[max(0, len(before) - config.local_window) :] + document[len(before) :]
                seen = [s for s in document if s in near or s in document[: config.local_sinks]]
                terms, vectors = [products[document.index(s)] for s in seen], v[seen, group]
                if len(seen) < len(document):
                    row = routed.index(head)
                    score = weights[prefix + "fallback.distant_score.weight"][row] @ x[t]
                    score += weights[prefix + "fallback.distant_score.bias"][row]
                    terms.append(score + math.log(len(document) - len(seen)))
                    vectors = np.vstack([vectors, weights[prefix + "fallback.distant_value"][row]])
                outputs[t, head] = softmax(np.array(terms)) @ vectors
                continue
            outputs[t, head] = gates[t, head] * (patterns[t, head] @ v[:, group])
            if gates[t, head] == 0 and config.head_fallback == "value":
                row = routed.index(head)
                share = weights[prefix + "fallback.own_value.weight"][row] @ x[t]
                share += weights[prefix + "fallback.own_value.bias"][row]
                fitted = weights[prefix + "fallback.bias"][row] + share * v[t, group]
                is_first = visible[:, t].any(0).nonzero()[0].tolist() == [t]  # it sees nothing but itself
                outputs[t, head] = v[t, group] if is_first else fitted
    return Heads(gates, scores, patterns, outputs)


def decode(config, weights: dict[str, np.ndarray], ids: np.ndarray, **how) -> tuple[np.ndarray, list[Heads]]:
    """Logits [T, V] of one sequence, and what each layer's heads do. Attention is Eq. 4 by the letter.

    `how` are positions, visible keys and biases of `heads_of`.
    """

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[name]

    x, layers = weights["model.embed_tokens.weight"][ids], []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        layers.append(heads_of(config, weights, layer, norm(x, prefix + "input_layernorm.weight"), **how))
        x = x + layers[-1].outputs.reshape(len(x), -1) @ weights[prefix + "self_attn.o_proj.weight"].T
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = h @ weights[prefix + "mlp.gate_proj.weight"].T
        up = h @ weights[prefix + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T, layers


def logits(config, weights: dict[str, np.ndarray], ids: np.ndarray, **how) -> np.ndarray:
    """Logits [T, V] of one sequence; `how` as in `decode`."""
    return decode(config, weights, ids, **how)[0]
