"""`python -m ampatch`, the same as the command `ampatch`."""

import sys

from ampatch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
