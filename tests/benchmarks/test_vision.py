"""The parts of vision transformers that MoH is compared with, against loops, and the benchmark's own arithmetic."""

import gzip
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Dinov2Config, Dinov2Model

from moh_llm.analysis.heads import LayerPass, measure_load, watch
from moh_llm.errors import UserError
from moh_llm.vision import MoHDinov2Config, MoHViTConfig
from moh_llm.vision.modeling_moh_vit import MoHDinov2Model, MoHViTForImageClassification

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import vision
import vision_data
from baselines.images import LearnedSharedRouter, SwitchFeedForward, add_experts, attend_to_fewer_keys

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 10}
SIZE |= {"image_size": 8, "patch_size": 4, "num_channels": 1}
PLAN = {"router_type": "two_stage", "router_score": "normalized", "num_shared_heads": 1, "num_active_heads": 3}


def make(**plan) -> MoHViTForImageClassification:
    torch.manual_seed(0)
    model = MoHViTForImageClassification(MoHViTConfig(**SIZE | PLAN | plan)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.5)
    return model


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def watched(model: MoHViTForImageClassification, images: torch.Tensor) -> list[LayerPass]:
    seen: list[LayerPass] = []
    assert watch(model, [{"pixel_values": images}], seen.append) == 6 * 5
    return seen


