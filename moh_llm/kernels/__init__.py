"""Triton kernels of head-sparse attention; importing them registers `attn_implementation="moh_sparse"`."""

from moh_llm.kernels.head_sparse import NAME, head_sparse_attention, what_lacks

__all__ = ["NAME", "head_sparse_attention", "what_lacks"]
