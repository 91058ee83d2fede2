{{- define "tensorferry.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "tensorferry.selector" -}}
app.kubernetes.io/name: tensorferry
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tensorferry.labels" -}}
{{ include "tensorferry.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "tensorferry.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "tensorferry.fullname" .) }}
{{- else -}}
{{ required "serviceAccount.name is empty: name your ServiceAccount, or let serviceAccount.create be true" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "tensorferry.image" -}}
{{- $device := ternary "cuda" "cpu" .Values.gpu.enabled -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $device) }}
{{- end -}}
{{- end -}}

{{- define "tensorferry.claim" -}}
{{ .Values.models.claim.existing | default (printf "%s-models" (include "tensorferry.fullname" .)) }}
{{- end -}}

{{- /* The protocol of the Services' port, for gateways and meshes. */ -}}
{{- define "tensorferry.appProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" (not (empty .Values.tls.secret)) }}
{{- end -}}

{{- /* The rights of each container. */ -}}
{{- define "tensorferry.hardened" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* A probe, given as (dict "root" $ "path" PATH "service" SERVICE). The kubelet's gRPC probes have no TLS, so a
server with TLS is probed on the metrics port, which reports the same health. */ -}}
{{- define "tensorferry.probe" -}}
{{- if .root.Values.tls.secret -}}
httpGet:
  port: metrics
  path: {{ .path }}
{{- else -}}
grpc:
  port: 8001
  service: {{ .service }}
{{- end -}}
{{- end -}}

{{- /* Whether values go together. */ -}}
{{- define "tensorferry.check" -}}
{{- if and .Values.auth.tokensSecret (not .Values.tls.secret) -}}
{{- fail (printf "auth.tokensSecret is %q without tls.secret: tokens need TLS, so name the Secret of a certificate" .Values.auth.tokensSecret) -}}
{{- end -}}
{{- if and .Values.tls.clientCertificates (not .Values.tls.secret) -}}
{{- fail "tls.clientCertificates is true without tls.secret: name the Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (eq .Values.autoscaling.kind "ScaledObject") (not .Values.monitoring.enabled) -}}
{{- fail "autoscaling.kind is ScaledObject without monitoring.enabled: Prometheus needs the servers' metrics" -}}
{{- end -}}
{{- end -}}
