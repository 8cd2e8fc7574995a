package ipvstest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/ipset"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/kernel/xtables/xtablestest"
	"nodeproxy/plan"
)

// Node is a machine where several programs change what mode ipvs programs, in simulated time (testing/synctest): tables of iptables, and what
// each Kernel holds. The mutex of the tables guards all fields.
type Node struct {
	*xtablestest.Tables
	Held map[plan.Family]*Kernel
	// Altered is called after each change of what a Kernel holds, with the Node locked. by is nil for a change by Alter.
	Altered func(f plan.Family, by *Process, what string)
	// Failed is called when a trouble keeps a Process from changing what a Kernel holds, with the Node locked.
	Failed func(f plan.Family)

	trouble  Trouble
	until    time.Time // when the trouble ends
	changes  int
	watching []*Process
}

// Trouble is what happens to programs that read or write what a Kernel holds.
type Trouble int

// The troubles.
const (
	Refused    Trouble = iota // nothing is taken
	Halfway                   // only the beginning of what is sent is taken
	Unanswered                // changes are carried out, but the answer is lost
	Unreadable                // reading fails
	Slow                      // reading takes seconds
	Troubles                  // is how many there are
)

func (t Trouble) String() string {
	return [...]string{"refuses all", "refuses the second half", "loses outcomes", "loses answers", "slow to read"}[t]
}

// NewNode returns a Node that holds nothing.
func NewNode(draw func(string, time.Duration) time.Duration) *Node {
	n := &Node{Tables: xtablestest.NewTables(draw), Held: map[plan.Family]*Kernel{}}
	for _, f := range plan.Families {
		k, tables := New(f), n.Kernels[f]
		n.Held[f] = k
		tables.HasSet = func(name string) bool { return k.Set[name] != nil }
		k.InUse = func(name string) bool {
			for _, chains := range tables.Tables {
				for _, rules := range chains {
					if slices.ContainsFunc(rules, func(r string) bool { return xtablestest.SetOf(r) == name }) {
						return true
					}
				}
			}
			return false
		}
	}
	return n
}

// Trouble lets a trouble happen until some time has passed.
func (n *Node) Trouble(what Trouble, long time.Duration) {
	n.Lock()
	defer n.Unlock()
	n.trouble, n.until = what, time.Now().Add(long)
}

// ails reports whether a trouble happens. The Node must be locked.
func (n *Node) ails(what Trouble) bool { return n.trouble == what && time.Now().Before(n.until) }

// Alter changes what the kernel holds of a family as programs other than a Process do. The changes of the interface that do returns are
// notified.
func (n *Node) Alter(f plan.Family, do func(*Kernel) []host.DeviceChange) {
	n.Lock()
	defer n.Unlock()
	n.altered(f, nil, "", do(n.Held[f]))
}

func (n *Node) altered(f plan.Family, by *Process, what string, changes []host.DeviceChange) {
	n.changes++
	n.Altered(f, by, what)
	for _, p := range n.watching {
		for _, c := range changes {
			p.device <- c
		}
	}
}

// ChangedTable notifies that a table of nftables of a family has changed. The Node must be locked.
func (n *Node) ChangedTable(f plan.Family) {
	for _, p := range n.watching {
		p.tables <- f
	}
}

// Process is a process that reads and writes.
type Process struct {
	*xtablestest.Process
	node    *Node
	written int
	// Notifications on their way.
	device chan host.DeviceChange
	tables chan plan.Family
}

// mostNotifications is more than come before they are read.
const mostNotifications = 100000

// Start starts a process.
func (n *Node) Start() *Process {
	p := &Process{Process: n.Tables.Start(), node: n, device: make(chan host.DeviceChange, mostNotifications),
		tables: make(chan plan.Family, mostNotifications)}
	n.Lock()
	defer n.Unlock()
	n.watching = append(n.watching, p)
	return p
}

// Kill ends a process.
func (p *Process) Kill(all bool) {
	p.Process.Kill(all)
	p.Lock()
	defer p.Unlock()
	p.node.watching = slices.DeleteFunc(p.node.watching, func(o *Process) bool { return o == p })
}

