package endpoints

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/host"
	"nodeproxy/plan"
)

// LookOut returns the endpoints to which the kernel has no route, with the reason for each, and the families of those elsewhere whose packets this node
// does not forward. sysctls is /proc/sys.
func LookOut(ctx context.Context, sysctls string, endpoints []netip.Addr) (unreached map[netip.Addr]string, notForwarded []plan.Family, err error) {
	unreached = map[netip.Addr]string{}
	away := map[plan.Family]bool{}
	for _, ep := range endpoints {
		if err := ctx.Err(); err != nil {
			return nil, nil, err
		}
		r, err := host.RouteTo(ep, host.Way{})
		var why syscall.Errno
		switch {
		case err == nil && !r.Local:
			away[plan.FamilyOf(ep)] = true
		case err == nil:
		case !errors.As(err, &why):
			return nil, nil, err
		default:
			unreached[ep] = noRoute(why)
		}
	}
	for _, f := range plan.Families {
		if away[f] && !forwards(sysctls, f) {
			notForwarded = append(notForwarded, f)
		}
	}
	return unreached, notForwarded, nil
}

// noRoute says why the kernel has no route.
func noRoute(why syscall.Errno) string {
	switch why {
	case unix.EINVAL:
		return "its route is of type blackhole"
	case unix.EACCES:
		return "its route is of type prohibit"
	case unix.EHOSTUNREACH:
		return "its route is of type unreachable"
	}
	return why.Error()
}

// forwards reports whether this node forwards packets of a family, from some interface at least; also where that can't be read.
func forwards(sysctls string, f plan.Family) bool {
	settings := []string{filepath.Join(sysctls, "net/ipv6/conf/all/forwarding")}
	if f == plan.IPv4 {
		settings, _ = filepath.Glob(filepath.Join(sysctls, "net/ipv4/conf/*/forwarding")) // It fails only for a malformed pattern.
	}
	read := 0
	for _, path := range settings {
		if name := filepath.Base(filepath.Dir(path)); name == "lo" || name == "default" {
			continue
		}
		text, err := os.ReadFile(path)
		if err != nil { // The interface may be gone.
			continue
		}
		if read++; strings.TrimSpace(string(text)) != "0" {
			return true
		}
	}
	return read == 0
}
