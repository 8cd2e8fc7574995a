package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/e2e/harness"
)

// healthPort is the health check node port of a Service; see addHealthPort.
const healthPort = 32100

// addHealthPort makes a Service with a health check node port, which the daemon serves at the node's addresses in the ranges of
// --nodeport-addresses, as they come and go.
func (f *faultScene) addHealthPort() {
	f.Helper()
	s := harness.Service("health", 8, harness.Policies("Cluster", "Local"))
	s.Spec.HealthCheckNodePort = healthPort
	f.Write(f.T, "health.yaml", harness.Objects(s, f.Ready("n1a")...)...)
	f.flags = append(f.flags, "--nodeport-addresses=192.168.77.0/24,fd00:77::/64")
}

// serves is a check that the health check node port answers at an address of node1.
func (f *faultScene) serves(at string) func() error {
	return func() error {
		c, err := f.Client.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr(at), healthPort), time.Now().Add(harness.Brief))
		if err == nil {
			defer c.Close()
			fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
			_, err = bufio.NewReader(c).ReadString('\n')
		}
		return err
	}
}

// TestFaultNotificationsLost: so much changes in the kernel while the daemon stands still that notifications are lost: of nf_tables,
// and of addresses. What they would have told of is found all the same.
func TestFaultNotificationsLost(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "notifications lost", "rules and addresses change until the sockets of the stopped daemon drop (ENOBUFS)")
		f.addHealthPort()
		f.start()
		eventually(t, "health check node port", f.serves(f.Node1().IP4.String()))
		rule(t, f.World, variant, "-t nat -N CNI-OTHER")
		time.Sleep(time.Second) // The daemon may still look at the new chain, and then leaves it alone.
		before := held(t, f.World, variant)
		line := len(f.daemon.Log())
		f.signal(syscall.SIGSTOP)
		const netfilter, route = "12", "0"
		if variant == harness.NFT {
			var text strings.Builder
			text.WriteString("*nat\n")
			for i := range 5000 {
				fmt.Fprintf(&text, "-A CNI-OTHER -s 192.0.%d.%d -m comment --comment \"%s\" -j RETURN\n", i/200, i%200, strings.Repeat("x", 200))
			}
			text.WriteString("COMMIT\n*nat\n-F CNI-OTHER\nCOMMIT\n")
			f.until(f.dropped(netfilter), text.String(), variant.Tool("iptables")+"-restore", "--noflush")
		}
		var text strings.Builder
		for _, verb := range []string{"add", "del"} {
			for i := range 500 {
				fmt.Fprintf(&text, "addr %s 10.99.%d.%d/32 dev lo\n", verb, i/200, i%200)
			}
		}
		f.until(f.dropped(route), text.String(), "ip", "-batch", "-")
		f.breakRules()
		output(t, f.World, "ip addr add 192.168.77.99/24 dev eth0")
		f.change("n2a")
		f.signal(syscall.SIGCONT)
		end := time.Now()
		f.inForce("n2a")
		eventually(t, "health check node port at a new address", f.serves("192.168.77.99"))
		eventually(t, "a rule of ours is repaired", func() error {
			// The change is of other chains, by which both differ.
			if strings.Contains(held(t, f.World, variant), strayRule()) {
				return fmt.Errorf("a rule of others is still in a chain of ours")
			}
			return nil
		})
		f.repairs = append(f.repairs, time.Since(end))
		if variant == harness.NFT && mode == harness.IPTables { // In mode ipvs, something else may be noticed sooner.
			f.log(line, "notifications of nf_tables were lost")
		}
		if mode == harness.NFTables {
			f.log(line, "notifications of nftables were lost")
		}
		f.change("n1a")
		eventually(t, "all is as before", func() error {
			if now := held(t, f.World, variant); now != before {
				return fmt.Errorf("%s", firstDifference(before, now))
			}
			return nil
		})
		output(t, f.World, "ip addr del 192.168.77.99/24 dev eth0")
		rule(t, f.World, variant, "-t nat -X CNI-OTHER")
		f.finish()
	})
}

func (f *faultScene) signal(s syscall.Signal) {
	f.Helper()
	require.NoError(f, syscall.Kill(f.daemon.PID(), s))
}

// until runs a command with an input again and again until a check succeeds.
func (f *faultScene) until(check func() bool, input, name string, args ...string) {
	f.Helper()
	for begin := time.Now(); !check(); {
		if time.Since(begin) > harness.Limit {
			f.Fatalf("%s, for %v, was not enough", name, harness.Limit)
		}
		if _, err := f.Node1().OutputWithInput(input, name, args...); err != nil {
			f.Fatal(err)
		}
	}
}

