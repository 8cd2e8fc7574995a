package config

import (
	"net/netip"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"nodeproxy/plan"
)

// parse reads a command line. --manifests and --node-name are given, so that a case needs no more than what it is about.
func parse(t *testing.T, args ...string) (*Config, error) {
	t.Helper()
	return flagsOf(t, append([]string{"--manifests=m", "--node-name=node1"}, args...)...).Config()
}

func prefixes(texts ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, text := range texts {
		out = append(out, netip.MustParsePrefix(text))
	}
	return out
}

// defaults are the Config of a command line without further flags.
func defaults() Config {
	return Config{
		Mode: "iptables", NodeName: "node1", Manifests: "m",
		API:          APIServer{ContentType: "application/vnd.kubernetes.protobuf", QPS: 5, Burst: 10},
		ServiceCIDRs: prefixes("10.96.0.0/16"), ServiceCIDRsGiven: true, NodePorts: plan.PortRange{First: 30000, Last: 32767},
		IPTablesBackend: AutoVariant, MasqueradeBit: 14, SysctlDir: "/proc/sys", Socket: "/run/nodeproxy/nodeproxy.sock", LogLevel: "info", LogFormat: "text",
		SyncPeriod: 30 * time.Second, OOMScoreAdj: -999,
		Servers: Servers{
			Bind: netip.MustParseAddr("0.0.0.0"), Healthz: netip.MustParseAddrPort("0.0.0.0:10256"),
			Metrics: netip.MustParseAddrPort("127.0.0.1:10249"), UI: "node",
		},
		Conntrack: Conntrack{
			MaxPerCore: 32768, Min: 131072, TCPEstablishedTimeout: 24 * time.Hour, TCPCloseWaitTimeout: time.Hour,
		},
		IPVS: IPVS{VIPs: "routes", GracePeriod: 5 * time.Minute},
		Settings: plan.Settings{
			DetectLocal: plan.DetectLocal{Mode: plan.DetectClusterCIDR}, LocalhostNodePorts: true,
			ServiceCIDRs: prefixes("10.96.0.0/16"),
		},
	}
}

