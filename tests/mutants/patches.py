"""Small faults that a test must find: one line of the package each, and the tests that turn red."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """A fault: in ``file``, ``old``, which stands there exactly once, becomes ``new``, and one of ``tests`` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SELECTED = "tests/modeling/test_selected_attention.py"
MASKS = "tests/modeling/test_masks.py"
FALLBACKS = "tests/training/test_fallbacks.py"
NETWORKS = "tests/training/test_networks.py"
CONVERTED = "tests/recount/test_recount.py::test_the_record_of_the_conversion"
LOG = "tests/recount/test_recount.py::test_the_log_of_the_run"
PATCHES = (
    Patch(
        "LoRA freezes the fallbacks",
        "moh_llm/training/adapters.py",
        "if is_routing_weight(name) and w.requires_grad]\n",
        'if is_routing_weight(name) and ".fallback." not in name]\n',
        (NETWORKS, FALLBACKS),
    ),
    Patch(
        "a frozen base is trained",
        "moh_llm/training/networks.py",
        "weight.requires_grad_(weight.requires_grad and is_routing_weight(name))",
        "weight.requires_grad_(weight.requires_grad)",
        (FALLBACKS,),
    ),
    Patch(
        "the teacher within a frozen student has its heads off",
        "moh_llm/training/step.py",
        "with without, self.network.all_heads_active():",
        "with without:",
        (FALLBACKS,),
    ),
    Patch(
        "tuned fallbacks are not saved",
        "moh_llm/training/networks.py",
        "    read_weights(checkpoint, trained_weights(network))\n",
        "    before = {n: w.detach().clone() for n, w in trained_weights(network).items() if '.fallback.' in n}\n"
        "    read_weights(checkpoint, trained_weights(network))\n"
        "    [trained_weights(network)[n].data.copy_(w) for n, w in before.items()]\n",
        (NETWORKS, FALLBACKS),
    ),
    Patch(
        "the student has no fallbacks",
        "moh_llm/training/networks.py",
        "    network.set_attn_implementation(config.attn_implementation)\n",
        "    network.set_attn_implementation(config.attn_implementation)\n"
        "    [setattr(layer.self_attn, 'fallback', None) for layer in network.model.layers]\n",
        (FALLBACKS,),
    ),
    Patch(
        "gate and up projections of experts are swapped",
        "moh_llm/conversion/layers.py",
        "torch.cat([gate, up], dim=1)",
        "torch.cat([up, gate], dim=1)",
        ("tests/conversion/test_layers.py",),
    ),
    Patch(
        "the loss of experts is not weighted in training",
        "moh_llm/training/losses.py",
        "config.expert_balance_coef * torch.stack(losses)",
        "torch.stack(losses)",
        ("tests/training/test_experts.py",),
    ),
    Patch(
        "the loss of experts is left out of the model's",
        "moh_llm/modeling/modeling_moh_llama.py",
        " + self.config.expert_balance_coef * experts",
        "",
        ("tests/modeling/test_experts.py",),
    ),
    Patch(
        "a token picks one head too few",
        "moh_llm/modeling/routing_moh.py",
        "        return select_top_k(logits, self.top_k)\n",
        "        return select_top_k(logits, max(self.top_k - 1, 0))\n",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "a threshold router selects what is below zero",
        "moh_llm/modeling/routing_moh.py",
        "(logits > 0)",
        "(logits < 0)",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "a document's first tokens are shown with their routers' heads",
        "moh_llm/modeling/routing_moh.py",
        "        return on | (all_on[..., None] if isinstance(all_on, torch.Tensor) else all_on)\n",
        "        return on\n",
        ("tests/modeling/test_token_heads.py",),
    ),
    Patch(
        "routers are left out though their logits are asked for",
        "moh_llm/modeling/attention_moh.py",
        "self._is_local and not self.router._forward_hooks",
        "self._is_local",
        (
            "tests/modeling/test_token_heads.py",
            "tests/modeling/test_local_attention.py",
            "tests/modeling/test_forward.py",
        ),
    ),
    Patch(
        "heads with dense attention are taken from the first queries",
        "moh_llm/modeling/computed_heads_moh.py",
        "found[:, lead:]",
        "found[:, : found.shape[1] - lead]",
        (SELECTED,),
    ),
    Patch(
        "a layer without a head for all queries keeps the dtype of its queries under autocast",
        "moh_llm/modeling/attention_moh.py",
        "own if early_outputs is None else own.to(early_outputs.dtype)",
        "own",
        ("tests/modeling/test_local_attention.py",),
    ),
    Patch(
        "a selected query does not see its own key",
        "moh_llm/modeling/selected_attention_moh.py",
        ".triu(1)",
        ".triu(0).index_fill(-1, torch.tensor([0]), 0.0)",
        (SELECTED,),
    ),
    Patch(
        "parts of attention are merged by the other's weight",
        "moh_llm/modeling/flash_attention_moh.py",
        "torch.sigmoid(other[1] - one[1])",
        "torch.sigmoid(one[1] - other[1])",
        ("tests/modeling/test_flash_attention.py",),
    ),
    Patch(
        "the later half of the queries does not see the earlier half's keys",
        "moh_llm/modeling/flash_attention_moh.py",
        "torch.cat([out[:, 0, :, :first], later]",
        "torch.cat([out[:, 0, :, :first], out[:, 1]]",
        ("tests/modeling/test_flash_attention.py",),
    ),
    Patch(
        "gradients leave out what the later half of the queries reads of the earlier half",
        "moh_llm/modeling/flash_attention_moh.py",
        "whole[:, :, :first] += part.unflatten(0, (-1, 2)).sum(1)",
        "whole[:, :, :first] += 0 * part.unflatten(0, (-1, 2)).sum(1)",
        ("tests/modeling/test_flash_attention.py",),
    ),
    Patch(
        "gradients of local attention leave out the distant token",
        "moh_llm/modeling/flash_attention_moh.py",
        "            sums = torch.logaddexp(scores.flatten(2, 3), sums)",
        "            pass",
        ("tests/modeling/test_local_attention.py",),
    ),
    Patch(
        "decoding reads a group only where its first head is on",
        "moh_llm/modeling/selected_attention_moh.py",
        "selected.view(batch, -1, shared).any(-1)",
        "selected.view(batch, -1, shared)[..., 0]",
        (SELECTED,),
    ),
    Patch(
        "a step of decoding takes the wrong heads for a pair",
        "moh_llm/modeling/selected_attention_moh.py",
        "slice(one, other + 1, other - one)",
        "slice(one, one + 2)",
        (SELECTED,),
    ),
    Patch(
        "the cache keeps first tokens of padding",
        "moh_llm/modeling/cache_moh.py",
        "int(self.sinks.max()) < self.begin",
        "self.begin",
        ("tests/modeling/test_cache.py",),
    ),
    Patch(
        "the cache drops tokens that the window reads",
        "moh_llm/modeling/cache_moh.py",
        "max(window - 1, sinks) + _MORE",
        "max(window - 1, sinks) - 1",
        ("tests/modeling/test_cache.py",),
    ),
    Patch(
        "one token less has all heads on",
        "moh_llm/modeling/documents_moh.py",
        "positions - starts < max(all_on_until, window + sinks)",
        "positions - starts < max(all_on_until, window + sinks) - 1",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "an engine's requests see each other's keys",
        "moh_llm/serving/paged.py",
        "index=band.index + add(request, begin, length)",
        "index=band.index + 0 * add(request, begin, length)",
        ("tests/modeling/test_paged.py",),
    ),
    Patch(
        "keys come from the wrong place of their block",
        "moh_llm/serving/paged.py",
        "positions % self.tokens",
        "(positions + 1) % self.tokens",
        ("tests/modeling/test_paged.py",),
    ),
    Patch(
        "first queries see keys of their first ones only",
        "moh_llm/modeling/computed_heads_moh.py",
        "seen = keys.shape[2] - (queries.shape[2] - early)",
        "seen = early",
        ("tests/modeling/test_documents.py",),
    ),
    Patch(
        "the cache drops tokens while all heads are on",
        "moh_llm/modeling/cache_moh.py",
        " and self.begin + self.num_recent >= self.late",
        "",
        ("tests/modeling/test_cache.py",),
    ),
    Patch(
        "the threshold leaves one group too many on",
        "moh_llm/conversion/local_fit.py",
        "logits.flatten(), drops * len(logits)",
        "logits.flatten(), (drops - 1) * len(logits) + 1",
        ("tests/conversion/test_local_fit.py",),
    ),
    Patch(
        "the threshold is a token's own score",
        "moh_llm/conversion/local_fit.py",
        "return off + (on - off) / 2",
        "return off",
        ("tests/conversion/test_local_fit.py",),
    ),
    Patch(
        "windows count padding",
        "moh_llm/modeling/local_attention_moh.py",
        "return Band.of(positions, starts, window, sinks, all_on_until, counts)",
        "return Band.of(positions, starts, window, sinks, all_on_until)",
        (MASKS,),
    ),
    Patch(
        "selected queries see padding between tokens",
        "moh_llm/modeling/selected_attention_moh.py",
        "return not bool((shown[:, :-1] & ~shown[:, 1:]).any())",
        "return True",
        (MASKS,),
    ),
    Patch(
        "a mask of one's own is one of documents",
        "moh_llm/modeling/local_attention_moh.py",
        "return bool(is_right.all() & begins.all())",
        "return True",
        (MASKS,),
    ),
    Patch(
        "the cache drops tokens before padding",
        "moh_llm/modeling/cache_moh.py",
        "extra = min(extra, int(kept.recent.min()) - self.begin)",
        "pass",
        ("tests/modeling/test_cache.py",),
    ),
    Patch(
        "the lowest scores win",
        "moh_llm/modeling/routing_moh.py",
        "logits.topk(k, dim=-1).indices",
        "logits.topk(k, dim=-1, largest=False).indices",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "the gradient of the KL has the other sign",
        "moh_llm/training/losses.py",
        "gradient = own.exp_().sub_(wanted).mul_(temperature)",
        "gradient = own.exp_().sub_(wanted).mul_(-temperature)",
        ("tests/training/test_losses.py",),
    ),
    Patch(
        "the load-balance loss is subtracted",
        "moh_llm/training/step.py",
        "(beta * balance + experts) / sequences",
        "(experts - beta * balance) / sequences",
        ("tests/training/test_losses.py",),
    ),
    Patch(
        "a checkpoint forgets the first moment",
        "moh_llm/training/checkpoints.py",
        "    _fill(tensors, reader)\n    return updates\n",
        "    _fill(tensors, reader)\n"
        '    [state["exp_avg"].zero_() for state in optimizer.state.values()]\n'
        "    return updates\n",
        ("tests/training/test_checkpoints.py",),
    ),
    Patch(
        "the card shows the base's scores as the model's",
        "moh_llm/hub/evaluated.py",
        "metric_value=row.scores[label].value",
        'metric_value=row.scores["base"].value',
        ("tests/hub/test_card_metadata.py",),
    ),
    Patch(
        "documents run into each other",
        "moh_llm/data/windows.py",
        "    origin[begins] = begins\n",
        "    origin[begins[:1]] = begins[:1]\n",
        ("tests/data/test_windows.py",),
    ),
    Patch(
        "the first token of a document is predicted from the one before",
        "moh_llm/data/windows.py",
        "    labels[begins] = -100\n",
        "",
        ("tests/data/test_windows.py",),
    ),
    Patch(
        "the fallback's bias is decayed",
        "moh_llm/training/optimizer.py",
        '    if kind == "bias" or any(',
        "    if any(",
        (NETWORKS,),
    ),
    Patch(
        "useless heads are learned as the shared ones",
        "moh_llm/training/shared_heads.py",
        "gate = straight_through(gate, soft.to(gate.dtype))",
        "gate = straight_through(gate, -soft.to(gate.dtype))",
        ("tests/training/test_shared_heads.py",),
    ),
    Patch(
        "with the shared heads fixed, routers have the rows of others",
        "moh_llm/training/shared_heads.py",
        "_take_rows(attention.router, router, ~router.shared().bool())",
        "_take_rows(attention.router, router, ~router.shared().bool().flip(0))",
        ("tests/training/test_shared_heads.py",),
    ),
    Patch(
        "a special token gets the rows of its text's pieces",
        "moh_llm/conversion/vocabulary.py",
        "elif not added[number].special:",
        "else:",
        ("tests/conversion/test_vocabulary.py",),
    ),
    Patch(
        "the base is taken for the teacher of a model with more tokens",
        "moh_llm/training/reference.py",
        "    if added:\n        if given",
        "    if False:\n        if given",
        ("tests/training/test_more_tokens.py",),
    ),
    Patch(
        "sequences in which all heads are on are trained on",
        "moh_llm/training/preflight.py",
        'model.head_fallback == "local" and length <= all_on',
        'model.head_fallback == "local" and length < all_on',
        ("tests/training/test_preflight_data.py",),
    ),
    Patch(
        "the size of a router's inputs is that of the norm's weights squared",
        "moh_llm/training/preflight_rates.py",
        ".double().abs().sum()",
        ".double().square().sum()",
        ("tests/training/test_preflight_rates.py",),
    ),
    Patch(
        "training does not say that routers move too far in a step",
        "moh_llm/training/preflight.py",
        'return rates if rates and rates.state == "warning" else None',
        "return None",
        ("tests/training/test_preflight_rates.py",),
    ),
    Patch(
        "a resumed run does not keep its precision",
        "moh_llm/training/precision.py",
        "chosen = None if overwrite else _recorded(config)",
        "chosen = None",
        ("tests/training/test_precision.py",),
    ),
    Patch(
        "processes may compute in different dtypes",
        "moh_llm/training/loop.py",
        "    check_agreement(accelerator, config)\n",
        "",
        ("tests/training/test_precision.py",),
    ),
    Patch(
        "float64 is asked of devices without it",
        "moh_llm/devices.py",
        '    if device.type == "mps":\n        return torch.device("cpu")\n',
        "",
        ("tests/test_any_accelerator.py",),
    ),
    Patch(
        "the heads that were read in training are those that were asked for",
        "moh_llm/training/log.py",
        "heads_read=round(losses.heads_read, 6)",
        "heads_read=sum(heads) / len(heads)",
        (f"{LOG}[local]",),
    ),
    Patch(
        "tokens with other heads are of all tokens, also of those that have all heads on",
        "moh_llm/training/scoring.py",
        "any(-1) & free).sum()",
        "any(-1)).sum()",
        (f"{LOG}[local]",),
    ),
    Patch(
        "shares of calibration are the mixture's weights",
        "moh_llm/conversion/description.py",
        "sources={name: round(count / sum(read.values()), 6) for name, count in read.items()}",
        "sources={name: round(share, 6) for name, share in zip(names, shares, strict=True)}",
        (f"{CONVERTED}[value]",),
    ),
    Patch(
        "weights of fallbacks are told as those of routers",
        "moh_llm/conversion/description.py",
        "    routers = sum(tensor.numel() for tensor in routing.values()) - fallbacks\n",
        "    routers, fallbacks = sum(tensor.numel() for tensor in routing.values()), 0\n",
        (f"{CONVERTED}[value]",),
    ),
    Patch(
        "costs are not stated at the conversion's context",
        "moh_llm/flops.py",
        "return sorted({*usual, *([context] if context else [])})",
        "return sorted(usual)",
        (f"{CONVERTED}[value]",),
    ),
)
