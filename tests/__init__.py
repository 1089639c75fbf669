# SPDX-License-Identifier: Apache-2.0
"""The tests; contract/ and engine/ run real vLLM, the rest reads its sources or uses the fake in fake_vllm/."""
