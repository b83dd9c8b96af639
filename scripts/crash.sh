#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# crash.sh [--cycles N] [--seed S] [--failpoints SHARE] [--pressure SHARE] [--rebuilds SHARE]: kills a real server with
# SIGKILL N times (default 2,000) while clients of two tenants upload, decode, fork, truncate, seal, resume and drop
# sequences of every kind, at random or, in a share of the cycles (default 0.5), at a named failpoint; in a share of the
# cycles (default 0.5) with so little memory that it moves segments to disk. Checks after each start that every acknowledged
# seal is there and answers as it did, and after a share of the cycles (default: all) that attnctl finds a copy of the data
# folder whole and makes a catalogue of it that has every one of them. Prints how often each failpoint was met and
# `N cycles, 0 lost, 0 wrong`, and exits non-zero otherwise. Builds the server
# and the tools that it runs; needs the Python environment that scripts/quickstart.sh makes.
set -euo pipefail
# shellcheck source=scripts/lib/campaign.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/campaign.sh"
run_campaign crash.py "$@"
