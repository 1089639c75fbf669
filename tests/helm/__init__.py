# SPDX-License-Identifier: Apache-2.0
"""The chart, what it injects, and the containers that come of it."""
