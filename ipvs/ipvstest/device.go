package ipvstest

import (
	"errors"
	"fmt"
	"net/netip"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/host"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

// ProcessDevice is the interface with the addresses of Services as a process uses it.
type ProcessDevice struct{ *Process }

// Open makes the interface unless it exists. That takes no time and does not fail: a process that fails at its start is started again.
func (p ProcessDevice) Open() ProcessDevice {
	p.Lock()
	defer p.Unlock()
	for _, f := range plan.Families {
		_, _ = Device{p.node.Held[f]}.Ensure()
	}
	return p
}

// Up is as that of host.Device.
func (p ProcessDevice) Up() bool { return true }

// EnableIPv6 is as that of host.Device, where IPv6 is on.
func (ProcessDevice) EnableIPv6(string) error { return nil }

// Close is as that of host.Device.
func (ProcessDevice) Close() error { return nil }

// Remove removes the interface, the tables of nftables, and routing rules, as that of ipvs.Node.
func (p ProcessDevice) Remove() error {
	for _, f := range plan.Families {
		there := false
		err := p.read(f, func(k *Kernel) error {
			there = k.Device || k.Guard || k.Ports != nil
			return nil
		})
		if there && err == nil {
			err = p.write(f, "remove the interface", func(k *Kernel) ([]host.DeviceChange, error) {
				k.Guard, k.BrokenGuard, k.Ports, k.BrokenPorts = false, false, nil, false
				return Device{k}.Lose(), nil
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Ensure is as that of host.Device.
func (p ProcessDevice) Ensure() (mended string, err error) {
	for _, f := range plan.Families {
		gone := false
		err := p.read(f, func(k *Kernel) error {
			gone = !k.Device
			return nil
		})
		if gone && err == nil {
			err = p.write(f, "make the interface", func(k *Kernel) ([]host.DeviceChange, error) {
				mended, _ = Device{k}.Ensure()
				return []host.DeviceChange{{}}, nil
			})
		}
		if err != nil {
			return "", err
		}
	}
	return mended, nil
}

func (p ProcessDevice) list(f plan.Family, of func(Device, plan.Family) (set.Set[netip.Addr], error)) (out set.Set[netip.Addr], err error) {
	err = p.read(f, func(k *Kernel) (err error) {
		out, err = of(Device{k}, f)
		return err
	})
	return out, err
}

// Addresses is as that of host.Device.
func (p ProcessDevice) Addresses(f plan.Family) (set.Set[netip.Addr], error) {
	return p.list(f, Device.Addresses)
}

// UnroutedAddresses is as that of host.Device.
func (p ProcessDevice) UnroutedAddresses(f plan.Family) (set.Set[netip.Addr], error) {
	return p.list(f, Device.UnroutedAddresses)
}

// PortRoutes is as that of host.Device.
func (p ProcessDevice) PortRoutes(f plan.Family) (set.Set[netip.Addr], error) {
	return p.list(f, Device.PortRoutes)
}

// change changes some addresses, all of one family.
func (p ProcessDevice) change(what string, list []netip.Addr, do func(Device, []netip.Addr) error, notify func(netip.Addr) host.DeviceChange) error {
	f := plan.FamilyOf(list[0])
	var late error
	err := p.write(f, fmt.Sprintf("%s %v", what, list), func(k *Kernel) (changes []host.DeviceChange, err error) {
		var most int
		most, late = p.node.most(f, len(list))
		if notify != nil {
			for _, a := range list[:most] {
				changes = append(changes, notify(a))
			}
		}
		return changes, do(Device{k}, list[:most])
	})
	return errors.Join(err, late)
}

func added(a netip.Addr) host.DeviceChange { return host.DeviceChange{Address: a} }

// AddAddresses is as that of host.Device.
func (p ProcessDevice) AddAddresses(list []netip.Addr) error {
	return p.change("add addresses", list, Device.AddAddresses, added)
}

// RemoveAddresses is as that of host.Device.
func (p ProcessDevice) RemoveAddresses(list []netip.Addr) error {
	return p.change("remove addresses", list, Device.RemoveAddresses, func(a netip.Addr) host.DeviceChange {
		return host.DeviceChange{Address: a, Gone: true}
	})
}

// AddUnrouted is as that of host.Device.
func (p ProcessDevice) AddUnrouted(list []netip.Addr) error {
	return p.change("add unrouted", list, Device.AddUnrouted, added)
}

// RouteAddresses is as that of host.Device.
func (p ProcessDevice) RouteAddresses(list []netip.Addr) error {
	return p.change("route addresses", list, Device.RouteAddresses, nil)
}

// AddPortRoutes is as that of host.Device.
func (p ProcessDevice) AddPortRoutes(list []netip.Addr) error {
	return p.change("add port routes", list, Device.AddPortRoutes, nil)
}

// RemovePortRoutes is as that of host.Device.
func (p ProcessDevice) RemovePortRoutes(list []netip.Addr) error {
	return p.change("remove port routes", list, Device.RemovePortRoutes, func(a netip.Addr) host.DeviceChange {
		return host.DeviceChange{Route: xtables.Single(a), ByPort: true, Gone: true}
	})
}

// Routes is as that of host.Device.
func (p ProcessDevice) Routes(f plan.Family) (out map[netip.Prefix]netip.Addr, err error) {
	err = p.read(f, func(k *Kernel) (err error) {
		out, err = Device{k}.Routes(f)
		return err
	})
	return out, err
}

// AddRoute is as that of host.Device.
func (p ProcessDevice) AddRoute(r netip.Prefix, src netip.Addr) error {
	return p.write(plan.FamilyOf(r.Addr()), fmt.Sprintf("add route %s %s", r, src), func(k *Kernel) ([]host.DeviceChange, error) {
		return nil, Device{k}.AddRoute(r, src)
	})
}

// RemoveRoute is as that of host.Device.
func (p ProcessDevice) RemoveRoute(r netip.Prefix) error {
	return p.write(plan.FamilyOf(r.Addr()), fmt.Sprintf("remove route %s", r), func(k *Kernel) ([]host.DeviceChange, error) {
		return []host.DeviceChange{{Route: r, Gone: true}}, Device{k}.RemoveRoute(r)
	})
}

// ProcessPorts is the table that diverts ports of a family as a process uses it, with its routing rule.
type ProcessPorts struct {
	*Process
	Family plan.Family
}

// List is as that of nftrules.Ports.
func (p ProcessPorts) List() (ports set.Set[plan.Address], exists, complete bool, err error) {
	err = p.read(p.Family, func(k *Kernel) (err error) {
		ports, exists, complete, err = Ports{k}.List()
		return err
	})
	return ports, exists, complete, err
}

func (p ProcessPorts) change(what string, list []plan.Address, table bool, do func(Ports) error) error {
	return p.write(p.Family, fmt.Sprintf("%s %v", what, list), func(k *Kernel) ([]host.DeviceChange, error) {
		err := do(Ports{k})
		if table && err == nil {
			p.node.ChangedTable(p.Family)
		}
		return nil, err
	})
}

// Write is as that of nftrules.Ports.
func (p ProcessPorts) Write(list []plan.Address) error {
	return p.change("write ports", list, true, func(k Ports) error { return k.Write(list) })
}

// Add is as that of nftrules.Ports.
func (p ProcessPorts) Add(list []plan.Address) error {
	return p.change("add ports", list, false, func(k Ports) error { return k.Add(list) })
}

// Remove is as that of nftrules.Ports.
func (p ProcessPorts) Remove(list []plan.Address) error {
	return p.change("remove ports", list, false, func(k Ports) error { return k.Remove(list) })
}

// Clear is as that of nftrules.Ports.
func (p ProcessPorts) Clear() error { return p.change("clear ports", nil, true, Ports.Clear) }

// ProcessGuard is the table that guards marks of a family as a process uses it.
type ProcessGuard struct {
	*Process
	Family plan.Family
}

// Intact is as that of nftrules.Guards.
func (p ProcessGuard) Intact() (intact bool, err error) {
	err = p.read(p.Family, func(k *Kernel) (err error) {
		intact, err = Guard{k}.Intact()
		return err
	})
	return intact, err
}

// Ensure is as that of nftrules.Guards.
func (p ProcessGuard) Ensure() (was, written bool, err error) {
	intact, err := p.Intact()
	if intact || err != nil {
		return intact, false, err
	}
	return was, true, p.write(p.Family, "write the guard", func(k *Kernel) ([]host.DeviceChange, error) {
		was, _, err = Guard{k}.Ensure()
		p.node.ChangedTable(p.Family)
		return nil, err
	})
}
