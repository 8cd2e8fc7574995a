package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"nodeproxy/e2e/harness"
)

// neighbours are those of TestNeighbours.
var neighbours = []otherProgram{
	kubelet, oldKubelet, felix, flannel, kubeRouter, cilium, docker, docker29, firewalld, ufw, nftablesConf, flushRuleset, iptablesPersistent,
}

// ensure makes a rule as programs do that look for it first.
func (b *beside) ensure(tool, table, how, rule string) {
	b.Helper()
	chain, rest, _ := strings.Cut(rule, " ")
	x := b.variant.Tool(tool) + " -w -t " + table
	b.script(fmt.Sprintf("%s -C %s %s 2>/dev/null || %s %s %s %s", x, chain, rest, x, how, chain, rest))
}

// A kubelet keeps chains by which it, and others, see that somebody has emptied a table, a hint at which variant of iptables is in
// use, and a guard of the node's loopback addresses. It looks each minute, and at once when a chain of its own is gone.
var kubelet = otherProgram{
	name: "kubelet", kind: recorded,
	start: kubeletRules, reload: kubeletRules,
	shares: []string{"KUBE-FIREWALL"},
}

func kubeletRules(b *beside) {
	for _, tool := range []string{"iptables", "ip6tables"} {
		x := b.variant.Tool(tool) + " -w "
		for _, table := range []string{"mangle", "nat", "filter"} {
			b.script(x + "-t " + table + " -N KUBE-KUBELET-CANARY 2>/dev/null || true")
		}
		b.script(x + "-t mangle -N KUBE-IPTABLES-HINT 2>/dev/null || true\n" + x + "-N KUBE-FIREWALL 2>/dev/null || true")
		if tool == "iptables" {
			b.ensure(tool, "filter", "-A", `KUBE-FIREWALL -m comment --comment "block incoming localnet connections"`+
				` ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP`)
		}
		for _, chain := range []string{"OUTPUT", "INPUT"} {
			b.ensure(tool, "filter", "-I", chain+" -j KUBE-FIREWALL")
		}
	}
}

// Until 1.26, a kubelet also kept the chains for masquerading that are the proxy's now, and one by which packets could be marked
// to be dropped.
var oldKubelet = otherProgram{
	name: "kubelet before 1.27", kind: recorded,
	start: oldKubeletRules, reload: oldKubeletRules,
	shares: []string{"KUBE-FIREWALL"},
}

func oldKubeletRules(b *beside) {
	kubeletRules(b)
	for _, tool := range []string{"iptables", "ip6tables"} {
		x := b.variant.Tool(tool) + " -w -t nat "
		for _, chain := range []string{"KUBE-MARK-DROP", "KUBE-MARK-MASQ", "KUBE-POSTROUTING"} {
			b.script(x + "-N " + chain + " 2>/dev/null || true")
		}
		b.ensure(tool, "nat", "-A", "KUBE-MARK-DROP -j MARK --or-mark 0x8000")
		b.ensure(tool, "nat", "-A", "KUBE-MARK-MASQ -j MARK --or-mark 0x4000")
		b.ensure(tool, "nat", "-I", `POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`)
		b.ensure(tool, "nat", "-A", "KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN")
		b.ensure(tool, "nat", "-A", "KUBE-POSTROUTING -j MARK --xor-mark 0x4000")
		b.ensure(tool, "nat", "-A",
			`KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`)
		b.ensure(tool, "filter", "-A", `KUBE-FIREWALL -m comment --comment "kubernetes firewall for dropping marked packets"`+
			` -m mark --mark 0x8000/0x8000 -j DROP`)
	}
}

