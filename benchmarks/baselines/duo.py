"""DuoAttention's gates, which say how much a key-value head needs full attention (Xiao et al., arXiv 2410.10819).

A head gives a F + (1 - a) S, with its full attention F in the unchanged model, its streaming attention S in the mixed
one, and its gate a between 0 and 1. The gates alone are trained, from 1 on, by

    mean over answer tokens and hidden units of (h - h')^2  +  0.05 mean of a

with the last hidden states h of the model and h' of the mixed one. Each text hides passkeys of random words in ordinary
text and asks for them at its end; questions and passkeys there are the answer tokens. Loss, prompts, optimizer and
schedule are those of the authors' code (mit-han-lab/duo-attention), which takes 2,000 steps of ten passkeys of 32 words
in 1,000 to 32,000 tokens, with 128 sinks and a window of 256 tokens. Numbers are smaller here, and window and sinks are
those of the plan.
"""

import random

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moh_llm.modeling.interval_attention_moh import near_attention
from moh_llm.modeling.seen_moh import Seen

NAME = "duo_gates"  # of the attention in transformers' registry
LENGTHS = 1024, 2048  # least and most tokens of a text
WORDS = 16  # of a passkey
RATE, REGULARISATION = 0.02, 0.05
_ALPHABET = "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima mike november oscar papa quebec"
_ALPHABET += " romeo sierra tango uniform victor whiskey xray yankee zulu"
_ORDINALS = "first", "second", "third", "fourth"
_NEEDLE = "\n\nRemeber this sequence of words, it's the {} passkey to the vault: {}\n\n"  # spelt as there
_QUESTION = "Based on the content of the book, what is the {} passkey to the vault?\nPasskey: {}\n\n"


def make_text(
    ordinary: list[int], length: int, tokenizer: PreTrainedTokenizerBase, generator: random.Random
) -> tuple[list[int], int]:
    """About `length` tokens, the passkeys in between those of `ordinary` text; and how many answer tokens end it."""

    def encode(words: str) -> list[int]:
        return tokenizer(words, add_special_tokens=False)["input_ids"]

    keys = [" ".join(generator.choices(_ALPHABET.split(), k=WORDS)) for _ in _ORDINALS]
    needles = [encode(_NEEDLE.format(*named)) for named in zip(_ORDINALS, keys, strict=True)]
    answers = [token for named in zip(_ORDINALS, keys, strict=True) for token in encode(_QUESTION.format(*named))]
    text = ordinary[: length - sum(map(len, needles)) - len(answers)]
    ids, before = encode("<|im_start|> This is a very long story book: <book> "), 0
    for needle, depth in zip(needles, sorted(generator.uniform(0.05, 0.95) for _ in keys), strict=True):
        ids += text[before : int(depth * len(text))] + needle
        before = int(depth * len(text))
    return ids + text[before:] + encode(" </book>.\n\n") + answers, len(answers)


def train_gates(
    model: PreTrainedModel,
    text: torch.Tensor,
    tokenizer: PreTrainedTokenizerBase,
    window: int,
    sinks: int,
    steps: int,
    seed: int = 0,
) -> torch.Tensor:
    """The trained gates `[layers, KV]`, between 0 and 1, for streaming heads of that window and so many sinks.

    `text` `[N]` is the ordinary text. The model's weights stay as they are.
    """
    model.requires_grad_(False)
    layers, groups = model.config.num_hidden_layers, model.config.num_key_value_heads
    gates = torch.ones(layers, groups, device=model.device, requires_grad=True)
    optimizer = torch.optim.AdamW([gates], lr=RATE, weight_decay=0)
    rise = max(1, steps // 5)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, max((step + 1) / rise, 0.1), max((steps - step) / rise, 0.1))
    )
    generator = random.Random(seed)
    for _ in (progress := tqdm(range(steps), desc="gates", unit="step")):
        length = generator.randint(*LENGTHS)
        first = generator.randint(0, max(0, len(text) - length))
        ids, count = make_text(text[first:].tolist(), length, tokenizer, generator)
        full, mixed = mixed_states(model, gates, torch.tensor([ids], device=model.device), window, sinks)
        distance = (full - mixed)[0, -count:].float().square().mean()
        (distance + REGULARISATION * gates.mean()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        gates.data.clamp_(0, 1)
        progress.set_postfix(distance=f"{distance.item():.4f}", gates=f"{gates.mean().item():.3f}")
    return gates.detach().cpu()


def mixed_states(
    model: PreTrainedModel, gates: torch.Tensor, ids: torch.Tensor, window: int, sinks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states of the model and, with gradients by `gates`, of the mixed one, for ids `[1, T]`."""
    usual, outputs = model.config._attn_implementation, []
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    seen = Seen.from_positions(positions, torch.zeros_like(positions), window, sinks)

    def attend(module, query, key, value, attention_mask, **kwargs):
        if not torch.is_grad_enabled():
            full = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=module.scaling, enable_gqa=True
            )
            outputs.append(full.transpose(1, 2))  # [1, T, H, D]
            return outputs[-1], None
        streaming = near_attention(query, key, value, seen, module.scaling)
        gate = gates[module.layer_idx].clamp(0, 1).to(query.dtype)
        gate = gate.repeat_interleave(module.num_key_value_groups)[:, None]
        return gate * outputs[module.layer_idx] + (1 - gate) * streaming, None

    ALL_ATTENTION_FUNCTIONS[NAME] = attend
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        full = model.model(ids, use_cache=False).last_hidden_state
    mixed = model.model(ids, use_cache=False).last_hidden_state
    model.set_attn_implementation(usual)
    return full, mixed
