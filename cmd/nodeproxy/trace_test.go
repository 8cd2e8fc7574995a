package main

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"nodeproxy/config"
	"nodeproxy/inspect"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/plantest"
	"nodeproxy/proxier"
)

// tracePairs is how many packets TestTraceVerdicts follows in each mode; a hundredth of them in short tests.
var tracePairs = flag.Int("trace.pairs", 4000, "number of random packets that are traced in each mode")

// packetsPerCluster is how many of them belong to one cluster and family.
const packetsPerCluster = 25

// TestTraceVerdicts: what trace says of packets in random clusters is what the plan says, in every mode, but for what a mode does otherwise
// by intent. That the rules on the way are those of the whole plan is tested in the package of each mode (TestMachine).
func TestTraceVerdicts(t *testing.T) {
	t.Parallel()
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			cfg := defaultConfig(t, m.name)
			pairs := *tracePairs
			if testing.Short() {
				pairs /= 100
			}
			clusters, packets := plantest.Clusters(), 0
			seen := map[string]int{}
			for seed := 0; packets < pairs; seed++ {
				c := clusters.Example(seed)
				c.Plan.Settings.LocalhostNodePorts = c.Plan.Settings.LocalhostNodePorts && m.name == "iptables"
				n := tracedNode(c.Plan, cfg)
				n.Local = func() (func(netip.Addr) bool, error) { return c.Local, nil }
				for _, f := range plan.Families {
					generator := c.Packets(f)
					judge, err := newJudge(c, cfg, f)
					require.NoError(t, err)
					for i := range packetsPerCluster {
						pkt := asTraced(c, generator.Example(seed*packetsPerCluster+i))
						answer, err := n.Trace(inspect.TraceQuery{From: pkt.Src.String(), To: netip.AddrPortFrom(pkt.Dst, pkt.DstPort).String(), Protocol: pkt.Protocol})
						require.NoError(t, err, "cluster %d, %s", seed, pkt)
						if err := judge.check(pkt, &answer.Packets[0]); err != nil {
							t.Fatalf("cluster %d, packet: %s\nplan: %s\ntrace: %+v\n%v", seed, pkt, judge.evaluator.Verdict(pkt), answer.Packets[0], err)
						}
						seen[answer.Packets[0].Action]++
						packets++
					}
				}
			}
			t.Logf("%d packets: %v", packets, seen)
			for _, action := range []plan.Action{plan.Pass, plan.Forward, plan.Reject, plan.Drop} {
				if seen[action.String()] == 0 {
					t.Errorf("of %d packets, none was to %s", packets, action)
				}
			}
		})
	}
}

// defaultConfig returns the configuration of a mode without further flags.
func defaultConfig(tb testing.TB, mode string) *config.Config {
	tb.Helper()
	flags, fs := &config.Flags{}, pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.Add(fs)
	err := fs.Parse([]string{"--manifests=m", "--mode=" + mode, "--node-name=node1"})
	cfg, bad := flags.Config()
	if err = errors.Join(err, bad); err != nil {
		tb.Fatal(err)
	}
	return cfg
}

// tracedNode returns a node on which a plan is programmed.
func tracedNode(p *plan.Plan, cfg *config.Config) *inspect.Node {
	var published plan.Publisher
	published.Publish(p, plan.Everything())
	state := proxier.NewState(p.Node.Name, p.Settings, plan.Families[:], nil)
	return &inspect.Node{
		Mode: cfg.Mode, View: func(read func(*proxier.State)) { read(state) }, Programmed: published.Latest, Machine: machineOf(cfg),
	}
}

// asTraced returns a packet with the interface by which it comes in if nothing is known of its source but the address.
func asTraced(c *plantest.Cluster, pkt plan.Packet) plan.Packet {
	pkt.InInterface, pkt.Output = "elsewhere", pkt.SrcLocal
	if pkt.Output {
		pkt.InInterface = ""
		return pkt
	}
	for _, sp := range c.Plan.Services {
		for _, ep := range sp.All() {
			if !ep.Local || ep.Addr.Addr() != pkt.Src {
				continue
			}
			switch d := c.Plan.Settings.DetectLocal; d.Mode {
			case plan.DetectBridgeInterface:
				pkt.InInterface = d.Interface
			case plan.DetectInterfaceNamePrefix:
				pkt.InInterface = d.Interface + "1"
			}
		}
	}
	return pkt
}

