package listeners

import (
	"net/netip"

	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// hostAddresses returns the addresses in this network namespace, except those of the devices in not.
func hostAddresses(not []string) ([]netip.Addr, error) {
	list, err := host.Filter{Except: not, LinkLocal: true}.Addresses(plan.Families[:]...)
	var out []netip.Addr
	for _, a := range list {
		out = append(out, a.Addr)
	}
	return out, err
}