def projected(model: MoHViTForImageClassification, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Input of the first layer's attention `[B, T, C]`, and its queries, keys and values `[B, T, H, D]`."""
    layer = model.base_model.layers[0]
    x = layer.layernorm_before(model.base_model.embeddings(images))
    attention = layer.attention
    return x, [map_(x).unflatten(-1, (4, 4)) for map_ in (attention.q_proj, attention.k_proj, attention.v_proj)]


@torch.no_grad()
def test_a_watched_pass_over_images_is_a_loop_over_tokens_and_heads(images):
    model = make()
    seen = watched(model, images)
    x, (query, key, value) = projected(model, images)
    gates = model.routers[0](x, query)[1]
    for b, t, h in ((0, 0, 0), (2, 3, 1), (5, 4, 3)):
        weights = torch.stack([query[b, t, h] @ key[b, s, h] / 2 for s in range(5)]).softmax(0)
        given = gates[b, t, h] * sum(weights[s] * value[b, s, h] for s in range(5))
        torch.testing.assert_close(seen[0].heads[b, t, h], given)
        assert seen[0].on[b, t, h] == (gates[b, t, h] != 0)
    load = measure_load(model, {"one": [{"pixel_values": images[:2]}], "all": [{"pixel_values": images}]})
    assert load["head_load_by_text"]["tokens"] == {"one": 10, "all": 30}
    assert load["head_load_by_text"]["load"]["all"] == seen[1].on.double().mean((0, 1)).tolist()


@torch.no_grad()
def test_sparse_attention_sees_the_keys_of_highest_score(images):
    model = make(router_type="none", router_score="quantized", num_shared_heads=4, num_active_heads=4)
    attend_to_fewer_keys(model, 0.5)
    found: list[torch.Tensor] = []
    model.base_model.layers[0].attention.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(pixel_values=images)
    _, (query, key, value) = projected(model, images)
    for b, t, h in ((0, 0, 0), (1, 4, 2)):
        scores = [float(query[b, t, h] @ key[b, s, h]) / 2 for s in range(5)]
        best = sorted(range(5), key=lambda s: -scores[s])[:3]
        total = sum(math.exp(scores[s]) for s in best)
        expected = sum(math.exp(scores[s]) / total * value[b, s, h] for s in best)
        torch.testing.assert_close(found[0].unflatten(-1, (4, 4))[b, t, h], expected)


def test_a_token_has_the_expert_of_highest_probability(images):
    model = make()
    add_experts(model)
    block = model.double().base_model.layers[0].mlp
    assert isinstance(block, SwitchFeedForward)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    out = block(x)
    chosen = []
    for b, t in np.ndindex(2, 3):
        p = (block.router.weight @ x[b, t]).softmax(0)
        chosen.append((int(p.argmax()), p))
        torch.testing.assert_close(out[b, t], p.max() * block.experts[chosen[-1][0]](x[b, t]))
    shares = [sum(best == expert for best, _ in chosen) / 6 for expert in range(2)]
    loss = 0.01 * 2 * sum(shares[expert] * sum(p[expert] for _, p in chosen) / 6 for expert in range(2))
    torch.testing.assert_close(block.auxiliary_loss, loss)


def test_learned_shared_heads_weigh_as_given_ones_and_their_choice_learns():
    config = MoHViTConfig(**SIZE | PLAN | {"num_shared_heads": 0})
    torch.manual_seed(0)
    router = LearnedSharedRouter(config, 0, 2).double()
    with torch.no_grad():
        router.preference.copy_(torch.tensor([0.1, 0.3, -0.2, 0.2]))  # heads 1 and 3 are shared
        for module in (router.routed, router.own, router.stages):
            module.weight.normal_()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    logits, gates = router(x, None)
    stages, p = 2 * (router.stages.weight @ x[1, 2]).softmax(0), router.routed(x)[1, 2]
    best = 0 if p[0] > p[2] else 2
    own = router.own(x)[1, 2][[1, 3]].softmax(0)
    expected = torch.zeros(4, dtype=torch.float64)
    expected[[1, 3]] = 2 * stages[0] * own
    expected[best] = stages[1]  # K = 1 routed head, whose weight is 1
    torch.testing.assert_close(gates[1, 2], expected)
    assert router.select(logits)[1, 2].nonzero().flatten().tolist() == [best]
    heads = torch.arange(1.0, 5.0, dtype=torch.float64)
    (given,) = torch.autograd.grad((gates[1, 2] * heads).sum(), router.preference)
    scores = router.own(x)[1, 2]
    as_shared = 2 * stages[0] * scores.exp() / scores[[1, 3]].exp().sum()
    as_routed = torch.zeros(4, dtype=torch.float64)
    as_routed[best] = stages[1]
    worth = (heads * (as_shared - as_routed)).detach()
    (wanted,) = torch.autograd.grad((worth * 2 * router.preference.softmax(0)).sum(), router.preference)
    torch.testing.assert_close(given, wanted)


def test_the_rank_of_features():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(500, 3, generator=draw) @ torch.randn(3, 16, generator=draw)
    assert vision.rank(features) == 3
    assert vision.rank(features + 100) == 3  # the mean does not count
    assert vision.rank(torch.randn(9999, 3, generator=draw) * torch.tensor([0.95, 0.045, 0.005]).sqrt()) == 2


@torch.no_grad()
def test_similarities_are_those_of_loops_over_pairs(images):
    model = make()
    found = vision.head_similarity(model, [{"pixel_values": images[:2]}, {"pixel_values": images[2:]}])
    assert model.config._attn_implementation == "sdpa" and not model.base_model.layers[0].attention._forward_hooks
    seen, (_, (query, key, _)) = watched(model, images)[0], projected(model, images)
    maps = (torch.einsum("bthd,bshd->bths", query, key) / 2).softmax(-1)
    alike, cosines = [], []
    for b, t, (h, g) in itertools.product(range(6), range(5), itertools.combinations(range(4), 2)):
        alike.append(1 - 0.5 * float((maps[b, t, h] - maps[b, t, g]).abs().sum()))
        if seen.on[b, t, h] and seen.on[b, t, g]:
            one, other = seen.heads[b, t, h], seen.heads[b, t, g]
            cosines.append(float(one @ other / (one.norm() * other.norm())))
    assert found["patterns"][0] == pytest.approx(sum(alike) / len(alike))
    assert found["outputs"][0] == pytest.approx(sum(cosines) / len(cosines))
    assert found["mean_patterns"] == pytest.approx(sum(found["patterns"]) / 2)
    model.set_active_heads(1)
    alone = vision.head_similarity(model, [{"pixel_values": images}])
    assert alone["outputs"] == [None, None] and alone["mean_outputs"] is None


@torch.no_grad()
def test_ranks_are_of_what_heads_add(images):
    model = make()
    model.base_model.layers[0].attention.o_proj.weight[:, 4:] = 0  # of heads 1 to 3
    model.base_model.layers[0].attention.o_proj.weight[:, 4:8] = torch.randn(16, 1)
    found = vision.ranks(model, [{"pixel_values": images}])
    assert found["routed"][0] == 1 and 2 <= found["shared"][0] <= 4 and found["shared"][1] <= 4


def test_a_probe_tells_classes_apart_and_standardises():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (400,), generator=draw)
    features = torch.randn(400, 16, generator=draw) * 0.1 + torch.eye(16)[labels]
    features = features * 10.0 ** (torch.arange(16) / 4 - 2) + torch.arange(16)
    probe = vision.linear_probe(features[:300], labels[:300])
    assert (probe(features[300:]).argmax(-1) == labels[300:]).float().mean() > 0.98


