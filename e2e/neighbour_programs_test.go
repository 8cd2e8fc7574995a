package e2e

import (
	"strings"

	"nodeproxy/e2e/harness"
)

// perFamily is a template for each family; see beside.text.
func (b *beside) perFamily(template string) string { return b.text(template, 4) + b.text(template, 6) }

// A firewall on a node has to admit what pods send, and what goes to pods; in mode ipvs, what is for a Service besides, since that
// comes by INPUT with the address of the Service as its destination.

// withoutRT takes out rules about a header of IPv6 that has long been given up, where the kernel knows nothing of it (xt_rt).
const withoutRT = `
	sed -i '/-m rt /d' /etc/ufw/before6.rules
`

// ufw's default is to drop what comes in, and what is forwarded.
var ufw = otherProgram{
	name: "ufw", kind: theProgram, slow: true,
	start: func(b *beside) {
		rules := `
			ufw allow from {pods}
			ufw route allow from {pods}
			ufw route allow to {pods}
		`
		if mode == harness.IPVS {
			rules += `
				ufw allow to {services}
				ufw allow to {lbs}
				ufw allow to {externals}
				4 ufw allow 30000:32767/tcp
				4 ufw allow 30000:32767/udp
			`
		}
		// What it sets in /proc/sys may be of the whole machine.
		b.program(`sed -i 's/^IPT_SYSCTL=.*/IPT_SYSCTL=/' /etc/default/ufw` + "\n" + byMode("", withoutRT))
		for _, command := range strings.Split(b.perFamily(rules)+"ufw --force enable", "\n") {
			b.program(command) // Each may take seconds.
		}
	},
	reload: func(b *beside) { b.program("ufw reload") },
}

// firewalld has tables of its own in nf_tables, as its default is, whichever variant of iptables others use. Version 1 empties all
// tables of iptables besides, at its start and at each reload; and while it reloads it drops what is new.
var firewalld = otherProgram{
	name: "firewalld", kind: theProgram,
	start:   startFirewalld,
	reload:  reloadFirewalld,
	empties: emptiesIPTables,
}

// emptiesIPTables is of programs that empty the tables of iptables, where mode nftables has nothing.
func emptiesIPTables(harness.Variant) bool { return mode != harness.NFTables }

// reloadFirewalld reloads until firewalld says that it has succeeded: a reload of its own fails at times where another program writes
// rules while it empties tables of the legacy variant.
func reloadFirewalld(b *beside) {
	b.program(`
		for i in 1 2 3 4 5; do
			! { firewall-cmd --quiet --reload && firewall-cmd --quiet --state; } || exit 0
		done
		cat /run/firewalld.log >&2
		exit 1`)
}

func startFirewalld(b *beside) {
	services := ""
	if mode == harness.IPVS {
		services = `<port port="30000-32767" protocol="tcp"/><port port="30000-32767" protocol="udp"/>`
		for _, to := range []string{"{services}", "{lbs}", "{externals}"} {
			services += b.perFamily(`<rule family="ipv{v}"><destination address="` + to + `"/><accept/></rule>`)
		}
	}
	b.program(`
		cat >/etc/firewalld/zones/trusted.xml <<-END
			<zone target="ACCEPT">` + b.perFamily(`<source address="{pods}"/>`) + `</zone>
		END
		cat >/etc/firewalld/zones/public.xml <<-END
			<zone><service name="ssh"/>` + services + `</zone>
		END
		mkdir -p /run/dbus
		cat >/run/bus.conf <<-END
			<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
				"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
			<busconfig>
				<type>system</type>
				<listen>unix:path=/run/dbus/system_bus_socket</listen>
				<auth>EXTERNAL</auth>
				<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/></policy>
			</busconfig>
		END
		dbus-daemon --config-file=/run/bus.conf --fork --nopidfile
		firewalld --nofork --nopid >/run/firewalld.log 2>&1 &`)
	b.comesUp("firewalld", "firewall-cmd --state", "/run/firewalld.log")
}

// comesUp waits until a program has started: until the check succeeds.
func (b *beside) comesUp(name, check, log string) {
	b.Helper()
	eventually(b.T, name, func() error {
		_, err := b.room.Output(check + " >/dev/null 2>&1 || { cat " + log + " >&2; exit 1; }")
		return err
	})
}

// docker sets the policy of FORWARD to DROP. The network plugin of a cluster has rules of its own that accept what goes to pods and
// what comes from them.
var docker = otherProgram{
	name: "Docker", kind: theProgram, slow: true,
	prepare: func(b *beside) {
		b.restore("*filter\n-A FORWARD -s {pods} -j ACCEPT\n-A FORWARD -d {pods} -j ACCEPT\nCOMMIT\n")
	},
	start: startDocker,
	reload: func(b *beside) {
		b.program(`kill $(cat /run/docker.pid); for i in $(seq 100); do [ -e /run/docker.pid ] || exit 0; sleep 0.1; done; exit 1`)
		startDocker(b)
	},
}

func startDocker(b *beside) {
	b.program("dockerd --storage-driver=vfs --pidfile=/run/docker.pid >/run/docker.log 2>&1 &")
	b.comesUp("Docker", "docker version", "/run/docker.log")
}

// docker29 stands for Docker from version 29 on, with its rules in tables of its own.
var docker29 = otherProgram{
	name: "Docker with nftables", kind: recorded,
	start: docker29Rules, reload: docker29Rules,
}

