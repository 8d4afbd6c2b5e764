"""A router in closed form: ridge regression of each head's log contribution on the layer's input.

For a token, head h adds H_h W_O^h to the layer's output; its contribution is the norm of that,
c_h = ||H_h W_O^h||. A linear map of the layer's input x fitted to log c_h ranks heads by what they
would add, before any of them is computed. Fitted values are router logits: their softmax is each
head's share of the contributions.

Shapes: N tokens, C hidden size, H query heads, D head size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

RIDGE = 1e-3  # of the mean diagonal of X^T X


@dataclass
class LayerStatistics:
    """Sums over calibration tokens that the fit of one layer needs, all float64.

    Attributes:
        gram: X^T X with x extended by a constant 1, `[C + 1, C + 1]`.
        cross: X^T log c, `[C + 1, H]`.
        energy: sum of c^2, `[H]`.
        tokens: N.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    energy: torch.Tensor
    tokens: int = 0

    @classmethod
    def zeros(cls, hidden_size: int, num_heads: int, device: torch.device) -> "LayerStatistics":
        """Empty sums."""
        size, kwargs = hidden_size + 1, {"dtype": torch.float64, "device": device}
        return cls(
            torch.zeros(size, size, **kwargs), torch.zeros(size, num_heads, **kwargs), torch.zeros(num_heads, **kwargs)
        )

    def add(self, inputs: torch.Tensor, contributions: torch.Tensor) -> None:
        """Add tokens: attention inputs `[N, C]` and squared contributions c^2 `[N, H]`, both float64."""
        extended = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        # A head whose output is exactly zero gets a log that is low but finite.
        log_contribution = 0.5 * contributions.clamp_min(1e-24).log()
        self.gram += extended.T @ extended
        self.cross += extended.T @ log_contribution
        self.energy += contributions.sum(0)
        self.tokens += len(inputs)

    @property
    def importance(self) -> list[float]:
        """Mean of c_h^2 per head."""
        return (self.energy / max(self.tokens, 1)).tolist()


def squared_contributions(head_outputs: torch.Tensor, o_proj: torch.Tensor) -> torch.Tensor:
    """c_h^2 = ||H_h W_O^h||^2 for head outputs `[N, H, D]` and `o_proj` weight `[C, H * D]`; returns `[N, H]`.

    Goes through the D x D Gram matrix of each head's slice, so that nothing of width C is formed.
    """
    heads, size = head_outputs.shape[1:]
    slices = o_proj.view(-1, heads, size)
    gram = torch.einsum("chd,che->hde", slices, slices)
    return torch.einsum("nhd,hde,nhe->nh", head_outputs, gram, head_outputs).clamp_min(0)


@torch.no_grad()
def collect_statistics(model: nn.Module, batches: Sequence[dict[str, torch.Tensor]]) -> list[LayerStatistics]:
    """Run a dense LLaMA over batches of `input_ids` and `position_ids` `[B, T]`; statistics per layer."""
    config, device = model.config, next(model.parameters()).device
    statistics = [
        LayerStatistics.zeros(config.hidden_size, config.num_attention_heads, device) for _ in model.model.layers
    ]
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    with _recording(model, statistics), tqdm(total=tokens, desc="calibrate", unit="token", unit_scale=True) as bar:
        for batch in batches:
            ids, positions = batch["input_ids"].to(device), batch["position_ids"].to(device)
            model.model(input_ids=ids, position_ids=positions, use_cache=False)
            bar.update(ids.numel())
    return statistics


def fit_router(
    statistics: LayerStatistics, routed_heads: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight `[R, C]` and bias `[R]` of the ridge regression for the given heads; the bias is not shrunk."""
    gram = statistics.gram.clone()
    size = len(gram) - 1
    gram.diagonal()[:size] += RIDGE * gram.diagonal()[:size].mean()
    solution = torch.linalg.solve(gram, statistics.cross[:, list(routed_heads)])
    return solution[:size].T.contiguous().to(dtype), solution[size].contiguous().to(dtype)


@contextmanager
def _recording(model: nn.Module, statistics: Sequence[LayerStatistics]) -> Iterator[None]:
    """Feed each layer's attention input and head outputs into its statistics."""
    handles = []
    for layer, sums in zip(model.model.layers, statistics, strict=True):
        attention = layer.self_attn
        inputs: list[torch.Tensor] = []

        def keep_input(module, args, kwargs, inputs=inputs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            inputs.append(hidden.flatten(0, -2).double())

        def add(module, args, attention=attention, sums=sums, inputs=inputs):
            heads = args[0].flatten(0, -2).unflatten(-1, (-1, attention.head_dim)).double()
            sums.add(inputs.pop(), squared_contributions(heads, module.weight.double()))

        handles.append(attention.register_forward_pre_hook(keep_input, with_kwargs=True))
        handles.append(attention.o_proj.register_forward_pre_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
