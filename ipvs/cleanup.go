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

	"golang.org/x/sys/unix"

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
	sets, err := ipset.OpenSets()
	if err != nil {
		return out, nil // A kernel without ipsets has none.
	}
	defer sets.Close()
	list, err := sets.Names()
	for _, name := range list {
		if names.IsOurSet(name) {
			out = append(out, "ipset "+name)
		}
	}
	return out, err
}

// Cleaner removes what mode ipvs has left, once the rules of another mode no longer lead new connections to it.
type Cleaner struct {
	// ExcludeCIDRs are ranges whose virtual servers belong to other programs.
	ExcludeCIDRs []netip.Prefix
	// GracePeriod is how long virtual servers with connections are kept; zero removes all at once, also where something can't be removed.
	GracePeriod time.Duration
	// MasqueradeBit is the bit that mode ipvs used.
	MasqueradeBit int
	// Node is what has been programmed; nil for this node.
	Node *Node
	Log  *slog.Logger
}

// Run removes all that mode ipvs has left, once no virtual server has connections any more. Meanwhile they take no new ones. It stops when ctx
// ends. No iptables rule may use a set any more.
func (c *Cleaner) Run(ctx context.Context) error {
	n := c.Node
	if n == nil {
		n = thisNode()
		defer n.close()
		if err := n.openServers(); err != nil {
			return fmt.Errorf("removing what mode ipvs has left: %w", err)
		}
		_ = n.openSets() // A kernel without ipsets has none.
	}
	if err := c.run(ctx, n); err != nil {
		return fmt.Errorf("removing what mode ipvs has left: %w", err)
	}
	return nil
}

func (c *Cleaner) run(ctx context.Context, n *Node) error {
	for deadline := time.Now().Add(c.GracePeriod); time.Now().Before(deadline); {
		left, err := c.quiesce(n.Servers)
		if err != nil {
			return err
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
	// Virtual servers go after the addresses: what is sent to an address of the node's own, and to no virtual server, may get to a program of the
	// node. Sets go last: as long as there are some, something is known to be left.
	err := n.Remove()
	if err == nil || c.GracePeriod == 0 {
		err = errors.Join(err, c.deleteServers(n.Servers))
	}
	if err == nil || c.GracePeriod == 0 {
		err = errors.Join(err, n.destroySets())
	}
	if err == nil {
		c.Log.Info("removed what mode ipvs had left")
	}
	return err
}

// List returns what Run would remove, one line each.
func (c *Cleaner) List() ([]string, error) {
	var out []string
	if v, err := ipvs.OpenServers(); err == nil {
		defer v.Close()
		for _, f := range plan.Families {
			list, err := v.List(f)
			if err != nil {
				return nil, err
			}
			for _, id := range slices.SortedFunc(maps.Keys(list), compareServers) {
				if c.ours(id) {
					out = append(out, fmt.Sprintf("virtual server %s with %d real servers", id, len(list[id].RealServers)))
				}
			}
		}
	}
	rest, err := leftovers()
	return append(out, rest...), err
}

// ours reports whether a virtual server is one of mode ipvs.
func (c *Cleaner) ours(id ipvs.ServerID) bool {
	return !newMarks(c.MasqueradeBit).foreign(id, c.ExcludeCIDRs)
}

// quiesce keeps virtual servers from getting new connections, as a Service that has gone since would still be reached by its own. It returns
// how many have connections that must continue.
func (c *Cleaner) quiesce(v servers) (left int, err error) {
	err = c.each(v, func(s *ipvs.ActualServer) (ops []ipvs.Op) {
		if waited(s) {
			left++
		}
		for _, a := range slices.SortedFunc(maps.Keys(s.RealServers), netip.AddrPort.Compare) {
			d := s.RealServers[a].RealServer
			switch {
			case !outlasts(s.ID):
				ops = append(ops, ipvs.Op{Kind: ipvs.DeleteRealServer, Server: s.Server, RealServer: d})
			case d.Weight > 0:
				d.Weight = 0
				ops = append(ops, ipvs.Op{Kind: ipvs.UpdateRealServer, Server: s.Server, RealServer: d})
			}
		}
		return ops
	})
	return left, err
}

func (c *Cleaner) deleteServers(v servers) error {
	return c.each(v, func(s *ipvs.ActualServer) []ipvs.Op { return []ipvs.Op{{Kind: ipvs.DeleteServer, Server: s.Server}} })
}

// each changes the virtual servers of mode ipvs.
func (c *Cleaner) each(v servers, changes func(*ipvs.ActualServer) []ipvs.Op) error {
	for _, f := range plan.Families {
		var ops []ipvs.Op
		err := v.Each(f, func(s *ipvs.ActualServer) {
			if c.ours(s.ID) {
				ops = append(ops, changes(s)...)
			}
		})
		if err == nil && len(ops) > 0 {
			gone := func(err error) bool { return errors.Is(err, unix.ESRCH) } // Somebody else has removed it meanwhile.
			err = errors.Join(slices.DeleteFunc(v.Apply(ops), gone)...)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// outlasts reports whether a virtual server stays for its connections. UDP flows have no end: without their real server, the kernel forgets
// them, and the other mode's rules take them over.
func outlasts(id ipvs.ServerID) bool { return id.Mark != 0 || id.Protocol == plan.TCP }

// waited reports whether a virtual server has connections that must continue.
func waited(s *ipvs.ActualServer) bool {
	if !outlasts(s.ID) {
		return false
	}
	for _, d := range s.RealServers {
		if d.Active+d.Inactive > 0 {
			return true
		}
	}
	return false
}

// destroySets destroys the sets of mode ipvs.
func (n *Node) destroySets() error {
	if n.Sets == nil {
		return nil
	}
	list, err := n.Sets.Names()
	errs := []error{err}
	for _, name := range list {
		if names.IsOurSet(name) {
			errs = append(errs, n.Sets.Destroy(name))
		}
	}
	return errors.Join(errs...)
}

// removeTables removes the device, nftables tables, and routing rules of this node.
func removeTables() error {
	return errors.Join(nftrules.RemovePorts(), host.RemoveDevice(names.Device), nftrules.RemoveGuards())
}