// Written is how often the process has changed something.
func (p *Process) Written() int {
	n := p.Process.Written()
	p.Lock()
	defer p.Unlock()
	return n + p.written
}

var errDead = errors.New("this process has been killed")

// WatchDevice follows the changes of the interface.
func (p *Process) WatchDevice() (func(context.Context, func(host.DeviceChange)), error) {
	return func(ctx context.Context, changed func(host.DeviceChange)) { follow(ctx, p, p.device, changed) }, nil
}

// WatchTables follows the changes of tables of nftables.
func (p *Process) WatchTables() (func(context.Context, func(plan.Family)), error) {
	return func(ctx context.Context, changed func(plan.Family)) { follow(ctx, p, p.tables, changed) }, nil
}

func follow[C any](ctx context.Context, p *Process, from chan C, changed func(C)) {
	for len(from) > 0 {
		<-from // from before
	}
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-from:
			time.Sleep(p.Draw("notification", 20*time.Millisecond)) // in simulated time
			changed(c)
		}
	}
}

// Host lists the node's own addresses.
func (p *Process) Host(f plan.Family) (out set.Set[netip.Addr], err error) {
	err = p.read(f, func(k *Kernel) error {
		out = maps.Clone(k.HostAddrs)
		return nil
	})
	return out, err
}

// WatchHost is as that of host.Filter, where the addresses stay.
func (p *Process) WatchHost(ctx context.Context, quiet time.Duration, changed func()) error {
	select {
	case <-ctx.Done():
	case <-time.After(quiet):
		changed()
		<-ctx.Done()
	}
	return nil
}

// read reads something of a family.
func (p *Process) read(f plan.Family, do func(*Kernel) error) error {
	most := time.Millisecond
	p.Lock()
	if p.node.ails(Slow) {
		most = 500 * time.Millisecond
	}
	p.Unlock()
	time.Sleep(p.Draw("reading "+f.String(), most)) // in simulated time
	p.Lock()
	defer p.Unlock()
	switch {
	case p.Dead():
		return errDead
	case p.node.ails(Unreadable):
		return unix.EINTR
	}
	return do(p.node.Held[f])
}

// write changes something of a family. do says what that changes of the interface.
func (p *Process) write(f plan.Family, what string, do func(*Kernel) ([]host.DeviceChange, error)) error {
	time.Sleep(p.Draw("writing "+f.String(), time.Millisecond)) // in simulated time
	p.Lock()
	defer p.Unlock()
	switch {
	case p.Dead():
		return errDead
	case p.node.ails(Refused):
		p.node.Failed(f)
		return unix.ENOMEM
	}
	changes, err := do(p.node.Held[f])
	if err != nil {
		return err
	}
	p.written++
	p.node.altered(f, p, what, changes)
	if p.node.ails(Unanswered) {
		return unix.ENOBUFS
	}
	return nil
}

// most returns how many of a list of a family are taken, and the error for the others. The Node must be locked.
func (n *Node) most(f plan.Family, all int) (int, error) {
	if n.ails(Halfway) {
		n.Failed(f)
		return all / 2, unix.ENOMEM
	}
	return all, nil
}

// Ready is what is to be done and asked once of virtual servers.
type Ready struct{}

// HasScheduler is as that of ipvs.Servers.
func (Ready) HasScheduler(string) bool { return true }

// SetTimeouts is as that of ipvs.Servers.
func (Ready) SetTimeouts(_, _, _ time.Duration) error { return nil }

// Stats is as that of ipvs.Servers, where there is no traffic.
func (Ready) Stats(func(ipvs.ServerID, ipvs.Traffic)) error { return nil }

// ProcessServers are the virtual servers as a process uses them.
type ProcessServers struct {
	*Process
	Ready
	// Once says that they are listed as by ipvs.Servers.EachOnce.
	Once bool
}

