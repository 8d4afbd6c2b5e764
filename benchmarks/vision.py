"""Small ViTs trained from scratch on Fashion-MNIST, dense and MoH with its ablations, and a probe of converted models.

    python benchmarks/vision_data.py out/vision
    python benchmarks/vision.py out/vision --output-dir out/vision-runs
    python benchmarks/vision.py out/vision --output-dir out/vision-runs --variants --probe out/vision/dinov2-small MOH

ViTs have 4 layers of 8 heads and width 64, and read 300 batches of 128 images of 28x28 as 17 tokens (AdamW, cosine,
flips, smoothed labels). With one seed all variants see the same images in the same order. Accuracy is of 10,000 test
images; 95 % intervals of the difference to the dense model are by bootstrap over images and seeds. `moh` has the
weights of the authors' code (`router_score: normalized`) and 2 shared heads; `-weighted` is Eq. 5 as printed, `fixed`
has the same heads on for all tokens. Tab. 5: `moe-attention` has neither shared heads nor stages, `-one-stage` no
stages. Of the reviews: `sparse` attends to the best keys alone, `-experts` has two feed-forward experts.

The probe puts models in the place of the first, their base: a linear probe of the class token and the 5 nearest
neighbours, both fitted on the base's features of training images, answer for test images by the model's features.
OUTPUT/vision.json has all runs; the same command goes on after an interruption.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baselines.images import add_experts, attend_to_fewer_keys, learn_shared_heads
from command import difference_interval, keep_settings, status_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel

from moh_llm.analysis.heads import LayerPass, measure_load, watch
from moh_llm.files import write_json
from moh_llm.intervals import show_figure
from moh_llm.reading import read_json
from moh_llm.training.step import warmup_cosine
from moh_llm.vision import MoHViTConfig
from moh_llm.vision.images import ImageSet, _open_idx, open_images
from moh_llm.vision.modeling_moh_vit import MoHViTForImageClassification

SIZE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 128}
SIZE |= {"image_size": 28, "patch_size": 7, "num_channels": 1, "num_labels": 10}
BATCH, RATE, SMOOTHING = 128, 2e-3, 0.1
TEST, SCORED = 10_000, 500  # images of test, and of a batch of these
WATCHED, PROBED = 2000, 100  # images that heads are watched on, of a small model and of a probed one
PENALTY = 1e-3  # of a linear probe's squared weights
PARTS = "train", "t10k"
KINDS = "linear probe", "5 neighbours"
CLASSES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Boot"]


@dataclass(frozen=True)
class Variant:
    """A head plan, and what is changed of the model that it makes."""

    plan: dict[str, Any]
    change: Callable[[MoHViTForImageClassification], None] = field(default=lambda model: None)

    def make(self) -> MoHViTForImageClassification:
        """The model with random weights, drawn from torch's generator."""
        model = MoHViTForImageClassification(MoHViTConfig(**SIZE, **self.plan))
        self.change(model)
        return model


def fixed(heads: int) -> dict[str, Any]:
    """The first heads are on for all tokens; all 8 are a dense ViT."""
    return {"router_type": "none", "num_shared_heads": heads, "num_active_heads": heads}


def moh(active: int, shared: int = 2, score: str = "normalized") -> dict[str, Any]:
    """The plan of the two-stage router."""
    heads = {"num_shared_heads": shared, "num_active_heads": active}
    return heads | {"router_type": "two_stage", "router_score": score}


def without_stages(model: MoHViTForImageClassification) -> None:
    """Shared and routed heads are not weighed against one another."""
    for router in model.routers:
        del router.stage


VARIANTS = {"dense": Variant(fixed(8))}
for _percent, _heads in ((75, 6), (50, 4)):
    VARIANTS |= {
        f"moh-{_percent}": Variant(moh(_heads)),
        f"moh-{_percent}-weighted": Variant(moh(_heads, score="weighted")),
        f"fixed-{_percent}": Variant(fixed(_heads)),
        f"sparse-{_percent}": Variant(fixed(8), functools.partial(attend_to_fewer_keys, share=_percent / 100)),
        f"moe-attention-{_percent}": Variant(moh(_heads, shared=0)),
        f"moh-{_percent}-learned": Variant(moh(_heads, shared=0), learn_shared_heads),
    }
