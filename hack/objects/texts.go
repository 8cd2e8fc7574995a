package main

// What the cluster has. Types that lack a field leave it out.

const serviceTexts = `
{"metadata": {"name": "web", "namespace": "shop", "resourceVersion": "1"}, "spec": {
  "type": "ClusterIP", "clusterIP": "10.96.0.10", "clusterIPs": ["10.96.0.10", "fd00:10:96::10"], "ipFamilies": ["IPv4", "IPv6"],
  "ipFamilyPolicy": "RequireDualStack", "internalTrafficPolicy": "Cluster", "sessionAffinity": "None", "trafficDistribution": "CLOSE",
  "selector": {"app": "web"}, "ports": [
    {"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080, "appProtocol": "kubernetes.io/h2c"},
    {"name": "metrics", "protocol": "TCP", "port": 9090, "targetPort": "metrics"}]}}
---
{"metadata": {"name": "lb", "namespace": "shop", "resourceVersion": "2"}, "spec": {
  "type": "LoadBalancer", "clusterIP": "10.96.0.11", "clusterIPs": ["10.96.0.11"], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
  "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Local", "healthCheckNodePort": 32000, "sessionAffinity": "None",
  "allocateLoadBalancerNodePorts": true, "loadBalancerClass": "example.org/lb", "loadBalancerSourceRanges": ["198.51.100.0/24"],
  "selector": {"app": "lb"}, "ports": [{"name": "https", "protocol": "TCP", "port": 443, "targetPort": 8443, "nodePort": 30443}]},
 "status": {"loadBalancer": {"ingress": [
  {"ip": "192.0.2.10", "ipMode": "VIP", "ports": [{"port": 443, "protocol": "TCP"}]}, {"ip": "192.0.2.11", "ipMode": "Proxy"}, {"hostname": "lb.example.org"}]}}}
---
{"metadata": {"name": "sticky", "namespace": "shop", "resourceVersion": "3"}, "spec": {
  "type": "NodePort", "clusterIP": "10.96.0.12", "clusterIPs": ["10.96.0.12"], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
  "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Cluster", "externalIPs": ["203.0.113.5"], "publishNotReadyAddresses": true,
  "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 600}},
  "selector": {"app": "sticky"}, "ports": [{"protocol": "UDP", "port": 53, "targetPort": 5353, "nodePort": 30053}]}}
---
{"metadata": {"name": "named", "namespace": "shop", "resourceVersion": "5"}, "spec": {
  "type": "ExternalName", "externalName": "example.org", "sessionAffinity": "None"}}
`

const sliceTexts = `
{"metadata": {"name": "web-4", "namespace": "shop", "resourceVersion": "1", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
 "ports": [{"name": "http", "protocol": "TCP", "port": 8080, "appProtocol": "kubernetes.io/h2c"}, {"name": "metrics", "protocol": "TCP", "port": 9100}], "endpoints": [
  {"addresses": ["10.244.1.10"], "conditions": {"ready": true, "serving": true, "terminating": false}, "nodeName": "node1", "zone": "a",
   "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-1"}, "hints": {"forZones": [{"name": "a"}], "forNodes": [{"name": "node1"}]}},
  {"addresses": ["10.244.2.10"], "conditions": {"ready": true, "serving": true, "terminating": false}, "nodeName": "node2", "zone": "a",
   "hints": {"forZones": [{"name": "a"}], "forNodes": [{"name": "node2"}]}},
  {"addresses": ["10.244.3.10"], "conditions": {"ready": true, "serving": true, "terminating": false}, "nodeName": "node3", "zone": "b",
   "hints": {"forZones": [{"name": "b"}], "forNodes": [{"name": "node3"}]}}]}
---
{"metadata": {"name": "web-6", "namespace": "shop", "resourceVersion": "2", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv6",
 "ports": [{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "metrics", "protocol": "TCP", "port": 9100}], "endpoints": [
  {"addresses": ["fd00:10:244:1::10"], "conditions": {"ready": true}, "nodeName": "node1", "zone": "a"},
  {"addresses": ["fd00:10:244:2::10"], "conditions": {}, "nodeName": "node2", "zone": "a"}]}
---
{"metadata": {"name": "lb-4", "namespace": "shop", "resourceVersion": "3", "labels": {"kubernetes.io/service-name": "lb"}}, "addressType": "IPv4",
 "ports": [{"name": "https", "protocol": "TCP", "port": 8443}], "endpoints": [
  {"addresses": ["10.244.1.11"], "conditions": {"ready": false, "serving": true, "terminating": true}, "nodeName": "node1", "zone": "a"},
  {"addresses": ["10.244.2.11"], "conditions": {"ready": true, "serving": true, "terminating": false}, "nodeName": "node2", "zone": "a"}]}
---
{"metadata": {"name": "sticky-4", "namespace": "shop", "resourceVersion": "4", "labels": {"kubernetes.io/service-name": "sticky"}}, "addressType": "IPv4",
 "ports": [{"name": "", "protocol": "UDP", "port": 5353}], "endpoints": [
  {"addresses": ["10.244.1.12"], "conditions": {"ready": true, "serving": false, "terminating": false}, "nodeName": "node1", "hostname": "sticky-1"},
  {"addresses": ["10.244.2.12"], "conditions": {"ready": false, "serving": false, "terminating": true}, "nodeName": "node2"}]}
`

const nodeText = `{"metadata": {"name": "node1", "resourceVersion": "1", "labels": {"kubernetes.io/hostname": "node1", "topology.kubernetes.io/zone": "a"}},
 "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]},
 "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "InternalIP", "address": "fd00:10::1"}, {"type": "Hostname", "address": "node1"}]}}`

const cidrText = `{"metadata": {"name": "kubernetes", "resourceVersion": "1"}, "spec": {"cidrs": ["10.96.0.0/16", "fd00:10:96::/112"]}}`
