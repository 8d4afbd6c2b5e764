"""Windows by FlashAttention 2: what can be said without a GPU."""

import math

import torch

from moh_llm.attention.windowed import with_gradient_of_lse


def test_a_backward_pass_without_a_gradient_of_the_log_sum_exp_gives_it():
    """As that of PyTorch's flash attention for CPUs, which reads outputs as those for GPUs do."""
    torch.manual_seed(0)
    states = [torch.randn(2, 3, 20, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    place = torch.arange(20)
    seen = (place <= place[:, None]) & (place > place[:, None] - 5)
    scores = (states[0] @ states[1].transpose(-1, -2) * 0.3).masked_fill(~seen, -math.inf)
    expected = scores.softmax(-1) @ states[2], scores.logsumexp(-1)
    grad, grad_lse = torch.randn_like(expected[0]), torch.randn_like(expected[1])
    wanted = torch.autograd.grad(expected, states, (grad, grad_lse))

    mask = torch.zeros(1, 1, 20, 20, dtype=torch.float64).masked_fill(~seen, -math.inf)
    plain = [state.detach() for state in states]
    aten = torch.ops.aten
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*plain, attn_mask=mask, scale=0.3)
    changed = with_gradient_of_lse(out, grad, grad_lse)
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *plain, changed, lse, 0.0, False, attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(found, wanted)
