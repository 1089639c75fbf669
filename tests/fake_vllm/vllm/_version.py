# SPDX-License-Identifier: Apache-2.0
"""The version that the fake gives itself."""

__version__ = version = "0.25.1"
