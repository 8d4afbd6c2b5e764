"""Continue-tune a converted model.

    python train.py recipes/smollm2_recovery.yaml --model out/moh --max_steps 20

Every key of the recipe can be overridden as ``--key value``; ``--help`` lists them. The same as
``moh-llm train``; the work is done by `moh_llm.training.loop.train`, which reads top to bottom.
"""

import sys

from moh_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
