# SPDX-License-Identifier: Apache-2.0
"""The sidecar against what stands around it: engines, OTLP receivers, a Prometheus server, and all their failures."""
