"""Turn a pretrained LLaMA into a Mixture-of-Head model.

    python convert.py BASE --num-active-heads 7 --output out/moh
    python convert.py BASE --preset paper --output out/paper

The same as ``moh-llm convert``; ``--help`` lists the flags. The job, step by step, is
moh_llm/conversion/convert.py.
"""

import sys

from moh_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
