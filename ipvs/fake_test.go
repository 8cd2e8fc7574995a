package ipvs

import (
	"log/slog"
	"maps"
	"net/netip"
	"time"

	"nodeproxy/internal/set"
	"nodeproxy/ipvs/ipvstest"
	"nodeproxy/kernel/ipvs"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// testGrace is the grace period of engines in tests.
const testGrace = 5 * time.Minute

// newKernel returns a kernel without anything, in which each change has to be one.
func newKernel(f plan.Family) *ipvstest.Kernel {
	k := ipvstest.New(f)
	k.Exact = true
	return k
}

// fakeEngine is an engine over a kernel without anything.
func fakeEngine(f plan.Family, o Options) (*engine, *ipvstest.Kernel) {
	k := newKernel(f)
	return engineOver(k, o), k
}

func engineOver(k *ipvstest.Kernel, o Options) *engine {
	v, s, d := ipvstest.Servers{Kernel: k}, ipvstest.Sets{Kernel: k}, ipvstest.Device{Kernel: k}
	return &engine{family: k.Family, options: o, grace: testGrace, log: slog.New(slog.DiscardHandler), machine: machine{
		servers: v, sets: s, device: d, ports: ipvstest.Ports{Kernel: k}, tables: ipvstest.Tables{Kernel: k},
		host:   func(plan.Family) (set.Set[netip.Addr], error) { return maps.Clone(k.HostAddrs), nil },
		reader: func(func(ipvs.ServerID) int) (Reader, error) { return Reader{v, s, d, func() {}}, nil },
	}}
}

// simulationOf is what packets meet where the kernel holds what it does.
func simulationOf(k *ipvstest.Kernel) (*packetsim.Machine, error) {
	m := newSimulation(k.Family).Machine
	k.Fill(m)
	return m, restore.IPTables(m, k.Fixed.Render())
}
