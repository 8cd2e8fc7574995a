package metrics

// The proxy modes.
const (
	iptables = "iptables"
	ipvs     = "ipvs"
	nftables = "nftables"
)

// features are what only some modes count. A mode has the metrics that kube-proxy has in its mode of that name.
type features struct {
	// partialSyncs is set if syncs that write only what has changed are told from those that compare everything.
	partialSyncs bool
	// restores is set if runs of iptables-restore are counted.
	restores bool
	// chains is set if all rules are those of iptables: single changes among the runs, rules, and packets of some rules are counted.
	chains bool
	// transactions is set if transactions of nftables are counted.
	transactions bool
}

// modes has the features of each mode.
var modes = map[string]features{
	iptables: {partialSyncs: true, restores: true, chains: true},
	ipvs:     {restores: true},
	nftables: {partialSyncs: true, transactions: true},
}
