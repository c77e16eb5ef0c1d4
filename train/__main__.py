"""`accelerate launch -m draftsmith.train RECIPE [section.key=value ...]`: the same code as `draftsmith train`."""

import sys

from ..cli.app import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