func TestFlags(t *testing.T) {
	t.Parallel()
	detect := func(mode plan.DetectLocalMode, iface string) func(*Config) {
		return func(c *Config) { c.Settings.DetectLocal = plan.DetectLocal{Mode: mode, Interface: iface} }
	}
	bit := func(n int) func(*Config) { return func(c *Config) { c.MasqueradeBit = n } }
	name := func(n string) func(*Config) { return func(c *Config) { c.NodeName = n } }
	level := func(l string) func(*Config) { return func(c *Config) { c.LogLevel = l } }
	period := func(c *Config) { c.MinSyncPeriod = 2 * time.Second }
	nodePorts := func(primary bool, cidrs ...string) func(*Config) {
		return func(c *Config) {
			c.Settings.NodePortAddresses = plan.NodePortAddresses{Primary: primary, CIDRs: prefixes(cidrs...)}
		}
	}
	clusterCIDR := func(cidrs ...string) func(*Config) {
		return func(c *Config) { c.Settings.DetectLocal.CIDRs = prefixes(cidrs...) }
	}
	serviceCIDR := func(cidrs ...string) func(*Config) {
		return func(c *Config) {
			c.ServiceCIDRs = prefixes(cidrs...)
			c.Settings.ServiceCIDRs = c.ServiceCIDRs
		}
	}
	nftables := func(change func(*Config)) func(*Config) {
		return func(c *Config) {
			c.Mode, c.Settings.LocalhostNodePorts, c.Settings.NodePortAddresses.Primary = "nftables", false, true
			c.ServiceMetrics = 1000
			change(c)
		}
	}
	for _, tc := range []struct {
		args   string
		change func(*Config) // what differs from the defaults
	}{
		{"", func(*Config) {}},
		{"--mode=iptables", func(*Config) {}},
		{"--mode=ipvs", func(c *Config) {
			c.Mode, c.Settings.LocalhostNodePorts, c.ServiceMetrics = "ipvs", false, 1000
		}},
		{"--mode=ipvs --ipvs-sync-period=1m --ipvs-min-sync-period=2s --iptables-sync-period=3m", func(c *Config) {
			c.Mode, c.Settings.LocalhostNodePorts, c.ServiceMetrics = "ipvs", false, 1000
			c.SyncPeriod, c.MinSyncPeriod = time.Minute, 2*time.Second
		}},
		{"--mode=nftables", func(c *Config) {
			c.Mode, c.Settings.LocalhostNodePorts, c.Settings.NodePortAddresses.Primary = "nftables", false, true
			c.ServiceMetrics = 1000
		}},
		{"--mode=nftables --masquerade-all --nodeport-addresses=10.0.0.0/8", func(c *Config) {
			c.Mode, c.Settings.LocalhostNodePorts, c.Settings.NodePortAddresses.CIDRs = "nftables", false, prefixes("10.0.0.0/8")
			c.ServiceMetrics = 1000
			c.Settings.MasqueradeAll = true
		}},
		{"--mode=nftables --iptables-sync-period=1m --min-sync-period=2s --nodeport-addresses=all", nftables(func(c *Config) {
			c.SyncPeriod, c.MinSyncPeriod = time.Minute, 2*time.Second
			c.Settings.NodePortAddresses = plan.NodePortAddresses{CIDRs: prefixes("0.0.0.0/0", "::/0")}
		})},
		{"--mode=nftables --iptables-sync-period=1m --nftables-sync-period=2m", nftables(func(c *Config) { c.SyncPeriod = 2 * time.Minute })},
		{"--mode=nftables --nftables-min-sync-period=1s --iptables-masquerade-bit=3", nftables(func(c *Config) {
			c.MinSyncPeriod = time.Second
		})},
		{"--mode=nftables --nftables-masquerade-bit=3", nftables(func(c *Config) { c.MasqueradeBit = 3 })},
		{"--proxy-mode=iptables", func(*Config) {}},
		{"--proxy-mode=", func(*Config) {}},
		{"--node-name=Node-2", name("node-2")},
		{"--hostname-override=Node-2", name("node-2")},
		{"--manifests=/etc/m", func(c *Config) { c.Manifests = "/etc/m" }},
		{"--service-cidr=10.0.0.7/24", serviceCIDR("10.0.0.0/24")},
		{"--service-cidr=fd00::/112,10.0.0.0/24", serviceCIDR("fd00::/112", "10.0.0.0/24")},
		{"--service-cidr=", serviceCIDR()},
		{"--service-node-port-range=1-65535", func(c *Config) { c.NodePorts = plan.PortRange{First: 1, Last: 65535} }},
		{"--service-node-port-range=80-80", func(c *Config) { c.NodePorts = plan.PortRange{First: 80, Last: 80} }},
		{"--cluster-cidr=10.244.3.0/16", clusterCIDR("10.244.0.0/16")},
		{"--cluster-cidr=10.244.0.0/16,fd00:10:244::/56", clusterCIDR("10.244.0.0/16", "fd00:10:244::/56")},
		{"--detect-local-mode=ClusterCIDR", func(*Config) {}},
		{"--detect-local-mode=NodeCIDR", detect(plan.DetectNodeCIDR, "")},
		{"--detect-local-mode=NodeCIDR --cluster-cidr=10.0.0.0/8", detect(plan.DetectNodeCIDR, "")},
		{"--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0", detect(plan.DetectBridgeInterface, "cni0")},
		{"--detect-local-mode=BridgeInterface --pod-bridge-interface=fifteen-letters",
			detect(plan.DetectBridgeInterface, "fifteen-letters")},
		{"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=veth",
			detect(plan.DetectInterfaceNamePrefix, "veth")},
		{"--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=fourteenletter",
			detect(plan.DetectInterfaceNamePrefix, "fourteenletter")},
		{"--masquerade-all", func(c *Config) { c.Settings.MasqueradeAll = true }},
		{"--iptables-masquerade-bit=0", bit(0)},
		{"--iptables-masquerade-bit=31", bit(31)},
		{"--nodeport-addresses=primary", nodePorts(true)},
		{"--nodeport-addresses=primary,10.0.0.0/8", nodePorts(true, "10.0.0.0/8")},
		{"--nodeport-addresses=localhost,primary", nodePorts(true, "127.0.0.0/8", "::1/128")},
		{"--nodeport-addresses=all", nodePorts(false, "0.0.0.0/0", "::/0")},
		{"--nodeport-addresses=192.168.1.1/16,fd00::/64", nodePorts(false, "192.168.0.0/16", "fd00::/64")},
		{"--nodeport-addresses=192.168.0.0/16 --nodeport-addresses=10.0.0.0/8",
			nodePorts(false, "192.168.0.0/16", "10.0.0.0/8")},
		{"--nodeport-addresses=", nodePorts(false)},
		{"--iptables-localhost-nodeports=false", func(c *Config) { c.Settings.LocalhostNodePorts = false }},
		{"--iptables-backend=nft", func(c *Config) { c.IPTablesBackend = NFTVariant }},
		{"--iptables-backend=legacy", func(c *Config) { c.IPTablesBackend = LegacyVariant }},
		{"--min-sync-period=2s", period},
		{"--iptables-min-sync-period=2s", period},
		{"--log-level=error", level("error")},
		{"-v=4", level("debug")},
		{"-v=4 --log-level=warn", level("debug")},
		{"--v=3 --log-level=warn", level("warn")},
		// A prefix of IPv4-mapped addresses is one of IPv4: iptables knows no other spelling.
		{"--cluster-cidr=::ffff:10.244.0.0/112", clusterCIDR("10.244.0.0/16")},
		{"--nodeport-addresses=::ffff:192.168.0.0/112", nodePorts(false, "192.168.0.0/16")},
		{"--service-cidr=::ffff:10.96.0.0/112", serviceCIDR("10.96.0.0/16")},
	} {
		t.Run(tc.args, func(t *testing.T) {
			t.Parallel()
			got, err := parse(t, strings.Fields(tc.args)...)
			require.NoError(t, err)
			want := defaults()
			tc.change(&want)
			got.Findings, got.Configz = nil, nil // TestFindings is about them.
			if !reflect.DeepEqual(*got, want) {
				t.Errorf("got\n%+v\nwant\n%+v", *got, want)
			}
		})
	}
}

