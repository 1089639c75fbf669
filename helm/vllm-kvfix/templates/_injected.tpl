{{/*
What is put into a pod: the one source for the policy, for the webhook, and for those who write it into their pods
themselves. A string may have @CONTAINER@ (the name of vLLM's container) and @SERVICE@ (the name of the service) in it.
*/}}

{{- define "vllm-kvfix.ringPath" -}}/run/vllm-kvfix{{- end -}}
{{- define "vllm-kvfix.pluginPath" -}}/opt/vllm-kvfix/plugin{{- end -}}

{{/* Where PYTHONPATH has to begin. The image has the plugin in the same folder that it is copied to. */}}
{{- define "vllm-kvfix.pythonPath" -}}
{{- if eq .Values.injection.delivery "imageVolume" -}}
{{- include "vllm-kvfix.pluginPath" . }}/opt/vllm-kvfix/plugin
{{- else -}}
{{- include "vllm-kvfix.pluginPath" . -}}
{{- end -}}
{{- end -}}

{{- define "vllm-kvfix.volumes" -}}
- name: vllm-kvfix-rings
  emptyDir:
    sizeLimit: {{ .Values.injection.ring.sizeLimit }}
{{- if eq .Values.injection.delivery "imageVolume" }}
- name: vllm-kvfix-plugin
  image:
    reference: {{ include "vllm-kvfix.image" . }}
    pullPolicy: {{ .Values.image.pullPolicy }}
{{- else }}
- name: vllm-kvfix-plugin
  emptyDir:
    sizeLimit: 16Mi
{{- end }}
{{- with .Values.sidecar.tokenSecret }}
- name: vllm-kvfix-token
  secret:
    secretName: {{ . }}
    optional: true
{{- end }}
{{- with .Values.otlp.caSecret }}
- name: vllm-kvfix-ca
  secret:
    secretName: {{ . }}
    optional: true
{{- end }}
{{- end -}}

{{/* Into vLLM's container. */}}
{{- define "vllm-kvfix.vllmVolumeMounts" -}}
- name: vllm-kvfix-plugin
  mountPath: {{ include "vllm-kvfix.pluginPath" . }}
  readOnly: true
- name: vllm-kvfix-rings
  mountPath: {{ include "vllm-kvfix.ringPath" . }}
{{- end -}}

{{- define "vllm-kvfix.vllmEnv" -}}
- name: VLLM_KVFIX_PATCH
  value: {{ .Values.injection.fix | quote }}
- name: VLLM_KVFIX_OBSERVE
  value: {{ .Values.injection.observe | quote }}
- name: VLLM_KVFIX_RING_DIR
  value: {{ include "vllm-kvfix.ringPath" . }}
- name: VLLM_KVFIX_RING_SIZE
  value: {{ .Values.injection.ring.size | quote }}
- name: VLLM_KVFIX_RING_MODE
  value: "644"
{{- end -}}

{{/* The init containers, in their order. */}}
{{- define "vllm-kvfix.initContainers" -}}
{{- if ne .Values.injection.delivery "imageVolume" }}
{{ include "vllm-kvfix.pluginContainer" . }}
{{- end }}
{{ include "vllm-kvfix.sidecarContainer" . }}
{{- end -}}

