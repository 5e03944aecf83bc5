"""``python -m estr``."""

import sys

from estr.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
