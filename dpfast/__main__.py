"""``python -m dpfast``: info, explain, bench, demo."""

import sys

from dpfast.commands import main

if __name__ == "__main__":
    sys.exit(main())
