package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
	"nodeproxy/inspect"
	"nodeproxy/kernel/names"
)

// liveTracer asks the daemon of node1 for the way of packets, while clients connect.
type liveTracer struct {
	w      *harness.World
	socket string
}

// follow runs trace --live until it has seen packets, and returns its answer, or its text and the error of a trace that finds a problem.
func (l liveTracer) follow(t *testing.T, client *harness.Host, from, network string, to netip.AddrPort, flags ...string) (answer inspect.Live, text string, failed error) {
	t.Helper()
	binary, err := harness.Binary()
	require.NoError(t, err)
	args := append([]string{"trace", from, to.String(), "-p", network, "--socket=" + l.socket, "--live", "--for=50s", "--max-packets=3"}, flags...)
	done := make(chan struct{})
	go func() {
		defer close(done)
		text, failed = l.w.Node1().Output(binary, args...)
	}()
	for {
		client.Ask(network, to, harness.Brief)
		select {
		case <-done:
			if err := json.Unmarshal([]byte(text), &answer); err != nil && strings.HasPrefix(text, "{") {
				t.Fatalf("%v: %s", err, text)
			}
			return answer, text, failed
		default:
		}
	}
}

// TestTraceLive: real packets go as predicted, and a packet that another program drops is dropped by the rule that is named.
func TestTraceLive(t *testing.T) {
	t.Parallel()
	for _, variant := range harness.Variants {
		if mode == harness.NFTables && variant == harness.Legacy {
			continue // It has no rules of iptables.
		}
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			w := harness.New(t, harness.Options{})
			w.Write(t, "nodes.yaml", w.NodeObjects()...)
			w.Write(t, "s1.yaml", harness.Objects(harness.Service("s1", 1), w.Ready("n1a", "n2a")...)...)
			w.Write(t, "s2.yaml", harness.Objects(harness.Service("s2", 2))...)
			l := liveTracer{w, filepath.Join(t.TempDir(), "socket")}
			w.Run(t, variant, clusterCIDR, "--socket="+l.socket)
			node, pod := w.Node1(), w.Pod("n1c")
			for _, family := range families {
				for _, c := range []struct {
					client   *harness.Host
					from     string
					network  string
					to       netip.AddrPort
					action   string
					endpoint bool
				}{
					{w.Client, "outside", "tcp", nodePort(node.IP(family), 1), "forward", true},
					{w.Client, w.Client.IP(family).String(), "udp", vip(1, family), "forward", true},
					{pod.Host, pod.IP(family).String(), "tcp", clusterIP(1, family), "forward", true},
					{node.Host, "node", "tcp", clusterIP(1, family), "forward", true},
					{w.Client, "outside", "tcp", vip(2, family), "reject", false},
				} {
					if mode == harness.IPVS && c.from == "node" {
						if _, text, err := l.follow(t, c.client, c.from, c.network, c.to); err == nil || !strings.Contains(err.Error(), "can't follow what the node itself sends") {
							t.Errorf("from the node: %v\n%s", err, text)
						}
						continue
					}
					what := fmt.Sprintf("%s to %s", c.from, c.to)
					got, text, err := l.follow(t, c.client, c.from, c.network, c.to, "-o", "json")
					if (err == nil) != (c.action == "forward") || len(got.Seen) != 3 {
						t.Errorf("%s: %v\n%s", what, err, text)
						continue
					}
					for _, s := range got.Seen {
						want := c.action
						if variant == harness.Legacy && want == "reject" {
							want = inspect.Lost // The rule that rejects it does not show.
						}
						if len(s.Differences) > 0 || want == "forward" && !s.Answered || (s.Endpoint != "") != c.endpoint || s.Action != want {
							t.Errorf("%s: %+v", what, s)
						}
						predicted := 0
						for _, step := range s.Steps {
							if step.Predicted {
								predicted++
							}
						}
						if want := len(s.Prediction.Steps); variant == harness.NFT && predicted < max(want, 1) {
							t.Errorf("%s: %d steps were predicted, at least %d should be:\n%s", what, predicted, want, text)
						}
					}
				}
			}
			text, code := "", error(nil)
			_, err := node.OutputWithInput("table inet firewall { chain guard { type filter hook postrouting priority 5; th dport 8080 drop; }; }", "nft", "-f", "-")
			require.NoError(t, err)
			for _, want := range []string{"PREDICTED", "DIFFERS: predicted to be forwarded, it was dropped by chain guard of table inet firewall: th dport 8080 drop",
				"DROPPED HERE", "3 of 3 connections differ from the prediction."} {
				if text == "" {
					_, text, code = l.follow(t, w.Client, "outside", "tcp", vip(1, 4))
				}
				if code == nil || !strings.Contains(text, want) {
					t.Errorf("%v: no %q in\n%s", code, want, text)
				}
			}
			if left, err := node.Output("nft", "list", "tables"); err != nil || strings.Contains(left, names.Trace) {
				t.Errorf("%v, there are still %s", err, left)
			}
			binary, err := harness.Binary()
			require.NoError(t, err)
			text, err = node.Output(binary, "trace", "198.51.100.77", vip(1, 4).String(), "--socket="+l.socket, "--live", "--for=100ms")
			if err == nil || !strings.Contains(text, "Have the client connect while this runs") {
				t.Errorf("without a packet: %v\n%s", err, text)
			}
		})
	}
}
