package harness

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	if end := os.Getenv(endVariable); end != "" {
		os.Exit(Supervise(func() int { return makeWorldAndEnd(end) }))
	}
	os.Exit(Main(m))
}

var networks = []string{"tcp", "udp"}

func TestWorldRoutesPlainTraffic(t *testing.T) {
	for _, bridge := range []bool{false, true} {
		t.Run(fmt.Sprintf("bridge=%v", bridge), func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			w := New(t, Options{Bridge: bridge, SecondAddress: true})
			t.Logf("made in %v", time.Since(start))
			clients := []*Host{w.Client, w.Nodes[0].Host, w.Nodes[1].Host, w.Pod("n1a").Host, w.Pod("n2b").Host}
			for _, client := range clients {
				for _, server := range []string{"n1a", "n1b", "n2a", "n3a"} {
					for _, network := range networks {
						for _, family := range []int{4, 6} {
							to := netip.AddrPortFrom(w.Pod(server).IP(family), 8081)
							a := client.Ask(network, to, Patient)
							if a.Outcome != Answered || a.Server != server || a.Port != 8081 || a.Source != client.IP(family) {
								t.Errorf("%s to %s, %s over IPv%d: %v", client.Name, server, network, family, a)
							}
						}
					}
				}
			}
		})
	}
}

// TestOutcomes holds the client's verdicts against rules whose effect is known.
func TestOutcomes(t *testing.T) {
	for _, variant := range Variants {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			w := New(t, Options{})
			var running sync.WaitGroup
			for _, family := range []int{4, 6} {
				writeKnownRules(t, w, variant, family)
				for _, network := range networks {
					for _, client := range []*Host{w.Client, w.Node1().Host, w.Pod("n1a").Host, w.Nodes[1].Host} {
						running.Go(func() { checkKnownRules(t, w, client, network, family) })
					}
				}
			}
			running.Wait()
		})
	}
}

// served, rejected and dropped are the numbers of Services whose cluster IPs have known rules.
const served, rejected, dropped = 1, 2, 3

func writeKnownRules(t *testing.T, w *World, variant Variant, family int) {
	t.Helper()
	run := func(format string, args ...any) {
		t.Helper()
		tool := variant.Tool(map[int]string{4: "iptables", 6: "ip6tables"}[family])
		if _, err := w.Node1().Output(tool, strings.Fields("-w "+fmt.Sprintf(format, args...))...); err != nil {
			t.Fatal(err)
		}
	}
	pod := w.Pod("n2a").IP(family)
	for _, chain := range []string{"PREROUTING", "OUTPUT"} {
		run("-t nat -A %s -d %s -j DNAT --to-destination %s", chain, AddressesOf(served).ClusterIP(family), pod)
	}
	run("-t nat -A POSTROUTING -s %s -d %s -j MASQUERADE", w.Client.IP(family), pod)
	for _, chain := range []string{"FORWARD", "OUTPUT"} {
		run("-A %s -d %s -j REJECT", chain, AddressesOf(rejected).ClusterIP(family))
		run("-A %s -d %s -j DROP", chain, AddressesOf(dropped).ClusterIP(family))
	}
}

func checkKnownRules(t *testing.T, w *World, client *Host, network string, family int) {
	what := fmt.Sprintf("%s, %s over IPv%d", client.Name, network, family)
	at := func(service int) netip.AddrPort {
		return netip.AddrPortFrom(AddressesOf(service).ClusterIP(family), 8080)
	}
	want := client.IP(family)
	if client == w.Client {
		want = w.Node1().IP(family)
	}
	// Another node gets its replies from the pod on a shorter way than its requests took, which breaks the connection.
	if client != w.Nodes[1].Host {
		a := client.Ask(network, at(served), Patient)
		if a.Outcome != Answered || a.Server != "n2a" || a.Source != want {
			t.Errorf("%s to a DNAT address: %v, want n2a to see %v", what, a, want)
		}
	}
	for range 3 {
		if a := client.Ask(network, at(rejected), Patient); a.Outcome != Refused {
			t.Errorf("%s to a rejected address: %v", what, a)
		}
	}
	if a := client.Ask(network, at(dropped), Brief); a.Outcome != TimedOut {
		t.Errorf("%s to a dropped address: %v", what, a)
	}
	closed := netip.AddrPortFrom(w.Pod("n2a").IP(family), 99)
	if a := client.Ask(network, closed, Patient); a.Outcome != Refused {
		t.Errorf("%s to a closed port: %v", what, a)
	}
}