// Felix, with Calico's iptables dataplane, puts its jumps first in built-in chains, and puts them there again when others have come
// before them. Its marks are the upper half of the packet mark. It accepts what a policy admits, and drops the rest of what comes
// from or goes to a pod. Where it sees kube-ipvs0, it follows packets through INPUT and OUTPUT by a mark for each pod. The rules
// are those for pods without policies, but for one whose policy admits nothing but port 8080.
var felix = otherProgram{
	name: "Calico", kind: recorded,
	start: func(b *beside) {
		b.felixSets()
		b.restore(b.felixRules() + felixJumps("-I", "-A"))
	},
	reload: func(b *beside) {
		b.felixSets()
		jumps := strings.Split(felixJumps("-D", "-D"), "COMMIT\n")
		again := strings.Split(felixJumps("-I", "-A"), "COMMIT\n")
		text := b.felixRules()
		for i := range jumps {
			if strings.TrimSpace(jumps[i]) != "" {
				_, insert, _ := strings.Cut(again[i], "\n")
				text += jumps[i] + insert + "COMMIT\n"
			}
		}
		b.restore(text)
	},
}

func (b *beside) felixSets() {
	var out strings.Builder
	for _, family := range families {
		out.WriteString(b.text(`
			create cali{v}0masq-ipam-pools hash:net family {inet} maxelem 1048576
			create cali{v}0all-ipam-pools hash:net family {inet} maxelem 1048576
			create cali{v}0this-host hash:ip family {inet} maxelem 1048576
			add cali{v}0masq-ipam-pools {pods}
			add cali{v}0all-ipam-pools {pods}
			add cali{v}0this-host {node}
			4 add cali40this-host 127.0.0.1
			6 add cali60this-host ::1
		`, family))
	}
	if _, err := b.w.Node1().OutputWithInput(out.String(), "ipset", "restore", "-exist"); err != nil {
		b.Fatal(err)
	}
}

// felixJumps are the rules in built-in chains, put first or last.
func felixJumps(first, last string) string {
	return strings.NewReplacer("FIRST", first, "LAST", last).Replace(`*raw
		FIRST PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
		FIRST OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
		COMMIT
		*mangle
		FIRST PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
		FIRST POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
		COMMIT
		*nat
		FIRST PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
		FIRST OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
		FIRST POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
		COMMIT
		*filter
		FIRST INPUT -m comment --comment "cali:Cz_u1IQiXIMmKD4c" -j cali-INPUT
		FIRST FORWARD -m comment --comment "cali:wUHhoiAYhphO9Mso" -j cali-FORWARD
		FIRST OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
		LAST FORWARD -m comment --comment "cali:S93hcgKJrXEqnTfs" -m comment --comment "Policy explicitly accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
		LAST FORWARD -m comment --comment "cali:mp77cMpurHhyjLrM" -j MARK --set-xmark 0x10000/0x10000
		COMMIT
	`)
}

