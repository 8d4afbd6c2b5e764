"""Routers of other methods in place of a conversion's: what they score heads by, and fallbacks fitted to their choices.

All of them pick the Top-K of their scores, so that budgets and fallbacks can be those of a conversion. `MoHRouter` with
`router_type="query_norm"` is the MoH paper's (arXiv 2410.11842, Eq. 9), and `by_paper_plan` its whole layer. The oracle
keeps for each token the heads whose fallbacks would change the layer's output most.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from moh_llm.conversion.fit import LayerFitter, LayerSample, RoutingFit
from moh_llm.metrics import Batch, LogitsOf, logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM, MoHRouter
from moh_llm.modeling.attention_moh import MoHLlamaAttention
from moh_llm.modeling.routing_moh import HeadShard, select_top_k

WIDTH = 128  # of the hidden layer
STEPS, ROWS = 200, 1024  # of training: steps, and tokens in each


class RandomRouter(MoHRouter):
    """Selects each token's routed heads at random, as a baseline for routers."""

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.generator = torch.Generator().manual_seed(layer_idx)

    def _routed_logits(
        self, hidden_states: torch.Tensor, query_states: torch.Tensor, shard: HeadShard | None
    ) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], self.routed_groups)
        return torch.rand(shape, generator=self.generator).to(hidden_states)


