{{/* Name of all objects: `baton-operator` for a release called `baton`, as in manifests/. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 54 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-%s-operator" (.Release.Name | trunc 48 | trimSuffix "-") .Chart.Name -}}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "baton.fullname" .) -}}
{{- end -}}

{{/* Selects the operator's pods only: pods of services have another component. A Deployment's selector is immutable. */}}
{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "baton.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* What LLMServices may request: the operator's default if `templates` is empty. */}}
{{- define "baton.templates" -}}
{{- .Values.templates | default (empty .Values.watchNamespaces | ternary "restricted" "unrestricted") -}}
{{- end -}}
