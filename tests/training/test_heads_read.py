"""How many heads tokens had on: by the gates of a step and of the held-out text, not by the plan."""

from pathlib import Path

import pytest
import torch

from moh_llm.analysis.heads import heads_on
from moh_llm.modeling import MoHLlamaConfig, MoHLlamaForCausalLM
from moh_llm.training import networks
from moh_llm.training.config import ObjectiveConfig
from moh_llm.training.scoring import evaluate
from moh_llm.training.step import TrainingStep

LENGTH = 40


@pytest.fixture(scope="module")
def folders(made_once, base_folder: Path, convert, model_folder: Path) -> dict[str, Path]:
    """A model whose tokens have as many heads on as is asked for, and models whose tokens do not."""
    found = {"full": model_folder}
    flags = ["--fallback", "local", "--local-window", "6", "local_sinks=2", "--context", "64"]
    flags += ["--heldout-tokens", "0"]
    for kind in ("threshold", "none"):
        given = [*flags, "--num-active-heads", "2", "--router", kind]
        found[kind] = made_once(f"read-{kind}", lambda folder, given=given: convert(base_folder, folder, *given))
    return found


def batch_of(seed: int) -> dict[str, torch.Tensor]:
    """Two rows of two documents each."""
    ids = torch.randint(0, 200, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(25), torch.arange(LENGTH - 25)]).expand(2, -1)
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "documents": 1 + (ids >= 0).cumsum(-1) // 26}


def step_of(folder: Path, kind: str) -> TrainingStep:
    network = networks.load_network(folder, torch.float32)
    chosen = {}
    if kind == "threshold":  # the fit may have left no head to choose
        chosen = {"shared_heads": [[0], [1]], "num_shared_heads": 1, "num_active_heads": 2, "never_on_heads": None}
    if kind == "full":  # one layer's budget is all heads
        chosen = {"num_active_heads": [network.config.num_attention_heads, 2]}
    if chosen:
        torch.manual_seed(0)
        network = MoHLlamaForCausalLM(MoHLlamaConfig(**network.config.to_dict() | chosen)).eval()
    return TrainingStep(network, None, ObjectiveConfig(kind="cross_entropy"))


@pytest.mark.parametrize("kind", ["full", "threshold", "none"])
def test_held_out_text_has_the_heads_of_its_gates(folders, kind: str) -> None:
    """Of all its tokens; those with other heads are of the layers that choose, past the tokens with all heads on."""
    batches = [batch_of(1), batch_of(2)]
    step, other = step_of(folders[kind], kind), step_of(folders[kind], kind)
    with torch.no_grad():
        for router in other.network.routers:
            for weight in router.parameters():
                weight.neg_()
    start, now = (evaluate(None, one, batches)[1] for one in (step, other))
    routing = now.health(start, lambda tensor: tensor)

    def heads_of(network: MoHLlamaForCausalLM) -> torch.Tensor:
        """Of each token, bool `[N, layers, H]`."""
        on = [heads_on(network, batch["input_ids"], position_ids=batch["position_ids"]) for batch in batches]
        return torch.cat([heads.movedim(1, 2).flatten(0, 1) for heads in on])

    mine, others = heads_of(other.network), heads_of(step.network)
    assert routing.heads_read == pytest.approx(float(mine.sum(-1).float().mean()), abs=1e-5)
    free = ~torch.cat([step.all_heads_on(batch["position_ids"]).flatten() for batch in batches])
    moved = (mine != others)[free].any(-1).float().mean(0)
    choose = (others[free] != others[free][0]).flatten(2).any(-1).any(0).tolist()
    assert choose == {"full": [False, True], "none": [False] * 2}.get(kind, [True] * 2)
    assert [share is not None for share in routing.changed] == [bool(load) for load in routing.load] == choose
    assert [share for share in routing.changed if share is not None] == pytest.approx(moved[choose].tolist(), abs=1e-5)
    if any(choose):
        assert routing.tokens_with_other_heads == pytest.approx(float(moved[choose].mean()), abs=1e-5)
        assert moved.max() > 0
    else:  # the same heads for all tokens: none of them is dead
        assert sum(routing.dead_heads) == 0 and routing.tokens_with_other_heads is None
