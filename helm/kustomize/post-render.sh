#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Puts plugin and sidecar into what another chart renders, on its way to the cluster: for charts whose values cannot say it.
# VLLM_KVFIX_DEPLOYMENTS: a regular expression of the names of the Deployments that run vLLM, as its container `vllm`; unset,
# the names that vLLM's example chart and production-stack give them.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here/patch.yaml" "$work"
cat > "$work/rendered.yaml"
cat > "$work/kustomization.yaml" <<END
resources: [rendered.yaml]
patches:
  - path: patch.yaml
    target:
      kind: Deployment
      name: '${VLLM_KVFIX_DEPLOYMENTS:-.*-deployment-vllm}'
END
kubectl kustomize "$work"
