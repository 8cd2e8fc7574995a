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

// Unreached is an endpoint to which the kernel has no route, and why, as it says.
type Unreached struct {
	Addr netip.Addr
	Why  string
}

// Routes says whether packets can leave this node for endpoints.
type Routes struct {
	Unreached []Unreached
	// NotForwarded are the families of endpoints elsewhere whose packets this node does not forward.
	NotForwarded []plan.Family
}

// LookOut finds out whether there are routes to endpoints, and whether this node forwards packets to those that are not its
// own addresses. sysctls is /proc/sys.
func LookOut(ctx context.Context, sysctls string, endpoints []netip.Addr) (*Routes, error) {
	out, away := &Routes{}, map[plan.Family]bool{}
	for _, ep := range endpoints {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r, err := host.RouteTo(ep, host.Way{})
		var why syscall.Errno
		switch {
		case err == nil && !r.Local:
			away[plan.FamilyOf(ep)] = true
		case err == nil:
		case !errors.As(err, &why):
			return nil, err
		default:
			out.Unreached = append(out.Unreached, Unreached{ep, noRoute(why)})
		}
	}
	for _, f := range plan.Families {
		if away[f] && !forwards(sysctls, f) {
			out.NotForwarded = append(out.NotForwarded, f)
		}
	}
	return out, nil
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
