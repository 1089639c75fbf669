# SPDX-License-Identifier: Apache-2.0
"""Contract tests: the real scheduler of every release, without and with the back-port, without a GPU."""
