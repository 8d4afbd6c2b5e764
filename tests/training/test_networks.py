import json
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training import networks
from moh_llm.training.reference import Reference, StartingPoint, find_starting_point
from moh_llm.training.saving import save_network
from moh_llm.training.step import TrainingStep, make_optimizer, set_learning_rates

OWN = Reference("start", own=True)


def some_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(6), torch.arange(10)]).expand(2, -1)  # two documents a block
    return {"input_ids": ids, "position_ids": positions, "targets": ids.roll(-1, 1)}


def begun(config) -> tuple[StartingPoint, int]:
    """What `save_network` wants to know of a run of 3 steps."""
    return find_starting_point(config), 3


def dense_values(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """-log p of each next token by the plain LLaMA with the converted model's weights."""
    model = MoHLlamaForCausalLM.from_pretrained(folder)
    names = LlamaConfig().to_dict().keys()
    config = LlamaConfig(**{name: value for name, value in model.config.to_dict().items() if name in names})
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict({name: w for name, w in model.state_dict().items() if not is_routing_weight(name)})
    with torch.no_grad():
        logits = llama(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")


def values(step: TrainingStep, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by the student and by its teacher."""
    found, _ = step(**batch, compare=True)
    return found[:, 0].float(), found[:, 1].float()


def changed_lora_student(configure) -> tuple:
    """A student whose adapters and routers have been moved away from their start."""
    config = configure(**{"lora.rank": 4})
    network = networks.load_network(config.model, torch.float32)
    model = networks.add_lora(network, config.lora).train()
    with torch.no_grad():
        for weight in networks.trained_weights(model).values():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return config, network, model


def test_the_lora_teacher_is_the_base_and_the_rest_is_trained(configure, model_folder: Path) -> None:
    config, network, model = changed_lora_student(configure)
    assert networks.make_teacher(config, OWN, torch.device("cpu")) is None
    step, batch = TrainingStep(model, None, config.objective, OWN).train(), some_batch()
    assert step.has_teacher
    student, teacher = values(step, batch)
    torch.testing.assert_close(teacher, dense_values(model_folder, batch), rtol=0, atol=1e-6)
    # The student is as it was before the teacher spoke: adapters on, its own heads active, training.
    assert not torch.allclose(student, teacher, atol=0.1)
    assert [router.num_active for router in network.routers] == [3, 1]
    assert model.training
    adapters = {name for name, _ in model.named_parameters() if "lora_" in name}
    routing = {name for name, _ in model.named_parameters() if is_routing_weight(name)}
    assert adapters and any(".router." in name for name in routing) and any(".fallback." in name for name in routing)
    assert networks.trained_weights(model).keys() == adapters | routing


def test_merging_keeps_the_function(configure, tmp_path: Path) -> None:
    config, _, model = changed_lora_student(configure)
    batch = some_batch()
    before = logits_of(model.eval())(batch).detach()
    weights = {name: weight.detach().clone() for name, weight in networks.trained_weights(model).items()}
    save_file(weights, tmp_path / "model.safetensors")
    save_network(config, tmp_path, networks.load_tokenizer(config.model), tmp_path / "merged", *begun(config))
    merged = networks.load_network(tmp_path / "merged", torch.float32)
    torch.testing.assert_close(logits_of(merged.eval())(batch).detach(), before, atol=2e-3, rtol=1e-4)


def wrapped_lora(network: torch.nn.Module, config) -> torch.nn.Module:
    return networks.add_lora(network, config.lora)


def in_wrappers(network: torch.nn.Module, config) -> torch.nn.Module:
    """With the names that wrappers of the whole model and of its layers make."""
    for index, layer in enumerate(network.model.layers):
        network.model.layers[index] = torch.nn.Sequential(OrderedDict(_fsdp_wrapped_module=layer))
    return torch.nn.Sequential(OrderedDict(module=network))


def in_zero3(network: torch.nn.Module, config) -> torch.nn.Module:
    """With the parameters that DeepSpeed leaves a process: a flat part, and the shape of the whole beside it."""
    for weight in network.parameters():
        shape, weight.data = weight.shape, weight.data.flatten()[::2].clone()
        weight.ds_shape = shape
    return network


@pytest.mark.parametrize("wrap", [None, wrapped_lora, in_wrappers, in_zero3])
def test_decay_acts_on_matrices_and_routers_have_their_rate(configure, make_model, wrap) -> None:
    folder = make_model(
        MoHLlamaConfig,
        **{"num_shared_heads": 1, "num_active_heads": 2, "router_type": "linear", "head_fallback": "value"},
        **{"attention_bias": True, "mlp_bias": True, "query_key_norm": True},
    )
    config = configure(model=str(folder), **{"lora.rank": 2} if wrap is wrapped_lora else {})
    model = networks.load_network(folder, torch.float32)
    model = wrap(model, config) if wrap else model
    optimizer = make_optimizer(model, config)
    set_learning_rates(optimizer, config, 1)
    found = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    matrices = ("_proj.weight", "lora_A.default.weight", "lora_B.default.weight", "routed.weight", "own_value.weight")
    matrices += ("embed_tokens.weight", "lm_head.weight")
    for name, weight in networks.trained_weights(model).items():
        group = found.pop(id(weight))
        assert group["weight_decay"] == (0.1 if name.endswith(matrices) else 0.0), name
        assert group["lr"] == pytest.approx(1e-2 if is_routing_weight(name) else 1e-3), name
    assert not found


def test_the_saved_folder_is_complete(configure, model_folder: Path, tmp_path: Path) -> None:
    began_with = Path(shutil.copytree(model_folder, tmp_path / "moh"))
    for name in ("LICENSE.txt", "NOTICE", "README.md"):
        (began_with / name).write_text("Terms.")
    record = {"base": {"name": "x", "revision": None, "dense_sha256": "0"}}
    (began_with / "conversion.json").write_text(json.dumps(record))
    for name in ("seal.json", "lineage.json"):  # of other weights
        (began_with / name).unlink()
    config = configure(model=str(began_with))
    tokenizer = networks.load_tokenizer(config.model)
    network = networks.load_network(config.model, torch.float32)
    weights = {name: weight.detach() + 1 for name, weight in networks.trained_weights(network).items()}
    save_file(weights, tmp_path / "model.safetensors")
    save_network(config, tmp_path, tokenizer, tmp_path / "saved", *begun(config))
    saved = networks.load_network(tmp_path / "saved", torch.float32)
    assert torch.equal(saved.model.norm.weight.detach(), weights["model.norm.weight"])
    assert (tmp_path / "saved" / "modeling_moh_llama.py").is_file()
    assert json.loads((tmp_path / "saved" / "conversion.json").read_text()) == record
    assert all((tmp_path / "saved" / name).read_text() == "Terms." for name in ("LICENSE.txt", "NOTICE"))
    assert not (tmp_path / "saved" / "README.md").exists()
    assert networks.load_tokenizer(tmp_path / "saved")("a day")["input_ids"] == tokenizer("a day")["input_ids"]


@pytest.mark.parametrize("divided", [False, True])
def test_under_zero3_adapters_have_the_dtype_of_the_weights(configure, divided) -> None:
    config = configure(**{"lora.rank": 2})
    network = networks.load_network(config.model, torch.bfloat16)
    for weight in network.parameters() if divided else ():
        weight.ds_id = 0  # as DeepSpeed marks what it divides; it takes only weights of one dtype
    model = networks.add_lora(network, config.lora)
    dtypes = {weight.dtype for name, weight in model.named_parameters() if "lora_" in name}
    assert dtypes == {torch.bfloat16 if divided else torch.float32}
