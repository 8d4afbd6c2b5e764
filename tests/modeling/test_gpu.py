"""The same promises on a CUDA device."""

import pytest
import torch

from moh_llm.kernels.head_sparse import head_sparse_attention
from moh_llm.kernels.head_sparse_decoding import head_sparse_decoding
from moh_llm.kernels.head_sparse_kernels import selected_positions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("router_type", ["query_norm", "linear"])
def test_all_heads_active_is_the_base_bit_for_bit(make_pair, ids, dtype, implementation, router_type):
    dense, moh = make_pair(
        dtype=dtype, attn_implementation=implementation, num_shared_heads=1, num_active_heads=2, router_type=router_type
    )
    dense, moh, ids = dense.cuda(), moh.cuda(), ids.cuda()
    with torch.no_grad(), moh.all_heads_active():
        assert torch.equal(moh(ids).logits, dense(ids).logits)


@pytest.mark.parametrize("router_type", ["query_norm", "linear", "two_stage"])
def test_logits_are_those_of_the_cpu(make_pair, ids, router_type):
    _, moh = make_pair(dtype=torch.float64, num_shared_heads=1, num_active_heads=2, router_type=router_type)
    with torch.no_grad():
        expected = moh(ids).logits
        torch.testing.assert_close(moh.cuda()(ids.cuda()).logits.cpu(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("local_heads", [[[3], [1, 2]], [[3], [0, 1, 2, 3]]], ids=["some", "a whole layer"])
def test_gradients_under_autocast_are_those_of_float32_on_a_cpu(make_pair, local_heads):
    fields = {"num_shared_heads": 0, "num_active_heads": [2, 0], "local_heads": local_heads}
    fields |= {"router_type": "threshold", "head_fallback": "local", "local_window": 4, "local_sinks": 2}
    _, moh = make_pair(**fields, local_start=9)
    ids = torch.randint(1, 257, (1, 60), generator=torch.Generator().manual_seed(0))

    def gradients(device: str) -> dict[str, torch.Tensor]:
        moh.to(device).zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=device == "cuda"):
            moh(ids.to(device), labels=ids.to(device), use_cache=False).loss.backward()
        grads = {name: weight.grad for name, weight in moh.named_parameters() if weight.grad is not None}
        return {name: grad.to("cpu", copy=True) for name, grad in grads.items()}

    expected, found = gradients("cpu"), gradients("cuda")
    assert found.keys() == expected.keys() and any("distant" in name for name in found)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.1 * gradient.norm(), name


@pytest.mark.parametrize("length", [1, 300])
def test_head_sparse_attention_in_a_cuda_graph_follows_a_new_gate(length):
    """Lists of other lengths come out of the same launches: nothing of them was read by the host."""
    pytest.importorskip("triton")
    q = torch.randn(1, 8, length, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 600, 64, device="cuda", dtype=torch.bfloat16)
    attend = head_sparse_decoding if length == 1 else head_sparse_attention
    gates = [(torch.rand(1, length, 8, device="cuda") < share).float() for share in (0.9, 0.2)]
    gate = gates[0].clone()
    with torch.no_grad():
        attend(q, k, v, gate, 0.1)  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(q, k, v, gate, 0.1)
        for new in gates:
            gate.copy_(new)
            graph.replay()
            assert torch.equal(out, attend(q, k, v, new, 0.1))


def test_lists_compile_as_one_graph():
    pytest.importorskip("triton")
    gate = (torch.rand(2, 300, 8, device="cuda") < 0.5).float()
    compiled = torch.compile(selected_positions, fullgraph=True)
    (rows, counts, before), (_, *expected) = compiled(gate), selected_positions(gate)
    assert torch.equal(counts, expected[0]) and torch.equal(before, expected[1])
    assert rows.shape == before.shape
