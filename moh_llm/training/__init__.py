"""Continue-tuning of a converted model: recipe, schedule, objective, loop, checkpoints.

``train(load_config("recipes/smollm2_recovery.yaml", ["--model", "out/moh"]))`` is the whole of
``moh-llm train``; see `moh_llm.training.recipe` and `moh_llm.training.loop`. Nothing heavy is
imported here, so that the command's ``--help`` stays quick.
"""
