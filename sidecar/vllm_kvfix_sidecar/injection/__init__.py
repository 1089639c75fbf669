# SPDX-License-Identifier: Apache-2.0
"""Puts the plugin and the sidecar into the pods of a Kubernetes cluster: the webhook's side of the Helm chart."""