// felixRules are the chains of Felix.
func (b *beside) felixRules() string {
	var fromPods, toPods, pods, setMarks, fromMarks strings.Builder
	for i, p := range b.w.Node1().Pods {
		mark := fmt.Sprintf("%#x/0xfff00000", (i+2)<<20)
		fmt.Fprintf(&fromPods, "-A cali-from-wl-dispatch -i pod%[1]s -g cali-fw-pod%[1]s\n", p.Name)
		fmt.Fprintf(&toPods, "-A cali-to-wl-dispatch -o pod%[1]s -g cali-tw-pod%[1]s\n", p.Name)
		fmt.Fprintf(&setMarks, "-A cali-set-endpoint-mark -i pod%s -g cali-sm-pod%[1]s\n", p.Name)
		fmt.Fprintf(&setMarks, "-A cali-sm-pod%s -j MARK --set-xmark %s\n", p.Name, mark)
		fmt.Fprintf(&fromMarks, "-A cali-from-endpoint-mark -m mark --mark %s -g cali-fw-pod%s\n", mark, p.Name)
		for _, way := range []string{"fw", "tw"} {
			chain := "cali-" + way + "-pod" + p.Name
			fmt.Fprintf(&pods, `-A %[1]s -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
				-A %[1]s -m conntrack --ctstate INVALID -j DROP
				-A %[1]s -j MARK --set-xmark 0x0/0x10000
			`, chain)
			if way == "tw" && p.Name == "n1a" {
				fmt.Fprintf(&pods, `-A %[1]s -j MARK --set-xmark 0x0/0x20000
					-A %[1]s -m mark --mark 0x0/0x20000 -j cali-pi-only-8080
					-A %[1]s -m mark --mark 0x10000/0x10000 -j RETURN
					-A %[1]s -m mark --mark 0x0/0x20000 -j DROP
				`, chain)
				continue
			}
			fmt.Fprintf(&pods, `-A %[1]s -j cali-pr%[2]s-kns.default
				-A %[1]s -m mark --mark 0x10000/0x10000 -j RETURN
				-A %[1]s -j DROP
			`, chain, map[string]string{"fw": "o", "tw": "i"}[way])
		}
	}
	ipvsInput, ipvsOutput, ipvsChains := "", "", ""
	if mode == harness.IPVS {
		ipvsInput = `-A cali-INPUT -j MARK --set-xmark 0x0/0xfff00000
			-A cali-INPUT -j cali-forward-check
			-A cali-INPUT -m mark ! --mark 0x0/0xfff00000 -j RETURN
		`
		ipvsOutput = "-A cali-OUTPUT -m mark ! --mark 0x0/0xfff00000 -g cali-forward-endpoint-mark\n"
		ipvsChains = `-A cali-forward-check -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN
			-A cali-forward-check -p tcp -m multiport --dports 30000:32767 -m set --match-set cali{v}0this-host dst -g cali-set-endpoint-mark
			-A cali-forward-check -p udp -m multiport --dports 30000:32767 -m set --match-set cali{v}0this-host dst -g cali-set-endpoint-mark
			-A cali-forward-check -m set ! --match-set cali{v}0this-host dst -j cali-set-endpoint-mark
			` + setMarks.String() + `
			-A cali-set-endpoint-mark -i pod+ -j DROP
			-A cali-set-endpoint-mark -j MARK --set-xmark 0x100000/0xfff00000
			-A cali-forward-endpoint-mark -m mark ! --mark 0x100000/0xfff00000 -j cali-from-endpoint-mark
			-A cali-forward-endpoint-mark -o pod+ -j cali-to-wl-dispatch
			-A cali-forward-endpoint-mark -j cali-to-hep-forward
			-A cali-forward-endpoint-mark -j MARK --set-xmark 0x0/0xfff00000
			-A cali-forward-endpoint-mark -m mark --mark 0x10000/0x10000 -j ACCEPT
			` + fromMarks.String() + `
			-A cali-from-endpoint-mark -j DROP
		`
	}
	return declared(`*raw
		-A cali-PREROUTING -j MARK --set-xmark 0x0/0xf0000
		-A cali-PREROUTING -i pod+ -j MARK --set-xmark 0x40000/0x40000
		-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -j cali-rpf-skip
		-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
		-A cali-PREROUTING -m mark --mark 0x0/0x40000 -j cali-from-host-endpoint
		-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
		-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000
		-A cali-OUTPUT -j cali-to-host-endpoint
		-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
		COMMIT
		*mangle
		-A cali-PREROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
		-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
		-A cali-PREROUTING -j cali-from-host-endpoint
		-A cali-PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT
		-A cali-POSTROUTING -m mark --mark 0x10000/0x10000 -j RETURN
		-A cali-POSTROUTING -j MARK --set-xmark 0x0/0xf0000
		-A cali-POSTROUTING -m conntrack --ctstate DNAT -j cali-to-host-endpoint
		-A cali-POSTROUTING -m mark --mark 0x10000/0x10000 -j RETURN
		COMMIT
		*nat
		-A cali-PREROUTING -j cali-fip-dnat
		-A cali-OUTPUT -j cali-fip-dnat
		-A cali-POSTROUTING -j cali-fip-snat
		-A cali-POSTROUTING -j cali-nat-outgoing
		-A cali-nat-outgoing -m set --match-set cali{v}0masq-ipam-pools src -m set ! --match-set cali{v}0all-ipam-pools dst -j MASQUERADE --random-fully
		COMMIT
		*filter
		` + ipvsInput + `
		-A cali-INPUT -i pod+ -g cali-wl-to-host
		-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
		-A cali-INPUT -j MARK --set-xmark 0x0/0xf0000
		-A cali-INPUT -j cali-from-host-endpoint
		-A cali-INPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
		-A cali-wl-to-host -j cali-from-wl-dispatch
		-A cali-wl-to-host -m comment --comment "Configured DefaultEndpointToHostAction" -j ACCEPT
		-A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000
		-A cali-FORWARD -m mark --mark 0x0/0x10000 -j cali-from-hep-forward
		-A cali-FORWARD -i pod+ -j cali-from-wl-dispatch
		-A cali-FORWARD -o pod+ -j cali-to-wl-dispatch
		-A cali-FORWARD -j cali-to-hep-forward
		-A cali-FORWARD -j cali-cidr-block
		-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
		` + ipvsOutput + `
		-A cali-OUTPUT -o pod+ -j RETURN
		-A cali-OUTPUT -j MARK --set-xmark 0x0/0xf0000
		-A cali-OUTPUT -m conntrack ! --ctstate DNAT -j cali-to-host-endpoint
		-A cali-OUTPUT -m mark --mark 0x10000/0x10000 -j ACCEPT
		` + fromPods.String() + `
		-A cali-from-wl-dispatch -j DROP
		` + toPods.String() + `
		-A cali-to-wl-dispatch -j DROP
		-A cali-pri-kns.default -j MARK --set-xmark 0x10000/0x10000
		-A cali-pro-kns.default -j MARK --set-xmark 0x10000/0x10000
		-A cali-pi-only-8080 -p tcp -m tcp --dport 8080 -j MARK --set-xmark 0x10000/0x10000
		-A cali-pi-only-8080 -p udp -m udp --dport 8080 -j MARK --set-xmark 0x10000/0x10000
		` + pods.String() + ipvsChains + `
		COMMIT
	`)
}

