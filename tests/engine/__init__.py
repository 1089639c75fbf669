# SPDX-License-Identifier: Apache-2.0
"""Engine tests: a real `vllm serve` with our built wheel beside it, under real HTTP load."""
