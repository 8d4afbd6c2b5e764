"""Needles of RULER beside other methods: score, time and cache of models, and of their base with a pressed cache.

    python benchmarks/ruler_rivals.py BASE --models out/heads out/groups --tasks single_2 single_3 --length 4096 \
        --bytes-of out/groups --presses SnapKVPress ExpectedAttentionPress --output-dir out/rivals

Prompts are those of `needles.py`. All ways answer one prompt after the other, so that times are of the same minutes.
The text before the question is read in one pass. Then presses (classes of kvpress, `baselines/pressed.py`) drop keys of
the base's cache, until it has the bytes that the cache of a model of `--bytes-of` has. With `--pressed` they drop keys
of the groups that are on in a converted model, too; with `--query-aware` they choose after they have read the question.
Up to 128 tokens are decoded greedily, until they hold the answer. Scores are RULER's recall, in percent; the share of
the base's average has its 95 % interval by Fieller's method, paired by prompts. Times are over the base's for the same
prompt: the median, and the quartiles. A run that was interrupted goes on where it stopped.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.pressed import press_of, press_prompt, read_later
from command import add_compute_dtype, cache_bytes, device_and_dtype, keep_settings, load_models, now, status_of
from needles import Prompt, read_prompts
from tqdm import tqdm
from transformers import AutoTokenizer, Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from moh_llm import MoHCache
from moh_llm.errors import UserError
from moh_llm.evaluation.ruler import import_generators
from moh_llm.evaluation.statistics import difference, kept_share, mean_of, value_of
from moh_llm.files import write_json
from moh_llm.intervals import show_error, show_figure
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.reading import read_json

ANSWER = 128  # tokens, as RULER's
Reads = Callable[[torch.Tensor], Cache]  # ids `[1, T]` of a text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--models", nargs="+", required=True, help="converted folders")
    parser.add_argument("--tasks", nargs="+", required=True, help="names after niah_, such as single_2")
    parser.add_argument("--length", type=int, default=4096, metavar="T", help="tokens of a prompt (default: 4096)")
    parser.add_argument("--prompts", type=int, default=15, metavar="N", help="of each task (default: 15)")
    parser.add_argument("--bytes-of", nargs="+", default=[], metavar="MODEL", help="of --models, for presses")
    parser.add_argument("--presses", nargs="+", default=[], metavar="CLASS", help="such as SnapKVPress")
    parser.add_argument("--query-aware", nargs="+", default=[], metavar="CLASS", help="presses that read the question")
    parser.add_argument("--pressed", metavar="MODEL", help="without a router, to press its groups as --presses says")
    add_compute_dtype(parser, "float32", "as the KL of these ways is measured")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of figures.json")
    return status_of(run, parser.parse_args())


@torch.inference_mode()
def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    if strange := {*args.bytes_of} - {*args.models}:
        raise UserError(f"--bytes-of {' '.join(sorted(strange))}: not one of --models")
    labels = ["base", *(Path(name).name for name in args.models)]
    if len({*labels}) < len(labels):
        raise UserError(f"rows are named after folders, and two are called the same: {', '.join(labels)}; rename one")
    presses = {name: press_of(name) for name in (*args.presses, *args.query_aware)}
    base, models = load_models(args.base, [*args.models, *filter(None, [args.pressed])], device, dtype)
    pressed = {"base": base} | ({Path(args.pressed).name: models.pop(args.pressed)} if args.pressed else {})
    asked = {name: value for name, value in vars(args).items() if name not in ("output_dir", "prompts", "tasks")}
    keep_settings(args.output_dir, asked | {"compute_dtype": computed})
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    import_generators()
    path = args.output_dir / "figures.json"
    found: dict[str, Any] = read_json(path) if path.exists() else {}
    of_tasks = {task: read_prompts(task, args, tokenizer, device) for task in args.tasks}
    prompts = {f"{task} {number}": of_tasks[task][number] for number in range(args.prompts) for task in args.tasks}
    for key, prompt in tqdm(prompts.items(), desc="prompts", unit="prompt"):
        if key not in found:
            found[key] = of_prompt(prompt, base, models, pressed, presses, args, tokenizer)
            write_json(path, found)
    print_table({key: found[key] for key in prompts}, args.tasks)


def of_prompt(
    prompt: Prompt,
    base: PreTrainedModel,
    models: dict[str, MoHLlamaForCausalLM],
    pressed: dict[str, PreTrainedModel],
    presses: dict[str, Any],
    args: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, dict[str, float]]:
    """The figures of each way, by its name."""
    plain = {"base": base, **{Path(name).name: model for name, model in models.items()}}
    found = {
        name: answer(model, prompt, partial(read_prompt, model), tokenizer, aware=False)
        for name, model in plain.items()
    }
    for of in map(Path, args.bytes_of):
        size = int(found[of.name]["bytes"])
        rows = [(press, False, model) for press in args.presses for model in pressed]
        for press, aware, name in [*rows, *((press, True, "base") for press in args.query_aware)]:
            model, kind = pressed[name], presses[press]

            def reads(text: torch.Tensor, model: Any = model, kind: Any = kind, size: int = size) -> Cache:
                return press_prompt(model, text, size, kind)[1]

            way = f"{press}{' with the question' * aware}, bytes of {of.name}" + f", {name}" * (name != "base")
            found[way] = answer(model, prompt, reads, tokenizer, aware)
    return found


def read_prompt(model: PreTrainedModel, text: torch.Tensor) -> Cache:
    """The cache of a model that has read a text, without a press."""
    kind = MoHCache if isinstance(model, MoHLlamaForCausalLM) else DynamicCache
    cache = kind(config=model.config)
    model.model(text, past_key_values=cache)
    return cache


def answer(
    model: PreTrainedModel, prompt: Prompt, reads: Reads, tokenizer: PreTrainedTokenizerBase, aware: bool
) -> dict[str, float]:
    """Whether a model finds the answer; seconds of the text and of a decoded token; bytes of the cache of the text.

    Where it is `aware` of the question, all of that but the last token belongs to the text.
    """
    text, question, wanted = prompt
    if aware:
        text, question = torch.cat([text, question[:, :-1]], 1), question[:, -1:]
    begin = now()
    cache = reads(text)
    read, size, length = now() - begin, cache_bytes(cache), text.shape[1]
    right, said, ids, decoding = tokenizer.decode(wanted[0]).strip().lower(), [], question, []
    solved, ends = False, {tokenizer.eos_token_id}
    while not solved and len(said) < ANSWER and not ends & {*said}:
        begin = now()
        hidden = read_later(model, ids, cache, length)
        following = model.lm_head(hidden[:, -1:]).argmax(-1)
        decoding.append(now() - begin)
        length, ids = length + ids.shape[1], following
        said.append(following.item())
        solved = right in tokenizer.decode(said).lower()
    step = float(np.mean(decoding[1:])) if len(decoding) > 1 else float("nan")
    return {"solved": float(solved), "read_s": read, "step_s": step, "bytes": size}


def print_table(found: dict[str, dict[str, dict[str, float]]], tasks: Sequence[str]) -> None:
    """A row for each way, in Markdown, and presses beside the model whose bytes they have, prompt by prompt."""
    keys = {task: [key for key in found if key.rpartition(" ")[0] == task] for task in tasks}
    ways = list(next(iter(found.values())))
    strata = {way: {task: [[found[key][way]["solved"] for key in keys[task]]] for task in tasks} for way in ways}
    head = ["way", *tasks, "average", "% of the base's", "points less the base's", "cache, MiB", "prompt", "token"]
    print(f"{', '.join(f'{len(own)} prompts of {task}' for task, own in keys.items())}")
    print(f"| {' | '.join(head)} |", "|---" * len(head) + "|", sep="\n")
    base = strata["base"]
    base_mean = mean_of([value_of(own, 0, 1) for own in base.values()])
    for way in ways:
        own = {task: value_of(strata[way][task], 0, 1) for task in tasks}
        delta = mean_of([value_of(difference(strata[way][task], base[task]), -1, 1) for task in tasks])
        average, mib = mean_of(list(own.values())), np.mean([row[way]["bytes"] for row in found.values()]) / 2**20
        cells = [way, *(f"{value.value:.1f}" for value in own.values()), f"{average.value:.1f}"]
        if way == "base":
            cells += ["100", ""]
        else:
            share = kept_share(average, base_mean, delta)
            shown = "" if share.share is None else show_figure(share.share, share.interval, ".1f")
            cells += [shown, show_error(delta.value, delta.stderr, "+.1f", ".1f")]
        cells.append(f"{mib:.2f}")
        for name in ("read_s", "step_s"):
            ratios = np.array([row[way][name] / row["base"][name] for row in found.values()])
            low, middle, high = np.nanpercentile(ratios, (25, 50, 75))
            seconds = np.nanmedian([row["base"][name] for row in found.values()])
            cells.append(f"{seconds:.3f} s" if way == "base" else f"{middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {' | '.join(cells)} |")
    for way, model in ((way, model) for way in ways for model in ways if f"bytes of {model}" in way):
        gains = [row[model]["solved"] - row[way]["solved"] for row in found.values()]
        print(f"{way}: {gains.count(1)} prompts are solved by that model alone, {gains.count(-1)} by this way alone")


if __name__ == "__main__":
    sys.exit(main())
