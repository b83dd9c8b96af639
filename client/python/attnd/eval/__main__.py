# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.eval``."""

import sys

from attnd.eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
