# SPDX-License-Identifier: Apache-2.0
"""A real engine under load, without the fix and with it: ``vllm-kvfix demo``; its parts serve the tests as well.

The plugin never imports it.
"""
