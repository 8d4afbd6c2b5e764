"""What a config says of its heads, and the keys that they read, position by position."""

from typing import Any

import numpy as np

Config = dict[str, Any]


def keys_of(config: Config, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys that a head reads at each position of a sequence: one that is on, and one that is off; both `[T]`.

    A local fallback reads its window and sinks, or all keys at a document's first positions.
    """
    on = np.arange(1, length + 1)
    if config["head_fallback"] != "local":
        return on, np.zeros(length, dtype=int)
    seen = config["local_window"] + config["local_sinks"]
    return on, np.where(on <= all_heads_until(config), on, np.minimum(on, seen))


def all_heads_until(config: Config) -> int:
    """First tokens of a document that have all heads on: local fallbacks see all that heads see there."""
    if config["head_fallback"] != "local":
        return 0
    return max(config["local_start"], config["local_window"] + config["local_sinks"])


def per_layer(config: Config, name: str) -> list[int]:
    """A number of the config by layer."""
    value = config[name]
    return value if isinstance(value, list) else [value] * config["num_hidden_layers"]


def keys_read(config: Config, length: int) -> float:
    """Keys that a sequence reads as planned, over those that the base reads."""
    on, off = keys_of(config, length)
    shares = [active / config["num_attention_heads"] for active in per_layer(config, "num_active_heads")]
    share = sum(shares) / len(shares)
    return float((share * on + (1 - share) * off).sum() / on.sum())


def routed(config: Config, layer: int) -> list[int]:
    """Heads of a layer that its router chooses among."""
    shared = shared_heads(config)[layer]
    never = (config.get("never_on_heads") or [[]] * config["num_hidden_layers"])[layer]
    return [head for head in range(config["num_attention_heads"]) if head not in {*shared, *never}]


def shared_heads(config: Config) -> list[list[int]]:
    """Heads of each layer that are always on."""
    if config.get("shared_heads") is not None:
        return config["shared_heads"]
    return [list(range(number)) for number in per_layer(config, "num_shared_heads")]
