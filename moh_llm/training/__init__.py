"""Continue-tuning of a converted model: `moh_llm.training.loop.train` is the whole of ``moh-llm train``.

Nothing heavy is imported here, so that the command's ``--help`` stays quick.
"""
