package packetsim

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// serverKey identifies a virtual server: a firewall mark, or a protocol, an address and a port.
type serverKey struct {
	mark     uint32
	protocol string
	addr     netip.AddrPort
}

// server is a virtual server of IPVS.
type server struct {
	rule        *rule // the line that added it, for the rules of an outcome
	scheduler   string
	persistent  bool
	realServers []realServer
}

// realServer is a real server. One with weight 0 gets no new connections.
type realServer struct {
	rule   *rule
	addr   netip.AddrPort // port 0 keeps the packet's
	weight int
}

// unweighted are the schedulers that treat all real servers alike, except those of weight 0.
var unweighted = []string{"rr", "lc", "dh"}

// RestoreServers adds virtual servers from the input of "ipvsadm --restore", which "ipvsadm --save --numeric" prints. The error
// names the line, and stands for an error of ipvsadm or the kernel; the lines before it have been added.
func (rs *Ruleset) RestoreServers(text string) error {
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if err := rs.serverCommand(i+1, line); err != nil {
			return fmt.Errorf("%s virtual servers, line %d: %w: %.300s", rs.family, i+1, err, line)
		}
	}
	return nil
}

// serverLine is a line of ipvsadm, read.
type serverLine struct {
	command string // as the short option, such as -A
	key     serverKey
	isSix   bool // it says -6
	server  server
	dest    realServer
	method  string // -m, -g or -i; empty if not given
}

func (rs *Ruleset) serverCommand(number int, line string) error {
	l := serverLine{server: server{scheduler: "wlc"}, dest: realServer{weight: 1}}
	if err := l.parse(strings.Fields(line)); err != nil {
		return err
	}
	if l.command == "-C" {
		clear(rs.servers)
		return nil
	}
	if err := l.check(rs.family); err != nil {
		return err
	}
	r := &rule{line: number, text: line}
	l.server.rule, l.dest.rule = r, r
	old := rs.servers[l.key]
	if l.command == "-A" {
		if old != nil {
			return errors.New("the virtual server exists")
		}
		rs.servers[l.key] = &l.server
		return nil
	}
	if old == nil {
		return errors.New("there is no such virtual server")
	}
	at := slices.IndexFunc(old.realServers, func(d realServer) bool { return d.addr == l.dest.addr })
	switch l.command {
	case "-E":
		l.server.realServers = old.realServers
		rs.servers[l.key] = &l.server
	case "-D":
		delete(rs.servers, l.key)
	case "-a":
		if at >= 0 {
			return errors.New("the real server exists")
		}
		old.realServers = append(old.realServers, l.dest)
	case "-e", "-d":
		if at < 0 {
			return errors.New("there is no such real server")
		}
		old.realServers = slices.Delete(old.realServers, at, at+1)
		if l.command == "-e" {
			old.realServers = slices.Insert(old.realServers, at, l.dest)
		}
	}
	return nil
}

// shortOptions are the options of ipvsadm that are known, by each of their names.
var shortOptions = map[string]string{
	"--add-service": "-A", "--edit-service": "-E", "--delete-service": "-D", "--clear": "-C", "--add-server": "-a",
	"--edit-server": "-e", "--delete-server": "-d", "--tcp-service": "-t", "--udp-service": "-u",
	"--fwmark-service": "-f", "--ipv6": "-6", "--scheduler": "-s", "--persistent": "-p", "--netmask": "-M",
	"--sched-flags": "-b", "--real-server": "-r", "--masquerading": "-m", "--gatewaying": "-g", "--ipip": "-i",
	"--weight": "-w",
}

func (l *serverLine) parse(words []string) error {
	for len(words) > 0 {
		name := words[0]
		if short, ok := shortOptions[name]; ok {
			name = short
		}
		words = words[1:]
		value := ""
		if len(words) > 0 && !strings.HasPrefix(words[0], "-") {
			value = words[0]
		}
		took, err := l.option(name, value)
		if err != nil {
			return fmt.Errorf("option %s: %w", name, err)
		}
		if took && value != "" {
			words = words[1:]
		}
	}
	return nil
}