// declared puts a line for each chain that is mentioned in front of the rules of its table: iptables-restore makes such a chain, or
// empties it.
func declared(rules string) string {
	var out strings.Builder
	for _, table := range strings.SplitAfter(rules, "COMMIT\n") {
		header, body, found := strings.Cut(strings.TrimSpace(table), "\n")
		if !found {
			continue
		}
		out.WriteString(header + "\n")
		seen := map[string]bool{"INPUT": true, "OUTPUT": true, "FORWARD": true, "PREROUTING": true, "POSTROUTING": true}
		for _, line := range strings.Split(body, "\n") {
			f := strings.Fields(strings.TrimLeft(strings.TrimSpace(line), "46 "))
			if len(f) < 2 || f[0] != "-A" {
				continue
			}
			names := []string{f[1]}
			if to := ruleTarget.FindStringSubmatch(line); to != nil && strings.ContainsAny(to[1], "-_") { // not ACCEPT and the like
				names = append(names, to[1])
			}
			for _, name := range names {
				if !seen[name] {
					seen[name] = true
					out.WriteString(":" + name + " - [0:0]\n")
				}
			}
		}
		out.WriteString(body + "\n")
	}
	return out.String()
}

// flannel masquerades what leaves the pods' network, but for what bears the mark of a service proxy, and accepts all that is
// forwarded from or to pods. Its rules stand at the end of built-in chains; it looks for them each five seconds.
var flannel = otherProgram{
	name: "flannel", kind: recorded,
	start: func(b *beside) {
		b.restore(declared(flannelRules))
		flannelJumps(b)
		b.restore("*filter\n:FORWARD DROP [0:0]\nCOMMIT\n") // somebody else's doing, for which flannel has rules in FORWARD
	},
	reload: func(b *beside) {
		b.restore(declared(flannelRules))
		flannelJumps(b)
	},
}

func flannelJumps(b *beside) {
	for _, tool := range []string{"iptables", "ip6tables"} {
		b.ensure(tool, "nat", "-A", `POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG`)
		b.ensure(tool, "filter", "-A", `FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD`)
	}
}

const flannelRules = `*nat
	-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
	-A FLANNEL-POSTRTG -s {here} -d {pods} -m comment --comment "flanneld masq" -j RETURN
	-A FLANNEL-POSTRTG -s {pods} -d {here} -m comment --comment "flanneld masq" -j RETURN
	-A FLANNEL-POSTRTG ! -s {pods} -d {here} -m comment --comment "flanneld masq" -j RETURN
	-A FLANNEL-POSTRTG -s {pods} ! -d {multicast} -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
	-A FLANNEL-POSTRTG ! -s {pods} -d {pods} -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
	COMMIT
	*filter
	-A FLANNEL-FWD -s {pods} -m comment --comment "flanneld forward" -j ACCEPT
	-A FLANNEL-FWD -d {pods} -m comment --comment "flanneld forward" -j ACCEPT
	COMMIT
`

