package restore

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// Servers adds virtual servers from the input of "ipvsadm --restore", which "ipvsadm --save --numeric" prints. The error
// names the line, and stands for an error of ipvsadm or the kernel; the lines before it have been added.
func Servers(m *packetsim.Machine, text string) error {
	return eachLine(m, "virtual servers", text, func(o origin) error { return serverCommand(m, o) })
}

// serverLine is a line of ipvsadm, read.
type serverLine struct {
	command    string // as the short option, such as -A
	key        packetsim.ServerKey
	isSix      bool // it says -6
	persistent bool
	server     packetsim.Server
	real       packetsim.RealServer
	method     string // -m, -g or -i; empty if not given
}

func serverCommand(m *packetsim.Machine, o origin) error {
	l := serverLine{server: packetsim.Server{Origin: o, Scheduler: "wlc"}, real: packetsim.RealServer{Origin: o, Weight: 1}}
	if err := l.parse(strings.Fields(o.text)); err != nil {
		return err
	}
	if l.command == "-C" {
		clear(m.Servers)
		return nil
	}
	if err := l.check(m.Family); err != nil {
		return err
	}
	old := m.Servers[l.key]
	switch {
	case l.command == "-A" && old != nil:
		return errors.New("the virtual server exists")
	case l.command == "-A":
		m.Servers[l.key] = &l.server
		return nil
	case old == nil:
		return errors.New("there is no such virtual server")
	}
	at := slices.IndexFunc(old.RealServers, func(r packetsim.RealServer) bool { return r.Addr == l.real.Addr })
	switch l.command {
	case "-E":
		l.server.RealServers = old.RealServers
		m.Servers[l.key] = &l.server
	case "-D":
		delete(m.Servers, l.key)
	case "-a":
		if at >= 0 {
			return errors.New("the real server exists")
		}
		old.RealServers = append(old.RealServers, l.real)
	case "-e", "-d":
		if at < 0 {
			return errors.New("there is no such real server")
		}
		old.RealServers[at] = l.real
		if l.command == "-d" {
			old.RealServers = slices.Delete(old.RealServers, at, at+1)
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
		l.persistent = true // The timeout may be left out.
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
		l.key.Protocol = map[string]string{"-t": "tcp", "-u": "udp", "--sctp-service": "sctp"}[name]
		l.key.Addr, err = netip.ParseAddrPort(value)
	case "-f":
		var mark uint64
		mark, err = strconv.ParseUint(value, 10, 32)
		l.key.Mark = uint32(mark)
		if mark == 0 {
			err = errors.New("a firewall mark is a decimal number greater than 0")
		}
	case "-s":
		l.server.Scheduler = value
	case "-b", "-M":
	case "-r":
		if l.real.Addr, err = parseEndpoint(value); l.real.Addr.Port() == 0 {
			l.real.Addr = netip.AddrPortFrom(l.real.Addr.Addr(), l.key.Addr.Port())
		}
	case "-w":
		l.real.Weight, err = strconv.Atoi(value)
		if l.real.Weight < 0 {
			err = errors.New("a weight is no less than 0")
		}
	default:
		return false, errors.New("the simulator does not know it")
	}
	return true, err
}

// check says what is wrong with a line as a whole.
func (l *serverLine) check(f plan.Family) error {
	byMark, markFamily := l.key.Mark != 0, plan.IPv4
	if l.isSix {
		markFamily = plan.IPv6
	}
	addr, real := l.key.Addr.Addr(), l.real.Addr.Addr()
	onReal := l.command == "-a" || l.command == "-e" || l.command == "-d"
	switch {
	case l.command == "":
		return errors.New("it has no command")
	case byMark == (l.key.Protocol != ""):
		return errors.New("a virtual server has either an address or a firewall mark")
	case byMark && markFamily != f:
		return fmt.Errorf("a firewall mark of %s: option -6 makes it one of IPv6", markFamily)
	case !byMark && (l.isSix || plan.FamilyOf(addr) != f):
		return fmt.Errorf("%s is not an %s address, or it has -6, which is for firewall marks", addr, f)
	case !byMark && l.key.Addr.Port() == 0 && !l.persistent && !onReal:
		return errors.New("a virtual server without a port must be persistent")
	case onReal != real.IsValid():
		return errors.New("commands -a, -e and -d need a real server, and no other has one")
	case onReal && plan.FamilyOf(real) != f:
		return fmt.Errorf("%s is not an %s address", real, f)
	case l.command != "-d" && onReal && l.method != "-m":
		return errors.New("the simulator follows masquerading (-m) only")
	}
	return nil
}
