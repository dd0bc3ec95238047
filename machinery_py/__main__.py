"""`python -m machinery_py` is `machinery`."""

from __future__ import annotations

import sys

from machinery_py.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
