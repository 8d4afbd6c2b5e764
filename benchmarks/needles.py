"""Which heads a converted model misses where it finds a needle less surely than its base does.

    python benchmarks/needles.py out/fifth --base BASE --tasks single_2 single_3 --length 2048 --prompts 15 --worst 3

The prompts are RULER's, of tasks with one right answer. The figures are the log-probability of that answer, in nats,
which falls before the share of solved prompts does, and in how many prompts its tokens are the most likely ones.
`--begun :` gives the beginning of the answer: a model may begin it otherwise although it knows the rest. With
`--generate 128` answers are decoded, as RULER does it; with all heads on from the question or the answer on, too.

Then the prompts with the largest loss in the last model are looked at: what all heads bring, in the text before the
question or from the question on, and what each head that was off brings from the question on. With the best head of
each the other prompts are scored again.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import lm_eval
import numpy as np
import torch
from command import add_compute_dtype, device_and_dtype, load_models, status_of
from tqdm import tqdm
from transformers import AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from moh_llm.evaluation.ruler import import_generators, make_prompts
from moh_llm.intervals import interval, show_figure
from moh_llm.modeling import MoHLlamaForCausalLM

Prompt = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # token ids `[1, T]` of the text, the question, the answer
Head = tuple[int, int]  # layer, head
WAYS = "as converted", "all heads on from the question on", "all heads on from the answer on"


class Score(NamedTuple):
    """The log-probability of an answer, and whether each of its tokens is the most likely one."""

    nats: float
    solved: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="model", help="converted folders")
    parser.add_argument("--base", required=True, help="the dense model they were converted from")
    parser.add_argument("--tasks", nargs="+", required=True, help="names after niah_, such as single_2")
    parser.add_argument("--length", type=int, default=2048, metavar="T", help="tokens of a prompt (default: 2048)")
    parser.add_argument("--prompts", type=int, default=15, metavar="N", help="of each task (default: 15)")
    parser.add_argument("--begun", default="", metavar="TEXT", help="what begins the answer, for all models")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="tokens to decode (default: 0)")
    parser.add_argument("--worst", type=int, default=3, metavar="N", help="prompts to look at (default: 3)")
    add_compute_dtype(parser)
    return status_of(run, parser.parse_args())


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base, models = load_models(args.base, args.models, device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    import_generators()
    how = args, tokenizer, device, args.begun
    found = [(task, prompt) for task in args.tasks for prompt in read_prompts(task, *how)]
    progress = tqdm(found, desc="prompts", unit="prompt", leave=False)
    all_scores = [[score(model, prompt) for model in (base, *models.values())] for _, prompt in progress]
    (of_base, *of_models), solved = np.array(all_scores).T
    print(f"log-probability of the answer, {args.prompts} prompts of {args.length} tokens of each task, {computed}")
    for task in args.tasks:
        own = np.array([name == task for name, _ in found])
        right = iter(solved[:, own].sum(1))
        print(f"{task}: base {of_base[own].mean():.3f}, most likely in {next(right):.0f} prompts")
        for name, scores in zip(models, of_models, strict=True):
            print(f"  {name[-40:]:<40} {show((scores - of_base)[own])}, most likely in {next(right):.0f}")
    for name, model in {args.base: base, **models}.items() if args.generate else ():
        progress = tqdm(found, desc="answers", unit="prompt", leave=False)
        given = np.array([answers(model, prompt, tokenizer, args.generate) for _, prompt in progress], float).T
        if model is base:
            right = given[0]
            print(f"decoded: the base finds {right.sum():.0f} of {len(found)}")
        else:
            for way, own in zip(WAYS, given, strict=True):
                print(f"  {name[-40:]}, {way}: {own.sum():.0f}, {show(100 * (own - right))} points")
    print("all tasks")
    for name, scores in zip(models, of_models, strict=True):
        print(f"  {name[-40:]:<40} {show(scores - of_base)}")
    last, name, losses = models[args.models[-1]], args.models[-1], of_models[-1] - of_base
    worst, heads = np.argsort(losses)[: args.worst], set()
    for index in worst:
        task, prompt = found[index]
        answer = tokenizer.decode(prompt[-1][0])
        print(f"\n{task}, answer{answer}: base {of_base[index]:.3f}, {name} {of_models[-1][index]:.3f}")
        heads.add(look(last, prompt))
    if not heads:
        return
    others = [index for index in range(len(found)) if index not in worst]
    with heads_on(last, sorted(heads)):
        changed = np.array([score(last, found[index][1]).nats for index in others]) - of_base[others]
    print(f"\nthe {len(others)} other prompts: {show(losses[others])}, with layer.head on for all tokens", end=" ")
    print(*(f"{layer}.{head}" for layer, head in sorted(heads)), show(changed))


def read_prompts(
    task: str, args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, device: torch.device, begun: str = ""
) -> list[Prompt]:
    """The first prompts of a task, as `moh-llm evaluate` makes them without `--data-dir`; `begun` ends the question."""
    stock = Path(lm_eval.__file__).parent / "tasks" / "ruler" / f"niah_{task}.yaml"
    prompts = []
    for row in make_prompts(str(stock), args.base, [args.length], args.prompts, "test")["test"]:
        text, _, question = row["input"].rpartition("\n")
        parts = text, f"\n{question} {row['gen_prefix']}{begun}", f" {row['outputs'][0]}"
        prompts.append(tuple(tokenizer(part, return_tensors="pt").input_ids.to(device) for part in parts))
    return prompts


def score(model: PreTrainedModel, prompt: Prompt, cache: Cache | None = None) -> Score:
    """Score a prompt's answer. With a `cache` of its text, which stays as it is."""
    *read, answer = prompt if cache is None else prompt[1:]
    ids = torch.cat([*read, answer], 1)
    logits = model(ids, past_key_values=copy.deepcopy(cache), logits_to_keep=answer.shape[1] + 1).logits[:, :-1]
    nats = logits.float().log_softmax(-1).gather(-1, answer[..., None]).sum().item()
    return Score(nats, torch.equal(logits.argmax(-1), answer))


