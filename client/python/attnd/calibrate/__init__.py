# SPDX-License-Identifier: Apache-2.0
"""``python -m attnd.calibrate``: finds each policy's cheapest parameters that keep a model's
accuracy on an evaluation set, and writes them as named presets that a server can load.

A policy keeps the accuracy of a task if a one-tailed Welch t-test of its scores against those of
dense attention finds no decrease with p < 0.05 (The Sparse Frontier, section 4.2). ``--help`` has
the arguments; :mod:`attnd.calibrate.welch` says what the test's samples are.
"""
