// Package deploy has the manifests of this directory, for "nodeproxy install".
package deploy

import "embed"

// Files are the manifests of all modes, and what overlays change for a mode.
//
//go:embed base/rbac.yaml base/daemonset.yaml overlays/ipvs/daemonset.yaml overlays/nftables/daemonset.yaml cleanup/daemonset.yaml
var Files embed.FS
