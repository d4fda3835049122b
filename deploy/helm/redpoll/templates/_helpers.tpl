{{- define "redpoll.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "redpoll.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "redpoll.labels" -}}
{{ include "redpoll.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* "true" if the pods form a cluster, else empty. */}}
{{- define "redpoll.cluster" -}}
{{- if kindIs "bool" .Values.cluster }}{{ if .Values.cluster }}true{{ end }}{{ else if .Values.redis.url }}true{{ end }}
{{- end }}

{{/* "true" if there may be more than one pod, else empty. */}}
{{- define "redpoll.several" -}}
{{- if include "redpoll.cluster" . }}{{ if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}true{{ end }}{{ end }}
{{- end }}

{{/* Fails if `settings` or `secretSettings` has what the chart sets, or an address that no probe or Service reaches, and if
`existingSecret` is a Secret that the chart makes: Helm would take it over. */}}
{{- define "redpoll.refused" -}}
{{- $own := dict
  "port" "service.port is the port of the Service"
  "control_port" "it is always 9601"
  "tls_port" "tls.secret opens it, and tls.port is the port of the Service"
  "tls_cert" "use tls.secret"
  "tls_key" "use tls.secret"
  "tls_client_ca" "use tls.clientCaSecret"
  "data_dir" "persistence has the volume"
  "node_name" "it is the name of the pod"
  "shutdown_grace_s" "use drain.graceSeconds" }}
{{- range $place := list "settings" "secretSettings" }}
{{- range $name, $value := index $.Values $place }}
{{- if hasKey $own $name }}{{ fail (printf "%s.%s is set by the chart: %s" $place $name (index $own $name)) }}{{ end }}
{{- if and (has $name (list "host" "control_host")) (regexMatch "^(127\\..*|localhost|::1)$" (toString $value)) }}{{ fail (printf "%s.%s is a loopback address, which no probe or Service reaches: networkPolicy says who may connect" $place $name) }}{{ end }}
{{- end }}
{{- end }}
{{- $name := include "redpoll.name" . }}
{{- if or (and (include "redpoll.secrets" .) (eq .Values.existingSecret $name)) (and .Values.apps (eq .Values.existingSecret (printf "%s-apps" $name))) }}
{{- fail (printf "existingSecret is %s, the name of a Secret of the chart: give yours another name" .Values.existingSecret) }}
{{- end }}
{{- end }}

{{/* Environment variables, base64-encoded, of the settings that are secret. */}}
{{- define "redpoll.secrets" -}}
{{- range $name, $value := .Values.secretSettings }}
{{ printf "REDPOLL_%s" (upper $name) }}: {{ $value | toString | b64enc | quote }}
{{- end }}
{{- with .Values.redis.url }}
REDPOLL_REDIS_URL: {{ . | b64enc | quote }}
{{- end }}
{{- with .Values.database.url }}
REDPOLL_DATABASE_URL: {{ . | b64enc | quote }}
{{- end }}
{{- end }}

{{/* env and envFrom of every container. */}}
{{- define "redpoll.environment" -}}
env:
  - name: REDPOLL_NODE_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  # A folder in the volume, which redpoll creates with mode 0700.
  - name: REDPOLL_DATA_DIR
    value: /data/redpoll
  - name: REDPOLL_SHUTDOWN_GRACE_S
    value: {{ .Values.drain.graceSeconds | quote }}
  {{- if .Values.tls.secret }}
  - name: REDPOLL_TLS_PORT
    value: "6002"
  - name: REDPOLL_TLS_CERT
    value: /etc/redpoll/tls
  {{- end }}
  {{- if .Values.tls.clientCaSecret }}
  - name: REDPOLL_TLS_CLIENT_CA
    value: /etc/redpoll/client-ca/ca.crt
  {{- end }}
  {{- range $name, $value := .Values.settings }}
  - name: {{ printf "REDPOLL_%s" (upper $name) }}
    value: {{ if kindIs "slice" $value }}{{ join "," $value | quote }}{{ else if kindIs "float64" $value }}{{ if eq (floor $value) $value }}{{ printf "%.0f" $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}{{ else }}{{ $value | toString | quote }}{{ end }}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or (include "redpoll.secrets" .) .Values.existingSecret }}
envFrom:
  {{- if include "redpoll.secrets" . }}
  - secretRef:
      name: {{ include "redpoll.name" . }}
  {{- end }}
  {{- with .Values.existingSecret }}
  - secretRef:
      name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}
