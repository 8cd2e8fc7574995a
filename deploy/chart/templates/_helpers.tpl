{{- /* The labels of every object. */ -}}
{{- define "nodeproxy.labels" -}}
app.kubernetes.io/name: nodeproxy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "nodeproxy.image" -}}
{{- $digest := .Values.image.digest }}
{{- if not (or $digest .Values.image.tag) }}{{ $digest = index .Chart.Annotations "nodeproxy/image-digest" }}{{ end }}
{{- .Values.image.repository }}{{ if $digest }}@{{ $digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* The capabilities of nodeproxy's container. The legacy variant of iptables, which needs NET_RAW, needs the lock too. */ -}}
{{- define "nodeproxy.capabilities" -}}
{{- $all := list "NET_ADMIN" "NET_RAW" }}
{{- if eq .Values.config.mode "nftables" }}{{ $all = list "NET_ADMIN" }}{{ end }}
{{- toYaml (.Values.capabilities | default $all) }}
{{- end }}

{{- /* What both containers may do: these capabilities and no more. */ -}}
{{- define "nodeproxy.securityContext" -}}
privileged: false
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsUser: 0
runAsGroup: 0
capabilities:
  drop: ["ALL"]
  add:
    {{- toYaml . | nindent 4 }}
{{- end }}
