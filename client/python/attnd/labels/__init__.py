# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.labels``: chooses the channels of a model's token labels (Double Sparsity,
AsyncTLS) over calibration texts, and writes them as a file that a server loads with
``--label-channels``.

Needs the extra "nano". ``--help`` has the arguments; docs/POLICIES.md, "Labels", says what labels
are.
"""
