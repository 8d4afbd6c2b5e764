"""The head plan of a Mixture-of-Head (MoH) model: which heads are shared, and how many a token uses, per layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# The newest format that this code reads. It grows when a field or a tensor changes its meaning. 2:
# routing_granularity="kv_group". 3: head_fallback="local", router_type="none" and "threshold". 4: local_start. 5:
# num_local_experts. 6: never_on_heads is no longer called local_heads. Models without these are written as 1, which
# older code reads.
FORMAT = 6
CHOICES = {
    "router_type": ("query_norm", "linear", "threshold", "two_stage", "none"),
    "router_score": ("quantized", "weighted", "normalized"),
    "routing_granularity": ("head", "kv_group"),
    "head_fallback": ("none", "value", "local"),
}


@dataclass(init=False, repr=False, eq=False)  # configurations of transformers 5.2 have an __init__ of their own
class HeadPlan:
    r"""Fields that the configurations of all MoH models have, and what routers and fallbacks read of these.

    In each layer some heads are shared, that is, always on. Each token also uses the Top-K routed heads by routing
    score, K = active - shared. A number of heads applies to all layers; a list holds one number per layer. The class
    that inherits these has `hidden_size`, `head_dim`, `num_hidden_layers`, `num_attention_heads` and
    `num_key_value_heads`, and calls `complete_head_plan` once its fields are set.

    Args:
        num_shared_heads (`int` or `list[int]`, *optional*): Shared heads. Default: half of the heads.
        num_active_heads (`int` or `list[int]`, *optional*): Heads in use per token (shared + Top-K). Default: half
            plus a quarter of the heads, each rounded down, as whole groups; no fewer than the shared ones.
        shared_heads (`list[list[int]]`, *optional*): Ids of the shared heads, per layer. Default: the first
            `num_shared_heads`.
        router_type (`str`): `"query_norm"` scores a routed head by the l2 norm of its query and has no weights.
            `"linear"` scores it by a linear map with bias of the layer's input. `"threshold"` uses the same map and
            selects the heads whose score is above zero; `num_active_heads` is then the mean over the text that the
            router was fitted on. `"two_stage"` is Eq. 5 and 6 of the paper, without local
            fallbacks. `"none"` selects no head: only shared heads are on.
        router_score (`str`): `"quantized"` multiplies a selected head by exactly 1 and passes the gradient straight
            through to the score (Eq. 9 and 10); `"weighted"` multiplies by the score.
            `"normalized"` is the form of the authors' code, for `"two_stage"`: routed scores are divided by their sum
            over the selected heads and multiplied by the number of these, shared ones are multiplied by theirs, and
            stages by 2, so that the heads in use weigh about 1. Layers may then share all heads, or none.
        routing_granularity (`str`): The unit of routing: `"head"`, a single query head, or `"kv_group"`, all query
            heads that share one key-value head. The keys of a group that is off need not be read.
        head_fallback (`str`): What replaces a head that is off. `"none"`: zero, as in the paper. `"value"`: a fixed
            vector plus a multiple of the token's own value, linear in the layer's input. `"local"`: the head
            attends only to the document's first `local_sinks` tokens, the last `local_window` tokens, and one fitted
            distant token that stands for all other tokens.
        never_on_heads (`list[list[int]]`, *optional*): Ids of the heads that are never on, per layer. Default: none.
        head_balance_coef (`float`): Weight beta of the load-balance loss (Eq. 8).
        output_router_logits (`bool`): Whether a forward pass returns router logits and the load-balance loss.
        moh_format (`int`): Version of the meaning of fields and tensors. Code reads its own version and earlier ones.
    """

    num_shared_heads: int | list[int] | None = None
    num_active_heads: int | list[int] | None = None
    shared_heads: list[list[int]] | None = None
    router_type: str = "query_norm"
    router_score: str = "quantized"
    routing_granularity: str = "head"
    head_fallback: str = "none"
    never_on_heads: list[list[int]] | None = None
    head_balance_coef: float = 0.01
    output_router_logits: bool = False
    moh_format: int = 1

    def complete_head_plan(self) -> None:
        """Fill in the defaults and set `moh_format`; raise `ValueError` if the head plan of a layer is impossible."""
        heads, group_size = self.num_attention_heads, self.heads_per_group
        if self.num_shared_heads is None:
            self.num_shared_heads = heads // 2 // group_size * group_size
        if self.num_active_heads is None:
            active = (heads // 2 + heads // 4) // group_size * group_size
            self.num_active_heads = max(group_size, active, *self._per_layer("num_shared_heads"))
        if broken := next((rule for is_kept, rule in self._rules() if not is_kept), None):
            raise ValueError(broken)
        self.moh_format = max([1, *(number for number, asked in self._formats().items() if asked)])

    def _formats(self) -> dict[int, bool]:
        """Whether the fields need a format; a model is written in the lowest that covers them."""
        return {
            2: self.routing_granularity == "kv_group",
            3: self.head_fallback == "local" or self.router_type in ("none", "threshold"),
            6: self.never_on_heads is not None,
        }

    def _per_layer(self, name: str) -> list[int]:
        value = getattr(self, name)
        return list(value) if isinstance(value, Sequence) else [value] * self.num_hidden_layers

    def heads_of_layer(self, layer_idx: int) -> int:
        """Number of heads of a layer."""
        return self.num_attention_heads

    @property
    def heads_per_group(self) -> int:
        """Number of heads that are routed together."""
        return self.num_attention_heads // self.num_key_value_heads if self.routing_granularity == "kv_group" else 1

    @property
    def shared_heads_per_layer(self) -> list[list[int]]:
        """Sorted ids of each layer's shared heads."""
        if self.shared_heads is not None:
            return [sorted(ids) for ids in self.shared_heads]
        return [list(range(n)) for n in self._per_layer("num_shared_heads")]

    @property
    def never_on_heads_per_layer(self) -> list[list[int]]:
        """Sorted ids of each layer's heads that are never on."""
        return [sorted(ids) for ids in self.never_on_heads or [[]] * self.num_hidden_layers]

    def routed_heads(self, layer_idx: int) -> list[int]:
        """Sorted ids of a layer's routed heads."""
        others = {*self.shared_heads_per_layer[layer_idx], *self.never_on_heads_per_layer[layer_idx]}
        return [head for head in range(self.heads_of_layer(layer_idx)) if head not in others]

    @property
    def active_heads_per_layer(self) -> list[int]:
        """Number of heads that each layer uses per token, shared heads included."""
        return self._per_layer("num_active_heads")

    def _rules(self) -> Iterator[tuple[bool, str]]:
        """Yield for each rule whether it holds, and its text. Later rules rely on earlier ones."""
        layers, size = self.num_hidden_layers, self.heads_per_group
        rule = f"moh_format={self.moh_format}: this code reads formats up to {FORMAT}; load the model by the code"
        yield 1 <= self.moh_format <= FORMAT, f"{rule} beside it, with trust_remote_code=True, or update moh-llm"
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            yield value in choices, f"{name}={value!r} must be one of {', '.join(choices)}"
        is_local, fallback = self.head_fallback == "local", f"head_fallback={self.head_fallback!r}"
        is_quantized = self.head_fallback == "none" or self.router_score == "quantized"
        yield is_quantized, f"{fallback} needs router_score='quantized': a gate of 0 or 1"
        is_kept = self.router_score != "normalized" or self.router_type == "two_stage"
        yield is_kept, f"router_score='normalized' needs router_type='two_stage', not {self.router_type!r}"
        yield self.router_type != "two_stage" or not is_local, f"{fallback} needs another router than two_stage"
        yield self.never_on_heads is None or is_local, "never_on_heads needs head_fallback='local'"
        for name in ("num_shared_heads", "num_active_heads", "shared_heads", "never_on_heads"):
            count = len(self._per_layer(name))
            yield count == layers, f"{name} has {count} entries for num_hidden_layers={layers}"
        for layer in range(layers):
            for is_kept, rule in self._rules_of_layer(layer, self.heads_of_layer(layer), size, is_local):
                yield is_kept, f"{rule} (layer {layer})"

    def _rules_of_layer(self, layer: int, heads: int, size: int, is_local: bool) -> Iterator[tuple[bool, str]]:
        """The rules of one layer."""
        shared, active = (self._per_layer(name)[layer] for name in ("num_shared_heads", "num_active_heads"))
        local = self.never_on_heads_per_layer[layer]
        of_all, router = f"num_attention_heads={heads}", f"router_type={self.router_type!r}"
        yield 0 <= shared <= heads, f"num_shared_heads={shared} must lie between 0 and {of_all}"
        if self.shared_heads is not None:
            ids = self.shared_heads[layer]
            is_set = len(ids) == len({*ids}) == shared and {*ids} <= {*range(heads)}
            yield is_set, f"shared_heads={ids} must be {shared} different head ids below {of_all}"
        others = {*range(heads)} - {*self.shared_heads_per_layer[layer]}
        is_set = len({*local}) == len(local) and {*local} <= others
        yield is_set, f"never_on_heads={local} must be different head ids below {of_all} that are not shared"
        least, most = shared if is_local else max(shared, 1), heads - len(local)
        name, number = "num_shared_heads=" if shared else "", f"num_active_heads={active} must"
        yield least <= active <= heads, f"{number} lie between {name}{least} and {of_all}"
        yield active <= most, f"{number} not exceed the {most} heads that are not in never_on_heads"
        is_kept = self.router_type != "none" or active == shared
        yield is_kept, f"{number} be num_shared_heads={shared} with {router}"
        is_kept = self.router_type != "two_stage" or self.router_score == "normalized" or 0 < shared < heads
        yield is_kept, f"num_shared_heads={shared}: {router} needs at least one shared and one routed head of {of_all}"
        groups = f"whole key-value groups of {size} heads, for routing_granularity='kv_group'"
        for name, count in (("num_shared_heads", shared), ("num_active_heads", active)):
            yield count % size == 0, f"{name}={count} must be {groups}"
        for name, ids in (("shared_heads", self.shared_heads_per_layer[layer]), ("never_on_heads", local)):
            is_whole = ids == [head for head in range(heads) if head - head % size in ids]
            yield is_whole, f"{name}={ids} must be {groups}"
