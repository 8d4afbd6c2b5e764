"""Models of images to train from scratch: what `moh-llm init` writes, and the published plans."""

from pathlib import Path

import pytest
import torch
import yaml
from tiny_images import ROUTED, SIZE, recipe, weights_of, write_idx

import moh_llm
from moh_llm.cli import main
from moh_llm.recipe import read_options, recipe_values
from moh_llm.training.config import TrainConfig
from moh_llm.vision import load_model


def test_init_writes_a_vit_and_a_dit_that_starts_at_zero(tmp_path, capsys) -> None:
    pytest.importorskip("diffusers")
    shipped = Path(__file__).parents[2] / "recipes/architectures"
    toys = {"moh_vit_s_75": {"hidden_size": 24, "intermediate_size": 32, "image_size": 32}}
    toys["moh_dit_s2_75"] = {"attention_head_dim": 4, "sample_size": 8}
    for name, toy in toys.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load((shipped / path.name).read_text()) | toy))
        for seed in ("0", "0", "1"):
            folder = tmp_path / f"{name}-{len(list(tmp_path.glob(f'{name}-*')))}"
            assert main(["init", str(path), "--output-dir", str(folder), "--seed", seed]) == 0
        assert "12 layers of 6 heads -> 4.5 active, router two_stage" in capsys.readouterr().out
        first, again, other = (weights_of(tmp_path / f"{name}-{number}") for number in range(3))
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)
        assert sum(router.num_active for router in load_model(tmp_path / f"{name}-0").routers) == 54
    zero = {name for name, weight in first.items() if not weight.any() and name.endswith("weight")}
    adaptive = {f"transformer_blocks.{layer}.norm1.linear.weight" for layer in range(12)}
    assert zero == adaptive | {"proj_out_1.weight", "proj_out_2.weight"}
    path.write_text("sample_size: 8\nheads: 3\n")
    assert main(["init", str(path), "--output-dir", str(tmp_path / "out")]) == 2
    assert "makes no model: " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_init_writes_the_dense_base_that_a_model_from_scratch_is_distilled_from(tmp_path, capsys) -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    size |= {"image_size": SIZE, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    for name, plan in (("vit", {}), ("moh_vit", ROUTED)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"model_type": name, **size, **plan}))
        assert main(["init", str(path), "--output-dir", str(tmp_path / name)]) == 0
    said = capsys.readouterr().out
    assert "2 layers of 4 heads, dense\n" in said and "2 layers of 4 heads -> 2 active, router linear\n" in said
    assert type(load_model(tmp_path / "vit")).__name__ == "ViTForImageClassification"
    images = write_idx(tmp_path / "images", 10)
    config = recipe(tmp_path / "moh_vit", tmp_path / "run", images, base=str(tmp_path / "vit"), max_steps=1)
    assert moh_llm.train(config).status == "finished"
    for fields, told in (
        ({"hidden_size": 18}, "hidden_size must be a multiple of num_attention_heads=4"),
        ({"model_type": "moh_vit", "hidden_size": 18}, "hidden_size must be a multiple of num_attention_heads=4"),
        ({"num_attention_heads": 0}, "hidden_size must be a multiple of num_attention_heads=0"),
    ):
        path.write_text(yaml.safe_dump({"model_type": "vit", **size, **fields}))
        assert main(["init", str(path), "--output-dir", str(tmp_path / "out")]) == 2
        assert f"{path} makes no model: {told}" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["moh_vit_s_75", "moh_vit_b_50", "moh_dit_s2_75", "moh_dit_b2_75"])
def test_plans_have_the_published_shares(name) -> None:
    root = Path(__file__).parents[2] / "recipes"
    plan = yaml.safe_load((root / f"architectures/{name}.yaml").read_text())
    heads = plan["num_attention_heads"] * len(plan["num_active_heads"])
    assert sum(plan["num_active_heads"]) / heads == int(name[-2:]) / 100
    config = read_options(TrainConfig, recipe_values(root / f"{name}.yaml"))
    assert config.images is not None and config.model == f"out/{name}_initial"
