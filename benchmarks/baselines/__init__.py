"""Methods of other papers, to be measured beside MoH; nothing of it is in the package.

`attention`: layers that `scratch.py` trains in the place of LLaMA's. `routers`: routers in place of a conversion's, for
`rivals.py` and `perplexity.py`. `streaming`, `duo` and `retrieval_heads`: ways to choose streaming heads, for
`local_plans.py`. `pressed`: compressed caches, for `long_context.py`. `images`: parts of vision transformers.
"""
