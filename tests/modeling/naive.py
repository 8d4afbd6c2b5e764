"""The MoH layer as plain loops in float64, written from the equations: the reference of the tests."""

import math

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def gates(config, weights: dict[str, np.ndarray], layer: int, x: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Gate of every head for one token: layer input `x` [C], `queries` [H, D] before rotary embedding."""
    heads = config.num_attention_heads
    shared = config.shared_heads_per_layer[layer]
    routed = [head for head in range(heads) if head not in shared]
    size = heads // config.num_key_value_heads if config.routing_granularity == "kv_group" else 1
    groups = [routed[first : first + size] for first in range(0, len(routed), size)]
    k = (config.active_heads_per_layer[layer] - len(shared)) // size
    prefix = f"model.layers.{layer}.self_attn.router."
    gate = np.zeros(heads)
    gate[shared] = 1.0
    if not routed:
        return gate
    if config.router_type == "query_norm":
        norms = np.array([math.sqrt(sum((queries[head] ** 2).sum() for head in group_size)) for group_size in groups])
        logits = norms / norms.std(ddof=1) if len(groups) > 1 else norms
    elif config.router_type == "linear":
        logits = weights[prefix + "routed.weight"] @ x + weights[prefix + "routed.bias"]
    else:
        logits = weights[prefix + "routed.weight"] @ x
    scores = softmax(logits)
    real = np.ones(heads)
    if config.router_type == "two_stage":
        a1, a2 = softmax(weights[prefix + "stage.weight"] @ x)
        real[shared] = a1 * softmax(weights[prefix + "shared.weight"] @ x).repeat(size)
        scores = a2 * scores
    real[routed] = scores.repeat(size)
    chosen = [head for i in np.argsort(-logits, kind="stable")[:k] for head in groups[i]]
    for head in [*shared, *chosen]:
        gate[head] = real[head] if config.router_score == "weighted" else 1.0
    return gate


def attention(config, weights: dict[str, np.ndarray], layer: int, x: np.ndarray) -> np.ndarray:
    """Causal MoH attention of one sequence: input [T, C] after the norm, output [T, C]. Eq. 4 by the letter."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    prefix = f"model.layers.{layer}.self_attn."
    q = (x @ weights[prefix + "q_proj.weight"].T).reshape(len(x), heads, size)
    k = (x @ weights[prefix + "k_proj.weight"].T).reshape(len(x), kv_heads, size)
    v = (x @ weights[prefix + "v_proj.weight"].T).reshape(len(x), kv_heads, size)
    out_weight = weights[prefix + "o_proj.weight"]
    theta = config.rope_parameters["rope_theta"]
    routed = [head for head in range(heads) if head not in config.shared_heads_per_layer[layer]]

    def rotate(vector: np.ndarray, position: int) -> np.ndarray:
        half = size // 2
        angle = position / theta ** (np.arange(half) * 2 / size)
        a, b = vector[:half], vector[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    output = np.zeros_like(x)
    for t in range(len(x)):
        gate = gates(config, weights, layer, x[t], q[t])
        for head in range(heads):
            group = head // (heads // kv_heads)
            if gate[head] == 0:
                if config.head_fallback == "value":
                    row = routed.index(head)
                    share = weights[prefix + "fallback.own_value.weight"][row] @ x[t]
                    share += weights[prefix + "fallback.own_value.bias"][row]
                    fallback = weights[prefix + "fallback.bias"][row] + share * v[t, group] if t else v[t, group]
                    output[t] += out_weight[:, head * size : (head + 1) * size] @ fallback
                continue
            query = rotate(q[t, head], t)
            scores = np.array([query @ rotate(k[s, group], s) / math.sqrt(size) for s in range(t + 1)])
            head_output = softmax(scores) @ v[: t + 1, group]
            output[t] += gate[head] * (out_weight[:, head * size : (head + 1) * size] @ head_output)
    return output


def logits(config, weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits [T, V] of one sequence."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[name]

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        x = x + attention(config, weights, layer, norm(x, prefix + "input_layernorm.weight"))
        h = norm(x, prefix + "post_attention_layernorm.weight")
        gate = h @ weights[prefix + "mlp.gate_proj.weight"].T
        up = h @ weights[prefix + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[prefix + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["lm_head.weight"].T
