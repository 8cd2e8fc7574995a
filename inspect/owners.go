package inspect

import "strings"

// owner is a program whose rules are known by the names of their chains or tables.
type owner struct {
	// prefix is how the names of its chains begin, or the name of its table, if that is true of it.
	prefix string
	table  bool
	name   string
	// admit is how it is made to admit traffic.
	admit string
}

// byPolicy is what admits traffic where the rules are made of NetworkPolicies.
const byPolicy = "see which NetworkPolicies select the Pods, and have one admit this traffic"

// byLeftovers is what helps against rules of a kube-proxy in the other variant of iptables.
const byLeftovers = "stop the kube-proxy that writes them, or remove what one has left, and what restores it at each start"

var owners = []owner{
	{"cali-", false, "Calico", byPolicy},
	{"calico", true, "Calico", byPolicy},
	{"KUBE-POD-FW-", false, "kube-router or K3s", byPolicy},
	{"KUBE-NWPLCY-", false, "kube-router or K3s", byPolicy},
	{"KUBE-ROUTER-", false, "kube-router or K3s", byPolicy},
	{"kube-network-policies", true, "kube-network-policies", byPolicy},
	{"WEAVE-NPC", false, "Weave Net", byPolicy},
	{"ANTREA-", false, "Antrea", byPolicy},
	{"CILIUM_", false, "Cilium", byPolicy},
	{"ufw", false, "ufw", "admit it: ufw allow for what comes to the node, ufw route allow for what it forwards"},
	{"firewalld", true, "firewalld", "admit it by firewall-cmd, and put the interfaces of Pods into the zone trusted"},
	{"DOCKER", false, "Docker", "accept this traffic in the chain DOCKER-USER, or keep Docker off nodes"},
	{"f2b-", false, "Fail2ban", "see why it has banned the client: fail2ban-client status"},
	{"LIBVIRT_", false, "libvirt", "accept this traffic before its chains"},
	{"KUBE-SVC-", false, "a kube-proxy", byLeftovers},
	{"KUBE-SEP-", false, "a kube-proxy", byLeftovers},
	{"KUBE-SERVICES", false, "a kube-proxy", byLeftovers},
	{"ts-", false, "Tailscale", "accept this traffic before its chains"},
}

// ownerAt returns the program that has the chain or table which place names, such as "chain cali-tw-x of table ip filter".
func ownerAt(place string) (o owner, known bool) {
	chain, table, _ := strings.Cut(strings.TrimPrefix(place, "chain "), " of table ")
	_, table, _ = strings.Cut(table, " ") // behind the family
	table, _, _ = strings.Cut(table, ",")
	for _, o := range owners {
		if o.table && table == o.prefix || !o.table && strings.HasPrefix(chain, o.prefix) {
			return o, true
		}
	}
	return owner{}, false
}
