#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# soak.sh [--seconds S] [--seed N]: half an hour (by default) of everything at once on a real server: clients of two tenants
# with sequences of every kind under every preset, too little memory, malformed requests, slow and silent clients, kills and
# restarts. Ends with what must be left: no sequence, no stream, no file that nobody needs, memory as it was, metrics that
# agree with what clients counted, every acknowledged seal, also after attnctl has made the catalogue again. Prints
# `N sealed at the end, 0 faults`, and exits non-zero otherwise. Builds the server
# and the tools that it runs; needs the Python environment that scripts/quickstart.sh makes.
set -euo pipefail
# shellcheck source=scripts/lib/campaign.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/campaign.sh"
run_campaign soak.py "$@"
