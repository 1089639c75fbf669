{{/*
A value as a CEL expression. Map literals of CEL must be of one type, so everything in them is wrapped in dyn();
@CONTAINER@ and @SERVICE@ become the policy's variables.
*/}}
{{- define "vllm-kvfix.cel" -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha -}}
{{- if $i }}, {{ end -}}
{{ toJson $key }}: dyn({{ include "vllm-kvfix.cel" (index $ $key) }})
{{- end -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $i, $item := . -}}
{{- if $i }}, {{ end -}}
dyn({{ include "vllm-kvfix.cel" $item }})
{{- end -}} ]
{{- else if kindIs "string" . -}}
{{ toJson . | replace "@CONTAINER@" "\" + variables.target + \"" | replace "@SERVICE@" "\" + variables.service + \"" }}
{{- else -}}
{{ toJson . }}
{{- end -}}
{{- end -}}
