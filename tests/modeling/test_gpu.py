"""The same promises on a CUDA device."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
