# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.eval``: lets a real model answer questions over long texts through attnd, and
compares with local dense attention. docs/QUALITY.md has the figures; ``--help`` the arguments."""
