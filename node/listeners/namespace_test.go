package listeners

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
	"nodeproxy/source"
)

// node is nstest.Process on a node with addresses of its own and of Services.
func node(t *testing.T) bool {
	t.Helper()
	inside := nstest.Process(t)
	if inside {
		device(t, "node0", "10.0.0.5/24", "10.0.0.6/24", "fd00::5/64")
		device(t, "services0", "10.96.0.1/32", "10.96.0.10/32")
	}
	return inside
}

// device makes a device, of the pair that every kernel has, and gives it addresses.
func device(t *testing.T, name string, addresses ...string) {
	t.Helper()
	require.NoError(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer-" + name}))
	link, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	require.NoError(t, err)
	for _, text := range addresses {
		addr, err := netlink.ParseAddr(text)
		if err == nil {
			addr.Flags = unix.IFA_F_NODAD
			err = netlink.AddrAdd(link, addr)
		}
		require.NoError(t, err, "%s", text)
	}
}

// listen opens a socket: tcp, tcp4 and so on, or udp. It returns what closes it.
func listen(t *testing.T, network, address string) (closeIt func()) {
	t.Helper()
	var closer interface{ Close() error }
	var err error
	if strings.HasPrefix(network, "udp") {
		closer, err = net.ListenPacket(network, address)
	} else {
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		}}
		closer, err = config.Listen(context.Background(), network, address)
	}
	require.NoError(t, err)
	t.Cleanup(func() { closer.Close() })
	return func() { closer.Close() }
}

// watched is a Watcher that looks when the test asks for it, and its plan.
type watched struct {
	*Watcher
	t          *testing.T
	plan       *plan.Plan
	found      []source.Finding
	count      int
	programmed plan.Publisher
}

// newWatcher returns a Watcher that tells nobody anything, unless change says so.
func newWatcher(change func(*Config)) *Watcher {
	c := Config{Report: func(source.Finding) {}, Count: func(int) {}, Held: func(plan.Service) bool { return false },
		Log: slog.New(slog.DiscardHandler)}
	change(&c)
	return New(c)
}

func newWatched(t *testing.T, settings plan.Settings) *watched {
	node := plan.Node{Name: "me", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.5"), netip.MustParseAddr("fd00::5")}}
	w := &watched{t: t, plan: plan.New(node, settings), count: -1}
	w.Watcher = newWatcher(func(c *Config) {
		c.NotNode = []string{"services0"}
		c.Report = func(f source.Finding) { w.found = append(w.found, f) }
		c.Count = func(n int) { w.count = n }
	})
	w.own, w.gap = func() map[uint32]bool { return nil }, 0
	w.update(plan.Everything())
	return w
}

// set puts a ServicePort into the plan and updates the Watcher.
func (w *watched) set(sp *plan.ServicePort) {
	w.plan.Set(sp)
	w.update(plan.Only(plan.Keys{sp.Key: {}}))
}

// update updates the Watcher after a change of the plan.
func (w *watched) update(change plan.Change) {
	w.programmed.Publish(w.plan, change)
	w.Update(w.programmed.Latest(), change)
}

// snapshotOf returns a plan of one ServicePort as it is when it has been programmed.
func snapshotOf(sp *plan.ServicePort) *plan.Snapshot {
	p := plan.New(plan.Node{}, plan.Settings{})
	p.Set(sp)
	var programmed plan.Publisher
	programmed.Publish(p, plan.Everything())
	return programmed.Latest()
}

// see looks once and returns what is reported.
func (w *watched) see() []source.Finding {
	w.t.Helper()
	w.found = nil
	if err := w.look(); err != nil {
		w.t.Fatal(err)
	}
	return w.found
}

// servicePort makes a ServicePort ns/NAME of a port called "p". An endpoint is ADDRESS:PORT.
func servicePort(name string, f plan.Family, frontends []plan.Frontend, endpoints ...string) *plan.ServicePort {
	sp := &plan.ServicePort{
		Key: plan.Key{
			Service: plan.Service{Namespace: "ns", Name: name}, Port: "p", Protocol: frontends[0].Protocol, Family: f,
		},
		Frontends: frontends,
	}
	for _, text := range endpoints {
		sp.Endpoints.Cluster = append(sp.Endpoints.Cluster, plan.Endpoint{Addr: netip.MustParseAddrPort(text)})
	}
	return sp
}

func at(kind plan.FrontendKind, address string, p plan.Protocol, port uint16) plan.Frontend {
	f := plan.Frontend{Kind: kind, Protocol: p, Port: port}
	if address != "" {
		f.Addr = netip.MustParseAddr(address)
	}
	return f
}
