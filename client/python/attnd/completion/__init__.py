# SPDX-License-Identifier: Apache-2.0
"""Feature maps for the policy topk-completion: `python -m attnd.completion.train` makes them.

Needs the extra "completion" (PyTorch); nothing else of attnd does.
"""
