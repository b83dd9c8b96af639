# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.report``."""

import sys

from attnd.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
