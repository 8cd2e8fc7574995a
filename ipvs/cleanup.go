package ipvs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"nodeproxy/ipvs/nftrules"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Leftovers reports whether mode ipvs, this program's or kube-proxy's, has left objects on this node: the device, nftables tables,
// routing rules, or sets.
func Leftovers() (bool, error) {
	list, err := leftovers()
	if len(list) > 0 {
		return true, nil
	}
	return false, err
}

// leftovers lists them, one line each, as far as they can be read.
func leftovers() (out []string, err error) {
	if host.DeviceExists(names.Device) {
		out = append(out, "device "+names.Device)
	}
	guards, err := nftrules.GuardTables()
	if err != nil {
		return out, err
	}
	for _, f := range guards {
		out = append(out, fmt.Sprintf("nftables table %s (%s)", names.IPVSMarks, f))
	}
	ports, err := nftrules.PortsFamilies()
	if err != nil {
		return out, err
	}
	for _, f := range ports {
		out = append(out, fmt.Sprintf("nftables table %s and the routing rule for table %d (%s)", names.IPVSPorts, names.PortsRouteTable, f))
	}
	err = eachSet(func(_ *ipset.Sets, name string) error {
		out = append(out, "ipset "+name)
		return nil
	})
	return out, err
}

// eachSet calls do with each set of mode ipvs.
func eachSet(do func(s *ipset.Sets, name string) error) error {
	s, err := ipset.OpenSets()
	if err != nil {
		return nil // A kernel without ipsets has none.
	}
	defer s.Close()
	list, err := s.Names()
	errs := []error{err}
	for _, name := range list {
		if names.IsOurSet(name) {
			errs = append(errs, do(s, name))
		}
	}
	return errors.Join(errs...)
}

// Cleaner removes what mode ipvs has left, once the rules of another mode no longer lead new connections to it.
type Cleaner struct {
	// ExcludeCIDRs are ranges whose virtual servers belong to other programs.
	ExcludeCIDRs []netip.Prefix
	// GracePeriod is how long virtual servers with connections are kept; zero removes all at once.
	GracePeriod time.Duration
	// MasqueradeBit is the bit that mode ipvs used.
	MasqueradeBit int
	Log           *slog.Logger
}

// Run removes virtual servers as their connections end, and finally addresses, sets and the device. It stops when ctx ends. No
// iptables rule may use a set any more.
func (c *Cleaner) Run(ctx context.Context) error {
	v, err := ipvs.OpenServers()
	if err != nil {
		return fmt.Errorf("removing what mode ipvs has left: %w", err)
	}
	defer v.Close()
	deadline := time.Now().Add(c.GracePeriod)
	for {
		left, err := c.servers(v, time.Now().After(deadline) || c.GracePeriod == 0)
		if err != nil {
			return fmt.Errorf("removing what mode ipvs has left: %w", err)
		}
		if left == 0 {
			break
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(drainInterval):
		}
	}
	if err := removeRest(); err != nil {
		return fmt.Errorf("removing what mode ipvs has left: %w", err)
	}
	c.Log.Info("removed what mode ipvs had left")
	return nil
}

// List returns what Run would remove, one line each.
func (c *Cleaner) List() ([]string, error) {
	var out []string
	if v, err := ipvs.OpenServers(); err == nil {
		defer v.Close()
		for _, f := range plan.Families {
			list, err := c.ours(v, f)
			if err != nil {
				return nil, err
			}
			for _, id := range slices.SortedFunc(maps.Keys(list), compareServers) {
				out = append(out, fmt.Sprintf("virtual server %s with %d real servers", id, len(list[id].RealServers)))
			}
		}
	}
	rest, err := leftovers()
	return append(out, rest...), err
}

// ours returns the virtual servers of mode ipvs.
func (c *Cleaner) ours(v *ipvs.Servers, f plan.Family) (map[ipvs.ServerID]*ipvs.ActualServer, error) {
	list, err := v.List(f)
	maps.DeleteFunc(list, func(id ipvs.ServerID, _ *ipvs.ActualServer) bool {
		return newMarks(c.MasqueradeBit).foreign(id, c.ExcludeCIDRs)
	})
	return list, err
}

// servers removes virtual servers without connections, or all of them. It returns the number of those left.
func (c *Cleaner) servers(v *ipvs.Servers, all bool) (int, error) {
	left := 0
	for _, f := range plan.Families {
		list, err := c.ours(v, f)
		if err != nil {
			return 0, err
		}
		for id, s := range list {
			if !all && waited(id, s) {
				left++
				continue
			}
			if err := errors.Join(v.Apply([]ipvs.Op{{Kind: ipvs.DeleteServer, Server: s.Server}})...); err != nil {
				return 0, err
			}
		}
	}
	return left, nil
}

// waited reports whether a virtual server has connections that must continue. UDP flows have no end: the other mode's rules take
// them over with their next packet.
func waited(id ipvs.ServerID, s *ipvs.ActualServer) bool {
	if id.Mark == 0 && id.Protocol != plan.TCP {
		return false
	}
	for _, d := range s.RealServers {
		if d.Active+d.Inactive > 0 {
			return true
		}
	}
	return false
}

// removeRest removes the device, nftables tables, routing rules, and sets.
func removeRest() error {
	if err := errors.Join(nftrules.RemovePorts(), host.RemoveDevice(names.Device), nftrules.RemoveGuards()); err != nil {
		return err
	}
	return eachSet((*ipset.Sets).Destroy)
}
