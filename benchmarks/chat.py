"""How near converted models are to their base in a chat of 20 turns, by turn, and which early facts they still find.

    python benchmarks/chat.py out/half out/third --base BASE --text "$CORPORA"/redpajama_stackexchange/*.jsonl

Conversations are made by the base's chat template from the first short documents "Q: ... A: ...", each a turn; turns do
not refer to each other. In four turns the user also tells a passkey, and after the last one the assistant repeats them.
Figures: the share of the base's keys that is read (least to most conversation); on the answers, KL(base || model) in
nats per token with 95 % intervals over conversations; passkeys whose tokens are all the most likely ones, by the turn
that told them, and as a share of the base's.
"""

import argparse
import random
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from command import add_compute_dtype, device_and_dtype, load_models, status_of
from held_out import texts_of
from long_context import hidden_and_gates, keys_read, ratio
from tqdm import tqdm
from transformers import PreTrainedModel

from moh_llm.data.chat import ChatText, read_chat
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.errors import UserError
from moh_llm.intervals import show_figure
from moh_llm.metrics import Comparison, compare_predictions
from moh_llm.modeling import MoHLlamaForCausalLM

GROUPS = ((1, 5), (6, 10), (11, 15), (16, 20))  # first and last turn; the first one tells a passkey
MOST = 80  # tokens of a question and its answer, so that 20 turns fit into 2,048
NAMES = ("Anna", "Boris", "Clara", "David")  # whose passkeys they are


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="model", help="converted folders")
    parser.add_argument("--base", required=True, help="the dense model they were converted from; has a chat template")
    parser.add_argument("--text", nargs="+", required=True, help="text files with documents 'Q: ... A: ...'")
    parser.add_argument("--conversations", type=int, default=10, metavar="N", help="how many (default: 10)")
    add_compute_dtype(parser, "float32", "since bfloat16 rounds by as much as the smallest KL here")
    return status_of(run, parser.parse_args())


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base, models = load_models(args.base, args.models, device, dtype)
    chats = conversations(args.text, TextTokenizer.load(args.base), args.conversations)
    rows = [read(base, models, chat) for chat in tqdm(chats, desc="conversations", leave=False)]
    lengths = [len(ids) for ids, _, _ in chats]
    print(f"{len(rows)} conversations of {GROUPS[-1][1]} turns, {min(lengths)} to {max(lengths)} tokens, {computed}")
    print(f"{'model':<30} {'keys':>20}" + "".join(f"{f'KL, turns {low}-{high}':>26}" for low, high in GROUPS))
    for name in models:
        sums, keys = np.array([row[name]["sums"] for row in rows]), [row[name]["keys"] for row in rows]
        shown = [show_figure(of.kl, of.kl_interval, ".4f") for of in map(Comparison, sums.transpose(1, 0, 2))]
        share = f"{np.mean(keys):.3f} ({min(keys):.3f}-{max(keys):.3f})"
        print(f"{name[-30:]:<30} {share:>20}" + "".join(f"{cell:>26}" for cell in shown))
    print(f"{'passkeys found':<30}" + "".join(f"{f'told in turn {low}':>18}" for low, _ in GROUPS) + " of the base's")
    right = {name: np.array([row[name]["right"] for row in rows]) for name in ("base", *models)}
    for name, own in right.items():
        share = show_figure(*ratio(own.sum(1, keepdims=True), right["base"].sum(1, keepdims=True)), ".3f")
        print(f"{name[-30:]:<30}" + "".join(f"{f'{n} of {len(rows)}':>18}" for n in own.sum(0)) + f" {share}")


def read(
    base: PreTrainedModel, models: dict[str, MoHLlamaForCausalLM], chat: Sequence[torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Per model the sums of `Comparison` `[groups, 5]`, whether each passkey is right, and the share of keys read."""
    at = chat[1].nonzero()[:, 0]
    turn, passkey, ids = chat[1][at], chat[2][at], chat[0][None].to(base.device)
    found, log_q = {}, None
    for name, model in {"base": base, **models}.items():
        hidden, on = hidden_and_gates(model, ids) if name in models else (base.model(ids, use_cache=False)[0][0], None)
        log_p = model.lm_head(hidden[at - 1]).float().log_softmax(-1)
        log_q = log_p if log_q is None else log_q  # the base's
        values, likely = compare_predictions(log_p, log_q, ids[0, at]).cpu(), (log_p.argmax(-1) == ids[0, at]).cpu()
        groups = [values[(low <= turn) & (turn <= high)] for low, high in GROUPS]
        found[name] = {
            "sums": [[len(group), *group.sum(0).tolist()] for group in groups],
            "right": [likely[passkey == number].all().item() for number in range(1, len(GROUPS) + 1)],
            "keys": 1.0 if on is None else keys_read(on.mean(0), model.config),
        }
    return found


def conversations(texts: Sequence[str], tokenizer: TextTokenizer, count: int) -> list[list[torch.Tensor]]:
    """`count` conversations as `conversation` returns them. Raises UserError where there are too few questions."""
    documents = [text for name in texts for _, text in texts_of(name) if text.startswith("Q: ")]
    split = [re.split(r"\n\s*A: ", text[3:]) for text in documents]
    pairs = [(question.strip(), min(answers, key=len).strip()) for question, *answers in split if answers]
    pairs = [pair for pair in pairs if len(tokenizer.backend.encode(" ".join(pair))) <= MOST]
    turns = GROUPS[-1][1]
    if len(pairs) < count * turns:
        raise UserError(
            f"{len(pairs)} questions and answers of at most {MOST} tokens in {', '.join(texts)}, "
            f"{count * turns} needed; lower --conversations"
        )
    return [conversation(pairs[turns * n : turns * (n + 1)], tokenizer, n) for n in range(count)]


def conversation(pairs: Sequence[tuple[str, str]], tokenizer: TextTokenizer, seed: int) -> list[torch.Tensor]:
    """Token ids, the turn of each token that the assistant says, and the passkey that it is of; 0: none. `[T]` each."""
    generator = random.Random(seed)
    keys = [str(generator.randrange(10000, 100000)) for _ in NAMES]
    facts = [f"The pass key of {name} is {key}." for name, key in zip(NAMES, keys, strict=True)]
    said = [[*pair] for pair in pairs] + [["What were the pass keys?", " ".join(facts)]]
    for (low, _), fact in zip(GROUPS, facts, strict=True):
        said[low - 1][0] = f"{fact} Remember it.\n{said[low - 1][0]}"
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in said for role, text in zip(roles, turn, strict=True)]
    try:
        text = read_chat("messages", {"messages": messages}, tokenizer.chat)
    except ValueError as error:
        raise UserError(f"the base's tokenizer cannot write a conversation: {error}") from error
    spans = [(text.rindex(f"{key}."), text.rindex(f"{key}.") + len(key)) for key in keys]
    (_, ids, spoken), (_, _, of_keys) = tokenizer.encode([("", text), ("", ChatText.from_spans(text, spans, True))])
    # The number of each run of True.
    numbers = [np.cumsum(np.diff(own, prepend=False) & own) * own for own in (spoken, of_keys)]
    return [torch.from_numpy(values.astype(np.int64)) for values in (ids, *numbers)]


if __name__ == "__main__":
    sys.exit(main())