func docker29Rules(b *beside) {
	var text strings.Builder
	for _, family := range families {
		table := map[int]string{4: "ip docker-bridges", 6: "ip6 docker-bridges"}[family]
		text.WriteString("table " + table + "\ndelete table " + table + "\ntable " + table + ` {
			map filter-forward-in-jumps {
				type ifname : verdict
			}
			map filter-forward-out-jumps {
				type ifname : verdict
			}
			map nat-postrouting-out-jumps {
				type ifname : verdict
			}
			chain filter-FORWARD {
				type filter hook forward priority filter; policy accept;
				oifname vmap @filter-forward-in-jumps
				iifname vmap @filter-forward-out-jumps
			}
			chain filter-forward-in__docker0 {
				ct state established,related counter accept
				iifname "docker0" counter accept comment "ICC"
				counter drop comment "UNPUBLISHED PORT DROP"
			}
			chain filter-forward-out__docker0 {
				ct state established,related counter accept
				counter accept comment "OUTGOING"
			}
			chain nat-OUTPUT {
				type nat hook output priority -100; policy accept;
				fib daddr type local counter jump nat-prerouting-and-output
			}
			chain nat-POSTROUTING {
				type nat hook postrouting priority srcnat; policy accept;
				oifname vmap @nat-postrouting-out-jumps
			}
			chain nat-PREROUTING {
				type nat hook prerouting priority dstnat; policy accept;
				fib daddr type local counter jump nat-prerouting-and-output
			}
			chain nat-prerouting-and-output {
			}
			chain raw-PREROUTING {
				type filter hook prerouting priority raw; policy accept;
			}
		}
		add element ` + table + ` filter-forward-in-jumps { "docker0" : jump filter-forward-in__docker0 }
		add element ` + table + ` filter-forward-out-jumps { "docker0" : jump filter-forward-out__docker0 }
		`)
	}
	b.nft(text.String())
}

func (b *beside) nft(rules string) {
	b.Helper()
	if _, err := b.w.Node1().OutputWithInput(rules, "nft", "-f", "-"); err != nil {
		b.Fatal(err)
	}
}

// nftablesConf is an /etc/nftables.conf that somebody has written for a node. It empties its own table and no other. Its chains come
// after those of iptables, so that what nodeproxy refuses is refused and not dropped.
var nftablesConf = otherProgram{
	name: "nftables.conf", kind: written,
	start: loadConf, reload: loadConf,
}

func loadConf(b *beside) { b.nft(nodeConf(b)) }

// flushRuleset is the same with the line that many such files begin with. It removes all tables of nf_tables, iptables' among them.
var flushRuleset = otherProgram{
	name: "nftables.conf with flush ruleset", kind: written,
	start: flushAndLoad, reload: flushAndLoad,
	// The tables of mode nftables, and those in which mode ipvs keeps marks apart, are of nf_tables, whichever variant of iptables there is.
	empties: func(v harness.Variant) bool { return v == harness.NFT || mode != harness.IPTables },
}

func flushAndLoad(b *beside) { b.nft("flush ruleset\n" + nodeConf(b)) }

// iptablesPersistent reads its rules from a file at the start of the node, or when it is told to, in place of all that are in these
// tables.
var iptablesPersistent = otherProgram{
	name: "iptables-persistent", kind: written,
	start: restoreAll, reload: restoreAll,
	empties: emptiesIPTables,
}

func restoreAll(b *beside) {
	const rules = `*filter
		:INPUT ACCEPT [0:0]
		:FORWARD ACCEPT [0:0]
		:OUTPUT ACCEPT [0:0]
		-A INPUT -p tcp -m tcp --dport 23 -j DROP
		COMMIT
		*nat
		:PREROUTING ACCEPT [0:0]
		:INPUT ACCEPT [0:0]
		:OUTPUT ACCEPT [0:0]
		:POSTROUTING ACCEPT [0:0]
		-A POSTROUTING -s {pods} -o docker0 -j MASQUERADE
		COMMIT
	`
	for _, family := range families {
		tool := b.variant.Tool(map[int]string{4: "iptables", 6: "ip6tables"}[family]) + "-restore"
		if _, err := b.w.Node1().OutputWithInput(b.text(rules, family), tool, "-w"); err != nil {
			b.Fatal(err)
		}
	}
}

func nodeConf(b *beside) string {
	services := ""
	if mode == harness.IPVS {
		services = `
			tcp dport 30000-32767 accept
			udp dport 30000-32767 accept
		` + strings.Join([]string{
			b.text("4 ip daddr { {services}, {lbs}, {externals} } accept", 4),
			b.text("6 ip6 daddr { {services}, {lbs}, {externals} } accept", 6),
		}, "\n")
	}
	pods := b.text("4 ip saddr {pods} accept", 4) + b.text("6 ip6 saddr {pods} accept", 6)
	return `
	table inet node_firewall
	delete table inet node_firewall
	table inet node_firewall {
		chain input {
			type filter hook input priority filter + 10; policy drop;
			ct state invalid drop
			ct state established,related accept
			iifname "lo" accept
			meta l4proto { icmp, ipv6-icmp } accept
			tcp dport { 22, 10250 } accept
			` + pods + services + `
		}
		chain forward {
			type filter hook forward priority filter + 10; policy drop;
			ct state established,related accept
			ct status dnat accept
			` + pods + b.text("4 ip daddr {pods} accept", 4) + b.text("6 ip6 daddr {pods} accept", 6) + `
		}
	}
	`
}
