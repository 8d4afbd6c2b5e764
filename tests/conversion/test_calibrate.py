"""The closed-form router against straightforward computations in float64."""

import numpy as np
import torch
from transformers import LlamaForCausalLM

from moh_llm.conversion.calibrate import RIDGE, LayerStatistics, collect_statistics, fit_router, squared_contributions


def test_contribution_is_the_norm_of_what_a_head_adds():
    heads, o_proj = torch.randn(11, 3, 4, dtype=torch.float64), torch.randn(20, 12, dtype=torch.float64)
    expected = torch.stack([(heads[:, h] @ o_proj[:, 4 * h : 4 * h + 4].T).norm(dim=-1) ** 2 for h in range(3)], dim=1)
    torch.testing.assert_close(squared_contributions(heads, o_proj), expected)


def test_fit_is_ridge_regression_with_a_free_bias():
    rng = np.random.default_rng(0)
    x, c2 = rng.normal(size=(200, 6)) + 1.5, rng.random(size=(200, 3)) + 0.1
    statistics = LayerStatistics.zeros(6, 3, torch.device("cpu"))
    for part in range(0, 200, 50):
        statistics.add(torch.from_numpy(x[part : part + 50]), torch.from_numpy(c2[part : part + 50]))
    weight, bias = fit_router(statistics, [0, 2], torch.float64)

    # Ridge with a free intercept = least squares on an extended system of rows sqrt(ridge) * e_i.
    penalty = np.sqrt(RIDGE * (x**2).sum(0).mean())
    rows = np.vstack([np.hstack([x, np.ones((200, 1))]), np.hstack([penalty * np.eye(6), np.zeros((6, 1))])])
    targets = np.vstack([0.5 * np.log(c2[:, [0, 2]]), np.zeros((6, 2))])
    expected = np.linalg.lstsq(rows, targets, rcond=None)[0]
    np.testing.assert_allclose(weight.numpy(), expected[:6].T, rtol=1e-8)
    np.testing.assert_allclose(bias.numpy(), expected[6], rtol=1e-8)
    np.testing.assert_allclose(statistics.importance, c2.mean(0))


def test_statistics_see_every_layers_input_and_heads(make_llama):
    model = LlamaForCausalLM.from_pretrained(make_llama(), attn_implementation="eager").eval()
    ids = torch.randint(1, 257, (2, 16))
    batch = {"input_ids": ids, "position_ids": torch.arange(16).expand(2, -1)}
    first, second = collect_statistics(model, [batch, batch])
    assert first.tokens == second.tokens == 64
    assert not model.model.layers[0].self_attn._forward_pre_hooks  # nothing is left behind

    # The sum over heads of H_h W_O^h is the layer's output: recompute layer 1 by hand.
    captured = {}
    layer = model.model.layers[1].self_attn
    layer.register_forward_pre_hook(lambda m, a, k: captured.update(x=k["hidden_states"]), with_kwargs=True)
    layer.o_proj.register_forward_pre_hook(lambda m, a: captured.update(heads=a[0]))
    with torch.no_grad():
        model(**batch)
    x = torch.cat([captured["x"].flatten(0, 1), torch.ones(32, 1)], 1).double()
    torch.testing.assert_close(second.gram, 2 * x.T @ x)
    weight = layer.o_proj.weight.detach()
    norms = torch.stack(
        [(captured["heads"][..., 8 * h : 8 * h + 8] @ weight[:, 8 * h : 8 * h + 8].T).norm(dim=-1) for h in range(4)],
        -1,
    )
    torch.testing.assert_close(second.energy, 2 * (norms**2).sum((0, 1)).double(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(second.cross, 2 * x.T @ norms.flatten(0, 1).log().double(), rtol=1e-4, atol=1e-4)
