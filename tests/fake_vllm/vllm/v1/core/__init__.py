# SPDX-License-Identifier: Apache-2.0
"""Part of a fake of vLLM."""
