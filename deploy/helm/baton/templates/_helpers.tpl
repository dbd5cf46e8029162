{{- define "baton.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "baton.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "baton.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "baton.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "baton.modelName" -}}
{{- default (.Values.model.path | base | trimSuffix ".gguf") .Values.model.name -}}
{{- end -}}

{{/* Labels that select: (dict "root" $ "component" "prefill"). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ include "baton.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Labels of pods: those above and what endpoint pickers look for. (dict "root" "component" "role") */}}
{{- define "baton.podLabels" -}}
{{ include "baton.labels" . }}
llm-d.ai/engine-type: baton
llm-d.ai/inference-serving: "true"
llm-d.ai/model: {{ include "baton.modelName" .root | trunc 63 | quote }}
{{- with .role }}
llm-d.ai/role: {{ . }}
{{- end }}
{{- end -}}

{{/* Seconds of loading to be waited for: a minute to start, and the weights at the slowest speed. */}}
{{- define "baton.loadSeconds" -}}
{{- add 60 (divf (float64 .Values.model.sizeGiB) (float64 .Values.model.minLoadGiBPerSecond) | ceil | int) -}}
{{- end -}}

{{/* Probes: (dict "root" $ "port" 50081 "ready" "baton.v1.Generation" "load" true) */}}
{{- define "baton.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}, service: {{ .started | quote }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ if .load }}{{ divf (include "baton.loadSeconds" .root | float64) 5 | ceil | int }}{{ else }}12{{ end }}
livenessProbe:
  grpc: {port: {{ .port }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ .port }}, service: {{ .ready | quote }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 3
{{- end -}}

{{/* What all containers have in common. */}}
{{- define "baton.container" -}}
image: {{ include "baton.image" .root | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- $context := deepCopy .root.Values.securityContext }}
  {{- if and .root.Values.rdma.enabled .worker }}
  {{- $_ := set $context.capabilities "add" (list "IPC_LOCK") }}
  {{- end }}
  {{- toYaml $context | nindent 2 }}
lifecycle:
  preStop:
    sleep: {seconds: {{ .root.Values.preStopSeconds }}}
terminationMessagePolicy: FallbackToLogsOnError
{{- end -}}

{{/* Flags of TLS, of a port and of calls to workers: (dict "root" $ "clientCa" true) */}}
{{- define "baton.tlsArgs" -}}
{{- if .root.Values.tls.enabled -}}
- --tls-cert=/etc/baton/tls/tls.crt
- --tls-key=/etc/baton/tls/tls.key
{{- if .clientCa }}
- --tls-client-ca=/etc/baton/tls/ca.crt
{{- end }}
- --tls-ca=/etc/baton/tls/ca.crt
- --tls-server-name={{ .root.Values.tls.serverName }}
{{- else -}}
- --allow-plaintext
{{- end -}}
{{- end -}}

{{- define "baton.volumeMounts" -}}
volumeMounts:
  - {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  {{- if .Values.tls.enabled }}
  - {name: tls, mountPath: /etc/baton/tls, readOnly: true}
  {{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
volumes:
  - name: model
    {{- toYaml (default (dict "persistentVolumeClaim" (dict "claimName" "baton-model" "readOnly" true)) .Values.model.volume) | nindent 4 }}
  - name: tmp
    emptyDir: {sizeLimit: 64Mi}
  {{- if .Values.tls.enabled }}
  - name: tls
    secret: {secretName: {{ .Values.tls.secretName }}, defaultMode: 0440}
  {{- end }}
{{- end -}}

{{/* What all pods have in common: (dict "root" "values" "component") */}}
{{- define "baton.podSpec" -}}
serviceAccountName: {{ include "baton.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* One worker's container: (dict "root" "role" "values" "offset" 0 "drain" 150 "claim" "gpus" or "" "visible" "0,1") */}}
{{- define "baton.worker" -}}
{{- $v := .root.Values -}}
{{- $ports := $v.ports -}}
{{- $grpc := add $ports.worker .offset -}}
{{- $health := add $ports.health .offset -}}
{{- $metrics := add $ports.metrics .offset -}}
name: {{ .role }}
{{ include "baton.container" (dict "root" .root "worker" true) }}
command: [baton-{{ .role }}]
args:
  - --model={{ $v.model.path }}
  - --served-model-name={{ include "baton.modelName" .root }}
  - --listen=0.0.0.0:{{ $grpc }}
  {{- include "baton.tlsArgs" (dict "root" .root "clientCa" true) | nindent 2 }}
  - --http-port={{ $metrics }}
  - --health-port={{ $health }}
  - --device={{ $v.device }}
  - --weight-dtype={{ $v.model.weightDtype }}
  - --kv-dtype={{ $v.model.kvDtype }}
  - --kv-cache-bytes={{ .values.kvCacheBytes | int64 }}
  - --max-model-len={{ $v.model.maxModelLen | int }}
  - --chunk-tokens={{ .values.chunkTokens | int }}
  - --threads={{ .values.threads | int }}
  {{- if gt (int .values.tp) 1 }}
  - --tp={{ .values.tp | int }}
  {{- end }}
  - --kv-transport={{ $v.kvTransport }}
  {{- if eq .role "decode" }}
  - --max-batch={{ .values.maxBatch | int }}
  - --kv-listen=0.0.0.0:{{ $ports.kv }}
  - --kv-advertise-host=$(POD_IP)
  {{- if $v.tls.enabled }}
  - --allow-plaintext-kv
  {{- end }}
  {{- end }}
  - --drain-timeout={{ .drain }}s
  - --metrics-compat={{ $v.metricsCompat }}
  - --log-level={{ $v.logLevel }}
  {{- range .values.extraArgs }}
  - {{ . | quote }}
  {{- end }}
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  {{- if .visible }}
  # Both containers see all devices of the pod; the first in the list is a worker's own.
  - {name: CUDA_VISIBLE_DEVICES, value: {{ .visible | quote }}}
  {{- end }}
  {{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {name: {{ if .offset }}grpc-{{ .role }}{{ else }}grpc{{ end }}, containerPort: {{ $grpc }}}
  - {name: {{ if .offset }}health-{{ .role }}{{ else }}health{{ end }}, containerPort: {{ $health }}}
  - {name: {{ if .offset }}metrics-{{ .role }}{{ else }}metrics{{ end }}, containerPort: {{ $metrics }}}
  {{- if eq .role "decode" }}
  - {name: kv, containerPort: {{ $ports.kv }}}
  {{- if eq $v.kvTransport "nccl" }}
  - {name: kv-nccl, containerPort: {{ add $ports.kv 1 }}}
  {{- end }}
  {{- end }}
{{ include "baton.probes" (dict "root" .root "port" $health "started" "readiness" "ready" "readiness" "load" true) }}
{{- $resources := deepCopy .values.resources }}
{{- if and (eq $v.device "cuda") (not .claim) }}
{{- $limits := default (dict) $resources.limits }}
{{- $_ := set $limits $v.gpuResourceName (.values.gpus | int) }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
{{- if $v.rdma.enabled }}
{{- $limits := default (dict) $resources.limits }}
{{- $_ := set $limits $v.rdma.resourceName ($v.rdma.quantity | int) }}
{{- $_ := set $resources "limits" $limits }}
{{- end }}
resources:
  {{- toYaml $resources | nindent 2 }}
  {{- if .claim }}
  claims: [{name: {{ .claim }}}]
  {{- end }}
{{ include "baton.volumeMounts" .root }}
{{- end -}}

{{/* How many workers of a role the router is told of: with autoscaling as many as there may ever be. */}}
{{- define "baton.slots" -}}
{{- if .values.autoscaling.enabled }}{{ .values.autoscaling.maxReplicas | int }}{{ else }}{{ .values.replicas | int }}{{ end -}}
{{- end -}}

{{/* Addresses of one role's workers, with commas. */}}
{{- define "baton.addresses" -}}
{{- $full := include "baton.fullname" .root -}}
{{- $v := .root.Values -}}
{{- $list := list -}}
{{- if eq $v.layout "split" -}}
{{- $slots := include "baton.slots" (dict "values" (get $v .role)) | int -}}
{{- range $i := until $slots -}}
{{- $list = append $list (printf "%s-%s-%d.%s-%s:%d" $full $.role $i $full $.role (int $v.ports.worker)) -}}
{{- end -}}
{{- else if eq $v.layout "slice" -}}
{{- $port := add $v.ports.worker (ternary 0 1 (eq .role "prefill")) -}}
{{- range $i := until (int $v.pairs.replicas) -}}
{{- $list = append $list (printf "%s-slice-%d.%s-slice:%d" $full $i $full (int $port)) -}}
{{- end -}}
{{- else -}}
{{- range $i := until (int $v.pairs.replicas) -}}
{{- $pod := ternary (printf "%s-pair-%d" $full $i) (printf "%s-pair-%d-1" $full $i) (eq $.role "prefill") -}}
{{- $list = append $list (printf "%s.%s-pair:%d" $pod $full (int $v.ports.worker)) -}}
{{- end -}}
{{- end -}}
{{- join "," $list -}}
{{- end -}}
