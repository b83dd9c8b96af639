# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.labels``."""

import sys

from attnd.labels.cli import main

if __name__ == "__main__":
    sys.exit(main())
