{{/*
What to write into a pod template of your own, as a strategic merge patch of it. For charts that have this one as a
dependency (injection.mode: none), with `of` the context of that dependency:

  {{- $kvfix := include "vllm-kvfix.podTemplate" (dict "of" (index .Subcharts "vllm-kvfix") "container" "vllm"
        "service" .Release.Name) | fromYaml }}
  ...
      initContainers:
        {{- toYaml $kvfix.spec.initContainers | nindent 8 }}

Where a PYTHONPATH is set already, `pythonPath` is what stands there.
*/}}
{{- define "vllm-kvfix.podTemplate" -}}
{{- $told := include "vllm-kvfix.injection" .of | fromJson -}}
{{- $service := .service | toJson | trimPrefix "\"" | trimSuffix "\"" -}}
{{- $words := $told | toJson | replace "@CONTAINER@" .container | replace "@SERVICE@" $service | fromJson -}}
{{- $path := list $told.pythonPath .pythonPath | compact | join ":" -}}
metadata:
  labels:
    vllm-kvfix.dev/injected: "true"
  annotations:
    vllm-kvfix.dev/injected: {{ printf "%s %s" $told.version $told.profile | quote }}
spec:
  {{- if $told.shareProcessNamespace }}
  shareProcessNamespace: true
  {{- end }}
  initContainers:
    {{- toYaml $words.initContainers | nindent 4 }}
  containers:
    - name: {{ .container }}
      env:
        {{- toYaml (append $told.env (dict "name" "PYTHONPATH" "value" $path)) | nindent 8 }}
      volumeMounts:
        {{- toYaml $told.volumeMounts | nindent 8 }}
  volumes:
    {{- toYaml $told.volumes | nindent 4 }}
{{- end -}}
