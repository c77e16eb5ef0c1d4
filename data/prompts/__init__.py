"""The built-in prompt sets: `train.jsonl` and `heldout.jsonl`, written by `build.py` from the modules beside it."""
