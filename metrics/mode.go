package metrics

// The modes of the proxy. Their metrics differ: each has what kube-proxy has in its mode of that name.
const (
	iptables = "iptables"
	ipvs     = "ipvs"
	nftables = "nftables"
)

// Modes returns the names of all modes, sorted.
func Modes() []string { return []string{iptables, ipvs, nftables} }
