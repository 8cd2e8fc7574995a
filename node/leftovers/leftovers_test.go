package leftovers

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"nodeproxy/internal/nstest"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nfacct"
)

func runNFT(t *testing.T, script string) string {
	t.Helper()
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	return string(out)
}

// TestTables: kube-proxy's tables go, with chains, maps and rules that lead from one to the other, and nobody else's do.
func TestTables(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	const others = `table inet kube-proxy {
}
table ip kube-proxy-not {
}
table ip mine {
	chain kube-proxy {
	}
}
`
	runNFT(t, others)
	if found, err := Find(); err != nil || len(found) != 0 {
		t.Fatalf("found %v, %v before there was any", found, err)
	}
	for _, family := range []string{"ip", "ip6"} {
		runNFT(t, fmt.Sprintf(`table %s kube-proxy {
			map service-ips {
				type %sv%s_addr . inet_proto . inet_service : verdict
			}
			chain services {
				%s daddr . meta l4proto . th dport vmap @service-ips
			}
			chain endpoint {
				meta l4proto tcp counter
			}
			chain nat-prerouting {
				type nat hook prerouting priority dstnat
				jump services
			}
		}
		`, family, "ip", map[string]string{"ip": "4", "ip6": "6"}[family], family))
		address := map[string]string{"ip": "10.96.0.1", "ip6": "fd00::1"}[family]
		runNFT(t, fmt.Sprintf("add element %s kube-proxy service-ips { %s . tcp . 80 : goto endpoint }", family, address))
	}
	found, err := Find()
	require.NoError(t, err)
	var names []string
	for _, l := range found {
		names = append(names, l.String())
	}
	slices.Sort(names)
	if want := []string{"nftables table ip kube-proxy", "nftables table ip6 kube-proxy"}; !slices.Equal(names, want) {
		t.Fatalf("found %q, want %q", names, want)
	}
	removed, err := Remove(found)
	if err != nil || len(removed) != 2 {
		t.Errorf("removed %v, %v", removed, err)
	}
	if removed, err := Remove(found); err != nil || len(removed) != 0 {
		t.Errorf("what was gone was removed once more: %v, %v", removed, err)
	}
	left, err := exec.Command("nft", "list", "ruleset").Output()
	if err != nil || string(left) != others {
		t.Errorf("left is\n%s\nwant\n%s%v", left, others, err)
	}
}

// TestCounters: kube-proxy's accounting objects go once no rule counts with them; one that stays is named.
func TestCounters(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	const accountingNew, accountingName = unix.NFNL_SUBSYS_ACCT << 8, 1
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	for _, name := range append([]string{"mine"}, names.Counters...) {
		body := netlink.Buffer{unix.AF_UNSPEC, 0, 0, 0}.Text(accountingName, name)
		if errs := c.Do(netlink.Message{Type: accountingNew, Flags: unix.NLM_F_CREATE, Body: body}); errs != nil {
			t.Fatal(errs)
		}
	}
	rule := []string{"INPUT", "-m", "nfacct", "--nfacct-name", names.Counters[0], "-j", "DROP"}
	if out, err := exec.Command("iptables-nft", append([]string{"-A"}, rule...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	found, err := Find()
	if err != nil || len(found) != 2 {
		t.Fatalf("found %v, %v", found, err)
	}
	removed, err := Remove(found)
	if len(removed) != 1 || removed[0].String() != "accounting object "+names.Counters[1] {
		t.Errorf("removed %v", removed)
	}
	if want := "accounting object " + names.Counters[0] + " stays: device or resource busy"; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
	if out, err := exec.Command("iptables-nft", append([]string{"-D"}, rule...)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if removed, err := Remove(found); err != nil || len(removed) != 1 {
		t.Errorf("removed %v, %v", removed, err)
	}
	if left, err := nfacct.List(); err != nil || !slices.Equal(left, []string{"mine"}) {
		t.Errorf("left are %q, %v", left, err)
	}
}

// TestOwned: a table that can't be removed, since a process owns it, is named.
func TestOwned(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	owner := exec.Command("nft", "-i")
	in, err := owner.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, owner.Start())
	t.Cleanup(func() { in.Close(); _ = owner.Wait() })
	fmt.Fprintln(in, "table ip kube-proxy { flags owner; }")
	found, err := Find()
	for end := time.Now().Add(time.Minute); err == nil && len(found) == 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		found, err = Find()
	}
	if err != nil || len(found) != 1 {
		t.Fatalf("found %v, %v", found, err)
	}
	removed, err := Remove(found)
	if len(removed) != 0 || err == nil || !strings.HasPrefix(err.Error(), "nftables table ip kube-proxy stays: ") {
		t.Errorf("removed %v, %v", removed, err)
	}
}
