"""How long converted models write what their base writes, by greedy decoding.

    python benchmarks/generation.py out/moh out/tuned/model --base BASE --text "$CORPORA"/redpajama_stackexchange/v* \\
        --documents 100 --prompt-tokens 384 --new-tokens 128

The base continues the first tokens of each document. A model writes the same up to the first token that it would choose
otherwise. One pass over prompt and continuation finds that token, since until there both have read the same. Figures
are the number of tokens before it, at most `--new-tokens`, and the share of continuations that are the same throughout,
each with its 95 % interval over documents.
"""

import argparse
import sys

import numpy as np
import torch
from command import add_compute_dtype, device_and_dtype, load_models, status_of
from held_out import encode, texts_of
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from moh_llm.errors import UserError
from moh_llm.intervals import interval, show_figure, within

BATCH = 4  # sequences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="model", help="converted folders")
    parser.add_argument("--text", nargs="+", required=True, help="text files or globs")
    parser.add_argument("--base", required=True, help="the dense model they were converted from")
    parser.add_argument("--documents", type=int, default=100, metavar="N", help="prompts of each text (default: 100)")
    parser.add_argument("--prompt-tokens", type=int, default=384, metavar="T", help="of each document (default: 384)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="T", help="that the base writes (default: 128)")
    add_compute_dtype(parser)
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base, models = load_models(args.base, args.models, device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    prompts = torch.cat([read_prompts(name, args, tokenizer) for name in args.text]).to(device)
    agreed: dict[str, list[int]] = {name: [] for name in models}
    for batch in tqdm(prompts.split(BATCH), desc="prompts", unit="batch", leave=False):
        written = continuation(base, batch, args.new_tokens)
        for name, model in models.items():
            agreed[name] += agreement(model, batch, written).tolist()
    print(f"{len(prompts)} prompts of {args.prompt_tokens} tokens, {args.new_tokens} new ones, {computed}")
    for name, tokens in agreed.items():
        whole = show([count == args.new_tokens for count in tokens], 1)
        print(f"{name[-40:]:<40} {show(tokens, args.new_tokens)} tokens, the same throughout: {whole}")


def read_prompts(name: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """The first tokens `[N, T]` of the first documents that have as many. Raises UserError where none has."""
    found = (ids[: args.prompt_tokens] for ids in encode(texts_of(name), tokenizer) if len(ids) >= args.prompt_tokens)
    rows = [torch.from_numpy(ids.astype(np.int64)) for _, ids in zip(range(args.documents), found, strict=False)]
    if not rows:
        raise UserError(f"{name} has no document of {args.prompt_tokens} tokens; lower --prompt-tokens")
    return torch.stack(rows)


@torch.inference_mode()
def continuation(base: PreTrainedModel, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` tokens `[B, count]` that the base writes after prompts `[B, T]`, also past an end of text."""
    base.generation_config.eos_token_id = None
    mask = torch.ones_like(prompts)
    written = base.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=count)
    return written[:, prompts.shape[1] :]


@torch.inference_mode()
def agreement(model: PreTrainedModel, prompts: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """How many tokens `[B]` of what was `written` `[B, count]` a model also writes, from the first one on."""
    ids = torch.cat([prompts, written[:, :-1]], 1)
    chosen = model(ids, logits_to_keep=written.shape[1], use_cache=False).logits.argmax(-1)
    return (chosen == written).long().cumprod(1).sum(1)


def show(values: list[int], most: int) -> str:
    """The mean over prompts of numbers from 0 to `most`, with its interval."""
    sums = np.stack([np.ones(len(values)), np.array(values)], 1)
    bounds = interval([sums], lambda rows: rows[:, 1] / rows[:, 0])
    return show_figure(sums[:, 1].mean(), bounds and within(bounds, 0, most), ".3f" if most == 1 else ".1f")


if __name__ == "__main__":
    sys.exit(main())
