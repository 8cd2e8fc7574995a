package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"nodeproxy/config"
	"nodeproxy/internal/nstest"
	"nodeproxy/plan"
)

// changedLines are the lines of a diff that are added or removed.
func changedLines(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if strings.HasPrefix(line, "-") && !strings.HasPrefix(line, "--- ") || strings.HasPrefix(line, "+") && !strings.HasPrefix(line, "+++ ") {
			out = append(out, line)
		}
	}
	return out
}

// TestDiffDaemon: diff shows what another program has changed, and nothing once nodeproxy has repaired it; what other manifests or another
// mode would change, in comparison with the kernel and with the running nodeproxy; and it is empty once they are in force.
func TestDiffDaemon(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		mode, other   string
		damage        [][]string // while nodeproxy does not run
		drift, change []string   // what diff shows of the damage, and of one endpoint more
	}{
		{"iptables", "nftables", [][]string{
			{"iptables-nft", "-t", "nat", "-F", "KUBE-MARK-MASQ"}, {"iptables-nft", "-t", "nat", "-A", "KUBE-FOREIGN-TO-US", "-j", "RETURN"}},
			[]string{"+-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000"},
			[]string{
				"+:KUBE-SEP-XIQG3E4ATGAKTZVT - [0:0]",
				`+-A KUBE-SEP-XIQG3E4ATGAKTZVT -s 10.244.1.6/32 -m comment --comment "default/web" -j KUBE-MARK-MASQ`,
				`+-A KUBE-SEP-XIQG3E4ATGAKTZVT -p tcp -m comment --comment "default/web" -m tcp -j DNAT --to-destination 10.244.1.6:8080`,
				`--A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.244.1.5:8080" -j KUBE-SEP-XQWD6PXGZUTOOIVQ`,
				`+-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.244.1.5:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-XQWD6PXGZUTOOIVQ`,
				`+-A KUBE-SVC-LOLE4ISW44XBNF3G -m comment --comment "default/web -> 10.244.1.6:8080" -j KUBE-SEP-XIQG3E4ATGAKTZVT`,
			}},
		{"nftables", "iptables", [][]string{
			{"nft", "delete element ip nodeproxy endpoints { 10.96.0.10 . tcp . 80 . 0 }"}, {"nft", "add table ip foreign"}},
			[]string{"+10.96.0.10 . tcp . 80 . none : 10.244.1.5 . 8080"},
			[]string{
				`-10.96.0.10 . tcp . 80 comment "default/web" : 2000:1`,
				`+10.96.0.10 . tcp . 80 comment "default/web" : 2000:2`,
				"+2000:2 : goto cluster-ip-2",
				"+10.96.0.10 . tcp . 80 . 0:1 : 10.244.1.6 . 8080",
				"+chain cluster-ip-2 {", "+\tmeta priority set numgen random mod 2 goto to-endpoint", "+}",
			}},
	} {
		t.Run(tc.mode, func(t *testing.T) {
			t.Parallel()
			nstest.Enter(t)
			a := newAsked(t)
			a.write(inspectedService)
			now, next := a.manifests(), filepath.Join(a.dir, "next.yaml")
			writeFile(t, next, strings.Replace(inspectedService, "endpoints: [", "endpoints: [{addresses: [10.244.1.6]}, ", 1))
			diff := func(args ...string) (string, int) {
				t.Helper()
				return a.ask(append([]string{"diff"}, args...)...)
			}
			same := func(what string, args ...string) {
				t.Helper()
				if text, code := diff(args...); text != "" || code != 0 {
					t.Errorf("%s: exit code %d\n%s", what, code, text)
				}
			}
			shows := func(what string, want []string, args ...string) string {
				t.Helper()
				text, code := diff(args...)
				if got := changedLines(text); code != 1 || !slices.Equal(got, want) {
					t.Errorf("%s: exit code %d\n%s\nwant\n%s", what, code, text, strings.Join(want, "\n"))
				}
				return text
			}
			start := func() *process {
				p := a.start("--mode=" + tc.mode)
				a.awaitProgrammed()
				return p
			}
			a.says(2, "diff", "no nodeproxy answers at "+a.socket)
			nstest.Exec(t, "iptables-nft", "-t", "nat", "-N", "KUBE-FOREIGN-TO-US")

			p := start()
			same("nothing has changed")
			same("the same manifests", "--manifests="+now)
			text := shows("one endpoint more", tc.change, "--manifests="+next)
			if !strings.HasPrefix(text, "--- kernel ipv4 ") || !strings.Contains(text, ": default/web\n") {
				t.Errorf("headings:\n%s", text)
			}
			a.says(2, "diff default/other --manifests="+next, "no Service default/other is proxied here")
			if text, code := diff("--manifests="+next, "--against=running", "default/web"); code != 1 || !strings.Contains(text, "10.244.1.6") || strings.Contains(text, "--- kernel") {
				t.Errorf("against the running nodeproxy: exit code %d\n%s", code, text)
			}
			a.says(1, "diff --stat --mode="+tc.other, "ipv4 table ip nodeproxy", "ipv4 nat (iptables-save)")
			if text, _ := diff("--mode=" + tc.other); strings.Contains(text, "KUBE-FOREIGN") {
				t.Errorf("mode %s would touch others' rules:\n%s", tc.other, text)
			}
			require.NoError(t, p.Process.Signal(os.Interrupt))
			<-p.ended

			for _, args := range tc.damage {
				nstest.Exec(t, args[0], args[1:]...)
			}
			nstest.Exec(t, "nft", "add table ip kube-proxy")
			tc.drift = append(tc.drift, "-nftables table ip kube-proxy")
			alone := []string{"--manifests=" + now, "--node-name=n1", "--mode=" + tc.mode, "--iptables-backend=nft"}
			shows("drift", tc.drift, alone...)
			shows("drift, with another color", tc.drift, append(alone, "--color=never")...)
			if text, _ := diff(append(alone, "--color=always")...); !strings.Contains(text, "\x1b[32m"+tc.drift[0]) {
				t.Errorf("without color:\n%q", text)
			}
			require.NoError(t, os.Rename(next, filepath.Join(now, "web.yaml")))
			start()
			eventually(t, "what a kube-proxy left is removed", func() bool { text, _ := diff(); return !strings.Contains(text, "kube-proxy") })
			same("it is repaired, and the endpoint is there")
		})
	}
}

