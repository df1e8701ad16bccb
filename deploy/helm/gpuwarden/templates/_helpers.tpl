{{- define "gpuwarden.selector" -}}
app.kubernetes.io/name: gpuwarden
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gpuwarden.labels" -}}
{{ include "gpuwarden.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Not a default in values.yaml: Helm would add it to the labels that a user sets. */}}
{{- define "gpuwarden.nodes" -}}
{{ .Values.nodeSelector | default (dict "nvidia.com/gpu.present" "true") | toJson }}
{{- end }}

{{- /* Labels of a target: its node instead of the daemon's pod, as metrics have a pod and a container of their own. */}}
{{- define "gpuwarden.endpoint" -}}
- port: http
  interval: {{ .Values.monitor.interval }}
  relabelings:
    - sourceLabels: [__meta_kubernetes_pod_node_name]
      targetLabel: instance
    - action: labeldrop
      regex: pod|container|endpoint|service
{{- end }}
