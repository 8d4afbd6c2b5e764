"""MoH models in serving engines.

vLLM calls `register` in each of its processes, by the entry point of this package in the group `vllm.general_plugins`.
"""


def register() -> None:
    """Tell vLLM which class serves MoH models. With this package imported they need no remote code."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("MoHLlamaForCausalLM", "moh_llm.serving.vllm_model:MoHLlamaForVLLM")
