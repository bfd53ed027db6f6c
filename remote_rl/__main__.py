"""Command line: `python -m remote_rl` is `remote-rl` (imports cli)."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
