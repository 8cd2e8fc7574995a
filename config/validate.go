package config

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"nodeproxy/plan"
)

// checker validates values and collects their faults.
type checker struct {
	*Effective
	errs []error
}

// check adds a fault of a field, or of a flag that has no field.
func (k *checker) check(field string, err error) {
	if err != nil {
		k.errs = append(k.errs, fmt.Errorf("%s: %w", k.origin(field), err))
	}
}

// origin returns where the value of a field is from: a flag, or FILE:LINE and the field.
func (e *Effective) origin(field string) string {
	switch {
	case strings.HasPrefix(field, "--"):
		return field
	case e.given[field] != "":
		return e.given[field]
	case e.doc != nil:
		return e.doc.at(field) + ": " + field
	}
	return cmp.Or(flagOf(field), field)
}

// saying returns a setting as it is written where it is from.
func (e *Effective) saying(field, value string) string {
	if from := e.origin(field); strings.HasPrefix(from, "--") {
		return from + "=" + value
	}
	return field + ": " + value
}

// Config validates the configuration, but does not require a source of objects. Its error has a line for each fault.
func (e *Effective) Config() (*Config, error) { return e.validate(false) }

func (e *Effective) validate(toRun bool) (*Config, error) {
	k := &checker{Effective: e}
	kp, own := &e.kp, &e.own
	c := &Config{
		Manifests: own.manifests,
		API: APIServer{
			Kubeconfig: kp.ClientConnection.Kubeconfig, Master: own.master,
			ContentType: kp.ClientConnection.ContentType, AcceptContentTypes: kp.ClientConnection.AcceptContentTypes,
			QPS: kp.ClientConnection.QPS, Burst: int(kp.ClientConnection.Burst),
		},
		Configz:  *kp,
		Findings: e.findings(),
	}
	if own.manifests != "" {
		c.API.Kubeconfig = "" // It is from the file: onePlace refuses one by a flag.
	}
	k.mode(c)
	if toRun && !c.Cleanup && !c.InitOnly {
		k.onePlace()
	}
	k.nodeName(c)
	k.manifests(c)
	k.backend(c)
	k.log(c)
	k.rules(c)
	k.servers(c)
	k.conntrack(&c.Conntrack)
	k.ipvs(&c.IPVS)
	k.bit("nftables.masqueradeBit", kp.NFTables.MasqueradeBit)
	k.periods("nftables", kp.NFTables.SyncPeriod, kp.NFTables.MinSyncPeriod)
	k.featureGates(c)
	if c.ServiceCIDRsGiven {
		c.Settings.ServiceCIDRs = c.ServiceCIDRs
	}
	k.ofMode(c)
	k.notNegative()
	if kp.ConfigSyncPeriod.Duration <= 0 {
		k.check("configSyncPeriod", fmt.Errorf("%s is not more than 0", kp.ConfigSyncPeriod.Duration))
	}
	return c, errors.Join(k.errs...)
}

// onePlace checks that there is one source of objects. The flag --manifests overrides a kubeconfig in the file.
func (k *checker) onePlace() {
	kubeconfig, byFlag := k.kp.ClientConnection.Kubeconfig != "", k.given["clientConnection.kubeconfig"] != ""
	master := k.own.master != ""
	switch {
	case k.own.manifests != "" && (master || kubeconfig && byFlag):
		k.check("--manifests", errors.New("can't be combined with --kubeconfig or --master: objects come from one place"))
	case k.own.manifests == "" && !master && !kubeconfig && os.Getenv("KUBERNETES_SERVICE_HOST") == "":
		k.check("--manifests", errors.New("one of --manifests, --kubeconfig and --master is required outside a cluster"))
	}
}

func (k *checker) nodeName(c *Config) {
	name := strings.TrimSpace(k.kp.HostnameOverride)
	if name == "" {
		var err error
		if name, err = os.Hostname(); err != nil {
			k.check("--node-name", fmt.Errorf("not given, and the host's name can't be read: %w", err))
		}
	}
	c.NodeName = strings.ToLower(name)
}

