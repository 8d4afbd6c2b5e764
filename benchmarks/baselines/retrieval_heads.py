"""Retrieval heads: the heads that copy from a long context (Wu et al., arXiv 2404.15574).

Retrieval score of a head: the share of a needle's tokens that it copies, mean over the needles that the model finds. A
head copies a token if its largest attention weight is on the token's place in the needle and the model's most likely
next token is that token. There the needles are sentences in essays of 1,000 to 50,000 tokens. Here they are the random
strings, passkeys and pairs of `moh_llm.analysis.retrieval`, and the answers are given, so that one pass scores all.
"""

from collections.abc import Iterable

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from moh_llm.analysis.retrieval import Prompt, make_prompt
from moh_llm.errors import UserError

LENGTH, DISTANCES = 2048, (400, 800, 1200, 1600)  # tokens of a prompt, and from a needle to its repetition
PROMPTS, ASKED = 12, ("copying", "passkey", "key-value")
TIES = 1e-6  # of the weight on the token's place, for heads of equal scores: most have none
_FOUND = 0.5  # share of a needle's tokens that the model has right, above which it counts as found


def make_prompts(text: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> Iterable[Prompt]:
    """`PROMPTS` prompts in parts of this text `[N]`, in turn. Raises UserError for one shorter than a prompt."""
    if len(text) < LENGTH:
        raise UserError(f"retrieval scores take {LENGTH} tokens of text, not {len(text)}; more --calibration-tokens")
    parts = text.unfold(0, LENGTH, LENGTH).tolist()
    return (make_prompt(parts[seed % len(parts)], LENGTH, DISTANCES, tokenizer, seed, ASKED) for seed in range(PROMPTS))


@torch.inference_mode()
def retrieval_scores(model: PreTrainedModel, prompts: Iterable[Prompt]) -> torch.Tensor:
    """Retrieval scores `[layers, H]` of a dense model, from 0 to 1; zeros if it finds no needle."""
    copied, found = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads), 0
    usual = model.config._attn_implementation
    for prompt in tqdm(prompts, desc="retrieval scores", unit="prompt"):
        ids = torch.tensor([prompt.ids], device=model.device)
        begin, cache = min(answer.start for answer in prompt.answers) - 1, DynamicCache(config=model.config)
        model.model(ids[:, :begin], past_key_values=cache)
        model.set_attn_implementation("eager")  # which returns attention weights
        output = model(ids[:, begin:], past_key_values=cache, output_attentions=True)
        model.set_attn_implementation(usual)
        most_likely = output.logits[0].argmax(-1)
        most_read = torch.cat([weights.argmax(-1) for weights in output.attentions])  # [layers, H, T]
        for answer in prompt.answers:
            places = torch.arange(answer.start, answer.stop, device=ids.device)
            rows = places - 1 - begin  # of the predictions of the answer's tokens
            right = most_likely[rows] == ids[0, places]
            if right.float().mean() > _FOUND:
                found += 1
                needle = places - answer.distance
                copies = (most_read[..., rows] == needle) & right
                looks = torch.cat([weights[..., rows, needle] for weights in output.attentions])
                copied += (copies + TIES * looks).mean(-1).cpu()
    return copied / max(1, found)
