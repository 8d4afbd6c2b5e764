"""The models that `benchmarks/scratch.py` trains: sizes, methods, their parameters and FLOPs.

FLOPs are those of a forward pass with the least that each method needs by its paper (`moh_llm.flops`): keys and values
of all heads, queries, scores and outputs of the heads or experts that are selected. A backward pass is taken as twice
that for all. With quantized scores MoH's straight-through gradient reads outputs of heads that are off, too, which is
not counted.

How large each method is made:

- MoH: the dense model's weights and the routers. Its paper says no number of shared heads for language models, but
  advises more than 40 % of the active ones; here it is the least such number.
- MoA: 2H - 1 experts of the dense model's head size, which is chosen here: with one head of keys and values these are
  the dense attention's parameters. The router's are taken from the feed-forward network.
- SwitchHead, as in its paper: heads times experts are the dense model's heads; heads are as large as fits into the
  dense attention's parameters, and the feed-forward network takes the rest.
- GQE, as in its paper: two query heads per group, of which one is selected; the output projection has fewer parameters
  than that of grouped-query attention, `dense-gqa`, which the paper compares with.
- Mixtral: grouped queries, and per token as many FLOPs of the feed-forward network as the dense model. It is here to be
  converted (`scratch.py --save`), not to be compared.
- MoH with learned shared heads (`-learned-N`): `moh_llm.training.shared_heads`, over the first half of the steps;
  `-first-N` is the same but for the shared heads, which are the first. Both route in one stage.
- `moh-100`: MoH with all heads on, so that its difference to the dense model is due to the weights of its gates.
- Static: the heads that are off do not exist, keys and values included, so that it has fewer parameters.
- `-averaged`: outputs of heads are averaged, not summed, as MoH's weights do at first; no head is off, and none routed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from baselines.gqe import GQEAttention
from baselines.layers import BaselineAttention, BaselineForCausalLM
from baselines.moa import MoAAttention
from baselines.static import StaticAttention
from baselines.switchhead import SwitchHeadAttention
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

from moh_llm.conversion.base import moh_fields
from moh_llm.flops import forward_flops, forward_parts
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training.shared_heads import learn_shared_heads

SHARES = 75, 50  # percent of the heads that are on
SHARED = 1 / 8, 1 / 4, 1 / 2  # of the heads, where they are learned
BALANCE = 0, 0.001, 0.1  # weights of MoH's load-balance loss beside the paper's 0.01


@dataclass(frozen=True)
class Size:
    """Shape of the dense model: width, feed-forward width, layers and heads, keys and values for each."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    switch_experts: int  # of a head of SwitchHead

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.hidden // self.heads


# Parameters without embeddings: 21k (for tests), 4.8M, 14.2M.
SIZES = {
    "tiny": Size(32, 64, 2, 4, switch_experts=2),
    "5m": Size(256, 704, 6, 8, switch_experts=4),
    "15m": Size(384, 1024, 8, 12, switch_experts=4),
}


@dataclass(frozen=True)
class Method:
    """A model to train: its config, MoH's where it is one, and the attention that takes the place of LLaMA's.

    With `learns_shared` training finds out which heads are the shared ones of the config.
    """

    config: LlamaConfig | MixtralConfig
    attention: Callable[[LlamaConfig], BaselineAttention] | None = None
    learns_shared: bool = False

    def make(self) -> PreTrainedModel:
        """The model with random weights, drawn from torch's generator."""
        if self.attention is not None:
            return BaselineForCausalLM(self.config, self.attention)
        if self.learns_shared:
            model = MoHLlamaForCausalLM(MoHLlamaConfig(**self.config.to_dict() | {"num_shared_heads": 0}))
            learn_shared_heads(model, self.config.num_shared_heads)
            return model
        return AutoModelForCausalLM.from_config(self.config)

    def flops_per_token(self, length: int) -> float:
        """FLOPs of a forward pass, per token of a sequence of `length`."""
        if isinstance(self.config, MoHLlamaConfig):
            return forward_flops(self.config, length) / length
        parts = forward_parts(MoHLlamaConfig(**moh_fields(self.config)), length, dense=True)
        if self.attention is None:
            return sum(parts.values()) / length
        with torch.device("meta"):
            layer = self.attention(self.config)
        others = (parts["feed-forward"] + parts["vocabulary"]) / length
        return others + 2 * self.config.num_hidden_layers * layer.multiply_adds((length + 1) / 2)

    def parameters(self) -> tuple[int, int]:
        """Number of parameters, and of those that are not in the embeddings of input and output."""
        with torch.device("meta"):
            final = replace(self, learns_shared=False).make()
            counts = {name: weight.numel() for name, weight in final.named_parameters()}
        inner = sum(n for name, n in counts.items() if "embed_tokens" not in name and "lm_head" not in name)
        return sum(counts.values()), inner


