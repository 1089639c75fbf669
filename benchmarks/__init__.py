# SPDX-License-Identifier: Apache-2.0
"""Each figure that the README claims, as one command."""
