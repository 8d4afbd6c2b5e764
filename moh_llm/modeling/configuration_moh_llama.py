"""Configuration of Mixture-of-Head (MoH) LLaMA models."""

from collections.abc import Iterator

from transformers import LlamaConfig
from transformers.utils.versions import require_version

from .head_plan_moh import HeadPlan

# 5.2 is the first that has what the model is built on; 5.3.0 leaves the tied output embedding of remote code empty.
require_version("transformers>=5.2,!=5.3.0", "MoH models need another version: pip install -U transformers")


class MoHLlamaConfig(HeadPlan, LlamaConfig):
    r"""A `LlamaConfig` plus the head plan of "MoH: Multi-Head Attention as Mixture-of-Head Attention".

    The fields of the plan are those of `HeadPlan`.

    Args:
        local_window (`int`): Number of last tokens, including the token itself, that a head that is off attends to.
        local_sinks (`int`): Number of first tokens of the document that a head that is off attends to.
        local_start (`int`): Number of first tokens of a document that have all heads on. Values below
            `local_window + local_sinks` have no effect, as these tokens see every key anyway.
        attention_output_bias (`bool`, *optional*): Bias of the output projection. Default: `attention_bias`.
        query_key_norm (`bool`): Whether queries and keys are RMS-normalised before rotary embedding (Qwen3).
        num_local_experts (`int`): Feed-forward experts per layer, as in Mixtral; 0 for LLaMA's MLP.
        num_experts_per_tok (`int`): Experts that a token selects.
        expert_balance_coef (`float`): Weight of the experts' load-balance loss (Mixtral's `router_aux_loss_coef`).
        router_jitter_noise (`float`): In training the experts' input is multiplied by 1 plus or minus at most this.

    Raises:
        ValueError: the head plan is impossible; the message names the layer and the rule.
    """

    model_type = "moh_llama"

    local_window: int = 256
    local_sinks: int = 4
    local_start: int = 0
    attention_output_bias: bool | None = None
    query_key_norm: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    expert_balance_coef: float = 0.001
    router_jitter_noise: float = 0.0

    def __post_init__(self, **kwargs):
        # The name in earlier versions. Libraries that find this name treat the model as a mixture of experts.
        self.head_balance_coef = kwargs.pop("router_aux_loss_coef", self.head_balance_coef)
        self.never_on_heads = kwargs.pop("local_heads", self.never_on_heads)  # its name up to format 5
        super().__post_init__(**kwargs)
        # A model saved by any class must load through every Auto class.
        if not getattr(self, "auto_map", None):
            self.auto_map = {
                "AutoConfig": "configuration_moh_llama.MoHLlamaConfig",
                "AutoModel": "modeling_moh_llama.MoHLlamaModel",
                "AutoModelForCausalLM": "modeling_moh_llama.MoHLlamaForCausalLM",
                "AutoModelForSequenceClassification": "modeling_moh_llama.MoHLlamaForSequenceClassification",
            }
        self.complete_head_plan()

    def _formats(self) -> dict[int, bool]:
        late = self.all_heads_until > self.local_window + self.local_sinks
        return super()._formats() | {4: late, 5: self.num_local_experts > 0}

    @property
    def all_heads_until(self) -> int:
        """Number of first tokens of a document that have all heads on: 0 but with local fallbacks."""
        return max(self.local_start, self.local_window + self.local_sinks) if self.head_fallback == "local" else 0

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield from super()._rules()
        chosen, experts = self.num_experts_per_tok, self.num_local_experts
        rule = f"num_experts_per_tok={chosen} must lie between 1 and num_local_experts={experts}"
        yield not experts or 1 <= chosen <= experts, rule
        window, sinks, start = self.local_window, self.local_sinks, self.local_start
        rule = f"local_window={window} must be at least 1, local_sinks={sinks} and local_start={start} at least 0"
        yield window >= 1 and min(sinks, start) >= 0, rule


__all__ = ["MoHLlamaConfig"]