def make_methods(size: Size, vocab_size: int, length: int) -> tuple[dict[str, Method], list[str]]:
    """All methods by name, and the names of those that are compared; the others are ablations of MoH, and Mixtral."""
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": length,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    methods = {
        "dense": Method(LlamaConfig(**fields)),
        "dense-gqa": Method(LlamaConfig(**fields | {"num_key_value_heads": size.heads // 2})),
    }
    averaged = partial(StaticAttention, averaged=True)
    methods["dense-averaged"] = Method(methods["dense"].config, partial(averaged, heads=size.heads))
    for percent in SHARES:
        active = size.heads * percent // 100
        methods |= {
            f"moh-{percent}": moh(fields, active),
            f"moh-{percent}-quantized": moh(fields, active, router_score="quantized"),
            f"static-{percent}": Method(methods["dense"].config, partial(StaticAttention, heads=active)),
            f"static-{percent}-averaged": Method(methods["dense"].config, partial(averaged, heads=active)),
            f"moa-{percent}": matched(
                methods["dense"], partial(MoAAttention, experts=2 * size.heads - 1, active=active), methods["dense"]
            ),
        }
    methods["switchhead"] = switchhead(methods["dense"], size)
    methods["gqe"] = Method(methods["dense-gqa"].config, partial(GQEAttention, active=1))
    compared = list(methods)

    methods["mixtral"] = mixtral(fields, size)
    active = size.heads * SHARES[0] // 100
    name, usual = f"moh-{SHARES[0]}", methods[f"moh-{SHARES[0]}"].config
    one_stage = {"router_type": "linear"}
    methods |= {
        "moh-100": moh(fields, size.heads),
        f"{name}-one-stage": moh(fields, active, **one_stage),
        f"{name}-no-shared": moh(fields, active, num_shared_heads=0, **one_stage),
        f"{name}-one-stage-quantized": moh(fields, active, router_score="quantized", **one_stage),
    }
    for shared in range(1, active):
        if shared != usual.num_shared_heads:
            methods[f"{name}-shared-{shared}"] = moh(fields, active, num_shared_heads=shared)
    for shared in sorted({max(1, round(share * size.heads)) for share in SHARED}):
        first = moh(fields, active, num_shared_heads=shared, **one_stage)
        methods[f"{name}-first-{shared}"] = first
        methods[f"{name}-learned-{shared}"] = replace(first, learns_shared=True)
    for weight in BALANCE:
        methods[f"{name}-balance-{weight:g}"] = moh(fields, active, head_balance_coef=float(weight))
    return methods, compared


def mixtral(fields: dict, size: Size) -> Method:
    """Eight feed-forward experts; the two that a token selects are as wide as the dense model's network."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": size.intermediate // 2}
    experts["output_router_logits"] = True  # the loss has the load-balance loss
    return Method(MixtralConfig(**fields | {"num_key_value_heads": size.heads // 2} | experts))


def moh(fields: dict, active: int, **plan) -> Method:
    """MoH by Eq. 5 to 8 (two-stage, weighted, beta 0.01), with what `plan` changes of it."""
    defaults = {
        "num_active_heads": active,
        "num_shared_heads": math.floor(0.4 * active) + 1,
        "router_type": "two_stage",
        "router_score": "weighted",
        "output_router_logits": True,  # the loss has the load-balance loss
    }
    return Method(MoHLlamaConfig(**fields | defaults | plan))


def switchhead(dense: Method, size: Size) -> Method:
    """SwitchHead with the dense model's number of parameters."""
    experts = size.switch_experts
    heads = size.heads // experts
    # Queries and keys, experts' values and outputs, and two routers, in multiples of the hidden size.
    room = 4 * size.heads * size.head_dim - 2 * heads * experts
    head_dim = room // (2 * heads * (1 + experts)) // 2 * 2  # even, for the rotary embedding
    config = changed(dense.config, num_attention_heads=heads, num_key_value_heads=heads, head_dim=head_dim)
    attention = partial(SwitchHeadAttention, experts=experts, active=2)
    return matched(Method(config), attention, dense)


def matched(shape: Method, attention: Callable[[LlamaConfig], BaselineAttention], dense: Method) -> Method:
    """`shape` with another attention, and the feed-forward width that comes nearest to the parameters of `dense`."""
    spare = dense.parameters()[1] - Method(shape.config, attention).parameters()[1]
    config = shape.config
    width = config.intermediate_size + round(spare / (3 * config.hidden_size * config.num_hidden_layers))
    return Method(changed(config, intermediate_size=width), attention)


def changed(config: LlamaConfig, **fields) -> LlamaConfig:
    """A copy of a config with other fields."""
    return LlamaConfig(**config.to_dict() | fields)