// dropped is a check that a netlink socket of a protocol has lost messages in the daemon's network namespace.
func (f *faultScene) dropped(protocol string) func() bool {
	return func() bool {
		text, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(f.daemon.PID()), "net/netlink"))
		require.NoError(f, err)
		for _, line := range strings.Split(string(text), "\n") {
			if w := strings.Fields(line); len(w) > 8 && w[1] == protocol && w[8] != "0" {
				return true
			}
		}
		return false
	}
}

// inject makes system calls of the daemon and of what it starts fail as the words for strace say, and returns what ends that and
// says what was seen of them.
func (f *faultScene) inject(calls string, more ...string) (end func() string) {
	f.Helper()
	log := filepath.Join(f.Dir, "strace")
	cmd := exec.Command("strace", append([]string{"-f", "-o", log, "-p", strconv.Itoa(f.daemon.PID()), "-e", "trace=" + calls}, more...)...)
	var said bytes.Buffer
	cmd.Stderr = &said
	require.NoError(f, f.Node1().Start(cmd))
	eventually(f.T, "strace", func() error {
		status, err := os.ReadFile(filepath.Join("/proc", fmt.Sprint(f.daemon.PID()), "status"))
		if err == nil && strings.Contains(string(status), "TracerPid:\t0\n") {
			err = fmt.Errorf("it does not trace yet: %s", said.String())
		}
		return err
	})
	return func() string {
		f.Helper()
		// It lets go of all threads by itself, but sometimes waits for one of them for ever; the kernel does the same when it dies.
		require.NoError(f, cmd.Process.Signal(syscall.SIGTERM))
		kill := time.AfterFunc(3*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait() // It ends by the signal.
		kill.Stop()
		seen, err := os.ReadFile(log)
		require.NoError(f, err)
		return string(seen)
	}
}

// TestFaultNoMemory: the kernel has no memory for what the daemon, or iptables-restore, asks of it.
func TestFaultNoMemory(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		for _, c := range []struct{ errno, calls, when string }{
			{"ENOMEM", "sendto,sendmsg,setsockopt", ""},
			{"ENOBUFS", "sendto,sendmsg,recvfrom,recvmsg", ":when=2+3"},
		} {
			t.Run(c.errno, func(t *testing.T) {
				text := c.errno + " from each of " + c.calls + " for 3 s"
				if c.when != "" {
					text = c.errno + " from each third of " + c.calls + " for 3 s"
				}
				f := newFaultScene(t, variant, "kernel out of memory", text)
				f.start()
				// Something for each part of the daemon to do: flows to remove, rules to repair.
				end := f.inject(c.calls, "-e", "inject="+c.calls+":error="+c.errno+c.when)
				f.breakRules()
				f.change("n2a")
				time.Sleep(3 * time.Second) // how long the fault lasts
				if seen := end(); !strings.Contains(seen, c.errno) {
					t.Errorf("nothing failed:\n%s", seen)
				}
				f.repaired("n2a")
				f.finish()
			})
		}
	})
}

// TestFaultInterruptedDumps: what the daemon lists of the kernel changes while it does, so that the kernel breaks lists off.
func TestFaultInterruptedDumps(t *testing.T) {
	onEachFaultVariant(t, func(t *testing.T, variant harness.Variant) {
		f := newFaultScene(t, variant, "interrupted dumps", "addresses and flows come and go until the kernel has broken off 3 lists (NLM_F_DUMP_INTR)")
		f.addHealthPort()
		f.start()
		eventually(t, "health check node port", f.serves(f.Node1().IP4.String()))
		end := f.inject("recvfrom,recvmsg")
		var text strings.Builder
		for _, verb := range []string{"add", "del"} {
			for i := range 800 { // more than fit into one message of a list
				fmt.Fprintf(&text, "addr %s 10.99.%d.%d/32 dev lo\n", verb, i/200, i%200)
			}
		}
		flows := f.Client.StartLoad("udp", clusterIP(changing, 4), 1, 10*time.Millisecond)
		pods := []string{"n1a", "n2a", "n3a"}
		changes := 0
		interrupted := func() bool {
			changes++
			f.change(pods[changes%3])
			seen, err := os.ReadFile(filepath.Join(f.Dir, "strace"))
			require.NoError(t, err)
			return bytes.Count(seen, []byte("NLM_F_DUMP_INTR")) >= 3
		}
		f.until(interrupted, text.String(), "ip", "-batch", "-")
		end()
		flows.Stop()
		output(t, f.World, "ip addr add 192.168.77.99/24 dev eth0")
		begin := time.Now()
		f.inForce(pods[changes%3])
		eventually(t, "health check node port at a new address", f.serves("192.168.77.99"))
		f.repairs = append(f.repairs, time.Since(begin))
		output(t, f.World, "ip addr del 192.168.77.99/24 dev eth0")
		f.finish()
	})
}