def answers(
    model: PreTrainedModel, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, tokens: int
) -> tuple[bool, ...]:
    """Whether the next tokens, decoded greedily, hold the answer, in each of `WAYS`; for the base in one way."""
    text, question, answer = prompt
    ids, right = torch.cat([text, question], 1), tokenizer.decode(answer[0]).strip()
    given = {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.eos_token_id}
    cache = model(text, use_cache=True, logits_to_keep=1).past_key_values

    def decode(cache: Cache) -> bool:
        found = model.generate(ids, **given, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
        return right in tokenizer.decode(found[0, ids.shape[1] :])

    if not isinstance(model, MoHLlamaForCausalLM):
        return (decode(cache),)
    of_plan, of_question = decode(copy.deepcopy(cache)), copy.deepcopy(cache)
    model(question[:, :-1], past_key_values=cache, logits_to_keep=1)
    with model.all_heads_active():
        return of_plan, decode(of_question), decode(cache)


def look(model: MoHLlamaForCausalLM, prompt: Prompt) -> Head:
    """Print what heads bring that the model has off; return the one that brings most."""
    cache = model(prompt[0], use_cache=True, logits_to_keep=1).past_key_values
    shares: list[torch.Tensor] = []  # of the tokens from the end of the question on, by layer `[H]`
    with ExitStack() as hooks:
        for router in model.routers:
            answer = prompt[2].shape[1] + 1
            keep = router.register_forward_hook(lambda _, __, out, n=answer: shares.append(out[1][0, -n:].mean(0)))
            hooks.callback(keep.remove)
        before = score(model, prompt, cache).nats
    with model.all_heads_active():
        on_later = score(model, prompt, cache).nats
        of_base = model(prompt[0], use_cache=True, logits_to_keep=1).past_key_values
    print(f"all heads on in the text {score(model, prompt, of_base).nats:.3f}, from the question on {on_later:.3f}")
    off = [(layer, head) for layer, share in enumerate(shares) for head in (share < 1).nonzero().flatten().tolist()]
    gains = {}
    for head in tqdm(off, desc="heads", unit="head", leave=False):
        with heads_on(model, [head]):
            gains[head] = score(model, prompt, cache).nats - before
    best = sorted(gains, key=lambda head: -gains[head])
    for layer, head in best[:6]:
        never = head in model.routers[layer].kinds()[1]
        state = "never on" if never else f"on for {shares[layer][head]:.2f} of the answer's tokens"
        print(f"  layer {layer}, head {head}, {state}: {gains[layer, head]:+.3f}")
    for count in (4, 16):
        with heads_on(model, best[:count]):
            print(f"  the best {count} of {len(off)}: {score(model, prompt, cache).nats - before:+.3f}")
    return best[0]


@contextmanager
def heads_on(model: MoHLlamaForCausalLM, heads: Sequence[Head]) -> Iterator[None]:
    """A context in which some heads are on for all tokens."""
    with ExitStack() as changes:
        for layer in {layer for layer, _ in heads}:
            router, own = model.routers[layer], [head for of, head in heads if of == layer]

            def turn_on(_, __, outputs, own=own):
                return outputs[0], outputs[1].index_fill(-1, torch.tensor(own, device=outputs[1].device), 1.0)

            always, never = router.kinds()
            changes.enter_context(patch.object(router, "_kinds", (always, tuple(h for h in never if h not in own))))
            changes.callback(router.register_forward_hook(turn_on).remove)
        yield


def show(values: np.ndarray) -> str:
    """The mean over prompts with its interval."""
    sums = np.stack([np.ones(len(values)), values], 1)
    return show_figure(values.mean(), interval([sums], lambda rows: rows[:, 1] / rows[:, 0]), "+.3f")


if __name__ == "__main__":
    sys.exit(main())
