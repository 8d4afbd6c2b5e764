"""Tune a converted model, to recover the quality of its base with fewer heads.

    python train.py recipes/smollm2_recovery.yaml --model out/moh --max_steps 20
    torchrun --nproc-per-node 8 train.py recipes/moh_llama3_8b_stage2.yaml

Every key of the recipe can be overridden as ``--key value``; ``--help`` lists them. The same command resumes an
interrupted run. ``moh-llm train`` is the same command (moh_llm/commands/train.py), and `moh_llm.train` the same as a
Python function.

How a run works (moh_llm/training/loop.py), on one process or many:

1. Find the model that training begins with, and the base that its conversion names; the base is the teacher.
2. Tokenize the mixture, or open token shards; set held-out documents aside.
3. Load the student, and the newest checkpoint of an interrupted run.
4. Each step reads its sequences by their number, so that a resumed run reads what an uninterrupted one reads. The loss
   (moh_llm/training/losses.py) is the KL to the base or cross-entropy, plus the load-balance loss.
5. Every ``evaluation.eval_steps`` steps, score held-out text; every ``checkpoint.save_steps``, write a checkpoint.
6. Save the tuned model with its lineage and card, and score it as it was saved.
"""

import sys

from moh_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
