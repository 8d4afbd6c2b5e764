"""Convert a pretrained LLaMA checkpoint into a Mixture-of-Head model.

    python convert.py BASE --num-active-heads 7 --output-dir out/moh
    python convert.py BASE --preset paper --output-dir out/paper
    python convert.py recipes/convert_llama3_8b.yaml --num_active_heads 24

``--help`` lists the flags; a YAML recipe holds the same ones. ``moh-llm convert`` is the same command
(moh_llm/commands/convert.py: flags, `run`, what is printed), and `moh_llm.convert` the same as a Python function.

How `moh_llm.convert` works (moh_llm/conversion/convert.py), with one layer of the model in memory at a time:

1. Open the base: its config, the list of its weights, its tokenizer. Impossible head counts are refused here.
2. Tokenize the calibration text, and set held-out documents aside.
3. Calibrate: per layer, fit router and fallbacks in closed form to the base's attention outputs, and estimate what
   each number of active heads costs. No weight of the base changes.
4. Plan: give each layer the number of active heads that loses least in total.
5. Write the base's tensors as they are, the new ones beside them, and the code that transformers loads the model with.
6. Verify: with all heads on, each layer equals the base's bit for bit; perplexity and KL to the base on held-out text.
"""

import sys

from moh_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
