"""Models from scratch: what `moh-llm init` writes, the paper's sizes, and that both twins learn."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from trained import read_log
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.data.tokenizer import TextTokenizer
from moh_llm.modeling import MoHLlamaForCausalLM
from moh_llm.records.tensors import is_routing_weight
from moh_llm.training.from_scratch import architecture_keys, read_architecture
from moh_llm.training.loop import train

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ROOT / "recipes" / "architectures"
# The heads of the shipped S models, each of size 4.
TOY = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 4}
# Large enough that heads and routers are felt.
TOY |= {"max_position_embeddings": 64, "initializer_range": 0.2}
IDS = torch.arange(1, 41)[None]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: Callable[[Path], int]) -> Path:
    """A tokenizer of 257 ids and nothing else."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return folder


@pytest.fixture
def initialise(tokenizer_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """`initialise("llm_s", "name", "--seed", "1", head_dim=8)`: a shipped architecture at toy size, as a folder."""

    def make(architecture: str, name: str, *flags: str, **values: object) -> Path:
        content = yaml.safe_load((ARCHITECTURES / f"{architecture}.yaml").read_text())
        path = tmp_path / f"{architecture}.yaml"
        path.write_text(yaml.safe_dump(content | TOY | values))
        output = tmp_path / name
        command = ["init", str(path), "--tokenizer", str(tokenizer_folder), "--output-dir", str(output), *flags]
        assert main(command) == 0
        return output

    return make


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(IDS).logits


def test_the_papers_sizes() -> None:
    def dense(layers: int, hidden: int, mlp: int) -> int:
        embeddings, attention, norms = 2 * 65536 * hidden, 4 * hidden * hidden, 2 * hidden
        return embeddings + layers * (attention + 3 * hidden * mlp + norms) + hidden

    # Eq. 5 and 6: a row for each shared and each routed head, and two that weigh these groups.
    expected = {
        "llm_s": (dense(12, 768, 2048), 0, 186),
        "moh_llm_s": (dense(12, 768, 2048), 12 * 768 * (12 + 2), 186),
        "llm_b": (dense(24, 1536, 4096), 0, 881),
        "moh_llm_b": (dense(24, 1536, 4096), 24 * 1536 * (16 + 2), 882),
    }
    assert expected.keys() == {path.stem for path in ARCHITECTURES.glob("*llm_*.yaml")}
    for name, (base, routing, millions) in expected.items():
        with torch.device("meta"):
            model = MoHLlamaForCausalLM(read_architecture(ARCHITECTURES / f"{name}.yaml"))
        counts = {weight: tensor.numel() for weight, tensor in model.named_parameters()}
        assert sum(n for weight, n in counts.items() if is_routing_weight(weight)) == routing
        assert sum(counts.values()) == base + routing
        assert round((base + routing) / 1e6) == millions


@pytest.mark.parametrize("size", ["s", "b"])
def test_twins_differ_in_their_heads_only(size: str) -> None:
    texts = [(ARCHITECTURES / f"{name}_{size}.yaml").read_text() for name in ("llm", "moh_llm")]
    dense, moh = map(yaml.safe_load, texts)
    plan = {"num_shared_heads", "num_active_heads", "router_type", "router_score", "head_balance_coef"}
    assert {name for name in dense if dense[name] != moh[name]} == plan
    assert dense.keys() == moh.keys() <= architecture_keys()
    assert moh["num_active_heads"] == 0.75 * moh["num_attention_heads"]
    assert moh["num_shared_heads"] > 0.4 * moh["num_active_heads"]


def test_the_folder_loads(initialise, tokenizer_folder, tmp_path, capsys) -> None:
    folder = initialise("moh_llm_s", "moh")
    total = 2 * 300 * 48 + 2 * (4 * 48 * 48 + 3 * 48 * 128 + 2 * 48 + 48 * 14) + 48
    assert f"{total:,} parameters" in capsys.readouterr().out
    config = AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, 0, None)
    tokenizer = TextTokenizer.from_tokenizer(AutoTokenizer.from_pretrained(folder))
    assert tokenizer.sha256 == TextTokenizer.load(str(tokenizer_folder)).sha256
    assert config.auto_map["AutoModelForCausalLM"] == "modeling_moh_llama.MoHLlamaForCausalLM"
    assert (folder / "modeling_moh_llama.py").exists()  # loads where this package is not


def test_the_seed_makes_the_bytes(initialise) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first = content(initialise("moh_llm_s", "first"))
    torch.rand(5)  # whatever was drawn before
    assert content(initialise("moh_llm_s", "same", "--seed", "0")) == first
    other = content(initialise("moh_llm_s", "other", "--seed", "1"))
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors", "seal.json"}


def test_a_padding_token_of_its_own_is_the_models(initialise, tokenizer_folder, tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.pad_token = "!"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = MoHLlamaForCausalLM.from_pretrained(initialise("llm_s", "own", "--tokenizer", str(tmp_path / "tokenizer")))
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.model.embed_tokens.weight[0].any()  # the end-of-text token is learned


def test_the_dense_twin_is_a_llama(initialise) -> None:
    folder = initialise("llm_s", "twin")
    twin = MoHLlamaForCausalLM.from_pretrained(folder)
    own = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**own, num_attention_heads=12, rms_norm_eps=1e-5))
    llama.load_state_dict(twin.state_dict())  # strict: no tensor more, none less
    assert torch.equal(logits(twin), logits(llama))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["moh_llm_s", "llm_s"])
def test_both_twins_learn_from_scratch(initialise, configure, architecture: str) -> None:
    folder = initialise(architecture, "initial")
    scratch = {"objective.kind": "cross_entropy", "optimizer.router_learning_rate": "null", "evaluation.eval_steps": 20}
    config = configure(model=str(folder), max_steps=20, **scratch, **{"optimizer.learning_rate": 3e-3})
    record = train(config)
    # Random weights are no base to compare with.
    assert record.evaluation.model_fields_set == {"tokens", "documents", "perplexity", "dtype", "heads_read"}
    log = read_log(Path(config.output_dir))
    assert log[-1]["validation"]["perplexity"] < 0.5 * log[0]["validation"]["perplexity"]
    assert all(("balance_loss" in line) == (architecture == "moh_llm_s") for line in log[1:])
    tuned, initial = (
        MoHLlamaForCausalLM.from_pretrained(place).state_dict() for place in (Path(config.output_dir) / "model", folder)
    )
    assert not [name for name, tensor in tuned.items() if torch.equal(tensor, initial[name])]  # all of it learned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eos_token_id: 3", "eos_token_id is taken from the tokenizer; remove it"),
        ("num_shared_heads: 10", "num_active_heads=9 must lie between num_shared_heads=10 and num_attention_heads=12"),
        ("hidden_size: wide", "'hidden_size' expected int, got str (value: 'wide')"),
        ("num_key_value_heads: 5", "num_attention_heads=12 must be a multiple of num_key_value_heads=5"),
        ("hidden_act: quick", "'quick' is not known"),
        ("vocab_size: 256", "vocab_size=256 is less than the 257 ids of tokenizer"),
    ],
)
def test_architectures_that_make_no_model(tokenizer_folder, tmp_path, capsys, text: str, message: str) -> None:
    content = yaml.safe_load((ARCHITECTURES / "moh_llm_s.yaml").read_text()) | TOY
    content.pop(text.partition(":")[0], None)
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content) + text + "\n")
    words = ["init", str(path), "--tokenizer", str(tokenizer_folder), "--output-dir", str(tmp_path / "out")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error and "bad.yaml" in error
    assert not (tmp_path / "out").exists()
