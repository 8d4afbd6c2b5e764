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


INTERVAL = "tests/modeling/test_interval_attention.py"
BUDGET = "tests/training/test_budget.py"
CPU = "tests/attention/test_cpu.py"
MASKS = "tests/modeling/test_masks.py"
FALLBACKS = "tests/training/test_fallbacks.py"
NETWORKS = "tests/training/test_networks.py"
CONVERTED = "tests/recount/test_recount.py::test_the_record_of_the_conversion"
LOG = "tests/recount/test_recount.py::test_the_log_of_the_run"
RUN = "tests/recount/test_recount.py::test_the_record_of_the_run"
CLAIMS = "tests/recount/test_recount_claims.py"
PATCHES = (
    Patch(
        "the proof reads no token whose heads are off",
        "moh_llm/hub/proof.py",
        "length = min(model.config.all_heads_until + MAX_TOKENS,",
        "length = min(MAX_TOKENS,",
        ("tests/hub/test_proof.py::test_the_fallback_of_a_head_that_is_off_is_observed",),
    ),
    Patch(
        "the budget's multiplier has the wrong sign",
        "moh_llm/training/budget.py",
        "found = self.multiplier - self.slope",
        "found = self.multiplier + self.slope",
        (f"{BUDGET}::test_multiplier_is_the_slope_of_the_task_over_that_of_the_keys",),
    ),
    Patch(
        "the keys that are read give routers no gradient",
        "moh_llm/training/budget.py",
        "straight_through(router.select(logits), soft).sum(-1)",
        "router.select(logits).sum(-1)",
        (f"{BUDGET}::test_a_step_minimises_task_and_budget_together",),
    ),
    Patch(
        "LoRA freezes the fallbacks",
        "moh_llm/training/networks.py",
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
        "moh_llm/training/saving.py",
        "    read_weights(checkpoint, networks.trained_weights(network))\n",
        "    weights = networks.trained_weights(network)\n"
        "    before = {n: w.detach().clone() for n, w in weights.items() if '.fallback.' in n}\n"
        "    read_weights(checkpoint, weights)\n"
        "    [weights[n].data.copy_(w) for n, w in before.items()]\n",
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
        "a threshold router selects what is below zero",
        "moh_llm/modeling/routing_moh.py",
        "(logits > 0)",
        "(logits < 0)",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "keys come from the wrong place of their block",
        "moh_llm/serving/paged.py",
        "positions % self.tokens",
        "(positions + 1) % self.tokens",
        ("tests/modeling/test_paged.py",),
    ),
    Patch(
        "routers are left out though their logits are asked for",
        "moh_llm/modeling/attention_moh.py",
        "(torch.is_grad_enabled() or router._forward_hooks)",
        "torch.is_grad_enabled()",
        (
            "tests/modeling/test_token_heads.py",
            "tests/modeling/test_forward.py",
        ),
    ),
    Patch(
        "a token picks one head too few",
        "moh_llm/modeling/routing_moh.py",
        "select_top_k(logits, self.top_k) if",
        "select_top_k(logits, max(self.top_k - 1, 0)) if",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "gates learn from a fallback less its head",
        "moh_llm/modeling/attention_moh.py",
        "torch.where(on, 1.0, -1.0 / share)",
        "torch.where(on, -1.0, 1.0 / share)",
        (INTERVAL,),
    ),
    Patch(
        "heads that are sampled count once",
        "moh_llm/modeling/attention_moh.py",
        "torch.where(on, 1.0, -1.0 / share)",
        "torch.where(on, 1.0, -1.0)",
        (INTERVAL,),
    ),
    Patch(
        "a document's first token has another fallback",
        "moh_llm/modeling/attention_moh.py",
        "(seen.start == seen.last).all(-1)",
        "(seen.start > seen.last).all(-1)",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "sinks within the window are seen twice",
        "moh_llm/modeling/interval_attention_moh.py",
        "shows &= ~is_sink | (index < band[..., :1])",
        "pass",
        (INTERVAL,),
    ),
    Patch(
        "the distant token counts as one key",
        "moh_llm/modeling/interval_attention_moh.py",
        ".to(torch.promote_types(dtype, torch.float32)).log()",
        ".to(torch.promote_types(dtype, torch.float32)).log() * 0",
        (INTERVAL,),
    ),
    Patch(
        "selected queries see the document before",
        "moh_llm/modeling/interval_attention_moh.py",
        "(places > last) | (places < start)",
        "(places > last)",
        (INTERVAL,),
    ),
    Patch(
        "eager masks leave out a query's first key",
        "moh_llm/modeling/interval_attention_moh.py",
        "(places >= own)",
        "(places > own)",
        (INTERVAL,),
    ),
    Patch(
        "windows are a token longer",
        "moh_llm/modeling/seen_moh.py",
        "near = key_of(torch.maximum(own - window + 1, first))",
        "near = key_of(torch.maximum(own - window, first))",
        (INTERVAL,),
    ),
    Patch(
        "one token less has all heads on",
        "moh_llm/modeling/seen_moh.py",
        "all_on, lead = hidden <= max(",
        "all_on, lead = hidden < max(",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "windows count padding",
        "moh_llm/modeling/seen_moh.py",
        "*seen, shown if has_holes else None)",
        "*seen)",
        (MASKS,),
    ),
    Patch(
        "a mask of one's own is one of documents",
        "moh_llm/modeling/seen_moh.py",
        "can_be_read(mask) and bool(is_plain.all() & begins.all())",
        "can_be_read(mask)",
        (MASKS,),
    ),
    Patch(
        "a selected query does not see its own key",
        "moh_llm/attention/cpu_selected.py",
        ".triu(1)",
        ".triu(0).index_fill(-1, torch.tensor([0]), 0.0)",
        (CPU,),
    ),
    Patch(
        "queries before the first selected one's block are left out",
        "moh_llm/attention/cpu_selected.py",
        "    add(slice(0, len(positions)), 0, begin)  #",
        "    #",
        (CPU,),
    ),
    Patch(
        "decoding reads a group only where its first head is on",
        "moh_llm/attention/cpu_selected.py",
        "on.view(batch, groups, -1).any(-1)",
        "on.view(batch, groups, -1)[..., 0]",
        (CPU,),
    ),
    Patch(
        "a step of decoding takes the wrong heads for a pair",
        "moh_llm/attention/cpu_selected.py",
        "slice(one, other + 1, other - one)",
        "slice(one, one + 2)",
        (CPU,),
    ),
    Patch(
        "a step's window has no distant token",
        "moh_llm/attention/cpu_selected.py",
        "if distant is not None:\n                scores",
        "if False:\n                scores",
        (CPU,),
    ),
    Patch(
        "the cache keeps first tokens of the batch in place of each document's",
        "moh_llm/attention/cache.py",
        "index = (start + slots + moved)[:, 0]",
        "index = (start * 0 + slots + moved)[:, 0]",
        ("tests/attention/test_cache.py",),
    ),
    Patch(
        "the cache drops tokens while all heads are on",
        "moh_llm/attention/cache.py",
        "or self.length < late:",
        "or False:",
        ("tests/attention/test_cache.py",),
    ),
    Patch(
        "the cache takes windows from the wrong keys",
        "moh_llm/attention/cache.py",
        "near=seen.near + moved,",
        "near=seen.near + moved + 1,",
        ("tests/attention/test_cache.py",),
    ),
    Patch(
        "blocks that some queries do not see are taken for full",
        "moh_llm/attention/plan.py",
        "(begin >= most(low)) & (end <= least(last))",
        "(begin >= least(low)) & (end <= least(last))",
        ("tests/attention/test_flash.py",),
    ),
    Patch(
        "the distant token's share forgets how many keys it stands for",
        "moh_llm/attention/parts.py",
        "(score + hidden.clamp_min(1).log()).to",
        "score.to",
        ("tests/attention/test_parts.py",),
    ),
    Patch(
        "a sink in a query's window is merged once more",
        "moh_llm/attention/parts.py",
        "first.unsqueeze(-1) <= number",
        "first.unsqueeze(-1) < number",
        ("tests/attention/test_parts.py",),
    ),
    Patch(
        "an engine's requests see each other's keys",
        "moh_llm/serving/paged.py",
        "start, hidden = starts[of], own",
        "start, hidden = starts[of] * 0, own",
        ("tests/modeling/test_paged.py",),
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
        "the lowest scores win",
        "moh_llm/modeling/routing_moh.py",
        "logits.topk(k, dim=-1).indices",
        "logits.topk(k, dim=-1, largest=False).indices",
        ("tests/modeling/test_forward.py",),
    ),
    Patch(
        "the gradient of the KL has the other sign",
        "moh_llm/training/losses.py",
        "gradient = own.exp_().sub_(wanted)",
        "gradient = wanted.sub(own.exp_())",
        ("tests/training/test_losses.py",),
    ),
    Patch(
        "the load-balance loss is subtracted",
        "moh_llm/training/losses.py",
        "loss = self.task + beta * self.balance",
        "loss = self.task - beta * self.balance",
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
        "moh_llm/hub/card.py",
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
        "    labels[begins] = _IGNORED\n",
        "",
        ("tests/data/test_windows.py",),
    ),
    Patch(
        "the fallback's bias is decayed",
        "moh_llm/training/step.py",
        '    if kind == "bias" or any(',
        "    if any(",
        (NETWORKS,),
    ),
    Patch(
        "a special token gets the rows of its text's pieces",
        "moh_llm/conversion/checkpoint.py",
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
        "length <= all_on",
        "length < all_on",
        ("tests/training/test_preflight.py",),
    ),
    Patch(
        "a resumed run does not keep its precision",
        "moh_llm/training/preflight.py",
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
        "the heads that were read in training are those that were planned",
        "moh_llm/training/log.py",
        "heads_read=round(losses.heads_read, 6)",
        "heads_read=sum(heads) / len(heads)",
        (f"{LOG}[local]",),
    ),
    Patch(
        "shares of calibration are the mixture's weights",
        "moh_llm/conversion/convert.py",
        "read = {source.name: count * length for source, count in zip(sources, windows, strict=True)}",
        "read = {source.name: round(source.weight * tokens) for source in sources}",
        (f"{CONVERTED}[value]",),
    ),
    Patch(
        "weights of fallbacks are told as those of routers",
        "moh_llm/conversion/convert.py",
        "    routers = sum(tensor.numel() for tensor in routing.values()) - fallbacks\n",
        "    routers, fallbacks = sum(tensor.numel() for tensor in routing.values()), 0\n",
        (f"{CONVERTED}[value]",),
    ),
    Patch(
        "a plan is claimed as what held-out text reads",
        "moh_llm/hub/card.py",
        "heads_read=proof.heads_read,",
        "heads_read=made.plan.keys_read,",
        (f"{CLAIMS}::test_claims_state_what_is_so[local-True]",),
    ),
    Patch(
        "the heads of the last score in training are said to be those of the saved model",
        "moh_llm/training/scoring.py",
        '.removeprefix("torch."), routing.heads_read',
        '.removeprefix("torch."), evaluate(None, step, batches[:1])[1].heads_read',
        (f"{RUN}[local]",),
    ),
    Patch(
        "a frozen base is said to have changed",
        "moh_llm/hub/templates/card.md",
        "{% if lineage.trained_since and lineage.dense_kept %}",
        "{% if lineage.trained_since and not run %}",
        (f"{CLAIMS}::test_claims_state_what_is_so[local-True]",),
    ),
    Patch(
        "no training is on record of a tuned model that is converted again",
        "moh_llm/hub/templates/card.md",
        "{% elif not lineage.chain.runs %}",
        "{% else %}",
        (CLAIMS,),
    ),
    Patch(
        "scores of few items are results",
        "moh_llm/records/evaluation.py",
        "FEWEST_ITEMS = 100",
        "FEWEST_ITEMS = 1",
        (f"{CLAIMS}::test_claims_state_what_is_so[local-True]",),
    ),
    Patch(
        "the keys that were planned are claimed as read",
        "moh_llm/hub/card.py",
        "keys_read=proof.keys_read",
        "keys_read=made.plan.keys_read",
        (f"{CLAIMS}::test_claims_state_what_is_so[value-False]",),
    ),
    Patch(
        "rates are logged of weights that are not trained",
        "moh_llm/training/step.py",
        "return {name: rate for name, rate in rates.items() if name in trained}",
        "return rates",
        (f"{LOG}[local]",),
    ),
    Patch(
        "threshold routers are said to have a load-balance loss",
        "moh_llm/training/losses.py",
        'router_type in ("threshold", "none")',
        'router_type == "none"',
        (f"{LOG}[local]", f"{RUN}[local]"),
    ),
    Patch(
        "all weights are said to be trained",
        "moh_llm/training/networks.py",
        '        kinds[f"trained_{kind}"] += full_shape(weight).numel()\n',
        '        kinds["trained_base"] += full_shape(weight).numel()\n',
        (f"{RUN}[local]",),
    ),
    Patch(
        "an evaluation does not name the plan that it is of",
        "moh_llm/evaluation/record.py",
        "plan_sha256=result.identity.plan",
        "plan_sha256=None",
        (f"{CLAIMS}::test_claims_state_what_is_so[local-True]",),
    ),
    Patch(
        "how many heads are on is no part of what a model is known by",
        "moh_llm/records/identity.py",
        '*("shared_heads_per_layer", "active_heads_per_layer", "never_on_heads_per_layer"),',
        '*("shared_heads_per_layer", "never_on_heads_per_layer"),',
        ("tests/test_model.py::test_the_plan_tells_models_of_the_same_weights_apart",),
    ),
    Patch(
        "an interval over documents is that of the normal distribution",
        "moh_llm/intervals.py",
        "quantile = student_quantile(_CONFIDENCE + _MORE * min(1, _FEW / count), max(freedom, 1))",
        "quantile = 1.96",
        (f"{CONVERTED}[value]",),
    ),
    Patch(
        "an interval over items has no width where no item differs",
        "moh_llm/evaluation/statistics.py",
        "    squares += (low - centre) ** 2 + (high - centre) ** 2\n",
        "    squares += 0.0\n",
        ("tests/evaluation/test_eval_statistics.py::test_intervals_have_a_width_where_no_item_differs",),
    ),
)
