# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts: their names, their shape, and what a real Prometheus makes of them."""
