"""Configuration of Mixture-of-Head (MoH) LLaMA models."""

from collections.abc import Sequence

from transformers import LlamaConfig
from transformers.utils.versions import require_version

# 5.2 is the first that has what the model is built on; 5.3.0 leaves the tied output embedding of remote code empty.
require_version("transformers>=5.2,!=5.3.0", "MoH models need another version: pip install -U transformers")

# What this code can read. It grows when a field or a tensor changes its meaning, never with a patch release.
# 2: routing_granularity="kv_group". 3: head_fallback="local", router_type="none" and "threshold", local_heads.
# 4: local_start. 5: num_local_experts. All else is still written as 1, which older code reads.
FORMAT = 5
CHOICES = {
    "router_type": ("query_norm", "linear", "threshold", "two_stage", "none"),
    "router_score": ("quantized", "weighted"),
    "routing_granularity": ("head", "kv_group"),
    "head_fallback": ("none", "value", "local"),
}


class MoHLlamaConfig(LlamaConfig):
    r"""A `LlamaConfig` plus the head plan of "MoH: Multi-Head Attention as Mixture-of-Head Attention".

    In each layer some query heads are shared (always on); of the others, the routed heads, each token uses the Top-K by
    routing score, K = active - shared. Numbers are of heads, for all layers or one per layer.

    Args:
        num_shared_heads (`int` or `list[int]`, *optional*): Shared heads. Default: half of the heads.
        num_active_heads (`int` or `list[int]`, *optional*):
            Heads in use per token (shared + Top-K). Default: half plus a quarter of the heads, each rounded down to
            whole groups, and no fewer than the shared ones.
        shared_heads (`list[list[int]]`, *optional*): Their ids, per layer. Default: the first `num_shared_heads`.
        router_type (`str`):
            `"query_norm"` scores a routed head by the l2 norm of its query and has no weights; `"linear"` by a linear
            map with bias of the layer's input; `"threshold"` likewise, but selects heads whose score is above zero, so
            that `num_active_heads` is a mean over the text that the router was fitted on; `"two_stage"` is Eq. 5 and
            6 of the paper; `"none"` selects nothing: shared heads are on and all others off.
        router_score (`str`):
            `"quantized"` multiplies a selected head by exactly 1 and passes the gradient straight through to the
            score (Eq. 9 and 10); `"weighted"` multiplies by the score.
        routing_granularity (`str`):
            What is shared, scored and selected as one: each query `"head"`, or a `"kv_group"` of those that share one
            key-value head, so that where they are off none reads its cache.
        head_fallback (`str`):
            What takes the place of a head that is off: `"none"`, as in the paper; `"value"`, a fixed vector plus a
            share, linear in the layer's input, of the token's own value; or `"local"`, the head's own attention to the
            first `local_sinks` tokens of the document, the last `local_window` tokens and one fitted token for all
            others.
        local_window (`int`): Tokens, up to its own, that a head that is off attends to.
        local_sinks (`int`): First tokens of the document that it attends to.
        local_start (`int`):
            First tokens of a document that have all heads on: `local_window + local_sinks` at least.
        local_heads (`list[list[int]]`, *optional*): Ids of the heads that are never on, per layer. Default: none.
        head_balance_coef (`float`): Weight beta of the load-balance loss (Eq. 8).
        output_router_logits (`bool`): Whether a forward pass returns router logits and the load-balance loss.
        attention_output_bias (`bool`, *optional*):
            Whether the output projection has a bias. Default: `attention_bias`, that of the others.
        query_key_norm (`bool`): Whether queries and keys are RMS-normalised before rotary embedding (Qwen3).
        num_local_experts (`int`): Feed-forward experts of each layer, as in Mixtral; 0: layers have LLaMA's MLP.
        num_experts_per_tok (`int`): Experts that a token selects.
        expert_balance_coef (`float`): Weight of the experts' load-balance loss (Mixtral's `router_aux_loss_coef`).
        router_jitter_noise (`float`): In training the experts' input is multiplied by 1 plus or minus at most this.
        moh_format (`int`): What the fields and tensors mean. Code reads its own version and earlier ones.

    Raises:
        ValueError: a head plan that no model can follow; the message names the layer and the rule.
    """

    model_type = "moh_llama"

    num_shared_heads: int | list[int] | None = None
    num_active_heads: int | list[int] | None = None
    shared_heads: list[list[int]] | None = None
    router_type: str = "query_norm"
    router_score: str = "quantized"
    routing_granularity: str = "head"
    head_fallback: str = "none"
    local_window: int = 256
    local_sinks: int = 4
    local_start: int = 0
    local_heads: list[list[int]] | None = None
    head_balance_coef: float = 0.01
    output_router_logits: bool = False
    attention_output_bias: bool | None = None
    query_key_norm: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    expert_balance_coef: float = 0.001
    router_jitter_noise: float = 0.0
    moh_format: int = 1

    def __post_init__(self, **kwargs):
        if old := [name for name in ("head_stand_in", "routing_unit") if name in kwargs]:
            raise ValueError(
                f"{old[0]} was written by an earlier version of MoH-LLM; convert the base again: `moh-llm convert BASE`"
            )
        kwargs.pop("sparse_gate_gradient", None)  # a setting of training, which earlier versions wrote
        # Its name in earlier versions: libraries that find it take the model for a mixture of experts.
        self.head_balance_coef = kwargs.pop("router_aux_loss_coef", self.head_balance_coef)
        super().__post_init__(**kwargs)
        heads, group_size = self.num_attention_heads, self.heads_per_group
        if self.num_shared_heads is None:
            self.num_shared_heads = heads // 2 // group_size * group_size
        if self.num_active_heads is None:
            active = (heads // 2 + heads // 4) // group_size * group_size
            self.num_active_heads = max(group_size, active, *self._per_layer("num_shared_heads"))
        # A model saved by any class of this file must load through every Auto class.
        if not getattr(self, "auto_map", None):
            self.auto_map = {
                "AutoConfig": "configuration_moh_llama.MoHLlamaConfig",
                "AutoModel": "modeling_moh_llama.MoHLlamaModel",
                "AutoModelForCausalLM": "modeling_moh_llama.MoHLlamaForCausalLM",
                "AutoModelForSequenceClassification": "modeling_moh_llama.MoHLlamaForSequenceClassification",
            }
        self.validate_head_plan()
        is_local = self.head_fallback == "local"
        asks = {  # the lowest format that knows what the other fields ask for
            2: self.routing_granularity == "kv_group",
            3: is_local or self.router_type in ("none", "threshold"),
            4: is_local and self.all_heads_until > self.local_window + self.local_sinks,
            5: self.num_local_experts > 0,
        }
        self.moh_format = max([1, *(number for number, asked in asks.items() if asked)])

    def _per_layer(self, name: str) -> list[int]:
        value = getattr(self, name)
        return list(value) if isinstance(value, Sequence) else [value] * self.num_hidden_layers

    @property
    def heads_per_group(self) -> int:
        """Number of heads that are switched together."""
        return self.num_attention_heads // self.num_key_value_heads if self.routing_granularity == "kv_group" else 1

    @property
    def shared_heads_per_layer(self) -> list[list[int]]:
        """Sorted ids of each layer's shared heads."""
        if self.shared_heads is not None:
            return [sorted(ids) for ids in self.shared_heads]
        return [list(range(n)) for n in self._per_layer("num_shared_heads")]

    @property
    def local_heads_per_layer(self) -> list[list[int]]:
        """Sorted ids of each layer's heads that are never on."""
        return [sorted(ids) for ids in self.local_heads or [[]] * self.num_hidden_layers]

    def routed_heads(self, layer_idx: int) -> list[int]:
        """Sorted ids of a layer's routed heads."""
        others = {*self.shared_heads_per_layer[layer_idx], *self.local_heads_per_layer[layer_idx]}
        return [head for head in range(self.num_attention_heads) if head not in others]

    def local_groups(self, layer_idx: int) -> list[int]:
        """Sorted ids of a layer's key-value groups whose heads are never on and attend locally."""
        if self.head_fallback != "local":
            return []
        size = self.num_attention_heads // self.num_key_value_heads
        on = {head // size for head in self.shared_heads_per_layer[layer_idx]}
        if self.router_type != "none":
            on.update(head // size for head in self.routed_heads(layer_idx))
        return [group for group in range(self.num_key_value_heads) if group not in on]

    @property
    def all_heads_until(self) -> int:
        """Number of first tokens of a document that have all heads on, with local fallbacks."""
        return max(self.local_start, self.local_window + self.local_sinks)

    @property
    def feed_forward_width(self) -> int:
        """Intermediate size of all that a token goes through in a layer: the MLP, or the experts that it selects."""
        return self.intermediate_size * (self.num_experts_per_tok if self.num_local_experts else 1)

    @property
    def active_heads_per_layer(self) -> list[int]:
        """Number of heads that each layer uses per token, shared heads included."""
        return self._per_layer("num_active_heads")

    def validate_head_plan(self) -> None:
        """Raise `ValueError` unless every layer's head plan can be followed."""
        if not 1 <= self.moh_format <= FORMAT:
            raise ValueError(
                f"moh_format={self.moh_format}: this code reads formats up to {FORMAT}; load the model with "
                "trust_remote_code=True, by the code beside it, or pip install -U moh-llm"
            )
        heads, layers, group_size = self.num_attention_heads, self.num_hidden_layers, self.heads_per_group
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(choices)}")
        if self.head_fallback != "none" and self.router_score != "quantized":
            raise ValueError(f"head_fallback={self.head_fallback!r} needs router_score='quantized': a gate of 0 or 1")
        for name in ("num_shared_heads", "num_active_heads", "shared_heads"):
            if len(self._per_layer(name)) != layers:
                raise ValueError(f"{name} has {len(self._per_layer(name))} entries for num_hidden_layers={layers}")

        if self.num_local_experts and not 1 <= self.num_experts_per_tok <= self.num_local_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must lie between 1 and "
                f"num_local_experts={self.num_local_experts}"
            )
        self._validate_local_heads()
        counts = zip(self._per_layer("num_shared_heads"), self._per_layer("num_active_heads"), strict=True)
        for layer, (shared, active) in enumerate(counts):
            if not 0 <= shared <= heads:
                raise ValueError(
                    f"num_shared_heads={shared} must lie between 0 and num_attention_heads={heads} (layer {layer})"
                )
            least = shared if self.head_fallback == "local" else max(shared, 1)
            if not least <= active <= heads:
                raise ValueError(
                    f"num_active_heads={active} must lie between {'num_shared_heads=' if shared else ''}"
                    f"{least} and num_attention_heads={heads} (layer {layer})"
                )
            if self.router_type == "none" and active != shared:
                raise ValueError(
                    f"num_active_heads={active} must be num_shared_heads={shared} with router_type='none' "
                    f"(layer {layer})"
                )
            if self.router_type == "two_stage" and not 0 < shared < heads:
                raise ValueError(
                    f"num_shared_heads={shared}: a two_stage router needs at least one shared and one routed head "
                    f"of num_attention_heads={heads} (layer {layer})"
                )
            if self.shared_heads is not None:
                ids = self.shared_heads[layer]
                if len(ids) != shared or len(set(ids)) != shared or not all(0 <= i < heads for i in ids):
                    raise ValueError(
                        f"shared_heads={ids} must be {shared} different head ids below "
                        f"num_attention_heads={heads} (layer {layer})"
                    )
            rule = f"whole key-value groups of {group_size} heads, for routing_granularity='kv_group' (layer {layer})"
            for name, count in (("num_shared_heads", shared), ("num_active_heads", active)):
                if count % group_size:
                    raise ValueError(f"{name}={count} must be {rule}")
            lists = {"shared_heads": self.shared_heads_per_layer, "local_heads": self.local_heads_per_layer}
            for name, ids in ((name, lists[name][layer]) for name in lists):
                if ids != [head for head in range(heads) if head - head % group_size in ids]:
                    raise ValueError(f"{name}={ids} must be {rule}")

    def _validate_local_heads(self) -> None:
        """Raise `ValueError` unless what belongs to local fallbacks goes together."""
        if self.local_window < 1 or min(self.local_sinks, self.local_start) < 0:
            raise ValueError(
                f"local_window={self.local_window} must be at least 1, local_sinks={self.local_sinks} and "
                f"local_start={self.local_start} at least 0"
            )
        if self.local_heads is None:
            return
        heads, layers = self.num_attention_heads, self.num_hidden_layers
        if self.head_fallback != "local":
            raise ValueError("local_heads needs head_fallback='local'")
        if len(self.local_heads) != layers:
            raise ValueError(f"local_heads has {len(self.local_heads)} entries for num_hidden_layers={layers}")
        active = self.active_heads_per_layer
        for layer, (local, shared) in enumerate(zip(self.local_heads, self.shared_heads_per_layer, strict=True)):
            if len({*local}) != len(local) or not {*local} <= {*range(heads)} - {*shared}:
                raise ValueError(
                    f"local_heads={local} must be different head ids below num_attention_heads={heads} that are not "
                    f"shared (layer {layer})"
                )
            if active[layer] > heads - len(local):
                raise ValueError(
                    f"num_active_heads={active[layer]} must not exceed the {heads - len(local)} heads that are not in "
                    f"local_heads (layer {layer})"
                )


__all__ = ["MoHLlamaConfig"]
