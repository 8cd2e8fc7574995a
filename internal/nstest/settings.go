package nstest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// Variable is the environment variable that chooses the settings of the machine on which tests pretend to run: "hostile" for
// those that differ most from the kernel's defaults. Unset, they run with the machine's own, whatever these are.
const Variable = "NODEPROXY_TEST_SETTINGS"

// Hostile reports whether the tests run with hostile settings.
var Hostile = sync.OnceValue(func() bool {
	switch v := os.Getenv(Variable); v {
	case "":
		return false
	case "hostile":
		return true
	default:
		panic(fmt.Sprintf("%s=%s: the only value is hostile", Variable, v))
	}
})

// A setting is a kernel setting of a network namespace.
type setting struct {
	path    string // below /proc/sys/net
	normal  string // the kernel's default
	hostile string // what a machine may have instead, or empty if no test could notice
}

// settings are those that a new namespace takes over from the machine's first namespace or from parameters of kernel modules,
// and those that tests with hostile settings change: nothing else makes two new namespaces differ. What the kernel keeps for
// the machine as a whole is not here, such as nf_conntrack_max and the settings of neighbour tables; nor are tcp_rmem and
// tcp_wmem, whose defaults depend on its memory, and tcp_congestion_control.
//
// Each field is KEY=DEFAULT or KEY=DEFAULT/HOSTILE. A write to some keys of "all" changes others: forwarding changes
// accept_redirects, so it comes first.
var settings = parse(map[string]string{
	"ipv4/conf/*": `
		forwarding=0/1 accept_local=0 accept_redirects=1/0 accept_source_route=* arp_accept=0/1 arp_announce=0/2
		arp_evict_nocarrier=1 arp_filter=0/1 arp_ignore=0/8 arp_notify=0 bc_forwarding=0 bootp_relay=0 disable_policy=0 disable_xfrm=0
		drop_gratuitous_arp=0/1 drop_unicast_in_l2_multicast=0 force_igmp_version=0 igmpv2_unsolicited_report_interval=10000
		igmpv3_unsolicited_report_interval=1000 ignore_routes_with_linkdown=0 log_martians=0 medium_id=0 promote_secondaries=0
		proxy_arp=0/1 proxy_arp_pvlan=0 route_localnet=0/1 rp_filter=0/1 secure_redirects=1 send_redirects=1/0 shared_media=1
		src_valid_mark=0 tag=0`,
	"ipv6/conf/*": `
		forwarding=0/1 disable_ipv6=0/1 accept_dad=* accept_ra=1 accept_ra_defrtr=1 accept_ra_from_local=0 accept_ra_min_hop_limit=1
		accept_ra_min_lft=0 accept_ra_mtu=1 accept_ra_pinfo=1 accept_ra_rt_info_max_plen=0 accept_ra_rt_info_min_plen=0
		accept_ra_rtr_pref=1 accept_redirects=1/0 accept_source_route=0 accept_untracked_na=0 addr_gen_mode=0/1 autoconf=1
		dad_transmits=1/3 disable_policy=0 drop_unicast_in_l2_multicast=0 drop_unsolicited_na=0 enhanced_dad=1 force_forwarding=0
		force_mld_version=0 force_tllao=0 hop_limit=64/2 ignore_routes_with_linkdown=0 ioam6_enabled=0 ioam6_id=65535
		ioam6_id_wide=4294967295 keep_addr_on_down=0 max_addresses=16 max_desync_factor=600 mldv1_unsolicited_report_interval=10000
		mldv2_unsolicited_report_interval=1000 ndisc_evict_nocarrier=1 ndisc_notify=0 ndisc_tclass=0 optimistic_dad=0 proxy_ndp=0
		ra_defrtr_metric=1024 ra_honor_pio_life=0 ra_honor_pio_pflag=0 regen_max_retry=3 regen_min_advance=2
		router_probe_interval=60 router_solicitation_delay=1 router_solicitation_interval=4 router_solicitation_max_interval=3600
		router_solicitations=-1 rpl_seg_enabled=0 seg6_enabled=0 seg6_require_hmac=0 suppress_frag_ndisc=1 temp_prefered_lft=86400
		temp_valid_lft=604800 use_oif_addrs_only=0 use_optimistic=0 use_tempaddr=0`,
	"bridge": "bridge-nf-call-arptables=1/0 bridge-nf-call-ip6tables=1/0 bridge-nf-call-iptables=1/0",
	"netfilter": `
		nf_conntrack_acct=0/1 nf_conntrack_timestamp=0/1 nf_conntrack_tcp_be_liberal=0/1 nf_conntrack_tcp_loose=1/0
		nf_conntrack_tcp_timeout_established=432000/9 nf_conntrack_tcp_timeout_close_wait=60/9
		nf_conntrack_udp_timeout=30/9 nf_conntrack_udp_timeout_stream=120/9`,
})