// TestDiffDiskFull: what can't be written is said once, however much there is to write.
func TestDiffDiskFull(t *testing.T) {
	t.Parallel()
	nstest.Enter(t)
	var manifest strings.Builder
	for n := range 50 {
		fmt.Fprintf(&manifest, "---\n{apiVersion: v1, kind: Service, metadata: {name: s%d, namespace: default}, spec: {clusterIP: 10.96.1.%d, ports: [{port: 80}]}}\n", n, n)
	}
	file := filepath.Join(t.TempDir(), "services.yaml")
	writeFile(t, file, manifest.String())
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	require.NoError(t, err)
	defer full.Close()
	var said strings.Builder
	cmd := exec.Command("nodeproxy", "diff", "--manifests="+file, "--mode=iptables", "--iptables-backend=nft")
	cmd.Stdout, cmd.Stderr = full, &said
	_ = cmd.Run()
	if code, lines := cmd.ProcessState.ExitCode(), strings.Count(said.String(), "\n"); code != 2 || lines < 1 || lines > 2 {
		t.Errorf("exit code %d\n%s", code, said.String())
	}
}

// TestOptions: a command gets the configuration of a daemon in every field that matters, also where one of them is of the version in
// which the fields below were all that a daemon told.
func TestOptions(t *testing.T) {
	t.Parallel()
	const earlier = `{"Mode":"ipvs","NodeName":"n1","Settings":{"MasqueradeAll":true},"ServiceCIDRs":["10.96.0.0/16"],"ServiceCIDRsGiven":true,` +
		`"NodePorts":{"First":1,"Last":2},"Variant":"legacy","MasqueradeBit":3,"ServiceMetrics":4,"Scheduler":"wlc","VIPs":"addresses",` +
		`"ExcludeCIDRs":["10.1.0.0/16"],"StrictARP":true}`
	cfg := &config.Config{
		Mode: "ipvs", NodeName: "n1", Settings: plan.Settings{MasqueradeAll: true}, ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
		ServiceCIDRsGiven: true, NodePorts: plan.PortRange{First: 1, Last: 2}, IPTablesBackend: config.LegacyVariant, MasqueradeBit: 3, ServiceMetrics: 4,
		IPVS: config.IPVS{Scheduler: "wlc", VIPs: "addresses", ExcludeCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}, StrictARP: true},
	}
	var got options
	require.NoError(t, json.Unmarshal([]byte(earlier), &got))
	if !reflect.DeepEqual(got.config(), cfg) {
		t.Errorf("of an earlier version: %+v\nwant %+v", got.config(), cfg)
	}
	text, err := json.Marshal(optionsOf(cfg))
	require.NoError(t, err)
	var tells, want map[string]any
	require.NoError(t, errors.Join(json.Unmarshal(text, &tells), json.Unmarshal([]byte(earlier), &want)))
	for name := range want {
		if name != "Settings" && !reflect.DeepEqual(tells[name], want[name]) {
			t.Errorf("to an earlier version: %s is %v, want %v", name, tells[name], want[name])
		}
	}

	flags := &config.Flags{}
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.Add(set)
	if err := set.Parse([]string{"--manifests=/m", "--mode=nftables", "--cluster-cidr=10.1.0.0/16,fd00::/64", "--nodeport-addresses=10.0.0.0/8,primary",
		"--ipvs-exclude-cidrs=10.2.0.0/16", "--ipvs-tcp-timeout=1s", "--kube-api-qps=1.5", "--conntrack-min=7", "--feature-gates=AllowServiceExternalIPs=false",
		"--sysctl-dir=/elsewhere"}); err != nil {
		t.Fatal(err)
	}
	if cfg, err = flags.Config(); err != nil {
		t.Fatal(err)
	}
	if text, err = json.Marshal(optionsOf(cfg)); err != nil {
		t.Fatal(err)
	}
	got = options{}
	require.NoError(t, json.Unmarshal(text, &got))
	same := got.config()
	same.Configz, same.SysctlDir = cfg.Configz, cfg.SysctlDir
	if !reflect.DeepEqual(same, cfg) || got.config().SysctlDir != "" {
		t.Errorf("got %+v\nwant %+v", same, cfg)
	}
}
