"""The proof can fail, and the paper's router beside it is the paper's."""

import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from moh_llm.cli import main
from moh_llm.conversion.plan import paper_router
from moh_llm.conversion.verify import all_heads_equal, by_paper_router, verify
from moh_llm.errors import UserError
from moh_llm.metrics import logits_of
from moh_llm.modeling import MoHLlamaForCausalLM


@pytest.fixture
def pair(make_llama, tmp_path):
    """A base, its conversion with a linear router, and one batch."""
    folder = make_llama()
    (tmp_path / "text.txt").write_text("A heron stood in the shallow water and did not move. " * 100)
    flags = ["--calibration", str(tmp_path / "text.txt"), "--calibration-tokens", "512", "--heldout-tokens", "128"]
    assert main(["convert", str(folder), "--output", str(tmp_path / "moh"), "--shared", "importance", *flags]) == 0
    ids = torch.randint(1, 257, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(32).expand(2, -1), "labels": ids}
    base = LlamaForCausalLM.from_pretrained(folder).eval()
    return base, MoHLlamaForCausalLM.from_pretrained(tmp_path / "moh").eval(), batch


def test_one_changed_weight_is_found(pair):
    base, moh, batch = pair
    assert verify(moh, base, [batch])["all_heads_active"]["logits_equal_base"] is True
    with torch.no_grad():
        moh.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert not all_heads_equal(moh, base, [batch])
    with pytest.raises(UserError, match="does not equal the base"):
        verify(moh, base, [batch])


def test_paper_router_is_a_model_of_that_config(pair):
    _, moh, batch = pair
    paper = MoHLlamaForCausalLM(paper_router(moh.config)).eval()
    paper.load_state_dict({name: tensor for name, tensor in moh.state_dict().items() if ".router." not in name})
    with torch.no_grad():
        own = logits_of(moh)(batch)
        assert torch.equal(by_paper_router(moh)(batch), logits_of(paper)(batch))
        assert not torch.equal(own, logits_of(paper)(batch))
        assert torch.equal(logits_of(moh)(batch), own)  # its own routers are back


def test_a_failed_proof_leaves_no_folder(make_llama, tmp_path, monkeypatch, capsys):
    from moh_llm.conversion import verify as module

    monkeypatch.setattr(module, "all_heads_equal", lambda *_: False)
    assert main(["convert", str(make_llama()), "--preset", "paper", "--output", str(tmp_path / "moh")]) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_output_may_not_hold_the_base(make_llama, tmp_path, capsys):
    base = tmp_path / "models" / "base"
    shutil.copytree(make_llama(), base)
    before = sorted(path.name for path in base.iterdir())
    for output in (base, base.parent):
        assert main(["convert", str(base), "--preset", "paper", "--output", str(output), "--overwrite"]) == 2
        assert f"would replace {base}, which is read" in capsys.readouterr().err
    assert sorted(path.name for path in base.iterdir()) == before
