"""`python -m retrofit`, which is also what `accelerate launch -m retrofit` starts."""

import sys

from retrofit.cli import main

if __name__ == "__main__":
    sys.exit(main())