// kubeRouter stands for the network policies of kube-router, as K3s has them too. Its chains and sets have names that begin with
// KUBE, as a service proxy's have. It puts its jumps first, marks what a policy admits with 0x10000 and what may pass with 0x20000.
var kubeRouter = otherProgram{
	name: "kube-router", kind: recorded,
	start: func(b *beside) {
		b.kubeRouterSets()
		b.restore(declared(b.kubeRouterRules()))
		for _, tool := range []string{"iptables", "ip6tables"} {
			for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
				b.ensure(tool, "filter", "-I", chain+` -m comment --comment "kube-router netpol" -j KUBE-ROUTER-`+chain)
			}
		}
	},
	reload: func(b *beside) {
		b.kubeRouterSets()
		b.restore(declared(b.kubeRouterRules()))
	},
	instead: func(b *beside, c cell) string { return b.acceptedFirst(c, "endpoint") },
}

func (b *beside) kubeRouterSets() {
	const sets = `
		create {p}KUBE-SRC-2FAIIK2E4RIPMTGF hash:ip family {inet} timeout 0
		add {p}KUBE-SRC-2FAIIK2E4RIPMTGF {n1c}
		create {p}KUBE-DST-VVNWCMTTSD6BXXFW hash:ip family {inet} timeout 0
		add {p}KUBE-DST-VVNWCMTTSD6BXXFW {n1a}
		create {p}kube-router-local-pods hash:ip family {inet} timeout 0
		add {p}kube-router-local-pods {n1a}
	`
	var text strings.Builder
	for _, family := range families {
		text.WriteString(b.text(sets, family))
	}
	if _, err := b.w.Node1().OutputWithInput(text.String(), "ipset", "restore", "-exist"); err != nil {
		b.Fatal(err)
	}
}

// kubeRouterRules: pod n1a is under a policy that admits port 8080 from everywhere.
func (b *beside) kubeRouterRules() string {
	const rules = `*filter
		-A KUBE-ROUTER-INPUT -d {services} -m comment --comment "allow traffic to primary cluster IP range" -j RETURN
		-A KUBE-ROUTER-INPUT -p tcp -m addrtype --dst-type LOCAL -m multiport --dports {range} -j RETURN
		-A KUBE-ROUTER-INPUT -p udp -m addrtype --dst-type LOCAL -m multiport --dports {range} -j RETURN
		-A KUBE-ROUTER-INPUT -d {externals} -j RETURN
		-A KUBE-ROUTER-INPUT -d {lbs} -j RETURN
		-A KUBE-ROUTER-INPUT -s {n1a} -j KUBE-POD-FW-TT2IUJ4CPAVNDDSJ
		-A KUBE-ROUTER-INPUT -m mark --mark 0x20000/0x20000 -j ACCEPT
		-A KUBE-ROUTER-FORWARD -d {n1a} -j KUBE-POD-FW-TT2IUJ4CPAVNDDSJ
		-A KUBE-ROUTER-FORWARD -s {n1a} -j KUBE-POD-FW-TT2IUJ4CPAVNDDSJ
		-A KUBE-ROUTER-FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT
		-A KUBE-ROUTER-OUTPUT -d {n1a} -j KUBE-POD-FW-TT2IUJ4CPAVNDDSJ
		-A KUBE-ROUTER-OUTPUT -s {n1a} -j KUBE-POD-FW-TT2IUJ4CPAVNDDSJ
		-A KUBE-ROUTER-OUTPUT -m mark --mark 0x20000/0x20000 -j ACCEPT
		-A KUBE-NWPLCY-DEFAULT -m comment --comment "rule to mark traffic matching a network policy" -j MARK --set-xmark 0x10000/0x10000
		-A KUBE-NWPLCY-YPHVLCHLJDPMGPRC -m set --match-set {p}KUBE-DST-VVNWCMTTSD6BXXFW dst -p tcp -m tcp --dport 8080 -j MARK --set-xmark 0x10000/0x10000
		-A KUBE-NWPLCY-YPHVLCHLJDPMGPRC -m set --match-set {p}KUBE-DST-VVNWCMTTSD6BXXFW dst -p udp -m udp --dport 8080 -j MARK --set-xmark 0x10000/0x10000
		-A KUBE-NWPLCY-YPHVLCHLJDPMGPRC -m mark --mark 0x10000/0x10000 -j RETURN
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -m comment --comment "rule for stateful firewall for pod" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -m conntrack --ctstate INVALID -j DROP
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -d {n1a} -m addrtype --src-type LOCAL -j ACCEPT
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -d {n1a} -j KUBE-NWPLCY-YPHVLCHLJDPMGPRC
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -s {n1a} -j KUBE-NWPLCY-DEFAULT
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -m mark ! --mark 0x10000/0x10000 -j REJECT --reject-with {reject}
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -j MARK --set-xmark 0x0/0x10000
		-A KUBE-POD-FW-TT2IUJ4CPAVNDDSJ -j MARK --set-xmark 0x20000/0x20000
		COMMIT
	`
	return strings.ReplaceAll(rules, "{range}", "30000:32767")
}

