# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.report``: measures every preset with several budgets, keeps the figures as
JSON, makes the tables and plots of docs/QUALITY.md of them, and checks them against figures that
were computed apart from this project. ``--help`` has the arguments."""
