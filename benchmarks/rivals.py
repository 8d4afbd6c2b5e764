"""Ways to choose heads, without training: conversions by several plans, and other methods, from the same text.

    python benchmarks/rivals.py BASE --calibration mixture.yaml --budgets 7 6 5 --seeds 0 1 2 --output-dir out/rivals \\
        --documents 20 --tokens-per-document 512 --text "$CORPORA"/redpajama_c4/train* "$CORPORA"/dolma/train*

Each seed calibrates the base once, on its own part of the calibration text and with its own draws. A budget is the mean
number of active heads. Each method's heads, router and fallbacks are fitted to that text:

- "ours": what `convert.py --context 512 --fallback value` writes;
- "fixed heads": the same heads for all tokens, with fallbacks refitted (`--router none`);
- "random heads": a random choice for each token, with fallbacks and budgets fitted to it;
- "paper's layer": half of the heads shared, scored by the norm of their queries, without fallbacks, with as many heads
  in each layer; "paper's router" is the same, to be named with one of the words below;
- "MLP on Top-K labels": the router of Deja Vu and Polar Sparsity (`baselines/routers.py`), likewise;
- "oracle": ours, but each token keeps the heads whose fallbacks would change the layer's output most.

Words after a comma change a method: "fallback", "budgets" (uneven ones) or "both", "no fallback", "even budgets" or
"neither", "important shared" and "none shared" (the choice of shared heads), and "by groups" (key-value groups are
routed). Heads is the share that is on; KL(base || model), in nats per token, and perplexity / base perplexity are means
over texts and seeds, with 95 % intervals over documents; "seeds" is the least and the most KL of a seed, and "less
ours" the difference to the KL of "ours" on the same documents. --output-dir holds the figures of each text: the same
command goes on where it stopped.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import held_out
import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from baselines.routers import RandomRouter, RouterFitter, TopKLabelRouter, by_oracle
from command import add_compute_dtype, device_and_dtype, keep_settings, kind_of_device, load_dense, status_of
from local_plans import calibration_part, fit_plans
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from moh_llm.conversion.base import open_base
from moh_llm.conversion.calibrate import layer_samples, make_fitter
from moh_llm.conversion.fit import LayerFitter, LayerSample
from moh_llm.conversion.layers import LayerwiseModel
from moh_llm.conversion.local_fit import LocalFitter
from moh_llm.conversion.plan import PlanOptions, build_config, plan_layers, routing_tensors, shared_and_active
from moh_llm.data.mixture import mixture_from_arguments
from moh_llm.data.tokenizer import open_tokenizer
from moh_llm.errors import UserError
from moh_llm.files import write_json
from moh_llm.intervals import interval, kls, perplexity_ratios, show_figure
from moh_llm.metrics import Batch, LogitsOf, compare_to_reference, logits_of
from moh_llm.modeling import MoHLlamaForCausalLM, MoHRouter

ROUTERS = {kind.__name__: kind for kind in (MoHRouter, RandomRouter, TopKLabelRouter)}
NAMES = (
    "ours", "ours, no fallback", "ours, even budgets", "ours, neither", "fixed heads", "random heads", "paper's layer",
    "paper's router, fallback", "paper's router, budgets", "paper's router, both", "MLP on Top-K labels",
    "MLP on Top-K labels, both", "oracle",
)  # fmt: skip
FULL, BARE = {"fallback": "value", "budgets": "uneven"}, {"fallback": "none", "budgets": "even"}
KINDS: dict[str, dict[str, Any]] = {
    "ours": FULL,
    "oracle": FULL,
    "fixed heads": FULL | {"router": "none"},
    "random heads": FULL | {"chosen_by": "RandomRouter"},
    "paper's layer": BARE | {"chosen_by": "MoHRouter"},
    "paper's router": BARE | {"chosen_by": "MoHRouter"},
    "MLP on Top-K labels": BARE | {"chosen_by": "TopKLabelRouter", "num_shared_heads": 0},
}
WORDS: dict[str, dict[str, Any]] = {
    "fallback": {"fallback": "value"},
    "budgets": {"budgets": "uneven"},
    "both": FULL,
    "no fallback": {"fallback": "none"},
    "even budgets": {"budgets": "even"},
    "neither": BARE,
    "important shared": {"shared": "importance"},
    "none shared": {"num_shared_heads": 0},
    "by groups": {"routing_granularity": "kv_group"},
}


@dataclass(frozen=True)
class Method(PlanOptions):
    """A plan, the class of a router that takes the place of the plan's, and of how many heads that one's labels are."""

    chosen_by: str | None = None
    labels: int | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder or Hub id of the dense model")
    parser.add_argument("--calibration", nargs="+", required=True, help="text files or a mixture, as for convert")
    parser.add_argument("--calibration-tokens", type=int, default=24576)
    parser.add_argument("--text", nargs="+", required=True, help="text files or globs, each counts the same")
    held_out.add_arguments(parser)
    parser.add_argument("--budgets", nargs="+", type=budget_of, default=[7, 6], help="mean active heads, such as 4.5")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the calibration")
    parser.add_argument("--methods", nargs="+", default=list(NAMES), metavar="NAME", help="see above; default: most")
    parser.add_argument("--by-text", action="store_true", help="print a table of each text, too")
    add_compute_dtype(parser, "float32", "since methods may differ by less than bfloat16 rounds")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of figures.json")
    return status_of(run, parser.parse_args())


def budget_of(word: str) -> int | float:
    """A number of heads, which may be a fraction where layers have uneven budgets."""
    number = float(word)
    return int(number) if number.is_integer() else number


def method_of(name: str, budget: float, heads: int) -> Method:
    """The method of a name at a mean of `budget` of `heads` heads.

    Raises UserError for a name that is not known, and for a fraction where a method has as many heads on in all layers,
    or learns to choose a number of them.
    """
    kind, *words = name.split(", ")
    if kind not in KINDS or not {*words} <= {*WORDS}:
        raise UserError(f"--methods {name!r}: one of {', '.join(KINDS)}, and after commas any of {', '.join(WORDS)}")
    fields: dict[str, Any] = dict(KINDS[kind])
    if fields.get("chosen_by") == "MoHRouter":
        fields["num_shared_heads"] = min(int(budget), heads // 2)
    for word in words:
        fields |= WORDS[word]
    if isinstance(budget, int):
        labels = budget if fields.get("chosen_by") == "TopKLabelRouter" else None
        return Method(num_active_heads=budget, labels=labels, **fields)
    if fields["budgets"] == "even" or fields.get("chosen_by") == "TopKLabelRouter":
        raise UserError(f"{name}/{budget}: this method needs a whole number of heads; leave it out with --methods")
    # Without local fallbacks the share of keys that are read is the share of heads that are on.
    return Method(keys=budget / heads, **fields)


def run(args: argparse.Namespace) -> None:
    device, dtype, computed = device_and_dtype(args)
    base = open_base(args.base)
    for name, budget in itertools.product(args.methods, args.budgets):
        method_of(name, budget, base.config.num_attention_heads)
    tokenizer = open_tokenizer(base.folder, base.config.vocab_size)
    length = min(held_out.WINDOW, base.config.max_position_embeddings)
    texts = held_out.read_texts(args.text, args, tokenizer, length, held_out.BATCH)
    apart = ("base", "output_dir", "seeds", "by_text", "compute_dtype")
    asked = {key: value for key, value in vars(args).items() if key not in apart} | {"dtype": computed}
    asked |= {"base": base.dense_sha256, "torch": torch.__version__, "transformers": transformers.__version__}
    asked["hashes of texts"] = {name: held_out.hash_batches(batches) for name, batches in texts.items()}
    asked["device"] = kind_of_device(device)
    keep_settings(args.output_dir, asked)
    path = args.output_dir / "figures.json"
    found: dict[str, Any] = {"calibration": {}, "seeds": {}}
    if path.exists():
        found = json.loads(path.read_text())
    mixture = mixture_from_arguments(args.calibration)
    dense = load_dense(base.folder, device, dtype)
    for seed in args.seeds:
        batches = calibration_part(mixture, tokenizer, args.calibration_tokens, length, seed)
        text = held_out.hash_batches(batches)
        if found["calibration"].setdefault(str(seed), text) != text:
            raise UserError(f"{path} holds figures of another calibration text; name another folder")
        read = held_out.NGrams([held_out.numbered(batches)])
        shares = ", ".join(f"{read.overlap(*held_out.numbered(own)):.2%} of {name}" for name, own in texts.items())
        print(f"seed {seed}: of 13-grams the calibration text holds {shares}", flush=True)
        figures = found["seeds"].setdefault(str(seed), {})  # of each text the sums over its documents, by label
        missing = [name for name in texts if name not in figures]
        if missing:
            layers = LayerwiseModel(base.folder, base.weight_map, base.config, dtype, device)
            fits = fit_methods(layers, batches, args.methods, args.budgets, args.output_dir, seed)
            candidates = open_candidates(dense, fits, args.methods)
        for name in missing:
            progress = tqdm(texts[name], desc=f"seed {seed}, {Path(name).name}", unit="batch")
            results = compare_to_reference(candidates, logits_of(dense), progress)
            figures[name] = {label: one.sums.tolist() for label, one in results.items()}
            write_json(path, found)
    of_seeds, heads = [found["seeds"][str(seed)] for seed in args.seeds], base.config.num_attention_heads
    for own in [list(texts), *([name] for name in texts if args.by_text)]:
        print_table(of_seeds, args.methods, heads, own)
    print(f"{computed}, {asked['device']}, torch {torch.__version__}, transformers {transformers.__version__}")


def fit_methods(
    dense: LayerwiseModel,
    batches: Sequence[Batch],
    names: Sequence[str],
    budgets: Sequence[float],
    scratch: Path,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Config, router's class and tensors of each method at each budget, by label; `scratch` holds hidden states."""
    fitted = dict.fromkeys(fitted_name(name) for name in names)
    pairs, heads = itertools.product(budgets, fitted), dense.config.num_attention_heads
    methods = {f"{name}/{budget}": method_of(name, budget, heads) for budget, name in pairs}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        samples = layer_samples(dense, batches, PlanOptions(fallback="none"), Path(folder), seed)
        layers = [
            fit_plans(methods, dense.config, sample, Fitters(dense, number, sample))
            for number, sample in zip(reversed(range(len(dense))), samples, strict=True)  # last layer first
        ][::-1]
    found = {}
    for label, method in methods.items():
        config, fits = plan_layers(method, dense.config, [fitted[label] for fitted in layers])
        if method.chosen_by:
            config.router_type = "query_norm"  # the router of the modelling code that has no weights
        found[label] = {"config": config, "router": method.chosen_by, "tensors": routing_tensors(fits)}
    return found


