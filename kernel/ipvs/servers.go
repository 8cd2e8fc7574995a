package ipvs

import (
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"sync"
	"time"

	links "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/module"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// Servers are the virtual servers of a network namespace. moby/ipvs is not used: it sends one change at a time, cuts weights to 16
// bits, reads neither counters of 64 bits nor persistent connections, and logs through the logger that all users of logrus share.
type Servers struct {
	mu     sync.Mutex
	conn   *netlink.Conn
	dumps  lists
	counts *Counts // nil if the kernel does not have them
	family uint16  // what generic netlink calls IPVS
}

// OpenServers loads the kernel module ip_vs if necessary and possible. The error names what is missing.
func OpenServers() (*Servers, error) {
	family, err := genericFamily("IPVS", "ip_vs")
	if err != nil {
		return nil, fmt.Errorf("IPVS: %w", err)
	}
	s, err := open(family)
	if err != nil {
		return nil, err
	}
	if _, err := s.conn.Ask(netlink.Message{Type: family, Body: genl(commandGetConfig)}); err != nil {
		_ = s.Close()
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("IPVS: the capability CAP_NET_ADMIN is missing: run as root, or add it: %w", err)
		}
		return nil, fmt.Errorf("IPVS: the kernel does not say its timeouts: %w", err)
	}
	return s, nil
}

func open(family uint16) (*Servers, error) {
	dumps, err := dialLists()
	if err != nil {
		return nil, fmt.Errorf("IPVS: %w", err)
	}
	s := &Servers{conn: dumps[0], dumps: dumps, family: family}
	if c, err := OpenCounts(); err == nil {
		s.counts = c
	}
	return s, nil
}

// genericFamily is the number by which generic netlink knows an interface, which a module brings.
func genericFamily(name, needs string) (uint16, error) {
	family, err := links.GenlFamilyGet(name)
	if err != nil {
		if load := module.Load(needs); load != nil {
			return 0, fmt.Errorf("this kernel does not have it, and the module %s cannot be loaded: run modprobe %s on this node,"+
				" or use another proxy mode: %w", needs, needs, load)
		}
		if family, err = links.GenlFamilyGet(name); err != nil {
			return 0, fmt.Errorf("the module %s is loaded, but without the netlink interface %s: %w", needs, name, err)
		}
	}
	return family.ID, nil
}

// Close closes the sockets. It changes nothing.
func (s *Servers) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.dumps.Close()
	if s.counts != nil {
		err = errors.Join(err, s.counts.Close())
	}
	return err
}

// Another returns the same virtual servers by a socket of its own, so that reading does not hold up who uses s. It must be closed.
func (s *Servers) Another() (*Servers, error) {
	return open(s.family)
}

// List returns all virtual servers of a family, with their real servers.
func (s *Servers) List(f plan.Family) (map[ServerID]*ActualServer, error) {
	list := map[ServerID]*ActualServer{}
	err := s.Each(f, func(v *ActualServer) {
		is := *v
		is.RealServers = maps.Clone(v.RealServers)
		list[v.ID] = &is
	})
	return list, err
}

// Each calls each with all virtual servers of a family, with their real servers, which are valid only during the call. It must not use s.
func (s *Servers) Each(f plan.Family, each func(*ActualServer)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.dumps.services(s.family)
	if err != nil {
		return listing(err)
	}
	var expected func(ServerID) int
	if s.counts != nil && f == plan.IPv4 {
		counted := make(map[ServerID]int, len(all))
		if err := s.counts.Read(func(id ServerID, n int) { counted[id] = n }); err != nil {
			return err
		}
		expected = func(id ServerID) int { return counted[id] }
		s.counts.buf = nil // It has a hundred bytes for each virtual server; what follows needs as much for each real server of one.
	}
	return s.each(f, all, expected, each)
}

// EachOnce is Each with a single dump of virtual servers, however many of them change meanwhile: some may be missing that are there.
// expected returns how many real servers one probably has. Where it has another number, reading
// these takes four system calls instead of one, and three where expected is nil.
func (s *Servers) EachOnce(f plan.Family, expected func(ServerID) int, each func(*ActualServer)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []ActualServer
	if s.counts != nil {
		if n, err := s.counts.Servers(); err == nil {
			all = make([]ActualServer, 0, n)
		}
	}
	all, err := services(s.conn, s.family, all)
	if err != nil {
		return listing(err)
	}
	return s.each(f, all, expected, each)
}

func listing(err error) error { return fmt.Errorf("listing virtual servers: %w", err) }

