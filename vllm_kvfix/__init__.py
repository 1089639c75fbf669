# SPDX-License-Identifier: Apache-2.0
"""Fixes the host-memory leak of vLLM 0.17.1 to 0.25.1 where vLLM cannot be upgraded."""

__version__ = "0.1.0"
