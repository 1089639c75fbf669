# SPDX-License-Identifier: Apache-2.0
"""Shows host memory and KV-cache blocks of live vLLM engines, from a process of its own."""