// TestObjectsComeFromOnePlace: of manifests and an API server.
func TestObjectsComeFromOnePlace(t *testing.T) {
	t.Parallel()
	api, err := parse(t, "--manifests=", "--kubeconfig=k", "--master=https://[fd00::1]:6443", "--kube-api-qps=50",
		"--kube-api-burst=100", "--kube-api-content-type=application/json")
	require.NoError(t, err)
	want := APIServer{Kubeconfig: "k", Master: "https://[fd00::1]:6443", ContentType: "application/json", QPS: 50, Burst: 100}
	if api.Manifests != "" || api.API != want {
		t.Errorf("got manifests %q and %+v", api.Manifests, api.API)
	}
	for _, flag := range []string{"--kubeconfig=k", "--master=http://m"} {
		if _, err := parse(t, flag); err == nil || !strings.HasPrefix(err.Error(), "--manifests: ") {
			t.Errorf("%s together with --manifests: %v", flag, err)
		}
	}
}

// TestWrongFlags: every flag that is wrong gets a line of its own that begins with its name; nothing else does.
func TestWrongFlags(t *testing.T) {
	t.Parallel()
	const (
		bridge = "--detect-local-mode=BridgeInterface"
		prefix = "--detect-local-mode=InterfaceNamePrefix"
	)
	for _, tc := range []struct {
		args []string
		want []string
	}{
		{[]string{"--mode=ebpf"}, []string{`--mode: "ebpf" is not supported; iptables, ipvs and nftables are`}},
		{[]string{"--proxy-mode=userspace"}, []string{`--proxy-mode: "userspace" is not supported; iptables, ipvs and nftables are`}},
		{[]string{"--hand-over-to=ipvs"}, []string{`--hand-over-to: "ipvs" is not supported; only a kube-proxy in mode nftables needs it`}},
		{[]string{"--service-cidr=10.0.0.0"}, []string{`--service-cidr: "10.0.0.0" is not a CIDR`}},
		{[]string{"--service-cidr=10.0.0.0/33"}, []string{`--service-cidr: "10.0.0.0/33" is not a CIDR`}},
		{[]string{"--service-cidr=10.0.0.0/8,11.0.0.0/8"},
			[]string{`--service-cidr: "11.0.0.0/8" is a second range for IPv4; one is possible`}},
		{[]string{"--cluster-cidr=fd00::/8,fe00::/8"},
			[]string{`--cluster-cidr: "fe00::/8" is a second range for IPv6; one is possible`}},
		{[]string{"--cluster-cidr=pods"}, []string{`--cluster-cidr: "pods" is not a CIDR`}},
		{[]string{"--service-node-port-range=30000"},
			[]string{`--service-node-port-range: "30000" is not a range of ports such as 30000-32767`}},
		{[]string{"--service-node-port-range=2-1"},
			[]string{`--service-node-port-range: "2-1" is not a range of ports such as 30000-32767`}},
		{[]string{"--service-node-port-range=0-9"},
			[]string{`--service-node-port-range: "0-9" is not a range of ports such as 30000-32767`}},
		{[]string{"--service-node-port-range=1-65536"},
			[]string{`--service-node-port-range: "1-65536" is not a range of ports such as 30000-32767`}},
		{[]string{"--detect-local-mode=clustercidr"}, []string{`--detect-local-mode: "clustercidr" is not one of ` +
			`ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix`}},
		{[]string{bridge}, []string{"--pod-bridge-interface: required with --detect-local-mode=BridgeInterface"}},
		{[]string{bridge, "--pod-bridge-interface=sixteen-letters!"},
			[]string{`--pod-bridge-interface: "sixteen-letters!" can't be the name of a network interface`}},
		{[]string{bridge, "--pod-bridge-interface=a -j DROP"},
			[]string{`--pod-bridge-interface: "a -j DROP" can't be the name of a network interface`}},
		{[]string{bridge, "--pod-bridge-interface=a\n-A"},
			[]string{`--pod-bridge-interface: "a\n-A" can't be the name of a network interface`}},
		{[]string{bridge, "--pod-bridge-interface=a\rb"},
			[]string{`--pod-bridge-interface: "a\rb" can't be the name of a network interface`}},
		{[]string{bridge, "--pod-bridge-interface=veth+"},
			[]string{`--pod-bridge-interface: "veth+" can't be the name of a network interface`}},
		{[]string{prefix},
			[]string{"--pod-interface-name-prefix: required with --detect-local-mode=InterfaceNamePrefix"}},
		{[]string{prefix, "--pod-interface-name-prefix=!a"},
			[]string{`--pod-interface-name-prefix: "!a" can't be `}},
		// iptables puts a plus sign behind it, and takes 15 characters in all.
		{[]string{prefix, "--pod-interface-name-prefix=fifteen-letters"},
			[]string{`--pod-interface-name-prefix: "fifteen-letters" can't be `}},
		{[]string{"--iptables-masquerade-bit=-1"}, []string{"--iptables-masquerade-bit: -1 is not within 0-31"}},
		{[]string{"--iptables-masquerade-bit=32"}, []string{"--iptables-masquerade-bit: 32 is not within 0-31"}},
		{[]string{"--nodeport-addresses=10.0.0.1"},
			[]string{`--nodeport-addresses: "10.0.0.1" is not a CIDR, "primary", "localhost" or "all"`}},
		{[]string{"--nodeport-addresses=Primary"},
			[]string{`--nodeport-addresses: "Primary" is not a CIDR, "primary", "localhost" or "all"`}},
		{[]string{"--nftables-masquerade-bit=32"}, []string{"--nftables-masquerade-bit: 32 is not within 0-31"}},
		{[]string{"--mode=nftables", "--iptables-sync-period=0s", "--nftables-min-sync-period=-1s"}, []string{
			"--iptables-sync-period: 0s is not more than 0", "--iptables-sync-period: 0s is not more than 0",
			"--nftables-min-sync-period: -1s is negative"}},
		{[]string{"--iptables-backend=nftables"}, []string{`--iptables-backend: "nftables" is not one of auto, nft, legacy`}},
		{[]string{"--min-sync-period=-1s"}, []string{"--min-sync-period: -1s is negative"}},
		{[]string{"--log-level=verbose"}, []string{`--log-level: "verbose" is not one of debug, info, warn, error`}},
		{[]string{"--log-level=x", "--mode=x", "--iptables-backend=x", "--cluster-cidr=x"},
			[]string{"--mode: ", "--iptables-backend: ", "--log-level: ", "--cluster-cidr: "}},
	} {
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) {
			t.Parallel()
			_, err := parse(t, tc.args...)
			if err == nil {
				t.Fatal("it is accepted")
			}
			lines := strings.Split(err.Error(), "\n")
			ok := len(lines) == len(tc.want)
			for i := 0; ok && i < len(lines); i++ {
				ok = strings.HasPrefix(lines[i], tc.want[i])
			}
			if !ok {
				t.Errorf("got\n%s\nwant\n%s", err, strings.Join(tc.want, "\n"))
			}
		})
	}
}

// TestNodeNameIsTheHosts unless a name is given.
func TestNodeNameIsTheHosts(t *testing.T) {
	t.Parallel()
	host, err := os.Hostname()
	require.NoError(t, err)
	got, err := parse(t, "--node-name= ")
	if err != nil || got.NodeName != strings.ToLower(host) {
		t.Errorf("got %v, %v; want %s", got, err, host)
	}
}