{{- define "vllm-kvfix.pluginContainer" -}}
- name: vllm-kvfix-plugin
  image: {{ include "vllm-kvfix.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [cp, -R, /opt/vllm-kvfix/plugin/., /target/]
  securityContext:
    {{- include "vllm-kvfix.securityContext" (list .Values.sidecar.runAsUser .Values.sidecar.runAsGroup) | nindent 4 }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - name: vllm-kvfix-plugin
      mountPath: /target
{{- end -}}

{{/*
First in line and restarted by itself: it is there before vLLM, and stays until vLLM has ended. Nothing that befalls it may
befall vLLM: Kubernetes starts no container before a startup probe of a sidecar is met, and takes a pod out of service while
a sidecar is not running. So there is no probe, and what ends is started again inside the container.
*/}}
{{- define "vllm-kvfix.sidecarContainer" -}}
- name: vllm-kvfix
  image: {{ include "vllm-kvfix.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  command:
    - sh
    - -c
    - |-
      trap 'trap - TERM; kill $!; wait $!; exit 0' TERM
      while :; do
        vllm-kvfix "$@" &
        wait $!
        sleep 10 &
        wait $!
      done
    - vllm-kvfix
  args:
    - sidecar
    - --listen=0.0.0.0:{{ .Values.sidecar.port }}
    - --log-format={{ .Values.sidecar.logFormat }}
    - --log-level={{ .Values.sidecar.logLevel }}
    {{- if .Values.sidecar.tokenSecret }}
    - --token-file=/etc/vllm-kvfix/token/{{ .Values.sidecar.tokenKey }}
    {{- end }}
  env:
    {{- include "vllm-kvfix.sidecarEnv" . | nindent 4 }}
  ports:
    - name: kvfix-metrics
      containerPort: {{ .Values.sidecar.port }}
      protocol: TCP
  securityContext:
    {{- if eq .Values.injection.profile "ptrace" }}
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    runAsNonRoot: false
    runAsUser: 0
    runAsGroup: 0
    capabilities:
      drop: [ALL]
      # The first to read them; the others to meet the code of `attach` in a folder of a vLLM that is not root.
      add: [SYS_PTRACE, CHOWN, DAC_OVERRIDE]
    seccompProfile:
      type: RuntimeDefault
    {{- else }}
    {{- include "vllm-kvfix.securityContext" (list .Values.sidecar.runAsUser .Values.sidecar.runAsGroup) | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.sidecar.resources | nindent 4 }}
  volumeMounts:
    - name: vllm-kvfix-rings
      mountPath: {{ include "vllm-kvfix.ringPath" . }}
    {{- if .Values.sidecar.tokenSecret }}
    - name: vllm-kvfix-token
      mountPath: /etc/vllm-kvfix/token
      readOnly: true
    {{- end }}
    {{- if .Values.otlp.caSecret }}
    - name: vllm-kvfix-ca
      mountPath: /etc/vllm-kvfix/ca
      readOnly: true
    {{- end }}
{{- end -}}

{{- define "vllm-kvfix.sidecarEnv" -}}
- name: VLLM_KVFIX_RING_DIR
  value: {{ include "vllm-kvfix.ringPath" . }}
# vLLM may be any user, and nobody but the pod's containers has this folder.
- name: VLLM_KVFIX_RING_OWNER
  value: anybody
- name: K8S_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: K8S_POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: K8S_NAMESPACE_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: K8S_NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: OTEL_SERVICE_NAME
  value: "@SERVICE@"
- name: OTEL_RESOURCE_ATTRIBUTES
  value: "k8s.pod.name=$(K8S_POD_NAME),k8s.pod.uid=$(K8S_POD_UID),k8s.namespace.name=$(K8S_NAMESPACE_NAME),k8s.node.name=$(K8S_NODE_NAME),k8s.container.name=@CONTAINER@"
{{- with .Values.otlp.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_EXPORTER_OTLP_PROTOCOL
  value: {{ $.Values.otlp.protocol }}
{{- end }}
{{- with .Values.otlp.headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.otlp.headersKey }}, optional: true}}
{{- end }}
{{- if .Values.otlp.caSecret }}
- name: OTEL_EXPORTER_OTLP_CERTIFICATE
  value: /etc/vllm-kvfix/ca/{{ .Values.otlp.caKey }}
{{- end }}
{{- with .Values.sidecar.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* All of it as one JSON object: what the webhook reads and the policy is made of; see injection.py for the keys. */}}
{{- define "vllm-kvfix.injection" -}}
{{- $init := include "vllm-kvfix.initContainers" . | fromYamlArray -}}
{{- dict
  "version" .Chart.AppVersion
  "profile" .Values.injection.profile
  "select" .Values.injection.select
  "containerNames" .Values.injection.containerNames
  "pythonPath" (include "vllm-kvfix.pythonPath" .)
  "shareProcessNamespace" (ne .Values.injection.profile "minimal")
  "volumes" (include "vllm-kvfix.volumes" . | fromYamlArray)
  "initContainers" $init
  "volumeMounts" (include "vllm-kvfix.vllmVolumeMounts" . | fromYamlArray)
  "env" (include "vllm-kvfix.vllmEnv" . | fromYamlArray)
  | toJson -}}
{{- end -}}
