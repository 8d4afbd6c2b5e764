"""Attention maps against the weights of plain loops."""

import numpy as np
import pytest
import torch

from moh_llm.analysis.maps import attention_maps
from moh_llm.errors import UserError

TEXT = "A mill, two boats"


@pytest.mark.parametrize("layer", [0, 1])
def test_maps_are_the_weights_of_the_loops(make_moh, recompute, tokenizer, plan, layer) -> None:
    model = make_moh(vocab_size=257, **plan)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    batch = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    wanted = recompute(model, [batch])[layer]
    found = attention_maps(model, tokenizer, TEXT, layer)
    assert "".join(found.tokens).endswith(TEXT) and found.layer == layer
    assert found.on.T.tolist() == (np.asarray(wanted.gates) != 0).tolist()
    for query, weights in enumerate(wanted.patterns):  # [H, keys up to the query, or all]
        own = found.weights[:, query].numpy()
        np.testing.assert_allclose(own[:, : query + 1], np.asarray(weights)[:, : query + 1], atol=1e-6)
        assert not own[:, query + 1 :].any()
    assert model.config._attn_implementation == "sdpa"


def test_layers_and_texts_that_are_not_there(make_moh, tokenizer) -> None:
    model = make_moh(vocab_size=257, num_shared_heads=1, num_active_heads=2)
    with pytest.raises(UserError, match="layer 2: the model has layers 0 to 1"):
        attention_maps(model, tokenizer, TEXT, 2)
    tokenizer.add_bos_token = False
    with pytest.raises(UserError, match="no tokens"):
        attention_maps(model, tokenizer, "", 0)
