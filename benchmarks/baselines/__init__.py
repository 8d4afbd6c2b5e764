"""Attention of other papers, to be trained beside MoH by `benchmarks/scratch.py`; nothing of it is in the package.

Each module has one attention layer, which takes the place of LLaMA's: `moa`, `switchhead`, `static`.
`layers` has what they share. They train and score whole sequences: there is no cache. Projections of experts that a
token does not select are computed and left out; `multiply_adds` counts what a token needs. `images` has parts of vision
transformers, for `benchmarks/vision.py`.
"""
