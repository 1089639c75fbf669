# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts, made from the names in ``conventions``, so that they fit this version of the sidecar.

Its own entry point writes the files; the sidecar never imports it.
"""
