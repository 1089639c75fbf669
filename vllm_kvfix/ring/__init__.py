# SPDX-License-Identifier: Apache-2.0
"""A bounded ring of frames in a memory-mapped file: one writer that never waits, readers that trust nothing."""
