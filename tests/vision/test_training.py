"""Training on images: losses against float64 loops, what is drawn and dropped, what is frozen, and resuming."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from tiny_images import ROUTED, SIZE, recipe, save_dit, save_vit, weights_of, write_idx
from ways import ROOT, WAYS

import moh_llm
from moh_llm.cli import main
from moh_llm.errors import UserError
from moh_llm.evaluation.config import EvaluationConfig
from moh_llm.evaluation.images import evaluate
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.images import ImageStep, ImageStream, ImageTraining
from moh_llm.vision import load_model
from moh_llm.vision.gated_heads_moh import batch_balance_loss
from moh_llm.vision.images import open_images
from moh_llm.vision.prediction import add_noise, denoising_loss, predict


def write_folder(folder: Path, **classes: int) -> Path:
    """So many grey images in each class; later classes are brighter."""
    draw = np.random.default_rng(0)
    for place, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            values = draw.integers(0, 60, (SIZE, SIZE)) + 180 * place // len(classes)
            Image.fromarray(values.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


def edit(file: Path, **fields: Any) -> Path:
    """Change fields of a JSON file; return its folder."""
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))
    return file.parent


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "images", 10)


# ---- losses


def test_the_denoising_loss_is_a_loop_over_values() -> None:
    """Squared error, and the KL between two normal distributions in bits, with the means of Ho et al. (2020)."""
    draw = torch.Generator().manual_seed(0)
    images, noise, output = (torch.randn(3, n, 2, 2, generator=draw, dtype=torch.float64) for n in (2, 2, 4))
    timestep = torch.tensor([0, 1, 700])
    betas = [1e-4 + (0.02 - 1e-4) * step / 999 for step in range(1000)]
    kept = [math.prod(1 - beta for beta in betas[: step + 1]) for step in range(1000)]
    noised, errors, bits = torch.empty_like(images), [], []
    for row, step in enumerate(timestep.tolist()):
        a, before = kept[step], kept[step - 1] if step else 1.0
        of_image = math.sqrt(before) * betas[step] / (1 - a)
        of_noised = math.sqrt(1 - betas[step]) * (1 - before) / (1 - a)
        variance = betas[max(step, 1)] * (1 - kept[max(step, 1) - 1]) / (1 - kept[max(step, 1)])
        for place in range(8):
            x, e = images[row].flatten()[place].item(), noise[row].flatten()[place].item()
            found, v = output[row, :2].flatten()[place].item(), output[row, 2:].flatten()[place].item()
            y = math.sqrt(a) * x + math.sqrt(1 - a) * e
            noised[row].view(-1)[place] = y
            errors.append((found - e) ** 2)
            mean = of_image * x + of_noised * y
            predicted = of_image * (y - math.sqrt(1 - a) * found) / math.sqrt(a) + of_noised * y
            own = math.exp((v + 1) / 2 * math.log(betas[step]) + (1 - v) / 2 * math.log(variance))
            kl = 0.5 * (math.log(own / variance) + (variance + (mean - predicted) ** 2) / own - 1)
            bits.append(kl / math.log(2))
    torch.testing.assert_close(add_noise(images, noise, timestep), noised)
    expected = sum(errors) / len(errors)
    assert denoising_loss(output[:, :2], images, noise, noised, timestep).item() == pytest.approx(expected)
    expected += sum(bits) / len(bits)
    assert denoising_loss(output, images, noise, noised, timestep).item() == pytest.approx(expected)


def test_the_variance_is_learned_without_moving_the_mean() -> None:
    output = torch.randn(1, 2, 2, 2, requires_grad=True)
    images, noise = torch.randn(1, 1, 2, 2), torch.randn(1, 1, 2, 2)
    denoising_loss(output, images, noise, add_noise(images, noise, torch.tensor([5])), torch.tensor([5])).backward()
    torch.testing.assert_close(output.grad[:, :1], 2 * (output[:, :1] - noise).detach() / 4)
    assert output.grad[:, 1:].abs().min() > 0


def test_losses_of_a_classifier_are_loops(tmp_path, images) -> None:
    network = load_model(save_vit(tmp_path / "vit")).double()
    pixels, labels = torch.randn(3, 1, SIZE, SIZE, dtype=torch.float64), torch.tensor([0, 2, 1])
    config = recipe(tmp_path / "vit", tmp_path / "run", images, images__label_smoothing=0.3)
    with torch.no_grad():
        logits, router_logits = predict(network, {"pixel_values": pixels})
        task, balance, right = ImageStep(network, None, config)(labels, pixel_values=pixels).tolist()
        expected, hits = 0.0, 0
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
            total = sum(map(math.exp, row))
            expected -= sum((0.7 * (k == label) + 0.1) * math.log(math.exp(row[k]) / total) for k in range(3)) / 3
            hits += max(row) == row[label]
        assert task == pytest.approx(expected) and right == pytest.approx(hits / 3)
        assert balance == pytest.approx(batch_balance_loss(router_logits, network.routers).item())
        teacher = load_model(save_vit(tmp_path / "other", **ROUTED | {"num_active_heads": 4})).double()
        own, other = (predict(each, {"pixel_values": pixels})[0].softmax(-1) for each in (network, teacher))
        kl = sum(q * math.log(q / p) for p, q in zip(own.flatten().tolist(), other.flatten().tolist(), strict=True)) / 3
        task = ImageStep(network, teacher, config)(labels, pixel_values=pixels)[0].item()
        assert task == pytest.approx(kl) and kl > 0


def test_losses_are_taken_in_float32_under_autocast(tmp_path, images) -> None:
    network, teacher = load_model(save_vit(tmp_path / "vit")), load_model(save_vit(tmp_path / "vit"))
    config = recipe(tmp_path / "vit", tmp_path / "run", images)
    pixels, labels = torch.randn(3, 1, SIZE, SIZE), torch.tensor([0, 2, 1])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for weight in teacher.parameters():
            weight.mul_(1.1)
        own, other = (predict(each, {"pixel_values": pixels})[0] for each in (network, teacher))
        assert own.dtype == torch.bfloat16
        found = [ImageStep(network, each, config)(labels, pixel_values=pixels)[0] for each in (teacher, None)]
        networks = [each.vit for each in (network, teacher)]
        states = [predict(each, {"pixel_values": pixels})[0].double() for each in networks]
        found.append(ImageStep(*networks, config)(labels, pixel_values=pixels)[0])
    own, other = own.double().log_softmax(-1), other.double().log_softmax(-1)
    expected = [(other.exp() * (other - own)).sum() / 3, -own[range(3), labels].mean()]
    expected.append((states[0] - states[1]).square().mean())
    for loss, exact in zip(found, expected, strict=True):
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=1e-4)


# ---- what is read and drawn


def test_each_epoch_holds_each_image_once_in_an_order_of_its_own(tmp_path, images) -> None:
    stream = ImageStream(open_images(str(images), save_vit(tmp_path / "vit")), seed=1)
    epochs = [stream.batch(first, 10)["pixels"].flatten(1) for first in (0, 10)]
    assert not torch.equal(*epochs)
    whole = sorted(map(tuple, stream.images.batch(range(10)).flatten(1).tolist()))
    assert all(sorted(map(tuple, epoch.tolist())) == whole for epoch in epochs)
    parts = [next(stream.read_steps([2], 4, rank, 2))["pixels"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), next(stream.read_steps([2], 4, 0, 1))["pixels"])


def test_labels_are_dropped_once_for_all_blocks(tmp_path, images) -> None:
    pytest.importorskip("diffusers")
    network = load_model(save_dit(tmp_path / "dit"))
    config = recipe(tmp_path / "dit", tmp_path / "run", images, objective__kind="noise", images__label_dropout=0.5)
    step = ImageStep(network, None, config)
    seen = []
    for block in network.transformer_blocks:
        embedder = block.norm1.emb.class_embedder
        embedder.embedding_table.register_forward_pre_hook(lambda module, args: seen.append(args[0].tolist()))
    torch.manual_seed(0)
    pixels, labels = torch.zeros(64, 1, SIZE, SIZE), torch.arange(64) % 3
    inputs = step.train().make_inputs(pixels, labels)
    step(**inputs)
    dropped = [label == 3 for label in inputs["class_labels"].tolist()]
    assert 16 < sum(dropped) < 48 and all(rows == inputs["class_labels"].tolist() for rows in seen) and len(seen) == 3
    assert step.eval().make_inputs(pixels, labels)["class_labels"].tolist() == labels.tolist()
    assert step.make_inputs(pixels, torch.full((64,), -1))["class_labels"].tolist() == [3] * 64


def test_half_of_the_images_are_mirrored_in_training_only(tmp_path, images) -> None:
    network = load_model(save_vit(tmp_path / "vit"))
    pixels, labels = torch.rand(64, 1, SIZE, SIZE), torch.zeros(64, dtype=torch.int64)
    for flip in (True, False):
        config = recipe(tmp_path / "vit", tmp_path / "run", images, images__flip=flip)
        found = ImageStep(network, None, config).train().make_inputs(pixels, labels)["pixel_values"]
        mirrored = [torch.equal(own, other.flip(-1)) for own, other in zip(found, pixels, strict=True)]
        same = [torch.equal(own, other) for own, other in zip(found, pixels, strict=True)]
        assert sum(mirrored) + sum(same) == 64 and (16 < sum(mirrored) < 48 if flip else not any(mirrored))
    assert torch.equal(ImageStep(network, None, config).eval().make_inputs(pixels, labels)["pixel_values"], pixels)


# ---- runs


class Killed(Exception):
    """Ends a run in the middle of a step."""


@pytest.mark.parametrize("kind", ["classifier", "denoiser"])
def test_a_killed_run_resumes_bit_for_bit(kind, tmp_path, images, monkeypatch) -> None:
    if kind == "denoiser":
        pytest.importorskip("diffusers")
        model = save_dit(tmp_path / "model", out_channels=2, **ROUTED | {"head_fallback": "none"})
    else:
        model = save_vit(tmp_path / "model")
    how = {"images__ema_decay": 0.5, "images__held_out": str(images)}
    how["objective__kind"] = "noise" if kind == "denoiser" else "cross_entropy"
    moh_llm.train(recipe(model, tmp_path / "whole", images, **how))
    cut, gradients = recipe(model, tmp_path / "cut", images, **how), ImageTraining.gradients
    done = []

    def killed(self, batch):
        if len(done) == 2:
            raise Killed
        done.append(batch)
        return gradients(self, batch)

    monkeypatch.setattr(ImageTraining, "gradients", killed)
    with pytest.raises(Killed):
        moh_llm.train(cut)
    monkeypatch.undo()
    record = moh_llm.train(cut)
    assert record.status == "finished"
    names = ["model", "checkpoints/step-000004"]
    for name in names:
        whole, resumed = weights_of(tmp_path / "whole" / name), weights_of(tmp_path / "cut" / name)
        assert whole.keys() == resumed.keys() and all(torch.equal(whole[key], resumed[key]) for key in whole)
    logs = [
        [{**json.loads(line), "timing": None} for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    ]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == [0, 1, 2, 3, 4]
    assert moh_llm.train(cut) == record  # nothing to do
    assert main(["report", str(tmp_path / "cut")]) == 2 and not (tmp_path / "cut/report.md").exists()

    # What is saved is the moving average of the weights after each step.
    average = weights_of(model)
    for step in range(1, 5):
        weights = weights_of(tmp_path / "whole" / f"checkpoints/step-{step:06d}")
        average = {key: average[key].lerp(weights.get(key, average[key]), 0.5) for key in average}
    saved = weights_of(tmp_path / "whole" / "model")
    assert any(key.startswith("average.") for key in weights)
    for key in average.keys() & weights.keys():
        torch.testing.assert_close(saved[key], average[key], rtol=0, atol=1e-6)


def test_a_frozen_base_stays_and_routers_learn(tmp_path, images) -> None:
    model = save_vit(tmp_path / "vit")
    moh_llm.train(recipe(model, tmp_path / "run", images, freeze_base=True))
    before, after = weights_of(model), weights_of(tmp_path / "run/model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(map(is_routing_weight, changed))
    assert {name.rpartition(".attention.")[2] for name in changed} >= {"router.routed.weight", "fallback.bias"}


@pytest.mark.parametrize("kind", ["classifier", "denoiser"])
def test_weights_are_trained_in_float32_and_saved_in_their_own_dtype(kind, tmp_path, images) -> None:
    """Steps of 1e-4 are lost in bfloat16."""
    if kind == "denoiser":
        pytest.importorskip("diffusers")
        model, how = save_dit(tmp_path / "model"), {"objective__kind": "noise"}
    else:
        model, how = save_vit(tmp_path / "model"), {"objective__kind": "cross_entropy"}
        edit(model / "config.json", dtype="bfloat16")
    [file], before = model.glob("*.safetensors"), weights_of(model)
    vectors = {name for name, weight in before.items() if weight.dim() == 1}
    before = {name: weight if name in vectors else weight.bfloat16() for name, weight in before.items()}
    save_file(before, file, metadata={"format": "pt"})
    how |= {"optimizer__learning_rate": 1e-4, "images__held_out": str(images), "evaluation__eval_steps": 1}
    record = moh_llm.train(recipe(model, tmp_path / "run", images, **how))
    after, trained = weights_of(tmp_path / "run/model"), weights_of(tmp_path / "run/checkpoints/step-000004")
    assert all(after[name].dtype == weight.dtype for name, weight in before.items())
    assert all(weight.dtype == torch.float32 for weight in trained.values())
    if kind == "classifier":
        assert json.loads((tmp_path / "run/model/config.json").read_text())["dtype"] == "bfloat16"
        start, name = before["classifier.weight"].float(), "classifier.weight"
        assert (trained[name] != start).all() and torch.equal(trained[name].bfloat16(), after[name])
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert record.held_out != log[-1]["held_out"]  # that of the rounded weights, which are saved
    assert record.held_out["task_loss"] == pytest.approx(log[-1]["held_out"]["task_loss"], rel=1e-2)


def test_distillation_lowers_the_distance_to_the_base_and_leaves_it_as_it_is(tmp_path, images) -> None:
    model = save_vit(tmp_path / "vit")
    how = {"images__held_out": str(images), "max_steps": 15, "evaluation__eval_steps": 15, "images__flip": False}
    record = moh_llm.train(recipe(model, tmp_path / "run", images, **how, checkpoint__save_steps=15))
    log = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert record.held_out["task_loss"] == log[-1]["held_out"]["task_loss"] < 0.7 * log[0]["held_out"]["task_loss"]
    assert log[-1]["loss"] == pytest.approx(log[-1]["task_loss"] + 0.01 * log[-1]["balance_loss"])
    # The teacher is the model with all heads on, as it was at first.
    config = recipe(model, tmp_path / "run", images)
    network = load_model(model)
    teacher = moh_llm.training.images.make_teacher(config, network)
    pixels = open_images(str(images), model).batch(range(4))
    with torch.no_grad(), network.all_heads_active():
        expected = predict(network, {"pixel_values": pixels})[0]
    for weight in network.parameters():
        weight.data.zero_()
    assert torch.equal(predict(teacher, {"pixel_values": pixels})[0], expected)
    assert not any(weight.requires_grad for weight in teacher.parameters())


def test_a_classifier_gets_the_names_of_the_classes_unless_it_has_names(tmp_path, images) -> None:
    model, how = save_vit(tmp_path / "vit"), {"objective__kind": "cross_entropy", "max_steps": 1}
    moh_llm.train(recipe(model, tmp_path / "run", images, **how))
    config = load_model(tmp_path / "run/model").config
    assert config.id2label == {0: "0", 1: "1", 2: "2"} and config.label2id == {"0": 0, "1": 1, "2": 2}
    edit(model / "config.json", id2label={"0": "shirt", "1": "bag", "2": "boot"})
    moh_llm.train(recipe(model, tmp_path / "named", images, **how))
    assert load_model(tmp_path / "named/model").config.id2label == {0: "shirt", 1: "bag", 2: "boot"}


def test_a_base_that_does_not_fit_is_refused_before_the_run(tmp_path, images) -> None:
    pytest.importorskip("diffusers")
    model, names = save_vit(tmp_path / "vit"), {"0": "shirt", "1": "bag", "2": "boot"}
    edit(model / "config.json", id2label=names)
    bases = {"dit": save_dit(tmp_path / "dit"), "backbone": tmp_path / "backbone"}
    config = load_model(model).config
    transformers.ViTModel(transformers.ViTConfig(**config.to_dict())).save_pretrained(bases["backbone"])
    for name, fields in (
        ("two", {"num_labels": 2}),
        ("small", {"num_labels": 3, "image_size": 4}),
        ("three channels", {"num_labels": 3, "num_channels": 3}),
    ):
        sizes = {key: value for key, value in config.to_dict().items() if "label" not in key}
        dense = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes | fields))
        dense.save_pretrained(bases.setdefault(name, tmp_path / name))
    for name in ("order", "pixels"):
        bases[name] = save_vit(tmp_path / name)
    edit(bases["order"] / "config.json", id2label={"0": "bag", "1": "shirt", "2": "boot"})
    processor = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": True}
    processor |= {"do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}
    edit(bases["pixels"] / "preprocessor_config.json", **processor | {"image_std": [0.25]})
    told = dict.fromkeys(bases, "outputs; name a base of the same kind, sizes and number of classes")
    told["order"] = "names of classes, or another order; name a base with the same id2label"
    told["pixels"] = "pixels of the same image; give both the same preprocessor_config.json"
    for name, base in bases.items():
        with pytest.raises(UserError, match=f"^base={base} does not fit model={model}: it has other {told[name]}$"):
            moh_llm.train(recipe(model, tmp_path / "run", images, base=str(base)))
        assert not (tmp_path / "run").exists()
    base = save_dit(tmp_path / "variance", out_channels=2)
    with pytest.raises(UserError, match="it has other outputs"):
        moh_llm.train(recipe(bases["dit"], tmp_path / "run", images, base=str(base)))
    edit(bases["pixels"] / "preprocessor_config.json", **processor)  # the same pixels, by a file of its own
    moh_llm.train(recipe(model, tmp_path / "run", images, base=str(bases["pixels"]), max_steps=1))


def test_accuracy_in_distillation_is_that_of_evaluate(tmp_path, images) -> None:
    model, base = save_vit(tmp_path / "vit"), save_vit(tmp_path / "base")  # the model has no names
    edit(base / "config.json", id2label={"0": "fox", "1": "cat", "2": "dog"})
    held_out = write_folder(tmp_path / "photos", cat=1, dog=3, fox=8)
    how = {"base": str(base), "images__held_out": str(held_out), "max_steps": 1}
    record = moh_llm.train(recipe(model, tmp_path / "run", images, **how))
    tuned = tmp_path / "run/model"
    assert load_model(tuned).config.id2label == {0: "fox", 1: "cat", 2: "dog"}
    options = EvaluationConfig(models=(str(tuned),), output_dir=tmp_path / "report", data_dir=held_out)
    scores = evaluate(options)["models"].popitem()[1]["scores"]
    assert record.held_out["top1"] == pytest.approx(scores["top1"]["value"]["value"])


def test_held_out_images_of_other_classes_give_no_accuracy(tmp_path, images, capsys) -> None:
    model, other = save_vit(tmp_path / "vit"), write_folder(tmp_path / "photos", apple=2, zebra=2)
    record = moh_llm.train(recipe(model, tmp_path / "run", images, images__held_out=str(other), max_steps=1))
    assert record.held_out.keys() == {"images", "task_loss"}
    assert f"accuracy is not measured: {other} has 2 classes, and {model} has 3" in capsys.readouterr().out
    # With labels to learn they are refused: the model gets the names of the images that it is trained on.
    train = write_folder(tmp_path / "train", bird=2, cat=2, dog=2)
    other = write_folder(tmp_path / "other", apple=2, pear=2, zebra=2)
    config = recipe(model, tmp_path / "run2", train, images__held_out=str(other), objective__kind="cross_entropy")
    with pytest.raises(UserError, match=f"^{other} has the classes apple, pear, zebra, and .* has bird, cat, dog"):
        moh_llm.train(config)


@pytest.mark.slow
def test_two_processes_follow_the_curve_of_one(tmp_path, images) -> None:
    """Micro-batches of one image, since the load-balance loss is that of a micro-batch."""
    model = save_vit(tmp_path / "vit")
    how = {"objective__kind": "cross_entropy", "images__flip": False, "data__micro_batch_size": 1}
    moh_llm.train(recipe(model, tmp_path / "one", images, **how))
    (tmp_path / "two.yaml").write_text(
        f"model: {model}\noutput_dir: {tmp_path / 'two'}\nmax_steps: 4\nreport_to: []\nmixed_precision: no\n"
        f"images: {{train: {images}, flip: false}}\nobjective: {{kind: cross_entropy}}\nschedule: {{warmup_steps: 1}}\n"
        "optimizer: {learning_rate: 0.01, router_learning_rate: 0.01}\ndata: {batch_size: 4, micro_batch_size: 1}\n"
    )
    done = forks.run("train.py", tmp_path / "two.yaml", folder=ROOT, environment=WAYS["ddp"], processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    logs = [
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for one, two in zip(*(log[-4:] for log in logs), strict=True):
        for name in ("loss", "task_loss", "balance_loss", "gradient_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3), (one["step"], name)


def test_a_dit_on_latents_reads_them_from_a_file(tmp_path) -> None:
    diffusers = pytest.importorskip("diffusers")
    size = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_embeds_ada_norm": 3}
    diffusers.DiTTransformer2DModel(**size, sample_size=4, in_channels=4, out_channels=8).save_pretrained(
        tmp_path / "dit"
    )
    latents, file = torch.randn(6, 4, 4, 4), tmp_path / "latents.safetensors"
    save_file({"images": latents.half(), "labels": torch.arange(6) % 3}, file)
    opened = open_images(str(file), tmp_path / "dit")
    assert torch.equal(opened.batch([4, 1]), latents[[4, 1]].half().float()) and opened.labels[4] == 1
    record = moh_llm.train(recipe(tmp_path / "dit", tmp_path / "run", file, objective__kind="noise"))
    assert record.status == "finished" and record.data["images"] == 6
    for tensors, told in (
        ({"latents": latents}, r"needs a tensor `images` \[N, 4, 4, 4\]"),
        ({"images": latents[:, :3].clone()}, r"needs a tensor `images` \[N, 4, 4, 4\]"),
        ({"images": latents, "labels": torch.arange(6)}, r"`labels` \[N\] with a class of the model"),
    ):
        save_file(tensors, file)
        with pytest.raises(UserError, match=told):
            open_images(str(file), tmp_path / "dit")
    file.write_bytes(b"no tensors")
    with pytest.raises(UserError, match="cannot be read"):
        open_images(str(file), tmp_path / "dit")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora": {}}, "lora has no meaning for images"),
        ({"data__sequence_length": 64}, "data.sequence_length has no meaning for images"),
        ({"objective__kind": "noise"}, "objective.kind=noise is not for a MoHViTForImageClassification"),
        ({"images__train": "nowhere/at/all"}, "nowhere/at/all does not exist"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, told, tmp_path, images) -> None:
    config = recipe(save_vit(tmp_path / "vit"), tmp_path / "run", images, **changes)
    with pytest.raises(UserError, match=told) as error:
        moh_llm.train(config)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_models_and_recipes_of_text_and_images_are_told_apart(tmp_path, images) -> None:
    plan = ROUTED | {"head_fallback": "none", "router_score": "weighted"}
    config = recipe(save_vit(tmp_path / "vit", **plan), tmp_path / "run", images)
    with pytest.raises(UserError, match="holds no base to distill from"):
        moh_llm.train(config)
    with pytest.raises(UserError, match=r"is a model of images; name them as images\.train"):
        moh_llm.train(replace(config, images=None))
    with pytest.raises(UserError, match="holds a LlamaForCausalLM"):
        (tmp_path / "vit/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        moh_llm.train(config)
