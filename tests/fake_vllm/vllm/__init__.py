# SPDX-License-Identifier: Apache-2.0
"""A fake of vLLM: the few classes that the back-port touches, leaking as 0.25.1 does. No line of it is vLLM's."""