// each reads the real servers of virtual servers of IPv4 by socket options, which takes one system call for each instead of three, and a
// buffer of a hundred bytes for each instead of 32 KiB. What these do not show, and what changes meanwhile, it reads by netlink, as it
// reads all where expected is nil.
func (s *Servers) each(f plan.Family, all []ActualServer, expected func(ServerID) int, each func(*ActualServer)) error {
	realServers := map[netip.AddrPort]ActualRealServer{}
	for i := range all {
		v := &all[i]
		if v.ID.Family != f {
			continue
		}
		clear(realServers)
		v.RealServers = realServers
		if f != plan.IPv4 || expected == nil || s.counts == nil || !s.counts.realServers(v, expected(v.ID)) {
			if err := s.realServers(v); err != nil {
				return fmt.Errorf("listing the real servers of virtual server %s: %w", v.ID, err)
			}
		}
		each(v)
	}
	return nil
}

// Get returns one virtual server with its real servers and the numbers of their connections, or nil if there is none.
func (s *Servers) Get(id ServerID) (*ActualServer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, err := s.conn.Ask(s.serviceMessage(commandGetService, id))
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	var h ActualServer
	if err == nil {
		h, _, err = parseService(body)
	}
	if h.RealServers = map[netip.AddrPort]ActualRealServer{}; err == nil {
		err = s.realServers(&h)
	}
	if err != nil {
		return nil, fmt.Errorf("reading virtual server %s: %w", id, err)
	}
	return &h, nil
}

// RealServers returns the real servers of a virtual server, which probably has n of them, with the numbers of their connections; nil if
// it is not there. If it is of IPv4 and has n, that takes one system call.
func (s *Servers) RealServers(id ServerID, n int) (map[netip.AddrPort]ActualRealServer, error) {
	if is := s.counted(id, n); is != nil {
		return is, nil
	}
	h, err := s.Get(id)
	if h == nil {
		return nil, err
	}
	return h.RealServers, nil
}

// counted is RealServers by socket options; nil if it takes others.
func (s *Servers) counted(id ServerID, n int) map[netip.AddrPort]ActualRealServer {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := &ActualServer{Server: Server{ID: id}, RealServers: map[netip.AddrPort]ActualRealServer{}}
	if s.counts == nil || id.Family != plan.IPv4 || !s.counts.realServers(h, n) {
		return nil
	}
	return h.RealServers
}

// Stats calls each with the counters of all virtual servers in the network namespace of the calling thread, from one dump. Some may be missing,
// and others come twice, as lists.services says. It uses a socket of its own, so it may be called after Close, and does not wait for other
// calls.
func (s *Servers) Stats(each func(ServerID, Traffic)) error {
	c, err := netlink.DialParts(unix.NETLINK_GENERIC, partSizes[0])
	if err == nil {
		defer c.Close()
		err = dump(c, s.family, func(v ActualServer, t Traffic) { each(v.ID, t) })
	}
	if err != nil && !errors.Is(err, netlink.ErrInterrupted) {
		return fmt.Errorf("reading the counters of virtual servers: %w", err)
	}
	return nil
}

// lists are sockets to dump by. The parts of their dumps differ in length; with long parts there are few, from each of which on the kernel
// begins at the first server again.
type lists [len(partSizes)]*netlink.Conn

var partSizes = [...]int{68 << 10, 23 << 10}

func dialLists() (l lists, err error) {
	for i, most := range partSizes {
		if l[i], err = netlink.DialParts(unix.NETLINK_GENERIC, most); err != nil {
			_ = l.Close()
			return lists{}, err
		}
	}
	return l, nil
}