def test_answers_are_kept_as_they_are():
    right = torch.rand(21, generator=torch.Generator().manual_seed(0)) < 0.5
    assert vision.unpacked(vision.packed(right), 21).tolist() == right.double().tolist()
    found = {name: dict.fromkeys(vision.KINDS, digits) for name, digits in (("a", "f0"), ("b", "c0"))}
    rows = list(vision.probe_table(found, ["a", "b"], 8))[::2]
    assert rows[0].startswith("a | linear probe | 50.00 | |")
    assert rows[1].startswith("b | linear probe | 25.00 | -25.00 (")
    assert rows[1].endswith("| 50.0 % of the base's")


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder of images that are brighter the higher their class."""
    draw = np.random.default_rng(0)
    (tmp_path / "fashion-mnist").mkdir()
    for part, count in (("train", 40), ("t10k", 20)):
        labels = np.arange(count) % 10
        pixels = draw.integers(0, 100, (count, 28, 28)) + 15 * labels[:, None, None]
        write_idx(tmp_path / f"fashion-mnist/{part}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"fashion-mnist/{part}-labels-idx1-ubyte.gz", labels)
    return tmp_path


def test_a_probe_of_a_model_with_all_heads_on_is_its_base(data, monkeypatch, capsys):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    base = Dinov2Model(Dinov2Config(**size))
    base.save_pretrained(data / "base")
    for active in (4, 2):
        plan = {"num_shared_heads": 1, "num_active_heads": active}
        moh = MoHDinov2Model(MoHDinov2Config(**size, **plan))
        moh.load_state_dict(base.state_dict())
        moh.save_pretrained(data / f"moh-{active}")
    names = [str(data / name) for name in ("base", "moh-4", "moh-2")]
    command = ["vision", str(data), "--output-dir", str(data / "out"), "--variants", "--probe-images", "20"]
    monkeypatch.setattr(sys, "argv", [*command, "--probe", *names])
    assert vision.main() == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " | " in line]
    assert [(line[0], line[1]) for line in lines[:2]] == [(names[0], "linear probe"), (names[0], "5 neighbours")]
    assert float(lines[0][2].split(" ")[0]) > 30 and lines[2][3] == "+0.00 (+0.00 to +0.00)"
    found = vision.read_json(data / "out" / "vision.json")["probe"]
    assert found[names[1]]["heads"]["similarity"] == found[names[1]]["base"]
    assert found[names[2]]["heads"]["similarity"] != found[names[2]]["base"]
    load = found[names[2]]["heads"]["load"]["load"]["Bag"]
    assert load[0] == 1 and sum(load) == pytest.approx(2)
    assert found[names[2]]["linear probe"] != found[names[0]]["linear probe"]


def test_runs_are_trained_once_and_a_run_is_its_seed(data, monkeypatch, capsys):
    monkeypatch.setattr(vision, "TEST", 20)
    monkeypatch.setattr(vision, "BATCH", 8)
    command = ["vision", str(data), "--steps", "2", "--variants", "dense", "moh-50", "--seeds", "3"]
    for name in ("a", "b"):
        monkeypatch.setattr(sys, "argv", [*command, "--output-dir", str(data / name)])
        assert vision.main() == 0
    first, second = (vision.read_json(data / name / "vision.json") for name in ("a", "b"))
    assert first == second and first["runs"]["moh-50"]["3"] != first["runs"]["dense"]["3"]
    assert "load" in first["runs"]["moh-50"]["3"]["heads"] and "load" not in first["runs"]["dense"]["3"]["heads"]
    monkeypatch.setattr(vision, "measure", None)  # nothing is left to train
    capsys.readouterr()
    assert vision.main() == 0
    assert "\ndense | 139,018 | " in capsys.readouterr().out


def test_data_that_is_not_there_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"cannot get x; is a registry reachable\? sh -c echo no >&2; exit 3: no"):
        vision_data.download("x", ["sh", "-c", "echo no >&2; exit 3"], tmp_path)
    with pytest.raises(UserError, match="no-such-program, which is not installed"):
        vision_data.download("x", ["no-such-program"], tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"other")
    with pytest.raises(
        UserError, match="has sha256 d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa, not"
    ):
        vision_data.checked(tmp_path / "t10k-labels-idx1-ubyte.gz")


def test_latents_are_what_the_vae_makes_of_each_image(tmp_path, capsys):
    diffusers = pytest.importorskip("diffusers")
    import vision_latents

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=8)
    vae.save_pretrained(tmp_path / "vae")
    for number, name in enumerate(("cat/1.png", "cat/2.png", "dog/1.png")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 10), (50 * number, 90, 30)).save(tmp_path / "photos" / name)
    words = [str(tmp_path / "latents" / "train.safetensors"), "--vae", str(tmp_path / "vae"), "--batch-size", "2"]
    assert vision_latents.main([str(tmp_path / "photos"), *words]) == 0
    tensors = load_file(words[0])
    assert tensors["labels"].tolist() == [0, 0, 1] and tensors["images"].dtype == torch.float16
    draw = torch.Generator().manual_seed(0)
    noise = torch.cat([torch.randn(count, 4, 8, 8, generator=draw) for count in (2, 1)])
    for number in range(3):
        pixels = torch.tensor([50 * number, 90, 30]).view(1, 3, 1, 1).expand(1, 3, 8, 8) / 127.5 - 1
        with torch.no_grad():
            found = vae.encode(pixels).latent_dist
        expected = 0.18215 * (found.mean[0] + found.std[0] * noise[number])
        torch.testing.assert_close(tensors["images"][number].float(), expected, atol=2e-3, rtol=2e-3)
    assert vision_latents.main([str(tmp_path / "none"), *words]) == 1
    assert vision_latents.main([str(tmp_path / "photos"), *words[:2], str(tmp_path / "photos")]) == 1
    said = capsys.readouterr().err
    assert "none does not exist; name a folder of images" in said and "photos is no VAE of diffusers" in said
