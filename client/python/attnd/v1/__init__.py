# SPDX-License-Identifier: Apache-2.0
"""Generated messages and stubs of proto/attnd/v1; scripts/generate_python_stubs.sh makes them."""