// manifests reads what matters only with manifests.
func (k *checker) manifests(c *Config) {
	var err error
	c.ServiceCIDRs, err = onePerFamily(k.own.serviceCIDR)
	k.check("--service-cidr", err)
	c.ServiceCIDRsGiven = k.own.manifests != "" || k.given["--service-cidr"] != ""
	c.NodePorts, err = parsePorts(k.own.nodePortRange)
	k.check("--service-node-port-range", err)
}

func (k *checker) backend(c *Config) {
	switch c.IPTablesBackend = Variant(k.own.iptablesBackend); {
	case c.IPTablesBackend != BothVariants:
		k.oneOf("--iptables-backend", k.own.iptablesBackend, "auto", "nft", "legacy")
	case !k.own.cleanup:
		k.check("--iptables-backend", fmt.Errorf("%q is for cleanup alone", k.own.iptablesBackend))
	}
}

func (k *checker) rules(c *Config) {
	kp := &k.kp
	c.MasqueradeBit = k.bit("iptables.masqueradeBit", kp.IPTables.MasqueradeBit)
	c.SyncPeriod, c.MinSyncPeriod = kp.IPTables.SyncPeriod.Duration, kp.IPTables.MinSyncPeriod.Duration
	k.periods("iptables", kp.IPTables.SyncPeriod, kp.IPTables.MinSyncPeriod)
	c.Settings.MasqueradeAll = kp.IPTables.MasqueradeAll
	c.Settings.LocalhostNodePorts = *kp.IPTables.LocalhostNodePorts
	c.Settings.ResetTCP = k.own.resetTCP
	var err error
	c.Settings.NodePortAddresses, err = parseNodePortAddresses(kp.NodePortAddresses)
	k.check("nodePortAddresses", err)
	k.detectLocal(&c.Settings.DetectLocal)
}

func (k *checker) bit(field string, bit *int32) int {
	if *bit < 0 || *bit > 31 {
		k.check(field, fmt.Errorf("%d is not within 0-31", *bit))
	}
	return int(*bit)
}

// periods checks the periods of a mode.
func (k *checker) periods(mode string, every, min metav1.Duration) {
	period, least := every.Duration, min.Duration
	if period <= 0 {
		k.check(mode+".syncPeriod", fmt.Errorf("%s is not more than 0", period))
	}
	if least > period && period > 0 {
		k.check(mode+".minSyncPeriod", fmt.Errorf("%s is more than the %s of %s", least, period, k.origin(mode+".syncPeriod")))
	}
}

// detectLocal reads how traffic from pods is recognised.
func (k *checker) detectLocal(d *plan.DetectLocal) {
	kp := &k.kp
	d.Mode = plan.DetectLocalMode(kp.DetectLocalMode)
	cidrs, err := onePerFamily(kp.ClusterCIDR)
	k.check("clusterCIDR", err)
	switch d.Mode {
	case plan.DetectClusterCIDR:
		d.CIDRs = cidrs
	case plan.DetectNodeCIDR:
	case plan.DetectBridgeInterface:
		d.Interface = kp.DetectLocal.BridgeInterface
		k.interfaceName("detectLocal.bridgeInterface", d.Interface, 15)
	case plan.DetectInterfaceNamePrefix:
		d.Interface = kp.DetectLocal.InterfaceNamePrefix
		k.interfaceName("detectLocal.interfaceNamePrefix", d.Interface, 14)
	default:
		k.oneOf("detectLocalMode", string(d.Mode), "ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")
	}
}

// interfaceName checks the name of a network interface, or the prefix of one, which becomes part of rules. A name has at most 15
// characters; a rule for a prefix needs one of them for its wildcard.
func (k *checker) interfaceName(field, name string, longest int) {
	odd := strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune("/\"'\\+!", r) })
	switch {
	case name == "":
		k.check(field, fmt.Errorf("required with %s", k.saying("detectLocalMode", string(k.kp.DetectLocalMode))))
	case len(name) > longest || odd:
		k.check(field, fmt.Errorf("%q can't be the name of a network interface, or begin one", name))
	}
}