// Each is as that of ipvs.Servers. It reads the real servers of one half of the virtual servers, and then those of the other: of one that is
// gone by then, there are none.
func (p ProcessServers) Each(f plan.Family, each func(*ipvs.ActualServer)) error {
	var ids []ipvs.ServerID
	var servers []ipvs.Server
	list := func(k *Kernel, from, to int) {
		all := slices.SortedFunc(maps.Keys(k.Virtual), compareServers)
		for _, id := range all[min(from, len(all)):min(to, len(all))] {
			ids, servers = append(ids, id), append(servers, k.Virtual[id].Server)
		}
	}
	half := 0
	err := p.read(f, func(k *Kernel) error {
		if half = len(k.Virtual); p.Once {
			half /= 2
		}
		list(k, 0, half)
		return nil
	})
	if err == nil && p.Once {
		err = p.read(f, func(k *Kernel) error {
			list(k, half, len(k.Virtual))
			return nil
		})
	}
	var found []*ipvs.ActualServer
	for _, part := range [][2]int{{0, len(ids) / 2}, {len(ids) / 2, len(ids)}} {
		if err == nil {
			err = p.read(f, func(k *Kernel) error {
				for i := part[0]; i < part[1]; i++ {
					v, _ := Servers{k}.Get(ids[i])
					if v == nil {
						v = &ipvs.ActualServer{RealServers: map[netip.AddrPort]ipvs.ActualRealServer{}}
					}
					v.Server = servers[i]
					found = append(found, v)
				}
				return nil
			})
		}
	}
	if err != nil {
		return fmt.Errorf("listing virtual servers: %w", err)
	}
	for _, v := range found {
		each(v)
		clear(v.RealServers) // They are valid only during the call.
	}
	return nil
}

// Get is as that of ipvs.Servers.
func (p ProcessServers) Get(id ipvs.ServerID) (v *ipvs.ActualServer, err error) {
	err = p.read(id.Family, func(k *Kernel) error {
		v, _ = Servers{k}.Get(id)
		return nil
	})
	return v, err
}

// RealServers is as that of ipvs.Servers.
func (p ProcessServers) RealServers(id ipvs.ServerID, _ int) (map[netip.AddrPort]ipvs.ActualRealServer, error) {
	return realServers(p.Get(id))
}

// Apply is as that of ipvs.Servers.
func (p ProcessServers) Apply(ops []ipvs.Op) []error {
	errs := make([]error, len(ops))
	p.Lock()
	most, late := p.node.most(ops[0].Server.ID.Family, len(ops))
	p.Unlock()
	for i, op := range ops {
		if i >= most {
			errs[i] = late
			continue
		}
		errs[i] = p.write(op.Server.ID.Family, op.String(), func(k *Kernel) ([]host.DeviceChange, error) {
			if op.Kind == ipvs.UpdateRealServer && op.RealServer.Weight == 0 {
				p.node.connect(k, op.RealServer.Addr)
			}
			return nil, Servers{k}.Do(op)
		})
	}
	return errs
}

// connect gives a real server that drains connections, if it happens to have some, which end after some time.
func (n *Node) connect(k *Kernel, a netip.AddrPort) {
	if n.Draw("connections of "+a.String(), 2) == 0 {
		return
	}
	k.Connections[a]++
	time.AfterFunc(n.Draw("end of connections", 20*time.Second), func() {
		n.Lock()
		defer n.Unlock()
		if k.Connections[a]--; k.Connections[a] == 0 {
			delete(k.Connections, a)
		}
	})
}

// Counts counts virtual servers as ipvs.Counts does.
func (p *Process) Counts() *ProcessCounts { return &ProcessCounts{p} }

// ProcessCounts is as ipvs.Counts.
type ProcessCounts struct{ *Process }

// Close is as that of ipvs.Counts.
func (ProcessCounts) Close() error { return nil }

// Servers is as that of ipvs.Counts.
func (p ProcessCounts) Servers() (n int, err error) {
	err = p.read(plan.IPv4, func(k *Kernel) error {
		n = len(k.Virtual)
		return nil
	})
	return n, err
}