VARIANTS |= {"moh-75-one-stage": Variant(moh(6), without_stages), "moh-100": Variant(moh(8))}
VARIANTS |= {f"moh-75-shared-{shared}": Variant(moh(6, shared=shared)) for shared in (1, 3, 4, 5)}
VARIANTS |= {"dense-experts": Variant(fixed(8), add_experts), "moh-75-experts": Variant(moh(6), add_experts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of benchmarks/vision_data.py")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--probe", nargs="+", default=[], metavar="MODEL", help="a base, and models made from it")
    parser.add_argument("--probe-images", type=int, default=1000, help="of training, and of test")
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    keep_settings(args.output_dir, {"steps": args.steps})
    file = args.output_dir / "vision.json"
    record: dict[str, Any] = read_json(file) if file.exists() else {"runs": {}, "probe": {}}
    images = {part: read(args.data, part) for part in PARTS} if args.variants else {}
    for seed in args.seeds:
        for name in args.variants:
            found = record["runs"].setdefault(name, {})
            if str(seed) not in found:
                found[str(seed)] = measure(VARIANTS[name], seed, args.steps, images)
                write_json(file, record)
                print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    if args.variants:
        print(*table(record["runs"], args.variants, args.seeds), sep="\n")
    for name in args.probe:
        if name not in record["probe"]:
            record["probe"][name] = probe(args, name)
            write_json(file, record)
    print(*probe_table(record["probe"], args.probe, args.probe_images), sep="\n")


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Pixels from -1 to 1, `[N, 1, 28, 28]`, and labels `[N]`."""
    pixels, labels, _ = _open_idx(folder / "fashion-mnist" / f"{part}-images-idx3-ubyte.gz")
    return pixels[:, None] / 127.5 - 1, labels


def measure(variant: Variant, seed: int, steps: int, images: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Train and score one model."""
    torch.manual_seed(seed)
    model = train(variant.make(), *images["train"], steps, torch.Generator().manual_seed(seed))
    pixels, labels = images["t10k"]
    with torch.no_grad():
        logits = torch.cat([model(pixel_values=part).logits for part in pixels.split(SCORED)])
    answers = logits.argmax(-1) == labels
    found: dict[str, Any] = {"right": packed(answers), "parameters": model.num_parameters()}
    learned = [router.preference for router in model.routers if hasattr(router, "preference")]
    if learned:
        found["shared_heads"] = [sorted(one.topk(2).indices.tolist()) for one in learned]
    elif variant.change is VARIANTS["dense"].change:
        found["heads"] = analyse(model, pixels[:WATCHED], labels[:WATCHED])
    return found


def train(
    model: MoHViTForImageClassification, pixels: Tensor, labels: Tensor, steps: int, draw: torch.Generator
) -> MoHViTForImageClassification:
    """The model after some steps on images in an order that is drawn once."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    order = torch.randperm(len(pixels), generator=draw)
    model.train()
    for step in range(steps):
        chosen = order[torch.arange(step * BATCH, (step + 1) * BATCH) % len(order)]
        flipped = torch.rand(BATCH, 1, 1, 1, generator=draw) < 0.5
        shown = torch.where(flipped, pixels[chosen].flip(-1), pixels[chosen])
        out = model(pixel_values=shown, output_router_logits=True)
        loss = cross_entropy(out.logits, labels[chosen], label_smoothing=SMOOTHING)
        loss = loss + model.config.head_balance_coef * out.aux_loss
        (loss + sum(getattr(module, "auxiliary_loss", 0) for module in model.modules())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, steps // 20, steps, RATE / steps, RATE, 0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def analyse(model: nn.Module, pixels: Tensor, labels: Tensor) -> dict[str, Any]:
    """Similarity of heads (Tab. B) and ranks on the first 500 of the images at most, and load by class (Fig. 3)."""
    batches = [{"pixel_values": part} for part in pixels[:SCORED].split(100)]
    found = {"similarity": head_similarity(model, batches), "rank": ranks(model, batches)}
    if any(router.num_routed and router.top_k for router in model.routers):
        of_class = {name: pixels[labels == number] for number, name in enumerate(CLASSES)}
        parts = {name: [{"pixel_values": own}] for name, own in of_class.items()}
        found["load"] = measure_load(model, parts)["head_load_by_text"]
    return found


def head_similarity(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """How alike the heads of a layer are: per layer and as means over the layers, None where there are no two heads.

    Patterns: 1 - 0.5 * E|A - A'|_1, the mean over pairs of heads, on or off, and over tokens. Outputs: the mean cosine
    of what two heads give to the output projection, over tokens and pairs of heads that are both on.
    """
    sums = torch.zeros(len(model.routers), 4, dtype=torch.float64)  # similarity and pairs, of patterns and of outputs
    pairs = model.config.num_attention_heads * (model.config.num_attention_heads - 1) / 2

    def compare_maps(number: int, layer: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> None:
        for rows in out[1].transpose(1, 2).flatten(0, 1).split(1000):  # [tokens, H, T]
            distances = torch.cdist(rows, rows, p=1).sum(dtype=torch.float64)  # of every pair twice
            sums[number, 0] += len(rows) * pairs - distances / 4
            sums[number, 1] += len(rows) * pairs

    def compare_outputs(seen: LayerPass) -> None:
        units = normalize(seen.heads, dim=-1) * seen.on[..., None]
        # |sum u_i|^2 = sum |u_i|^2 + 2 * the sum over pairs, so pairs need not be formed.
        cosines = units.sum(-2).square().sum(dtype=torch.float64) - units.square().sum(dtype=torch.float64)
        count = seen.on.sum(-1)
        sums[seen.layer, 2:] += torch.stack([cosines, (count * (count - 1)).sum()]) / 2

    before = model.config._attn_implementation
    model.set_attn_implementation("eager")  # which gives the weights
    layers = [layer for layer in model.modules() if hasattr(layer, "router")]
    with contextlib.ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(layer.register_forward_hook(functools.partial(compare_maps, number)))
        watch(model, batches, compare_outputs)
    model.set_attn_implementation(before)
    found: dict[str, Any] = {}
    for kind, of_kind in (("patterns", sums[:, :2]), ("outputs", sums[:, 2:])):
        layers = found[kind] = [total / count if count else None for total, count in of_kind.tolist()]
        known = [value for value in layers if value is not None]
        found[f"mean_{kind}"] = sum(known) / len(known) if known else None
    return found


def ranks(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Of each layer, how many principal components hold 99 % of the variance of what shared heads add to the tokens,
    together, and of what the others add."""
    layers = [module for module in model.modules() if hasattr(module, "o_proj")]
    added: list[dict[str, list[Tensor]]] = [{"shared": [], "routed": []} for _ in layers]

    def take(seen: LayerPass) -> None:
        weight = layers[seen.layer].o_proj.weight.unflatten(1, seen.heads.shape[2:])  # [C, H, D]
        shared = list(layers[seen.layer].router.kinds()[0])
        routed = [head for head in range(seen.heads.shape[2]) if head not in shared]
        for kind, own in (("shared", shared), ("routed", routed)):
            if own:
                out = torch.einsum("bthd,chd->btc", seen.heads[:, :, own], weight[:, own])
                added[seen.layer][kind].append(out.flatten(0, 1))

    watch(model, batches, take)
    return {kind: [rank(torch.cat(one[kind])) if one[kind] else None for one in added] for kind in ("shared", "routed")}


def rank(features: Tensor) -> int:
    """How many principal components hold 99 % of the variance of features `[N, C]`."""
    held = torch.linalg.eigvalsh(features.double().T.cov()).flip(0).cumsum(0)
    return 1 + int((held < 0.99 * held[-1]).sum())


def packed(right: Tensor) -> str:
    """Whether each answer is right, bool `[N]`, as hexadecimal digits."""
    return np.packbits(right.numpy()).tobytes().hex()


def unpacked(digits: str, count: int) -> np.ndarray:
    """What was packed of `count` answers, float64 `[N]`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8), count=count).astype(np.float64)


def show(own: np.ndarray, other: np.ndarray | None) -> str:
    """Accuracy in percent of right answers `[S, N]`, and its paired difference in points with its interval."""
    accuracy = f"{100 * own.mean():.2f}"
    if other is None:
        return f"{accuracy} |"
    bounds = difference_interval(np.ones(own.shape[1]), own, other)
    return f"{accuracy} | {show_figure(100 * (own - other).mean(), [100 * end for end in bounds], '+.2f')}"


def table(runs: dict[str, dict[str, Any]], names: list[str], seeds: list[int]) -> Iterator[str]:
    """A line for each variant."""
    yield "variant | parameters | accuracy, % | less dense's | by seed"
    for name in names:
        pair = [[unpacked(runs[one][str(seed)]["right"], TEST) for seed in seeds] for one in (name, "dense")]
        own, dense = map(np.array, pair)
        by_seed = " ".join(f"{100 * one.mean():.2f}" for one in own)
        parameters = f"{runs[name][str(seeds[0])]['parameters']:,}"
        yield f"{name} | {parameters} | {show(own, None if name == 'dense' else dense)} | {by_seed}"


@torch.no_grad()
def features_of(model: nn.Module, images: ImageSet, count: int) -> Tensor:
    """Class tokens of the first images, `[N, C]`."""
    numbers = torch.arange(count).split(50)
    return torch.cat([model(pixel_values=images.batch(part)).last_hidden_state[:, 0] for part in numbers])


def linear_probe(features: Tensor, labels: Tensor) -> nn.Sequential:
    """A linear classifier of standardised features, fitted with a penalty on its weights."""
    norm, linear = nn.BatchNorm1d(features.shape[1], affine=False, momentum=None), nn.Linear(features.shape[1], 10)
    inputs = norm(features)  # which keeps their means and variances
    for weight in linear.parameters():
        nn.init.zeros_(weight)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = cross_entropy(linear(inputs), labels) + PENALTY * linear.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return nn.Sequential(norm, linear).eval().requires_grad_(False)


def probe(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Right answers of a model, and what its heads do if it is MoH; the first of `args.probe` is the base."""
    base, count, kept = args.probe[0], args.probe_images, args.output_dir / "probe" / "train.safetensors"
    keep_settings(kept.parent, {"base": base, "probe_images": count})
    places = (str(args.data / "fashion-mnist" / f"{part}-images-idx3-ubyte.gz") for part in PARTS)
    train, test = (open_images(place, Path(base)) for place in places)
    if not kept.exists():
        save_file({"states": features_of(AutoModel.from_pretrained(base).eval(), train, count)}, kept)
    known, labels, wanted = load_file(kept)["states"], train.labels[:count], test.labels[:count]
    model = AutoModel.from_pretrained(name).eval()
    asked = features_of(model, test, count)
    near = (normalize(asked, dim=-1) @ normalize(known, dim=-1).T).topk(5).indices
    answers = linear_probe(known, labels)(asked).argmax(-1), labels[near].mode(-1).values
    found: dict[str, Any] = {kind: packed(one == wanted) for kind, one in zip(KINDS, answers, strict=True)}
    if hasattr(model, "routers"):
        pixels = test.batch(range(min(PROBED, count)))
        found["heads"] = analyse(model, pixels, wanted[: len(pixels)])
        with model.all_heads_active():
            found["base"] = head_similarity(model, [{"pixel_values": pixels}])
    return found


def probe_table(found: dict[str, dict[str, str]], names: list[str], count: int) -> Iterator[str]:
    """A line for each model and kind of answers."""
    for name in names:
        for kind in KINDS:
            own, base = (unpacked(found[one][kind], count)[None] for one in (name, names[0]))
            share = f"{100 * own.mean() / base.mean():.1f} % of the base's"
            yield f"{name} | {kind} | {show(own, None if name == names[0] else base)} | {share}"


if __name__ == "__main__":
    sys.exit(main())
