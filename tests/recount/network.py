"""A model of plain transformers on one document at a time, and what its attention layers do there."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.modeling.interval_attention_moh import NAME, masked_attention
from recount.text import Row


@dataclass
class Pass:
    """One document, or the part of one that a window has, of T tokens.

    Attributes:
        logits: `[T, V]`.
        gates: per layer, which heads are on, bool `[T, H]`; none of a dense model.
        scores: per layer, the router's logits `[T, U]`.
        states: per layer, the hidden states that it hands on, the last layer's normed, `[T, C]`.
    """

    logits: torch.Tensor
    gates: list[torch.Tensor]
    scores: list[torch.Tensor]
    states: list[torch.Tensor]


def load(folder: Path) -> nn.Module:
    """A model as a user of transformers loads it, in float32."""
    options = {"trust_remote_code": True, "dtype": torch.float32, "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def run(model: nn.Module, ids: np.ndarray) -> Pass:
    """One document through a model."""
    seen = Pass(torch.empty(0), [], [], [])
    routers = [layer.self_attn.router for layer in model.model.layers if hasattr(layer.self_attn, "router")]
    handles = [router.register_forward_hook(lambda module, inputs, output: _keep(seen, output)) for router in routers]
    # By its definition, not by the backend that made the figures.
    ALL_ATTENTION_FUNCTIONS[NAME] = lambda *given, **_: masked_attention(*given)
    try:
        output = model(torch.from_numpy(ids)[None], use_cache=False, output_hidden_states=True)
    finally:
        del ALL_ATTENTION_FUNCTIONS[NAME]
        for handle in handles:
            handle.remove()
    seen.logits, seen.states = output.logits[0], [states[0] for states in output.hidden_states[1:]]
    return seen


def _keep(seen: Pass, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    seen.scores.append(output[0][0])
    seen.gates.append(output[1][0].detach() != 0)


def head_load(passes: list[Pass]) -> list[list[float]]:
    """Share of tokens that have each head on, by layer."""
    layers = zip(*(one.gates for one in passes), strict=True)
    return [torch.cat(gates).double().mean(0).tolist() for gates in layers]


@dataclass(frozen=True, eq=False)
class Comparison:
    """A model beside its reference on some windows.

    Attributes:
        sums: per document with a predicted token the number of those, and the sums of cross-entropy, of the
            reference's, of KL, and of equal top-1, float64 `[D, 5]`.
        ties: predictions whose two likeliest tokens are too near to say which is first.
        passes: the model's passes, of each piece of a document in turn.
        by_position: per predicted token its position in the document, and the row that `sums` adds up.
    """

    sums: np.ndarray
    ties: int
    passes: list[Pass]
    by_position: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """Per predicted token, `[5]`; the first is 1."""
        return self.sums.sum(0) / self.sums[:, 0].sum()


@torch.no_grad()
def compare(model: nn.Module, reference: nn.Module, read: Iterable[Row]) -> Comparison:
    """Run both on rows of documents."""
    sums: dict[int, np.ndarray] = {}
    passes: list[Pass] = []
    ties, rows = 0, []
    for row in read:
        for document, ids in row:
            passes.append(run(model, ids))
            other = run(reference, ids).logits
            found, close = _predictions(passes[-1].logits[:-1], other[:-1], torch.from_numpy(ids)[1:])
            ties += close
            rows += [(place, *values) for place, values in enumerate(found, start=0)]
            if len(found):
                sums.setdefault(document, np.zeros(5))
                sums[document] += found.sum(0)
    return Comparison(np.array([*sums.values()]), ties, passes, np.array(rows))


def _predictions(own: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, int]:
    """Per prediction 1, cross-entropy, the reference's, KL and equal top-1 `[N, 5]`; the number of near ties."""
    p, q = (logits.double().log_softmax(-1).numpy() for logits in (own, other))
    rows, ties = np.arange(len(p)), 0
    for logs in (p, q):
        if len(logs):
            first, second = -np.partition(-logs, 1, axis=-1)[:, :2].T
            ties += int((first - second < 1e-4).sum())
    values = [
        np.ones(len(p)),
        -p[rows, targets],
        -q[rows, targets],
        (np.exp(q) * (q - p)).sum(-1),
        p.argmax(-1) == q.argmax(-1),
    ]
    return np.stack([np.asarray(value, dtype=np.float64) for value in values], -1), ties