// cilium stands for Cilium that leaves Services to a proxy. It accepts what comes from or goes to its interfaces, masquerades what
// leaves the pods' network, and tells by the lower half of the mark what its programs and proxies have sent; in the upper half, there
// are the identities of pods.
var cilium = otherProgram{
	name: "Cilium", kind: recorded,
	start: func(b *beside) {
		b.restore(declared(ciliumRules) + ciliumJumps)
	},
	holds:   identityKept,
	instead: func(b *beside, c cell) string { return b.acceptedFirst(c, "endpoint", "pod") },
	// The agent renames its chains when it starts, makes new ones, and removes the old ones after that.
	reload: func(b *beside) {
		old := func(text string) string { return strings.ReplaceAll(text, "CILIUM_", "OLD_CILIUM_") }
		b.restore(declared(old(ciliumRules)) + old(ciliumJumps))
		b.restore(strings.ReplaceAll(ciliumJumps, "-I ", "-D "))
		b.restore(declared(ciliumRules) + ciliumJumps)
		b.restore(strings.ReplaceAll(old(ciliumJumps), "-I ", "-D "))
		var gone strings.Builder
		table := ""
		for _, line := range strings.Split(declared(old(ciliumRules)), "\n") {
			switch line = strings.TrimSpace(line); {
			case strings.HasPrefix(line, "*"):
				table = line
				gone.WriteString(table + "\n")
			case strings.HasPrefix(line, ":"):
				name := strings.Fields(line[1:])[0]
				gone.WriteString("-F " + name + "\n-X " + name + "\n")
			case line == "COMMIT":
				gone.WriteString("COMMIT\n")
			}
		}
		b.restore(gone.String())
	},
}

const ciliumJumps = `*raw
	-I PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_raw" -j CILIUM_PRE_raw
	-I OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT_raw" -j CILIUM_OUTPUT_raw
	COMMIT
	*mangle
	-I PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_mangle" -j CILIUM_PRE_mangle
	-I POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_mangle" -j CILIUM_POST_mangle
	COMMIT
	*nat
	-I PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_nat" -j CILIUM_PRE_nat
	-I OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT_nat" -j CILIUM_OUTPUT_nat
	-I POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_nat" -j CILIUM_POST_nat
	COMMIT
	*filter
	-I INPUT -m comment --comment "cilium-feeder: CILIUM_INPUT" -j CILIUM_INPUT
	-I FORWARD -m comment --comment "cilium-feeder: CILIUM_FORWARD" -j CILIUM_FORWARD
	-I OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT" -j CILIUM_OUTPUT
	COMMIT
`