func (l lists) Close() error {
	var errs []error
	for _, c := range l {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// services dumps all virtual servers at least twice, until two consecutive dumps have the same ones. Between two
// parts of a dump, the kernel remembers only how many servers it has passed, including those of all other network namespaces. So if any of
// these, of a container say, are added or deleted meanwhile, others are missing from the dump or in it twice, and the kernel does not report
// that. Consecutive dumps are divided at different places, so that changes in step with them do not hide the same servers twice.
func (l lists) services(family uint16) (all []ActualServer, err error) {
	var ids map[uint64]struct{} // hashes of all
	seed, n := maphash.MakeSeed(), 0
	err = netlink.Retry(func() (err error) {
		before := ids
		n++
		if all, err = services(l[n%len(l)], family, all[:0]); err != nil {
			return err
		}
		ids = make(map[uint64]struct{}, len(all))
		for i := range all {
			ids[maphash.Comparable(seed, all[i].ID)] = struct{}{}
		}
		if before == nil || !maps.Equal(ids, before) {
			return netlink.ErrInterrupted
		}
		return nil
	})
	return all, err
}

// services appends all virtual servers, without real servers, by dumping them once. Some may come twice.
func services(c *netlink.Conn, family uint16, to []ActualServer) ([]ActualServer, error) {
	err := dump(c, family, func(v ActualServer, _ Traffic) { to = append(to, v) })
	return to, err
}

// dump calls each with all virtual servers, without real servers, in one dump.
func dump(c *netlink.Conn, family uint16, each func(ActualServer, Traffic)) error {
	return c.Dump(netlink.Message{Type: family, Body: genl(commandGetService)}, func(body []byte) error {
		v, t, err := parseService(body)
		if err == nil {
			each(v, t)
		}
		return err
	})
}

// realServers dumps the real servers of one virtual server into it. The kernel does not report an error if the server is gone.
func (s *Servers) realServers(h *ActualServer) error {
	return netlink.Retry(func() error {
		clear(h.RealServers)
		return s.conn.Dump(s.serviceMessage(commandGetDest, h.ID), func(body []byte) error {
			d, foreign, err := parseRealServer(body, h.ID.Family)
			if err == nil {
				h.RealServers[d.Addr] = d
				h.Foreign = h.Foreign || foreign
			}
			return err
		})
	})
}

// serviceMessage is a request about the virtual server that id names.
func (s *Servers) serviceMessage(command uint8, id ServerID) netlink.Message {
	body := genl(command).Nest(attrService, func(b netlink.Buffer) netlink.Buffer { return appendServiceID(b, id) })
	return netlink.Message{Type: s.family, Body: body}
}

// SetTimeouts sets how long an idle connection is kept: one of TCP, one of TCP after a FIN, and one of UDP. In whole seconds;
// 0 leaves the kernel's value. It is for all virtual servers of the namespace.
func (s *Servers) SetTimeouts(tcp, tcpFin, udp time.Duration) error {
	if tcp == 0 && tcpFin == 0 && udp == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	body := genl(commandSetConfig)
	for kind, d := range map[uint16]time.Duration{attrTimeoutTCP: tcp, attrTimeoutTCPFin: tcpFin, attrTimeoutUDP: udp} {
		body = body.Uint32(kind, seconds(d))
	}
	if err := errors.Join(s.conn.Do(netlink.Message{Type: s.family, Body: body})...); err != nil {
		return fmt.Errorf("setting IPVS timeouts (TCP %v, TCP after FIN %v, UDP %v): %w", tcp, tcpFin, udp, err)
	}
	return nil
}

// HasScheduler reports whether the kernel has a scheduler, and loads its module if necessary and possible. It makes no virtual
// server.
func (s *Servers) HasScheduler(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tryScheduler(name) ||
		// The kernel asks for the module too, but may not know where modprobe is.
		module.Load("ip_vs_"+name) == nil && s.tryScheduler(name)
}

// tryScheduler asks for a virtual server that the kernel rejects as invalid, but only after it has looked for the scheduler: one of
// IPv6 with an empty netmask.
func (s *Servers) tryScheduler(name string) bool {
	const longest = 15 // IP_VS_SCHEDNAME_MAXLEN, without the zero at the end; what is longer is invalid too.
	if len(name) > longest {
		return false
	}
	probe := Server{Scheduler: name, ID: ServerID{
		Family: plan.IPv6, Protocol: plan.TCP, Addr: netip.MustParseAddr("2001:db8::1"), Port: 65535,
	}}
	_, err := s.conn.Ask(netlink.Message{Type: s.family, Body: genl(commandNewService).Nest(attrService, func(b netlink.Buffer) netlink.Buffer {
		return appendService(b, probe).Uint32(serviceNetmask, 0) // The last attribute of a kind is the one that counts.
	})})
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return s.makeWith(name)
	}
	return errors.Is(err, unix.EINVAL)
}

// makeWith does the same if IPVS is built without IPv6: it makes a virtual server with the scheduler and removes it at once. Its
// firewall mark is one that no packet has. If there is a virtual server with that mark already, it uses another one.
func (s *Servers) makeWith(name string) bool {
	const first, marks = 0xfedcba00, 256
	for mark := uint32(first); mark < first+marks; mark++ {
		probe := Server{Scheduler: name, ID: ServerID{Family: plan.IPv4, Mark: mark}}
		ops := []Op{{Kind: AddServer, Server: probe}, {Kind: DeleteServer, Server: probe}}
		if existing, err := s.conn.Ask(s.serviceMessage(commandGetService, probe.ID)); err == nil && existing != nil {
			continue
		}
		errs := s.conn.Do(s.command(commandNewService, ops[0]), s.command(commandDelService, ops[1]))
		return errs == nil || errs[0] == nil
	}
	return false
}
