# SPDX-License-Identifier: Apache-2.0
"""The demo: a real engine under load, without the fix and with it."""