// option reads one option, and reports whether it has a value.
func (l *serverLine) option(name, value string) (took bool, err error) {
	switch name {
	case "-A", "-E", "-D", "-C", "-a", "-e", "-d":
		if l.command != "" {
			return false, errors.New("a line has one command only")
		}
		l.command = name
		return false, nil
	case "-6":
		l.isSix = true
		return false, nil
	case "-m", "-g", "-i":
		l.method = name
		return false, nil
	case "-p":
		l.server.persistent = true // The timeout may be left out.
		if value != "" {
			_, err = strconv.ParseUint(value, 10, 31)
		}
		return true, err
	}
	if value == "" {
		return false, errors.New("it is not known, or has no value")
	}
	switch name {
	case "-t", "-u", "--sctp-service":
		l.key.protocol = map[string]string{"-t": "tcp", "-u": "udp", "--sctp-service": "sctp"}[name]
		l.key.addr, err = netip.ParseAddrPort(value)
	case "-f":
		var mark uint64
		mark, err = strconv.ParseUint(value, 10, 32)
		l.key.mark = uint32(mark)
		if mark == 0 {
			err = errors.New("a firewall mark is a decimal number greater than 0")
		}
	case "-s":
		l.server.scheduler = value
	case "-b", "-M":
	case "-r":
		l.dest.addr, err = netip.ParseAddrPort(value)
		if a, errAddr := netip.ParseAddr(strings.Trim(value, "[]")); errAddr == nil {
			l.dest.addr, err = netip.AddrPortFrom(a, l.key.addr.Port()), nil
		}
	case "-w":
		l.dest.weight, err = strconv.Atoi(value)
		if l.dest.weight < 0 {
			err = errors.New("a weight is no less than 0")
		}
	default:
		return false, errors.New("the simulator does not know it")
	}
	return true, err
}

// check says what is wrong with a line as a whole.
func (l *serverLine) check(f plan.Family) error {
	byMark := l.key.mark != 0
	family := plan.IPv4
	if l.isSix {
		family = plan.IPv6
	}
	onDestination := l.command == "-a" || l.command == "-e" || l.command == "-d"
	switch {
	case l.command == "":
		return errors.New("it has no command")
	case byMark == (l.key.protocol != ""):
		return errors.New("a virtual server has either an address or a firewall mark")
	case byMark && family != f:
		return fmt.Errorf("a firewall mark of %s: option -6 makes it one of IPv6", family)
	case !byMark && (l.isSix || plan.FamilyOf(l.key.addr.Addr()) != f):
		return fmt.Errorf("%s is not an %s address, or it has -6, which is for firewall marks", l.key.addr.Addr(), f)
	case !byMark && l.key.addr.Port() == 0 && !l.server.persistent && !onDestination:
		return errors.New("a virtual server without a port must be persistent")
	case onDestination != l.dest.addr.IsValid():
		return errors.New("commands -a, -e and -d need a real server, and no other has one")
	case onDestination && plan.FamilyOf(l.dest.addr.Addr()) != f:
		return fmt.Errorf("%s is not an %s address", l.dest.addr.Addr(), f)
	case l.command != "-d" && onDestination && l.method != "-m":
		return errors.New("the simulator follows masquerading (-m) only")
	}
	return nil
}

// serverOf returns the virtual server that a packet meets, or nil. One for the packet's mark goes first; the mark must be
// the server's in all of its bits.
func (rs *Ruleset) serverOf(p *packet) *server {
	if p.mark != 0 {
		if s := rs.servers[serverKey{mark: p.mark}]; s != nil {
			return s
		}
	}
	if s := rs.servers[serverKey{protocol: p.protocol, addr: netip.AddrPortFrom(p.dst, p.port)}]; s != nil {
		return s
	}
	return rs.servers[serverKey{protocol: p.protocol, addr: netip.AddrPortFrom(p.dst, 0)}]
}

// schedule does with a packet what IPVS does: if it meets a virtual server, each real server is a way to go on. A packet for
// another machine begins anew at hook OUTPUT with its new destination; one for this machine stays where it is.
func (rs *Ruleset) schedule(w way) []way {
	if w.virtual.IsValid() {
		return []way{w} // IPVS has had it.
	}
	s := rs.serverOf(&w.packet)
	if s == nil {
		return []way{w}
	}
	w.rules = &step{"ipvs", nil, s.rule, w.rules}
	total := 0
	for _, d := range s.realServers {
		total += s.share(d)
	}
	if total == 0 {
		w.end = Reject
		return []way{w}
	}
	var out []way
	for _, d := range s.realServers {
		if s.share(d) == 0 {
			continue
		}
		to := w
		to.probability *= float64(s.share(d)) / float64(total)
		to.rules = &step{"ipvs", nil, d.rule, to.rules}
		to.send(d.addr)
		out = append(out, to)
	}
	return out
}

// share returns a real server's relative share of new connections.
func (s *server) share(d realServer) int {
	if slices.Contains(unweighted, s.scheduler) {
		return min(d.weight, 1)
	}
	return d.weight
}

// send sends a packet to a real server. The kernel lets no loopback address out of the machine, and nothing from outside reaches
// one.
func (w *way) send(to netip.AddrPort) {
	here := w.local(to.Addr())
	if !here && w.src.IsLoopback() || here && to.Addr().IsLoopback() && w.hook == input && w.in != "lo" {
		w.end = Drop
		return
	}
	w.virtual = netip.AddrPortFrom(w.dst, w.port)
	w.dst = to.Addr()
	if to.Port() != 0 {
		w.port = to.Port()
	}
	w.leaves = !here
}
