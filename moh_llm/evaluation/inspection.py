"""Pictures of what the heads of an MoH model do on a text: which are on, for which tokens, and the keys they read.

found = inspect_model("out/moh", "The river was high that spring, and the boats ...")
write_text(Path("heads.html"), found.page)
found.charts[0].png
"""

from dataclasses import dataclass

import torch

from moh_llm.analysis.heads import heads_on
from moh_llm.claims import planned_heads
from moh_llm.data.mixture import EMBEDDED
from moh_llm.data.sample import sample_mixture
from moh_llm.data.windows import validation_batches
from moh_llm.devices import choose_device, compute_dtype
from moh_llm.errors import UserError
from moh_llm.evaluation.charts import Axis, Chart, HeatMap, LineChart
from moh_llm.evaluation.models import check_model, has_heads_off, load_moh
from moh_llm.evaluation.rendering import Table, facts, html_templates
from moh_llm.flops import distant_keys, keys_read

_TOKENS = 512  # of the built-in text, or more where a document's first tokens take more
_COLUMNS = 128  # of a chart; a longer text is drawn as the means of groups of tokens


@dataclass(frozen=True)
class Inspection:
    """The heads of a model on a text.

    Attributes:
        title: the model's name.
        table: its heads, and the heads and keys of the text.
        charts: heads by layer, heads along the text by layer and of one layer, keys along the text.
        text: the tokens, each with the share of all heads that it has on.
    """

    title: str
    table: Table
    charts: list[Chart]
    text: list[tuple[str, float]]

    @property
    def page(self) -> str:
        """One HTML file without scripts and requests."""
        return html_templates().get_template("inspection.html").render(**vars(self))


def inspect_model(model: str, text: str | None = None) -> Inspection:
    """Read a text in one pass, and draw what the heads of a model (a folder or Hub id) do.

    A text is cut at the model's context; None reads the beginning of the text that Python itself ships.

    Raises:
        UserError: it is no MoH model with heads to switch off, or cannot be loaded; or the text has no tokens.
    """
    check_model(model)
    if not has_heads_off(model):
        raise UserError(f"{model} has no heads that can be off; name a model that moh-llm convert or train made")
    device = choose_device()
    network, tokenizer = load_moh(model, compute_dtype(device), device)
    config, longest = network.config, network.config.max_position_embeddings
    start = config.all_heads_until
    if text is None:
        length = min(longest, max(_TOKENS, 2 * start))
        sources = sample_mixture(EMBEDDED, tokenizer, 0, length, window=length)
        ids = validation_batches(sources, length, length, 1)[0]["input_ids"][:1]
    else:
        ids = torch.tensor([tokenizer(text, verbose=False)["input_ids"][:longest]], dtype=torch.int64)
    if not ids.numel():
        raise UserError("the text has no tokens; give more text")
    with torch.no_grad():
        on = heads_on(network, ids.to(device))[0].float().cpu()  # [layers, T, H]
    tokens = on.shape[1]
    start = start if start < tokens else 0
    load, positions = on[:, start:].mean(1), torch.arange(tokens)
    # A head that is off leaves out the distant keys.
    read = positions + 1 - (1 - on.mean((0, 2))) * distant_keys(config, positions[None])[0]
    layers, heads = load.shape
    shared = sum(map(len, config.shared_heads_per_layer))
    routed = sum(len(config.routed_heads(layer)) for layer in range(layers)) if config.router_type != "none" else 0
    never, planned = layers * heads - shared - routed, keys_read(config, tokens)
    late = f"; after the first {start:,} tokens {load.sum(1).mean():.4g}" if start else ""
    table = [
        ("heads", f"{heads} in each of {layers} layers: {shared} always on, {routed} routed, {never} never on"),
        ("planned", planned_heads(config.active_heads_per_layer, heads, config.all_heads_until)),
        ("text", f"{tokens:,} tokens" + (f"; the first {start:,} have all heads on" if start else "")),
        ("heads on", f"{on.sum(2).mean():.4g} of {heads}{late}"),
        ("keys read", f"{read.sum() / (positions + 1).sum():.1%} of the base's; planned {planned:.1%}"),
    ]
    # The layer in which most heads are on for some of the tokens.
    layer = int(((load > 0) & (load < 1)).sum(1).argmax())
    size = -(-tokens // _COLUMNS)
    along = torch.stack([part.mean(1) for part in on.split(size, 1)], 1)  # [layers, columns, H]
    shown = range(0, tokens, size)
    keys = {"all heads": positions + 1.0, "this model": read}
    curves = {name: [(at + 1, float(values[at])) for at in shown] for name, values in keys.items()}
    share, alone = "share of its heads that are on", along[layer].T.tolist()
    charts: list[Chart] = [
        HeatMap("heads", "Heads of each layer", "", load.tolist(), ("head", "layer"), "share of tokens with it on"),
        HeatMap("layers", "Layers along the text", "", along.mean(2).tolist(), ("token", "layer"), share, size),
        HeatMap("tokens", f"Layer {layer} along the text", "", alone, ("token", "head"), "1: on, 0: off", size),
        LineChart("keys", "Keys read", "", curves, Axis("token"), Axis("keys, mean over heads")),
    ]
    # What a token adds to the text of the one before: decoded alone, many tokens lose their space.
    # A character of several tokens is shown with the last of them.
    text, before, own = [], [], []
    for token, part in zip(ids[0].tolist(), on.mean((0, 2)).tolist(), strict=True):
        own.append(token)
        piece = tokenizer.decode(before + own)[len(tokenizer.decode(before)) :]
        if piece.endswith("\ufffd") and len(own) < 4:
            piece = ""
        else:
            before, own = own, []
        text.append((piece, part))
    return Inspection(model, facts(table), charts, text)
