# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.calibrate``."""

import sys

from attnd.calibrate.cli import main

if __name__ == "__main__":
    sys.exit(main())
