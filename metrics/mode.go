package metrics

import (
	"maps"
	"slices"
)

// The modes of the proxy. Their metrics differ: each has what kube-proxy has in its mode of that name.
const (
	iptables = "iptables"
	ipvs     = "ipvs"
	nftables = "nftables"
)

// features are metrics that only some modes have.
type features struct {
	// partialSyncs has separate metrics for incremental and full syncs.
	partialSyncs bool
	// restores counts failed runs of iptables-restore.
	restores bool
	// chains counts rules, the packets of some of them, and failed incremental runs of iptables-restore.
	chains bool
	// transactions counts failed transactions of nftables.
	transactions bool
}

// Modes returns the names of all modes, sorted.
func Modes() []string { return slices.Sorted(maps.Keys(modes)) }

// modes has the features of each mode.
var modes = map[string]features{
	iptables: {partialSyncs: true, restores: true, chains: true},
	ipvs:     {restores: true},
	nftables: {partialSyncs: true, transactions: true},
}