// Read is as that of ipvs.Counts.
func (p ProcessCounts) Read(each func(id ipvs.ServerID, realServers int)) error {
	counted := map[ipvs.ServerID]int{}
	err := p.read(plan.IPv4, func(k *Kernel) error {
		for id, v := range k.Virtual {
			counted[id] = len(v.RealServers)
		}
		return nil
	})
	for id, n := range counted {
		each(id, n)
	}
	return err
}

// Fingerprint is as ipvs.ReadFingerprint.
func (p *Process) Fingerprint(skip func(ipvs.ServerID) bool) (sum ipvs.Fingerprint, err error) {
	for _, f := range plan.Families {
		err = errors.Join(err, p.read(f, func(k *Kernel) error {
			for id, v := range k.Virtual {
				if id.Mark != 0 {
					id = ipvs.ServerID{Mark: id.Mark}
				}
				if skip(id) {
					continue
				}
				sum.Add(v.Server)
				for _, d := range v.RealServers {
					sum.AddRealServer(v.Server, d.RealServer)
				}
			}
			return nil
		}))
	}
	return sum, err
}

// ProcessSets are the sets as a process uses them.
type ProcessSets struct{ *Process }

// familyOf returns the family of a set by its name.
func familyOf(name string) plan.Family {
	if strings.HasPrefix(name, "KUBE-6-") {
		return plan.IPv6
	}
	return plan.IPv4
}

// Names is as that of ipset.Sets.
func (p ProcessSets) Names() (names []string, err error) {
	for _, f := range plan.Families {
		err = errors.Join(err, p.read(f, func(k *Kernel) error {
			some, err := Sets{k}.Names()
			names = append(names, some...)
			return err
		}))
	}
	slices.Sort(names)
	return names, err
}

// Ensure is as that of ipset.Sets.
func (p ProcessSets) Ensure(s ipset.Set) (made bool, err error) {
	err = p.read(s.Family, func(k *Kernel) error {
		made = k.Set[s.Name] == nil || k.Kinds[s.Name] != s
		return nil
	})
	if !made || err != nil {
		return false, err
	}
	return true, p.write(s.Family, "make "+s.Name, func(k *Kernel) ([]host.DeviceChange, error) {
		_, err := Sets{k}.Ensure(s)
		return nil, err
	})
}

// Sizes is as that of ipset.Sets.
func (p ProcessSets) Sizes(names []string) (map[string]int, error) {
	sizes := map[string]int{}
	for _, f := range plan.Families {
		if err := p.read(f, func(k *Kernel) error {
			some, err := Sets{k}.Sizes(names)
			maps.Copy(sizes, some)
			return err
		}); err != nil {
			return nil, err
		}
	}
	return sizes, nil
}

// Entries is as that of ipset.Sets.
func (p ProcessSets) Entries(s ipset.Set, begin func(), each func(ipset.Entry)) error {
	return p.read(s.Family, func(k *Kernel) error { return Sets{k}.Entries(s, begin, each) })
}

func (p ProcessSets) change(what string, s ipset.Set, list []ipset.Entry, do func(Sets, []ipset.Entry) error) error {
	var late error
	err := p.write(s.Family, fmt.Sprintf("%s %s %v", what, s.Name, list), func(k *Kernel) ([]host.DeviceChange, error) {
		var most int
		most, late = p.node.most(s.Family, len(list))
		return nil, do(Sets{k}, list[:most])
	})
	return errors.Join(err, late)
}

// Add is as that of ipset.Sets.
func (p ProcessSets) Add(s ipset.Set, list []ipset.Entry) error {
	return p.change("add to", s, list, func(k Sets, some []ipset.Entry) error { return k.Add(s, some) })
}

// Remove is as that of ipset.Sets.
func (p ProcessSets) Remove(s ipset.Set, list []ipset.Entry) error {
	return p.change("remove from", s, list, func(k Sets, some []ipset.Entry) error { return k.Remove(s, some) })
}

// Destroy is as that of ipset.Sets.
func (p ProcessSets) Destroy(name string) error {
	return p.write(familyOf(name), "destroy "+name, func(k *Kernel) ([]host.DeviceChange, error) { return nil, Sets{k}.Destroy(name) })
}
