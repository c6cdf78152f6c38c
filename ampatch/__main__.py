"""`python -m ampatch`, the same as the command `ampatch`."""

import sys

from ampatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
