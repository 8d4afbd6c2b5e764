"""What a MoH model's heads do on text, as numbers: one function for each figure or table of the paper.

Each takes a model and batches as `moh_llm.data.windows` makes them, and returns a frozen dataclass
of plain lists and numbers; `dataclasses.asdict` makes it ready for JSON. Models are measured as they
are set: within `model.all_heads_active()` every head is on.
"""