// exceptions are defaults that are not the same for all, default and lo.
var exceptions = map[string]string{
	"ipv4/conf/all/accept_source_route": "0", "ipv4/conf/default/accept_source_route": "1", "ipv4/conf/lo/accept_source_route": "1",
	"ipv6/conf/all/accept_dad": "0", "ipv6/conf/default/accept_dad": "1", "ipv6/conf/lo/accept_dad": "-1",
	"ipv6/conf/lo/use_tempaddr": "-1", "ipv4/conf/lo/disable_policy": "1", "ipv4/conf/lo/disable_xfrm": "1",
}

func parse(table map[string]string) []setting {
	var out []setting
	for _, scope := range []string{"all", "default", "lo"} {
		for _, dir := range []string{"ipv4/conf/*", "ipv6/conf/*"} {
			out = append(out, parseFields(strings.Replace(dir, "*", scope, 1), table[dir])...)
		}
	}
	return append(append(out, parseFields("bridge", table["bridge"])...), parseFields("netfilter", table["netfilter"])...)
}

func parseFields(dir, fields string) []setting {
	var out []setting
	for _, field := range strings.Fields(fields) {
		key, values, _ := strings.Cut(field, "=")
		s := setting{path: dir + "/" + key}
		s.normal, s.hostile, _ = strings.Cut(values, "/")
		if v, ok := exceptions[s.path]; ok {
			s.normal = v
		}
		out = append(out, s)
	}
	return out
}

// Reset puts the settings of the calling thread's network namespace, a new one, to the kernel's defaults. With hostile settings,
// it pretends before that the namespace has taken over the worst from the machine.
func Reset() error {
	inherited, err := inheritedOnce()
	if err != nil {
		return err
	}
	if !Hostile() {
		return write(inherited, setting.toNormal)
	}
	worst := slices.DeleteFunc(slices.Clone(settings), func(s setting) bool { return s.hostile == "" })
	return errors.Join(write(worst, setting.toHostile), write(worst, setting.toNormal), write(inherited, setting.toNormal))
}

func (s setting) toNormal() string  { return s.normal }
func (s setting) toHostile() string { return s.hostile }

// inheritedOnce is inherited, asked in the first namespace that a process makes. Those that follow take over the same, for tests
// leave the machine's settings alone; and to look at each one takes longer than all else about a namespace.
var inheritedOnce = sync.OnceValues(inherited)

// inherited returns the settings of the calling thread's network namespace that are not the kernel's defaults.
func inherited() ([]setting, error) {
	_ = exec.Command("modprobe", "--quiet", "nf_conntrack").Run() // Without it, namespaces lack its settings until a rule needs it.
	var out []setting
	for _, s := range settings {
		have, err := os.ReadFile(filepath.Join("/proc/sys/net", s.path))
		switch {
		case errors.Is(err, fs.ErrNotExist): // Not every kernel has every setting.
		case err != nil:
			return nil, fmt.Errorf("a setting of a new network namespace: %w", err)
		case strings.TrimSpace(string(have)) != s.normal:
			out = append(out, s)
		}
	}
	return out, nil
}

func write(list []setting, value func(setting) string) error {
	for _, s := range list {
		err := os.WriteFile(filepath.Join("/proc/sys/net", s.path), []byte(value(s)), 0o644)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("a setting of a new network namespace to %s: %w", value(s), err)
		}
	}
	return nil
}