var version = regexp.MustCompile(`^\d+\.\d+$`)

func (k *checker) servers(c *Config) {
	kp := &k.kp
	bind, err := netip.ParseAddr(kp.BindAddress)
	if err != nil {
		k.check("bindAddress", fmt.Errorf("%q is not an IP address", kp.BindAddress))
	}
	c.Servers = Servers{
		Bind: bind.Unmap(), HardFail: kp.BindAddressHardFail, Profiling: kp.EnableProfiling, UI: k.own.ui,
		Healthz: k.addrPort("healthzBindAddress", kp.HealthzBindAddress),
		Metrics: k.addrPort("metricsBindAddress", kp.MetricsBindAddress),
	}
	if h, m := c.Servers.Healthz, c.Servers.Metrics; collide(h, m) {
		k.check("metricsBindAddress", fmt.Errorf("%s can't be used beside %s: give the two servers different ports, or leave one out",
			m, k.saying("healthzBindAddress", h.String())))
	}
	k.oneOf("--ui", c.Servers.UI, uiAccess...)
	if shown := kp.ShowHiddenMetricsForVersion; shown != "" && !version.MatchString(shown) {
		k.check("showHiddenMetricsForVersion", fmt.Errorf("%q is not a version such as 1.36", shown))
	}
	if c.OOMScoreAdj = int(*kp.OOMScoreAdj); c.OOMScoreAdj < -1000 || c.OOMScoreAdj > 1000 {
		k.check("oomScoreAdj", fmt.Errorf("%d is not within -1000 to 1000", c.OOMScoreAdj))
	}
}

// collide reports whether only one of two servers can listen: at the same address, or where one listens at all addresses, which are
// those of both families.
func collide(a, b netip.AddrPort) bool {
	if !a.IsValid() || !b.IsValid() || a.Port() != b.Port() {
		return false
	}
	first, second := a.Addr().Unmap(), b.Addr().Unmap()
	return first == second || first.IsUnspecified() || second.IsUnspecified()
}

// addrPort reads the address of a server; empty for none.
func (k *checker) addrPort(field, address string) netip.AddrPort {
	if address == "" {
		return netip.AddrPort{}
	}
	out, err := netip.ParseAddrPort(address)
	if err != nil || out.Port() == 0 {
		k.check(field, fmt.Errorf("%q is not an IP address with a port", address))
	}
	return out
}

func (k *checker) conntrack(c *Conntrack) {
	kp := &k.kp.Conntrack
	*c = Conntrack{
		MaxPerCore: int(*kp.MaxPerCore), Min: int(*kp.Min),
		TCPEstablishedTimeout: kp.TCPEstablishedTimeout.Duration, TCPCloseWaitTimeout: kp.TCPCloseWaitTimeout.Duration,
		UDPTimeout: kp.UDPTimeout.Duration, UDPStreamTimeout: kp.UDPStreamTimeout.Duration, TCPBeLiberal: kp.TCPBeLiberal,
	}
}

// scheduler matches the name of an IPVS scheduler, which becomes part of the name of a kernel module.
var scheduler = regexp.MustCompile(`^[a-z]{0,12}$`)

