"""MoH models in serving engines.

vLLM calls `register` in each of its processes, by the entry point of this package in the group `vllm.general_plugins`.
"""


def register() -> None:
    """Tell vLLM which class serves MoH models, and transformers' Auto classes that no remote code is needed."""
    from vllm import ModelRegistry

    import moh_llm.modeling  # noqa: F401 - registers the Auto classes

    ModelRegistry.register_model("MoHLlamaForCausalLM", "moh_llm.serving.vllm_model:MoHLlamaForVLLM")
