"""A perfect router: each token keeps the heads whose fallbacks would change the layer's output most."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moh_llm.metrics import Batch, LogitsOf, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM, MoHRouter
from moh_llm.modeling.routing_moh import select_top_k

from .routers import routed_as


def by_oracle(model: MoHLlamaForCausalLM) -> LogitsOf:
    """The logits of the model with a perfect router in place of its own, and with its budgets and fallbacks."""

    def run(batch: Batch) -> torch.Tensor:
        with _oracle(model):
            return logits_of(model)(batch)

    return run


@contextmanager
def _oracle(model: MoHLlamaForCausalLM) -> Iterator[None]:
    """Within the block each token drops the groups whose replacement by their fallbacks changes the output least."""
    handles, layers = [], model.model.layers
    for layer in layers:
        attention, state = layer.self_attn, {}

        def keep(module, args, kwargs, state=state):
            state["x"], seen = kwargs["hidden_states"], kwargs["seen"]
            state["first"] = (seen.start == seen.last).all(-1)

        def values(module, args, output, state=state):
            state["v"] = output

        def drop(module, args, attention=attention, state=state):
            shape = args[0].shape
            heads = args[0].unflatten(-1, (-1, attention.head_dim))
            fallback = torch.zeros_like(heads)
            if state["fallback"] is not None:
                own_values = state["v"].unflatten(-1, (-1, attention.head_dim))
                fallback = state["fallback"](state["x"], own_values, state["first"], None)
            router = state["router"]
            width = router.group_size * attention.head_dim
            slices = module.weight.unflatten(-1, (-1, width)).float()
            gram = torch.einsum("cud,cue->ude", slices, slices)
            residual = (heads - fallback).float().flatten(-2).unflatten(-1, (-1, width))
            cost = torch.einsum("...ud,ude,...ue->...u", residual, gram, residual)
            cost[..., [head // router.group_size for head in router.kinds()[0]]] = torch.inf
            gate = select_top_k(cost, router.num_active // router.group_size).to(heads.dtype)
            gate = gate.repeat_interleave(router.group_size, -1)[..., None]
            return ((heads * gate + fallback * (1 - gate)).reshape(shape),)

        state["fallback"], state["router"] = attention.fallback, attention.router
        handles += [
            attention.register_forward_pre_hook(keep, with_kwargs=True),
            attention.v_proj.register_forward_hook(values),
            attention.o_proj.register_forward_pre_hook(drop),
        ]
    try:
        with routed_as(model, model.config, _AllOn):
            yield
    finally:
        for handle in handles:
            handle.remove()


class _AllOn(MoHRouter):
    """A gate of ones, so that the oracle's hook sees every head's output."""

    def forward(self, hidden_states, query_states, all_on=False, shard=None):
        gate = hidden_states.new_ones(*hidden_states.shape[:-1], self.num_shared + self.num_routed)
        return gate[..., self.num_shared :], gate