class Fitters:
    """What fits a layer by each method, from the layer's number and sample."""

    def __init__(self, dense: LayerwiseModel, number: int, sample: LayerSample):
        attention = dense.layer(number).layers[0].self_attn
        queries = attention.q_proj(sample.inputs.to(dense.dtype)).unflatten(-1, (-1, attention.head_dim))
        # Before rotary embedding, `[N, H, D]`.
        self.queries = getattr(attention, "q_norm", torch.nn.Identity())(queries).float()
        self.number = number
        self.trained: dict[int | None, TopKLabelRouter] = {}  # by the number of heads of its labels

    def __call__(self, method: PlanOptions, base: PreTrainedConfig, sample: LayerSample) -> LayerFitter | LocalFitter:
        assert isinstance(method, Method)
        if method.chosen_by is None:
            return make_fitter(method, base, sample)
        shared, layers = shared_and_active(method, base)[0], base.num_hidden_layers
        config = build_config(base, method, [list(range(shared))] * layers, [max(1, shared)] * layers)
        config.router_type = "query_norm"
        router = ROUTERS[method.chosen_by](config, self.number).to(sample.inputs.device)
        if isinstance(router, TopKLabelRouter):
            if method.labels not in self.trained:
                router.train_on(sample, method.labels)
            router = self.trained.setdefault(method.labels, router)
        return RouterFitter(sample, router, self.queries, method.head_fallback == "value")


