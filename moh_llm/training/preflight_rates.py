"""Whether the routers' learning rate suits the size of the inputs that they read, for `moh_llm.training.preflight`."""

import math
from pathlib import Path

from safetensors import safe_open

from moh_llm.modeling import MoHLlamaConfig
from moh_llm.records.conversion import read_conversion
from moh_llm.records.model import read_weight_map
from moh_llm.training.config import TrainConfig
from moh_llm.training.preflight_data import Finding

# That one step may change a logit by. With 1e-3 it is 0.19 in SmolLM2-135M, which gets nearer to its base, and 2.5 in
# Qwen2.5-Coder-0.5B, which gets no nearer (docs/recovery.md).
MOST = 0.3


def check_router_rate(config: TrainConfig, model: MoHLlamaConfig) -> Finding | None:
    """A warning where one step may change a converted model's fitted routers by too much.

    AdamW changes each weight by about its rate, whatever the gradient, so that a logit `w x` may change by the rate
    times the sum of absolute inputs. A layer's inputs are normalised and then scaled by the norm's weights `n`; where
    normalised inputs are normal, that sum is `sqrt(2 / pi) * sum |n|`.

    Returns:
        None where no router that reads the inputs is trained (threshold routers are not), or the model was not
        converted.
    """
    folder = Path(config.model)
    if model.router_type != "linear" or read_conversion(folder) is None:
        return None
    sums = input_sums(folder)
    layer = max(sums, key=sums.__getitem__)
    rate = config.optimizer.router_learning_rate or config.optimizer.learning_rate
    step = rate * sums[layer]
    name = "learning_rate" if config.optimizer.router_learning_rate is None else "router_learning_rate"
    text = f"optimizer.{name}={rate:g} changes a router's logit by about {step:.2g} in a step in layer {layer}"
    if step <= MOST:
        return Finding("ok", "rates", text)
    fitting = MOST / sums[layer]
    digit = 10 ** math.floor(math.log10(fitting))
    lower = math.floor(fitting / digit) * digit
    return Finding(
        "warning", "rates", f"{text}, whose inputs are large; set optimizer.router_learning_rate to {lower:g} at most"
    )


def input_sums(folder: Path) -> dict[int, float]:
    """By layer, what the absolute values of its attention's inputs sum to, estimated from its norm's weights."""
    suffix, sums = ".input_layernorm.weight", {}
    for file in read_weight_map(folder)[0]:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if name.endswith(suffix):
                    layer = int(name.removesuffix(suffix).rsplit(".", 1)[1])
                    sums[layer] = math.sqrt(2 / math.pi) * tensors.get_tensor(name).double().abs().sum().item()
    return sums
