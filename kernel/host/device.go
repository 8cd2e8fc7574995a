package host

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/set"
	"nodeproxy/kernel/module"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Device is a dummy interface, whose addresses make packets to them local, so that IPVS sees them.
type Device struct {
	mu     sync.Mutex
	name   string
	link   links.Link
	handle *links.Handle // vishvananda/netlink, for links, lists and routes
	conn   *netlink.Conn // for many addresses at once
	// sysctlDir is where the interface's settings are written; empty where it has no addresses of IPv6.
	sysctlDir string
}

// OpenDevice makes the interface unless it exists, without any address, and brings it up. The error names what is missing.
func OpenDevice(name string) (*Device, error) { return newDevice(name, (*Device).open) }

// FindDevice returns an interface that exists, to read from; nil if there is none. It changes nothing.
func FindDevice(name string) (*Device, error) {
	d, err := newDevice(name, (*Device).find)
	if errors.As(err, new(links.LinkNotFoundError)) {
		return nil, nil
	}
	return d, err
}

func newDevice(name string, by func(*Device) error) (*Device, error) {
	d := &Device{name: name}
	var err error
	if d.handle, err = links.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("interface %s: netlink socket: %w", name, err)
	}
	if d.conn, err = netlink.Dial(unix.NETLINK_ROUTE); err != nil {
		d.handle.Close()
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	if err := by(d); err != nil {
		_ = d.Close()
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	return d, nil
}

// Up reports whether the interface was up when it was found.
func (d *Device) Up() bool { return d.link.Attrs().Flags&net.FlagUp != 0 }

// CheckDevice returns the error that OpenDevice would return, and makes no interface.
func CheckDevice(name string) error {
	d := &Device{name: name, handle: new(links.Handle)}
	err := d.find()
	if errors.As(err, new(links.LinkNotFoundError)) {
		err = d.canMake("dummy")
	}
	if err != nil {
		return fmt.Errorf("interface %s: %w", name, err)
	}
	return nil
}

// DeviceExists reports whether there is a network interface of that name.
func DeviceExists(name string) bool {
	_, err := links.LinkByName(name)
	return err == nil
}

// find finds the interface.
func (d *Device) find() error {
	link, err := d.handle.LinkByName(d.name)
	if err == nil && link.Type() != "dummy" {
		err = fmt.Errorf("it exists, but is of type %s and not dummy: remove or rename it", link.Type())
	}
	if err == nil {
		d.link = link
	}
	return err
}

func (d *Device) open() error {
	err := d.find()
	if errors.As(err, new(links.LinkNotFoundError)) {
		if err = d.add("dummy", nil); err == nil || errors.Is(err, unix.EEXIST) {
			err = d.find()
		}
	}
	if err != nil {
		return err
	}
	// Without IPv6 there is nothing to turn off. Where this fails for another reason, the interface has one address more.
	const none = 1 // IN6_ADDR_GEN_MODE_NONE
	_ = d.handle.LinkSetIP6AddrGenMode(d.link, none)
	if err := d.handle.LinkSetUp(d.link); err != nil {
		return fmt.Errorf("turning it on: %w", err)
	}
	return d.enableIPv6()
}

// Ensure makes the interface again if another program has removed it, and brings it up if it is down. It says what had happened; ""
// for nothing. The interface has lost its addresses and routes then.
func (d *Device) Ensure() (repaired string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	link, err := d.handle.LinkByName(d.name)
	switch {
	case err == nil && link.Attrs().Index == d.link.Attrs().Index && link.Attrs().Flags&net.FlagUp != 0:
		return "", nil
	case err == nil && link.Attrs().Index == d.link.Attrs().Index:
		repaired = "turned off"
	case err == nil:
		repaired = "removed and made again"
	case errors.As(err, new(links.LinkNotFoundError)):
		repaired = "removed"
	default:
		return "", fmt.Errorf("interface %s: %w", d.name, err)
	}
	was := d.link
	if err := d.open(); err != nil {
		d.link = was // The next call must not take the new one for whole.
		return "", fmt.Errorf("interface %s: %w", d.name, err)
	}
	return repaired, nil
}

// EnableIPv6 enables IPv6 addresses of the interface where the node has IPv6 off for new interfaces
// (net.ipv6.conf.default.disable_ipv6), now and whenever the interface is made again. sysctlDir is the directory of kernel
// settings.
func (d *Device) EnableIPv6(sysctlDir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sysctlDir = sysctlDir
	return d.enableIPv6()
}

func (d *Device) enableIPv6() error {
	if d.sysctlDir == "" {
		return nil
	}
	path := filepath.Join("net/ipv6/conf", d.name, "disable_ipv6")
	have, err := os.ReadFile(filepath.Join("/proc/sys", path))
	if err != nil || strings.TrimSpace(string(have)) == "0" { // A kernel without IPv6 has no such file.
		return nil
	}
	if err := os.WriteFile(filepath.Join(d.sysctlDir, path), []byte("0\n"), 0o644); err != nil {
		return fmt.Errorf("IPv6 is off on interface %s: setting %s to 0: %w", d.name, path, err)
	}
	return nil
}

// canMake finds out whether the interface could be made, by asking for one with a multicast address, which is invalid. Only a
// kernel that knows the kind of interface checks the address.
func (d *Device) canMake(kind string) error {
	err := d.add(kind, net.HardwareAddr{1, 0, 0, 0, 0, 0})
	if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil { // This kernel does not look at it.
		err = RemoveDevice(d.name)
	}
	return err
}

// add makes an interface of that name, with an address unless that is nil. The module for a kind of interface has its name.
func (d *Device) add(kind string, addr net.HardwareAddr) error {
	link := &links.GenericLink{LinkAttrs: links.NewLinkAttrs(), LinkType: kind}
	link.Name, link.HardwareAddr = d.name, addr
	err := d.handle.LinkAdd(link)
	if errors.Is(err, unix.EOPNOTSUPP) && module.Load(kind) == nil {
		err = d.handle.LinkAdd(link)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("this kernel has no %s interfaces, and the module %s cannot be loaded: run modprobe %s on this node,"+
			" or use another proxy mode: %w", kind, kind, kind, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("the capability CAP_NET_ADMIN is missing: run as root, or add it: %w", err)
	}
	return fmt.Errorf("making it: %w", err)
}

// Close closes the sockets. The interface stays.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.handle.Close()
	return d.conn.Close()
}

// RemoveDevice removes an interface, and with it its addresses and routes.
func RemoveDevice(name string) error {
	link, err := links.LinkByName(name)
	if errors.As(err, new(links.LinkNotFoundError)) {
		return nil
	}
	if err == nil {
		err = links.LinkDel(link)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing interface %s: %w", name, err)
	}
	return nil
}

// Addresses returns the addresses of the interface, without link-local ones of IPv6.
func (d *Device) Addresses(f plan.Family) (set.Set[netip.Addr], error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.addresses(f)
}

func (d *Device) addresses(f plan.Family) (set.Set[netip.Addr], error) {
	list, err := addresses(d.handle, d.link, f)
	if err != nil {
		return nil, err
	}
	out := make(set.Set[netip.Addr], len(list))
	for _, a := range list {
		if !linkLocal6(a.Addr) {
			out.Insert(a.Addr)
		}
	}
	return out, nil
}

// AddAddresses adds addresses, each as a range of its own. The node does not select one of them as the source of packets to other
// hosts: those of IPv4 have scope host, and those of IPv6 are deprecated (RFC 6724, section 5). If some fail, all others are added.
// When it returns, packets to the added addresses are local.
func (d *Device) AddAddresses(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	added, err := d.change(addrs, "adding address %s of interface %s", d.newAddress())
	return errors.Join(err, d.waitLocal(slices.DeleteFunc(added, netip.Addr.Is4)))
}

// RemoveAddresses removes addresses. If some fail, all others are removed.
func (d *Device) RemoveAddresses(addrs []netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.change(addrs, "removing address %s of interface %s",
		request{kind: unix.RTM_DELADDR, body: d.address, done: unix.EADDRNOTAVAIL})
	return err
}

// localWithin is the time that the kernel may take to make IPv6 addresses local, usually less than a millisecond. All other changes
// wait meanwhile.
const localWithin = time.Second

// goneAfter is the pause between two checks from which on it also checks whether the addresses still exist.
const goneAfter = time.Millisecond

// still returns those IPv6 addresses that the interface still has. A removed interface has none.
func (d *Device) still(addrs []netip.Addr) ([]netip.Addr, error) {
	have, err := d.addresses(plan.IPv6)
	if errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	return slices.DeleteFunc(addrs, func(a netip.Addr) bool { return !have.Has(a) }), err
}

// waitLocal waits until packets to IPv6 addresses are local, unless the addresses are removed meanwhile. The kernel leaves that to
// a worker thread, even if it does not check for duplicates. A packet that arrives earlier is forwarded as if to another host, and
// connection tracking does the same with all later ones of its connection, so that its client hangs.
func (d *Device) waitLocal(addrs []netip.Addr) error {
	pause := 50 * time.Microsecond
	for begin := time.Now(); ; {
		var err error
		if addrs, err = d.notLocal(addrs); err != nil || len(addrs) == 0 {
			return err
		}
		if pause > goneAfter { // It takes long: perhaps another program has removed some of them.
			if addrs, err = d.still(addrs); err != nil || len(addrs) == 0 {
				return err
			}
		}
		if time.Since(begin) > localWithin {
			return fmt.Errorf("%d addresses of interface %s, such as %s, are there for %v, but packets to them are not the node's",
				len(addrs), d.name, addrs[0], localWithin)
		}
		time.Sleep(pause)
		pause = min(2*pause, 10*time.Millisecond)
	}
}

// notLocal returns those IPv6 addresses that are not local yet. If there are few, it asks for each.
func (d *Device) notLocal(addrs []netip.Addr) ([]netip.Addr, error) {
	const few = 50
	var list []links.Route
	if len(addrs) > few {
		var err error
		if list, err = d.routes(plan.IPv6, unix.RT_TABLE_LOCAL); err != nil {
			return nil, fmt.Errorf("looking whether addresses of interface %s are local: %w", d.name, err)
		}
	} else {
		for _, a := range addrs {
			// Until there is a local route, the answer may be an error, or a route that refuses.
			route, _ := d.handle.RouteGet(a.AsSlice())
			list = append(list, route...)
		}
	}
	local := set.Set[netip.Addr]{}
	for _, r := range list {
		if r.Type == unix.RTN_LOCAL {
			local.Insert(prefixOf(r.Dst).Addr())
		}
	}
	return slices.DeleteFunc(addrs, local.Has), nil
}

// request is what is asked of the kernel for an address. done is the error that means that it was not necessary.
type request struct {
	kind, flags uint16
	body        func(netip.Addr) netlink.Buffer
	done        syscall.Errno
}

// change makes requests for each address, and returns the addresses for which the last one was necessary. doing is what failed, with verbs
// for the address and the interface.
func (d *Device) change(addrs []netip.Addr, doing string, requests ...request) ([]netip.Addr, error) {
	var messages []netlink.Message
	for _, a := range addrs {
		for _, r := range requests {
			messages = append(messages, netlink.Message{Type: r.kind, Flags: r.flags, Body: r.body(a)})
		}
	}
	const most = 10 // of possibly one error for each address
	var changed []netip.Addr
	var failed []error
	count := 0
	errs := d.conn.Do(messages...)
	for i := range messages {
		a, step := addrs[i/len(requests)], i%len(requests)
		switch {
		case errs == nil || errs[i] == nil:
			if step == len(requests)-1 {
				changed = append(changed, a)
			}
			continue
		case errors.Is(errs[i], requests[step].done):
			continue
		}
		what := fmt.Sprintf(doing, a, d.name)
		if len(requests) > 1 {
			what += fmt.Sprintf(", step %d", step+1)
		}
		if count++; count <= most {
			failed = append(failed, fmt.Errorf("%s: %w", what, errs[i]))
		}
	}
	if count > most {
		failed = append(failed, fmt.Errorf("and %d more", count-most))
	}
	return changed, errors.Join(failed...)
}

func (d *Device) newAddress() request {
	return request{unix.RTM_NEWADDR, unix.NLM_F_CREATE | unix.NLM_F_EXCL, d.address, unix.EEXIST}
}

// address is an address of the interface as in linux/if_addr.h.
func (d *Device) address(a netip.Addr) netlink.Buffer {
	family := plan.FamilyOf(a)
	b := netlink.Buffer{netlink.Family(family), uint8(a.BitLen()), 0, unix.RT_SCOPE_HOST}
	b = binary.NativeEndian.AppendUint32(b, uint32(d.link.Attrs().Index))
	b = b.Addr(unix.IFA_LOCAL, a)
	b = b.Addr(unix.IFA_ADDRESS, a)
	if family == plan.IPv4 {
		return b
	}
	b = b.Uint32(unix.IFA_FLAGS, unix.IFA_F_NODAD)
	const never = 0xffffffff
	var times []byte // preferred and valid in seconds; two more that only the kernel sets
	for _, t := range []uint32{0, never, 0, 0} {
		times = binary.NativeEndian.AppendUint32(times, t)
	}
	return b.Bytes(unix.IFA_CACHEINFO, times...)
}

// routes lists the local routes of this interface in a table.
func (d *Device) routes(f plan.Family, table int) ([]links.Route, error) {
	filter := &links.Route{LinkIndex: d.link.Attrs().Index, Table: table, Type: unix.RTN_LOCAL}
	list, err := routes(d.handle, netlink.Family(f), filter, links.RT_FILTER_OIF|links.RT_FILTER_TABLE|links.RT_FILTER_TYPE)
	if err != nil {
		return nil, fmt.Errorf("listing the %s routes of interface %s: %w", f, d.name, err)
	}
	return list, nil
}

// Routes returns the ranges that are local by a route to this interface, other than by its addresses, with the source address for
// connections to them; the zero Addr if that is the destination itself.
func (d *Device) Routes(f plan.Family) (map[netip.Prefix]netip.Addr, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list, err := d.routes(f, unix.RT_TABLE_LOCAL)
	if err != nil {
		return nil, err
	}
	out := map[netip.Prefix]netip.Addr{}
	for _, r := range list {
		if r.Protocol != unix.RTPROT_KERNEL {
			out[prefixOf(r.Dst)] = addrOf(r.Src)
		}
	}
	return out, nil
}

// AddRoute makes all addresses of a range local, and src, if given, the source address of the node's connections to them. It
// must be an address of the node.
func (d *Device) AddRoute(p netip.Prefix, src netip.Addr) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	route := d.route(p)
	if src.IsValid() {
		route.Src = src.AsSlice()
	}
	if err := d.handle.RouteReplace(route); err != nil {
		return fmt.Errorf("adding local route %s (source %s) to interface %s: %w", p, src, d.name, err)
	}
	return nil
}

// RemoveRoute undoes AddRoute.
func (d *Device) RemoveRoute(p netip.Prefix) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.handle.RouteDel(d.route(p)); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("removing local route %s of interface %s: %w", p, d.name, err)
	}
	return nil
}

func (d *Device) route(p netip.Prefix) *links.Route {
	p = p.Masked()
	return &links.Route{
		LinkIndex: d.link.Attrs().Index, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL,
		Scope: unix.RT_SCOPE_HOST, Protocol: unix.RTPROT_STATIC,
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
	}
}