def open_candidates(
    dense: PreTrainedModel, fits: dict[str, dict[str, Any]], names: Sequence[str]
) -> dict[str, LogitsOf]:
    """The models of what `fit_methods` found, by label; all share the weights of `dense`."""
    candidates = {}
    for label, stored in fits.items():
        name, budget = label.split("/")
        with init_empty_weights(include_buffers=False):
            model = MoHLlamaForCausalLM(stored["config"])
            for number, layer in enumerate(model.model.layers if stored["router"] else ()):
                layer.self_attn.router = ROUTERS[stored["router"]](stored["config"], number)
        # As convert.py writes them; other methods' routers compute in float32.
        routing = {
            key: tensor if stored["router"] and ".router." in key else tensor.to(dense.dtype)
            for key, tensor in stored["tensors"].items()
        }
        model.load_state_dict(dense.state_dict() | routing, assign=True)
        model.to(dense.device).eval()
        for wanted in names:
            if fitted_name(wanted) == name:
                candidates[f"{wanted}/{budget}"] = by_oracle(model) if wanted != name else logits_of(model)
    return candidates


def fitted_name(name: str) -> str:
    """The method whose heads, router and fallbacks a method has: an oracle those of ours."""
    return name.replace("oracle", "ours", 1)


def print_table(of_seeds: list[dict[str, Any]], names: list[str], heads: int, texts: list[str]) -> None:
    """A row for each method and budget, over these texts, in Markdown."""
    labels = list(of_seeds[0][texts[0]])
    one = [np.array(of_seeds[0][text][labels[0]]) for text in texts]
    print(f"{', '.join(texts)}: {sum(map(len, one))} documents, {int(sum(sums[:, 0].sum() for sums in one))} tokens")
    print("| heads | method | KL | x base | seeds | less ours |\n|---|---|---|---|---|---|")
    order = sorted(labels, key=lambda label: (-float(label.split("/")[1]), names.index(label.split("/")[0])))
    # Documents are the same for all seeds.
    means = {label: [np.mean([seed[text][label] for seed in of_seeds], axis=0) for text in texts] for label in labels}

    def figure_of(own: list[np.ndarray], figure: Callable[[np.ndarray], np.ndarray]) -> str:
        return show_figure(np.mean([figure(sums.sum(0)[None])[0] for sums in own]), interval(own, figure), ".4f")

    for label in order:
        spread = [np.mean([kls(np.sum(seed[text][label], 0)[None])[0] for text in texts]) for seed in of_seeds]
        name, budget = label.split("/")
        less = "not scored"
        if (ours := f"ours/{budget}") in labels:
            both = [np.hstack(pair) for pair in zip(means[label], means[ours], strict=True)]
            less = "" if label == ours else figure_of(both, kl_differences)
        kl, ratio = figure_of(means[label], kls), figure_of(means[label], perplexity_ratios)
        seeds_kl = f"{min(spread):.4f} to {max(spread):.4f}"
        print(f"| {float(budget) / heads:.3f} | {name} | {kl} | {ratio} | {seeds_kl} | {less} |")


def kl_differences(sums: np.ndarray) -> np.ndarray:
    """KL less another model's on the same tokens `[R]`, of R rows of the sums of both, `[R, 10]`."""
    return kls(sums[:, :5]) - kls(sums[:, 5:])


if __name__ == "__main__":
    sys.exit(main())
