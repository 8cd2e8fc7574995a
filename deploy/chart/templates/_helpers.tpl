{{- /* The labels of every object. */ -}}
{{- define "nodeproxy.labels" -}}
app.kubernetes.io/name: nodeproxy
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "nodeproxy.image" -}}
{{- $name := "[a-z0-9]+([._-]+[a-z0-9]+)*" }}
{{- if not (regexMatch (printf `^(([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:[0-9]+)?/)?%s(/%s)*$` $name $name) .Values.image.repository) }}{{ fail (printf "image.repository is %q; it must be the name of a repository alone, such as registry.example.org/nodeproxy: a tag belongs in image.tag, a digest in image.digest" .Values.image.repository) }}{{ end }}
{{- $digest := .Values.image.digest }}
{{- if not (or $digest .Values.image.tag) }}{{ $digest = index .Chart.Annotations "nodeproxy/image-digest" }}{{ end }}
{{- .Values.image.repository }}{{ if $digest }}@{{ $digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* The mode: that of the value config, or of an existing ConfigMap. */ -}}
{{- define "nodeproxy.mode" -}}
{{- $e := .Values.existingConfigMap }}
{{- if not $e.name }}{{ .Values.config.mode }}
{{- else }}
  {{- $mode := $e.mode }}
  {{- $found := lookup "v1" "ConfigMap" .Release.Namespace $e.name }}
  {{- if $found }}
    {{- $file := index (default dict $found.data) $e.key }}
    {{- if not $file }}{{ fail (printf "ConfigMap %s/%s has no key %s; set existingConfigMap.key" .Release.Namespace $e.name $e.key) }}{{ end }}
    {{- if and $e.kubeconfigKey (not (hasKey $found.data $e.kubeconfigKey)) }}{{ fail (printf "ConfigMap %s/%s has no key %s; set existingConfigMap.kubeconfigKey" .Release.Namespace $e.name $e.kubeconfigKey) }}{{ end }}
    {{- $mode = (fromYaml $file).mode | default "iptables" }}
    {{- if not (has $mode (list "iptables" "ipvs" "nftables")) }}{{ fail (printf "ConfigMap %s/%s has mode %s, which nodeproxy does not have" .Release.Namespace $e.name $mode) }}{{ end }}
    {{- if and $e.mode (ne $e.mode $mode) }}{{ fail (printf "existingConfigMap.mode is %s, and ConfigMap %s/%s has %s" $e.mode .Release.Namespace $e.name $mode) }}{{ end }}
  {{- else if not $mode }}{{ fail (printf "there is no ConfigMap %s/%s, or no cluster to ask; existingConfigMap.mode must name its mode" .Release.Namespace $e.name) }}
  {{- end }}
  {{- $mode }}
{{- end }}
{{- end }}

{{- /* Where the flags of both containers take the configuration from. What the pods are made for, they keep when an existing
ConfigMap changes: probes that ask at another port, or a mode without its capabilities, would be an outage. */ -}}
{{- define "nodeproxy.configFlags" -}}
- --config=/etc/nodeproxy/config.yaml
{{- if .Values.existingConfigMap.name }}
- --proxy-mode={{ include "nodeproxy.mode" . }}
- --healthz-bind-address={{ .Values.config.healthzBindAddress }}
- --metrics-bind-address={{ .Values.config.metricsBindAddress }}
{{- end }}
{{- end }}

{{- /* "true" if only programs on the node reach an address. An IPv6 address can be written in several ways. */ -}}
{{- define "nodeproxy.loopback" -}}
{{- if regexMatch `^(127\.|\[[0:]*:(0{0,3}1\]|[Ff]{4}:(127\.|7[Ff][0-9A-Fa-f]{2}:)))` . }}true{{ end }}
{{- end }}

{{- /* The port of the probes. They ask the node's address. */ -}}
{{- define "nodeproxy.healthzPort" -}}
{{- $at := .Values.config.healthzBindAddress }}
{{- $port := regexFind "[0-9]+$" $at }}
{{- if include "nodeproxy.loopback" $at }}{{ fail (printf "config.healthzBindAddress is %q, where the kubelet's probes can't reach nodeproxy, so that it would be restarted again and again; set it to 0.0.0.0:%s, or [::]:%s where nodes have no IPv4" $at $port $port) }}{{ end }}
{{- $port }}
{{- end }}

{{- /* What nodeproxy puts between https:// and the port, with brackets of its own around an IPv6 address. */ -}}
{{- define "nodeproxy.apiServerHost" -}}
{{- $host := .Values.apiServer.host }}
{{- if not (regexMatch `^([^][:]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)$` $host) }}{{ fail (printf "apiServer.host is %q; it must be a name or an address alone: the port belongs in apiServer.port, and an IPv6 address has no brackets here" $host) }}{{ end }}
{{- $host }}
{{- end }}

{{- define "nodeproxy.serviceAccount" -}}
{{- if not (or .Values.serviceAccount.create .Values.serviceAccount.name) }}{{ fail "serviceAccount.name must name the one to use, since serviceAccount.create is false" }}{{ end }}
{{- .Values.serviceAccount.name | default "nodeproxy" }}
{{- end }}

{{- /* The port of metrics, for monitors: one that can be reached from elsewhere. */ -}}
{{- define "nodeproxy.metricsPort" -}}
{{- $at := .Values.config.metricsBindAddress | default "" }}
{{- if or (not $at) (include "nodeproxy.loopback" $at) }}{{ fail (printf "config.metricsBindAddress is %q, which Prometheus can't reach; the comment on it in values.yaml says what to consider before it is 0.0.0.0:10249" $at) }}{{ end }}
{{- regexFind "[0-9]+$" $at }}
{{- end }}

{{- /* The capabilities of nodeproxy's container. The legacy variant of iptables, which needs NET_RAW, needs the lock too. */ -}}
{{- define "nodeproxy.capabilities" -}}
{{- $all := list "NET_ADMIN" "NET_RAW" }}
{{- if eq (include "nodeproxy.mode" .) "nftables" }}{{ $all = list "NET_ADMIN" }}{{ end }}
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