func (k *checker) ipvs(c *IPVS) {
	kp := &k.kp.IPVS
	*c = IPVS{
		Scheduler: kp.Scheduler, StrictARP: kp.StrictARP, VIPs: k.own.ipvsVIPs, GracePeriod: k.own.ipvsGrace,
		TCPTimeout: kp.TCPTimeout.Duration, TCPFinTimeout: kp.TCPFinTimeout.Duration, UDPTimeout: kp.UDPTimeout.Duration,
	}
	k.periods("ipvs", kp.SyncPeriod, kp.MinSyncPeriod)
	k.oneOf("--ipvs-vips", c.VIPs, ipvsVIPs...)
	if !scheduler.MatchString(c.Scheduler) {
		k.check("ipvs.scheduler", fmt.Errorf("%q can't be the name of a scheduler", c.Scheduler))
	}
	if c.GracePeriod < 0 {
		k.check("--ipvs-graceful-period", fmt.Errorf("%s is negative", c.GracePeriod))
	}
	for _, text := range kp.ExcludeCIDRs {
		if cidr, ok := parsePrefix(strings.TrimSpace(text)); ok {
			c.ExcludeCIDRs = append(c.ExcludeCIDRs, cidr)
		} else {
			k.check("ipvs.excludeCIDRs", fmt.Errorf("%q is not a CIDR", text))
		}
	}
}

func (k *checker) log(c *Config) {
	c.LogLevel, c.LogFormat = k.own.logLevel, k.kp.Logging.Format
	k.oneOf("--log-level", c.LogLevel, "debug", "info", "warn", "error")
	k.oneOf("logging.format", c.LogFormat, "text", "json")
	if k.kp.Logging.Verbosity >= debugVerbosity {
		c.LogLevel = "debug"
	}
}

// oneOf checks that a value is one of a list.
func (k *checker) oneOf(field, value string, list ...string) {
	if !slices.Contains(list, value) {
		k.check(field, fmt.Errorf("%q is not one of %s", value, strings.Join(list, ", ")))
	}
}

// notNegative checks the fields whose values must not be below 0.
func (k *checker) notNegative() {
	for _, field := range []string{
		"clientConnection.burst", "conntrack.maxPerCore", "conntrack.min", "conntrack.tcpEstablishedTimeout",
		"conntrack.tcpCloseWaitTimeout", "conntrack.udpTimeout", "conntrack.udpStreamTimeout", "iptables.minSyncPeriod",
		"ipvs.minSyncPeriod", "ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout", "nftables.minSyncPeriod",
	} {
		if value, _ := lookup(&k.kp, field); strings.HasPrefix(written(value), "-") {
			k.check(field, fmt.Errorf("%s is negative", written(value)))
		}
	}
}

// onePerFamily reads a comma-separated list of CIDRs, at most one of each family.
func onePerFamily(text string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	seen := map[plan.Family]bool{}
	for _, part := range strings.Split(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		cidr, ok := parsePrefix(part)
		if !ok {
			return nil, fmt.Errorf("%q is not a CIDR", part)
		}
		family := plan.FamilyOf(cidr.Addr())
		if seen[family] {
			return nil, fmt.Errorf("%q is a second range for %s; one is possible", part, family)
		}
		seen[family] = true
		out = append(out, cidr)
	}
	return out, nil
}

func parsePrefix(text string) (netip.Prefix, bool) {
	cidr, err := netip.ParsePrefix(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	return plan.Unmapped(cidr)
}

func parsePorts(text string) (plan.PortRange, error) {
	first, last, ok := strings.Cut(strings.TrimSpace(text), "-")
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if !ok || errA != nil || errB != nil || a == 0 || a > b {
		return plan.PortRange{}, fmt.Errorf("%q is not a range of ports such as 30000-32767", text)
	}
	return plan.PortRange{First: uint16(a), Last: uint16(b)}, nil
}

func parseNodePortAddresses(list []string) (plan.NodePortAddresses, error) {
	var out plan.NodePortAddresses
	for _, text := range list {
		switch text = strings.TrimSpace(text); text {
		case "primary":
			out.Primary = true
		case "all":
			for _, f := range plan.Families {
				out.CIDRs = append(out.CIDRs, f.All())
			}
		case "localhost":
			for _, f := range plan.Families {
				out.CIDRs = append(out.CIDRs, f.Loopback())
			}
		default:
			cidr, ok := parsePrefix(text)
			if !ok {
				return out, fmt.Errorf("%q is not a CIDR, \"primary\", \"localhost\" or \"all\"", text)
			}
			out.CIDRs = append(out.CIDRs, cidr)
		}
	}
	return out, nil
}