class TopKLabelRouter(MoHRouter):
    """A small MLP that is trained to tell which heads have the outputs of largest norm.

    Deja Vu (Liu et al., ICML 2023, arXiv 2310.17157) and Polar Sparsity (Shrestha et al., arXiv 2505.14884): a network
    of two layers on a layer's input, trained as a classifier of each head with binary cross-entropy, whose labels are
    the Top-K heads by output norm. Both train on far more tokens than a conversion reads; here it gets the same text.
    """

    def __init__(self, config: MoHLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.hidden = nn.Linear(config.hidden_size, WIDTH)
        self.scores = nn.Linear(WIDTH, self.routed_groups)

    def train_on(self, sample: LayerSample, active: int) -> None:
        """Fit to the fitted tokens of a layer, with the labels of `active` heads."""
        inputs = sample.inputs[: sample.fitted]
        norms = sample.heads[self.routed_heads, : sample.fitted].norm(dim=-1).T
        labels = select_top_k(norms, min(active, norms.shape[1]))
        mean, scale = inputs.mean(0), inputs.std(0).clamp_min(1e-6)
        inputs = (inputs - mean) / scale
        generator = torch.Generator().manual_seed(self.layer_idx)
        for layer in (self.hidden, self.scores):
            drawn = torch.empty(layer.weight.shape).normal_(std=layer.in_features**-0.5, generator=generator)
            layer.weight.data.copy_(drawn)  # the same on any device
            nn.init.zeros_(layer.bias)
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            rows = torch.randint(len(inputs), (ROWS,), generator=generator).to(inputs.device)
            logits = self.scores(self.hidden(inputs[rows]).relu())
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():  # the weights take inputs as they are
            self.hidden.weight /= scale
            self.hidden.bias -= self.hidden.weight @ mean
        self.requires_grad_(False)

    def _routed_logits(
        self, hidden_states: torch.Tensor, query_states: torch.Tensor, shard: HeadShard | None
    ) -> torch.Tensor:
        return self.scores(self.hidden(hidden_states.float()).relu())


class RouterFitter(LayerFitter):
    """Fallbacks of one layer for tokens that choose by a given router.

    Args:
        sample: the layer's calibration sample.
        router: scores the routed heads; its shared heads are the layer's.
        queries: of all tokens before rotary embedding, `[N, H, D]`.
        fallback: whether dropped heads get a fallback that is fitted.
    """

    @torch.no_grad()
    def __init__(self, sample: LayerSample, router: MoHRouter, queries: torch.Tensor, fallback: bool):
        super().__init__(sample, router.index[: router.shared_groups].tolist(), fallback)
        self.router = {f"router.{name}": tensor for name, tensor in router.state_dict().items()}
        self.logits = router(sample.inputs[None], queries[None])[0][0]

    def fit(self, dropped: int) -> RoutingFit:
        """Fallbacks for tokens that drop `dropped` of the routed heads, those of lowest score."""
        return self.fit_fallbacks(1 - select_top_k(self.logits, self.logits.shape[1] - dropped), self.router)


def paper_plan(config: MoHLlamaConfig) -> MoHLlamaConfig:
    """The paper's layer with as many active heads on average: first half shared, query norm, the same in each layer."""
    active = config.active_heads_per_layer
    mean = max(1, math.floor(sum(active) / len(active) + 0.5))
    fields = config.to_dict() | {
        "num_shared_heads": min(config.num_attention_heads // 2, mean),
        "num_active_heads": mean,
        "shared_heads": None,
        "router_type": "query_norm",
        "router_score": "quantized",
        "routing_granularity": "head",
        "head_fallback": "none",
        "never_on_heads": None,
    }
    return MoHLlamaConfig(**{key: value for key, value in fields.items() if key != "model_type"})


def by_paper_plan(model: MoHLlamaForCausalLM) -> LogitsOf:
    """The logits of the same weights as the paper's layer with as many active heads on average."""
    config = paper_plan(model.config)

    def run(batch: Batch) -> torch.Tensor:
        with routed_as(model, config):
            return logits_of(model)(batch)

    return run


@contextmanager
def routed_as(model: MoHLlamaForCausalLM, config: MoHLlamaConfig, kind: type[MoHRouter] = MoHRouter) -> Iterator[None]:
    """Within the block the model's layers route by fresh routers without weights, and have no fallbacks.

    Routers have the head counts and the type of `config`, and are of the class `kind`.
    """
    attentions = [layer.self_attn for layer in model.model.layers]
    kind_of_fallback, model.config.head_fallback = model.config.head_fallback, "none"
    own = [(attention.router, attention.fallback) for attention in attentions]
    for number, attention in enumerate(attentions):
        attention.router, attention.fallback = kind(config, number).to(attention.q_proj.weight.device), None
    try:
        yield
    finally:
        model.config.head_fallback = kind_of_fallback
        for attention, (router, fallback) in zip(attentions, own, strict=True):
            attention.router, attention.fallback = router, fallback


def by_oracle(model: MoHLlamaForCausalLM) -> LogitsOf:
    """The logits of the model with a perfect router in place of its own, and with its budgets and fallbacks."""

    def run(batch: Batch) -> torch.Tensor:
        with ExitStack() as hooks:
            for layer in model.model.layers:
                _choose_best(layer.self_attn, hooks)
            with routed_as(model, model.config, _AllOn):
                return logits_of(model)(batch)

    return run


def _choose_best(attention: MoHLlamaAttention, hooks: ExitStack) -> None:
    """Let each token drop the groups whose replacement by their fallbacks changes the output least."""
    router, fallback, state = attention.router, attention.fallback, {}

    def keep(module, args, kwargs):
        state["inputs"], seen = kwargs["hidden_states"], kwargs["seen"]
        state["first"] = (seen.start == seen.last).all(-1)

    def keep_values(module, args, output):
        state["values"] = output.unflatten(-1, (-1, attention.head_dim))

    def drop(module, args):
        heads = args[0].unflatten(-1, (-1, attention.head_dim))
        instead = torch.zeros_like(heads)
        if fallback is not None:
            instead = fallback(state["inputs"], state["values"], state["first"], None)
        width = router.group_size * attention.head_dim
        slices = module.weight.unflatten(-1, (-1, width)).float()
        gram = torch.einsum("cud,cue->ude", slices, slices)
        residual = (heads - instead).float().flatten(-2).unflatten(-1, (-1, width))
        cost = torch.einsum("...ud,ude,...ue->...u", residual, gram, residual)
        cost[..., [head // router.group_size for head in router.kinds()[0]]] = torch.inf
        gate = select_top_k(cost, router.num_active // router.group_size).to(heads.dtype)
        gate = gate.repeat_interleave(router.group_size, -1)[..., None]
        return ((heads * gate + instead * (1 - gate)).flatten(-2),)

    hooks.enter_context(attention.register_forward_pre_hook(keep, with_kwargs=True))
    hooks.enter_context(attention.v_proj.register_forward_hook(keep_values))
    hooks.enter_context(attention.o_proj.register_forward_pre_hook(drop))


class _AllOn(MoHRouter):
    """A gate of ones, so that the oracle's hook sees every head's output."""

    def forward(self, hidden_states, query_states, all_on=False, shard=None):
        gate = hidden_states.new_ones(*hidden_states.shape[:-1], self.num_shared + self.num_routed)
        return gate[..., self.num_shared :], gate