// judge compares what trace says of packets of a family in a cluster with the verdicts of the plan.
type judge struct {
	cluster   *plantest.Cluster
	mode      string
	evaluator *plan.Evaluator
	whole     *packetsim.Machine
	tolerance packetsim.Tolerance
}

func newJudge(c *plantest.Cluster, cfg *config.Config, f plan.Family) (*judge, error) {
	whole, err := machineOf(cfg)(c.Plan, c.Plan, f, c.Local)
	j := &judge{cluster: c, mode: cfg.Mode, evaluator: plan.NewEvaluator(c.Plan), whole: whole}
	if cfg.Mode == "ipvs" {
		j.tolerance = packetsim.IPVSTolerance(c.Plan)
		all := j.tolerance.RejectPass
		j.tolerance.RejectPass = func(a netip.Addr) bool { return whole.IsAdded(a) && all(a) }
	}
	return j, err
}

// check returns how the two differ other than by intent.
func (j *judge) check(pkt plan.Packet, got *inspect.PacketTrace) error {
	c, v, tolerance := j.cluster, j.evaluator.Verdict(pkt), j.tolerance
	switch j.mode {
	case "ipvs":
		if !pkt.Output && j.whole.IsAdded(pkt.Src) {
			if got.Action != plan.Drop.String() {
				return fmt.Errorf("the kernel takes in no packet from an address of its own")
			}
			return nil
		}
		if slices.ContainsFunc(v.Targets, func(t plan.Target) bool { return j.whole.IsAdded(t.Addr.Addr()) }) {
			return nil // The address of an endpoint is that of a Service too, and therefore the node's own.
		}
	case "nftables":
		if owned := atClusterIP(c.Plan, pkt.Dst); v.Action == plan.Pass && !pkt.DstLocal && owned != plan.Pass {
			if got.Action != owned.String() {
				return fmt.Errorf("want it to %s", owned)
			}
			return nil
		}
		if sp := c.Plan.Services[v.ServicePort]; sp != nil && (sp.Scheduler.Name == "sh" || sp.Scheduler.Name == "mh") {
			tolerance.AnyShare = true
			if len(got.Outcomes) == 1 { // The one that the hash of the client's address chooses.
				v.Targets = slices.DeleteFunc(v.Targets, func(t plan.Target) bool { return t.Addr.String() != got.Outcomes[0].Endpoint })
			}
		}
	}
	var outcomes []packetsim.Outcome
	for _, o := range got.Outcomes {
		to := packetsim.Outcome{Action: packetsim.Action(o.Action), Probability: o.Probability, Masquerade: o.Masqueraded, Dst: netip.AddrPortFrom(pkt.Dst, pkt.DstPort)}
		if o.Endpoint != "" {
			to.Dst, to.DNAT = netip.MustParseAddrPort(o.Endpoint), true
		}
		to.Delivered = c.Local(to.Dst.Addr())
		outcomes = append(outcomes, to)
	}
	if err := tolerance.Agree(v, pkt, outcomes); err != nil {
		return err
	}
	if v.Action == plan.Forward && got.Service != v.ServicePort.PortName() || len(got.Reasons) == 0 {
		return fmt.Errorf("it should be for %s", v.ServicePort)
	}
	return nil
}

// atClusterIP is what mode nftables does with packets to an address that are for no Service: it rejects those to cluster IPs, and drops
// those to addresses that could be some.
func atClusterIP(p *plan.Plan, a netip.Addr) plan.Action {
	for _, sp := range p.Services {
		for _, f := range sp.Frontends {
			if f.Kind == plan.ClusterIP && f.Addr == a {
				return plan.Reject
			}
		}
	}
	if slices.ContainsFunc(p.Settings.ServiceCIDRs, func(r netip.Prefix) bool { return r.Contains(a) }) {
		return plan.Drop
	}
	return plan.Pass
}

// BenchmarkTrace traces a packet in each mode on a node with 10,000 Services of three endpoints each.
func BenchmarkTrace(b *testing.B) {
	p := plantest.Large(10000, 3)
	for _, m := range modes {
		b.Run(m.name, func(b *testing.B) {
			n := tracedNode(p, defaultConfig(b, m.name))
			for b.Loop() {
				answer, err := n.Trace(inspect.TraceQuery{From: "outside", To: "bench/s7777"})
				if err != nil || answer.Packets[0].Action != "forward" || len(answer.Packets[0].Outcomes) != 3 {
					b.Fatal(answer, err)
				}
			}
		})
	}
}