// The identities that the rules of table mangle give stand for those that Cilium's programs give to packets of pods.
const ciliumRules = `*raw
	-A CILIUM_PRE_raw -m mark --mark 0x200/0xf00 -m comment --comment "cilium: NOTRACK for proxy traffic" -j CT --notrack
	-A CILIUM_OUTPUT_raw -o pod+ -m mark --mark 0xa00/0xfffffeff -m comment --comment "cilium: NOTRACK for proxy return traffic" -j CT --notrack
	-A CILIUM_OUTPUT_raw -o pod+ -m mark --mark 0x800/0xe00 -m comment --comment "cilium: NOTRACK for L7 proxy upstream traffic" -j CT --notrack
	COMMIT
	*mangle
	-A CILIUM_PRE_mangle -i pod+ -m comment --comment "identity of a pod" -j MARK --set-xmark 0x5f8b0f00/0xffffff00
	-A CILIUM_PRE_mangle -m mark --mark 0x200/0xf00 -j ACCEPT
	-A CILIUM_POST_mangle -m comment --comment "exclude nothing" -j RETURN
	COMMIT
	*nat
	-A CILIUM_PRE_nat -j RETURN
	-A CILIUM_OUTPUT_nat -j RETURN
	-A CILIUM_POST_nat -s {here} ! -d {pods} ! -o pod+ -m comment --comment "cilium masquerade non-cluster" -j MASQUERADE --random-fully
	-A CILIUM_POST_nat -m mark --mark 0xa00/0xe00 -m comment --comment "exclude proxy return traffic from masquerade" -j ACCEPT
	COMMIT
	*filter
	-A CILIUM_INPUT -m mark --mark 0x200/0xf00 -m comment --comment "cilium: ACCEPT for proxy traffic" -j ACCEPT
	-A CILIUM_FORWARD -o pod+ -m comment --comment "cilium: any->cluster on pod+ forward accept" -j ACCEPT
	-A CILIUM_FORWARD -i pod+ -m comment --comment "cilium: cluster->any on pod+ forward accept" -j ACCEPT
	-A CILIUM_OUTPUT -m mark --mark 0xa00/0xfffffeff -m comment --comment "cilium: ACCEPT for proxy return traffic" -j ACCEPT
	-A CILIUM_OUTPUT -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0xd00/0xf00 -m mark ! --mark 0xa00/0xe00 -m mark ! --mark 0x800/0xe00 -m mark ! --mark 0xf00/0xf00 -m comment --comment "cilium: host->any mark as from host" -j MARK --set-xmark 0xc00/0xf00
	COMMIT
`

// identityKept checks that a packet that is for no Service leaves the node with the identity that Cilium has given to it.
func identityKept(b *beside) {
	from, to := b.w.Pod("n1c"), b.w.Pod("n2a")
	for _, family := range families {
		tool := b.variant.Tool(map[int]string{4: "iptables", 6: "ip6tables"}[family]) + " -w -t mangle "
		rule := fmt.Sprintf("POSTROUTING -d %s -m mark --mark 0x5f8b0000/0xffff0000 -m comment --comment identity", to.IP(family))
		b.script(tool + "-A " + rule)
		if a := from.Ask("tcp", netip.AddrPortFrom(to.IP(family), 8080), harness.Patient); a.Outcome != harness.Answered {
			b.Errorf("from %s to %s: %v", from.Name, to.Name, a)
		}
		list := b.script(tool + "-vnxL POSTROUTING | grep identity")
		if f := strings.Fields(list); f[0] == "0" {
			b.Errorf("packets from %s to %s left without the mark that they had: %s", from.Name, to.Name, list)
		}
		b.script(tool + "-D " + rule)
	}
}

// acceptedFirst is what these sources get at an address of a Service without endpoints, where a neighbour that has put itself first
// in FORWARD accepts what they send, whoever it is for: nobody refuses it, and it goes where the network sends it.
func (b *beside) acceptedFirst(c cell, sources ...string) string {
	atNode := c.row.frontend == "node-port" || strings.HasPrefix(c.row.frontend, "localhost")
	if mode == harness.IPTables && b.row.order == nodeproxyFirst && c.want == "refused" && !atNode && slices.Contains(sources, c.source) {
		return "unanswered"
	}
	return c.want
}
