"""What the transformers backends of vLLM (0.33) and SGLang (0.5) do with a model, imitated; no server runs here.

They make the base model by `AutoModel.from_config`, put layers of their own in place of every
`nn.Linear`, and have attention call a function of theirs, which keeps keys and values itself, takes
the tokens of several requests in one row and returns them as `[tokens, heads * dim]`.
"""

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, ContinuousBatchingConfig, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PLAN = {"num_shared_heads": 1, "num_active_heads": 2}
PLANS = [
    {"router_type": "query_norm", "shared_heads": [[2], [3]]},
    {"router_type": "linear", "head_fallback": "value"},
    {"router_type": "two_stage", "router_score": "weighted"},
]


class Replicated(nn.Module):
    """A serving engine's linear layer: the names of `nn.Linear`'s tensors, and nothing else of it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class LayerAttention:
    """Attention of one layer, with keys and values of each request kept between calls."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, q_THD, k_TGD, v_TGD, scaling: float, requests: list[tuple[str, int]]) -> torch.Tensor:
        outputs, start = [], 0
        for name, count in requests:
            part = slice(start, start + count)
            start += count
            new = (k_TGD[part], v_TGD[part])
            before = self.kept.get(name)
            keys, values = new if before is None else (torch.cat(pair) for pair in zip(before, new, strict=True))
            self.kept[name] = (keys, values)
            groups = q_THD.shape[1] // keys.shape[1]
            scores = torch.einsum("thd,shd->hts", q_THD[part], keys.repeat_interleave(groups, 1)) * scaling
            total = keys.shape[0]
            future = torch.arange(total)[None, :] > torch.arange(total - count, total)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hts,shd->thd", weights, values.repeat_interleave(groups, 1)))
        assert start == q_THD.shape[0]
        return torch.cat(outputs)


def engine_attention(module, query, key, value, attention_mask, attention_instances=None, requests=None, **kwargs):
    """What an engine registers: it finds the layer's attention, and flattens what that gives."""
    assert attention_mask is None
    q_THD, k_TGD, v_TGD = (states[0].transpose(0, 1) for states in (query, key, value))
    found = attention_instances[module.layer_idx](q_THD, k_TGD, v_TGD, kwargs["scaling"], requests)
    return found.flatten(1), None


def replace_linear_layers(module: nn.Module) -> None:
    """Put an engine's layers in place of linear ones."""
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear):
            module.set_submodule(name, Replicated(child))


@pytest.fixture
def engine(make_pair, tmp_path, monkeypatch):
    """The model, and the base model as an engine makes it from the model's folder, with its layers' attention."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine", engine_attention)

    def make(**plan):
        _, model = make_pair(**PLAN, **plan)
        config = AutoConfig.from_pretrained(tmp_path / "moh")
        config._attn_implementation = "engine"
        with init_empty_weights(include_buffers=False):
            served = AutoModel.from_config(config, dtype=torch.float32)
        replace_linear_layers(served)
        weights = load_file(tmp_path / "moh" / "model.safetensors")
        weights = {name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
        served.load_state_dict(weights, assign=True)
        layers = {index: LayerAttention() for index in range(config.num_hidden_layers)}
        return model, served.eval(), layers

    return make


@pytest.mark.parametrize("plan", PLANS)
def test_requests_in_chunks_give_what_each_gives_alone(engine, ids, plan):
    model, served, layers = engine(**plan)
    prompts = {"a": ids[0, :17], "b": ids[1, :9], "c": ids[2, :23]}
    done = dict.fromkeys(prompts, 0)
    got = {name: [] for name in prompts}
    # Two prompts at once, a third that joins, prompts cut into chunks, then single tokens.
    schedule = [[("a", 8), ("b", 9)], [("a", 8), ("c", 20)], [("a", 1), ("c", 1)], [("c", 1)], [("c", 1)]]
    with torch.no_grad():
        for requests in schedule:
            tokens = torch.cat([prompts[name][done[name] : done[name] + count] for name, count in requests])
            positions = torch.cat([torch.arange(done[name], done[name] + count) for name, count in requests])
            hidden = served(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                return_dict=False,
                attention_instances=layers,
                requests=requests,
            )[0][0]
            for (name, count), part in zip(requests, hidden.split([count for _, count in requests]), strict=True):
                got[name].append(part)
                done[name] += count
        assert done == {name: len(prompt) for name, prompt in prompts.items()}
        for name, prompt in prompts.items():
            torch.testing.assert_close(torch.cat(got[name]), model.model(prompt[None]).last_hidden_state[0])


def test_engines_find_the_class_and_leave_routing_whole(make_pair, tmp_path):
    _, model = make_pair(**PLAN, router_type="linear", head_fallback="value")
    remote = get_class_from_dynamic_module(model.config.auto_map["AutoModel"], str(tmp_path / "moh"))
    assert remote.is_backend_compatible()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert not [name for name in linear if "router" in name or "fallback" in name]


def test_a_part_of_the_heads_is_refused(make_pair, ids):
    _, model = make_pair(**PLAN)
    attention = model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):  # what each of two devices would hold
        whole = getattr(attention, name)
        whole.weight = nn.Parameter(whole.weight[: whole.weight.shape[0] // 2])
    with pytest.raises(ValueError, match=r"2 of 4 heads.*tp_plan"):
        model(ids)


def test_a_local_fallback_is_refused(make_pair, ids, monkeypatch):
    """It reads keys, and an engine keeps them itself."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "engine", engine_attention)
    _, model = make_pair(**PLAN, router_type="linear", head_fallback="local")
    model.set_attn_implementation("engine")
    with pytest.raises(ValueError, match="head_fallback='local' reads keys that attn_implementation='engine' keeps"):
        model(ids)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"attn_implementation='eager' keeps to itself; use 'sdpa'$"):
        model(ids, cache=object())


LOCAL = {"head_fallback": "local", "local_window": 4, "local_sinks": 2}
GROUPS = {"num_shared_heads": 0, "num_active_heads": 2, "routing_granularity": "kv_group"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        PLANS[1],
        LOCAL | {"router_type": "threshold", "local_start": 8},
        LOCAL | {"router_type": "threshold", "local_start": 8} | GROUPS,
        LOCAL | {"router_type": "none", "shared_heads": [[0, 1], [2, 3]], "num_shared_heads": 2},
    ],
)
def test_continuous_batching_gives_what_each_request_gives_alone(make_pair, plan):
    """Of several lengths at once; prompts that are longer than a batch come in chunks."""
    _, model = make_pair(**(PLAN | plan))
    ids = torch.randint(1, model.config.vocab_size, (3, 60), generator=torch.Generator().manual_seed(3))
    prompts = [ids[0, :17].tolist(), ids[1, :1].tolist(), ids[2, :57].tolist(), ids[1, :40].tolist()]
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=0, pad_token_id=0)
    small = ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=32)  # else most of the memory
    for some in (prompts, prompts[:1]):
        found = model.generate_batch(some, generation_config=greedy, continuous_batching_config=small)
        got = [one.generated_tokens for one in found.values()]
        for prompt, tokens in zip(some, got, strict=True):
            assert tokens == model.generate(torch.tensor([prompt]), generation_config=greedy)[0, len(prompt) :].tolist()
