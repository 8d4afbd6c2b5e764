"""Verification: with all heads on the converted model equals its base; as planned, how far is it from it.

Base and converted model run side by side from disk, a layer at a time, on the same text.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from moh_llm.analysis.retrieval import Prompt, make_prompt, score
from moh_llm.conversion.layers import LayerwiseModel, run_layer
from moh_llm.errors import UserError
from moh_llm.flops import distant_keys, share_of_keys
from moh_llm.metrics import Batch, LogitsOf, compare_to_reference
from moh_llm.records.conversion import AllHeadsActive, Figures, PositionFigures, RetrievalFigures, Verification

_ASKED = ("copying", "uuid")
_ROOM = 660  # tokens at the end of a prompt, for its questions
EDGES = (0, 512, 2048)  # positions that divide the figures of long contexts


@torch.no_grad()
def verify(
    base: LayerwiseModel, converted: LayerwiseModel, batches: Sequence[Batch], prompt: Prompt | None = None
) -> Verification:
    """Compare a converted model, as it was written, with its base in the same dtype, on batches of held-out text.

    ``prompt`` has questions about facts that local fallbacks do not see.

    Raises:
        UserError: a layer's output with all heads on differs from the base's.
    """
    held_out = len(batches)
    if prompt:
        ids = torch.tensor([prompt.ids])
        batches = [*batches, {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}]
    of_base = base.embed(batch["input_ids"] for batch in batches)
    of_converted = list(of_base)
    held = batches[:held_out]
    distant = torch.cat([distant_keys(converted.config, batch["position_ids"]).flatten() for batch in held]).double()
    read = []  # heads on, and the share of the distant keys that is read, by layer
    for number in tqdm(range(len(base)), "verify", unit="layer", leave=False):
        on = _verify_layer(number, base, converted, of_base, of_converted, batches)[: len(distant)]
        share = (on * distant).sum() / (distant.sum() * converted.config.num_attention_heads)
        read.append([on.mean().item(), share.item()])
    heads_read, share = torch.tensor(read, dtype=torch.float64).mean(0).tolist()
    length = batches[0]["input_ids"].shape[1]
    head = base.head()

    def logits_in_turn(hidden: Sequence[torch.Tensor]) -> LogitsOf:
        states = (window for batch in hidden for window in batch.split(1))
        return lambda _: head(next(states))

    # One window at a time: logits of a large vocabulary take more memory than a layer.
    windows = [
        {name: batch[name][row : row + 1] for name in ("labels", "documents", "position_ids")}
        for batch in held
        for row in range(len(batch["labels"]))
    ]
    edges = [edge for edge in EDGES if edge < length]
    compared = {"converted": logits_in_turn(of_converted)}
    found = compare_to_reference(compared, logits_in_turn(of_base), windows, edges if edges[1:] else ())["converted"]
    return Verification(
        dtype=str(base.dtype).removeprefix("torch."),
        all_heads_active=AllHeadsActive(equals_base=True, tokens=batches[0]["input_ids"].numel()),
        held_out_tokens=found.tokens,
        held_out_documents=found.documents,
        base_perplexity=found.reference_perplexity,
        converted=Figures(**found.figures()),
        heads_read=round(heads_read, 4),
        keys_read=None if math.isnan(share) else round(share_of_keys(converted.config, share, length), 4),
        by_position=[
            PositionFigures(start=start, tokens=part.tokens, kl=part.kl) for start, part in found.parts.items()
        ],
        retrieval=_retrieval(head, prompt, of_base[-1][0], of_converted[-1][0]) if prompt else [],
    )


def retrieval_prompt(held_out: Sequence[Batch], tokenizer: PreTrainedTokenizerBase, in_sight: int) -> Prompt | None:
    """A prompt of the sequences' length about what is over `in_sight` tokens back; None if nothing fits."""
    text = held_out[0]["input_ids"][0].tolist()
    step = len(text) // 8
    distances = [distance for distance in range(step, len(text) - _ROOM, step) if distance > in_sight]
    try:
        return make_prompt(text, len(text), distances, tokenizer, 0, _ASKED) if distances else None
    except ValueError:  # a tokenizer of single bytes makes long sentences
        return None


def _retrieval(head: nn.Module, prompt: Prompt, base: torch.Tensor, converted: torch.Tensor) -> list[RetrievalFigures]:
    """Answers of both models, from their last hidden states `[T, C]`."""
    of_base, of_converted = (
        {task: [sum(column) for column in zip(*counts.values(), strict=True)] for task, counts in found.items()}
        for found in (score(prompt, lambda _, at, states=states: head(states[at])) for states in (base, converted))
    )
    return [
        RetrievalFigures(task=task, asked=asked, base=right, converted=own[0], nats=round((own[2] - nats) / asked, 3))
        for (task, (right, asked, nats)), own in zip(of_base.items(), of_converted.values(), strict=True)
    ]


def _verify_layer(
    number: int,
    base: LayerwiseModel,
    converted: LayerwiseModel,
    of_base: list[torch.Tensor],
    of_converted: list[torch.Tensor],
    batches: Sequence[Batch],
) -> torch.Tensor:
    """Run a layer of both models on their hidden states, in place; return each token's heads on, float64 `[N]`."""
    first = of_base[0]
    _run(base.layer(number), of_base, batches)
    layer = converted.layer(number)
    with layer.all_heads_active():  # the layers before equal the base's, so its hidden states do
        all_on = run_layer(layer, first, batches[0]["position_ids"])
    if not torch.equal(all_on, of_base[0]):
        raise UserError(
            f"layer {number} with all heads on does not equal the base's; nothing was written. "
            "Please report this with the base's name"
        )
    on: list[torch.Tensor] = []
    router = layer.layers[0].self_attn.router
    router.register_forward_hook(lambda module, args, output: on.append(output[1].ne(0).sum(-1).flatten().cpu()))
    _run(layer, of_converted, batches)
    return torch.cat(on).double()


def _run(layer: nn.Module, hidden: list[torch.Tensor], batches: Sequence[Batch]) -> None:
    """Replace the hidden states of each batch by the layer's outputs."""
    for number, batch in enumerate(batches):
        hidden[number] = run_layer(layer, hidden[number], batch["position_ids"])
