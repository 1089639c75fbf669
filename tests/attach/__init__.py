# SPDX-License-Identifier: Apache-2.0
"""Attaching, on cheap processes."""
