package inspect

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"nodeproxy/source"
)

// listeners is about programs that listen where the Service is.
func (c *checks) listeners(context.Context) {
	if c.reality.Listeners == nil || len(c.ports) == 0 {
		return
	}
	const name = "listeners on the node"
	none := true
	for _, f := range c.reality.Listeners() {
		if f.Object != "Service "+c.svc.String() {
			continue
		}
		severity := note
		if f.Severity == source.Problem {
			severity = problem
		}
		none = false
		c.found(name, severity, "%s", f.Detail)
		c.diagnose(severity, PortConflict, "end that program, or give one of the two another port", "%s: %s.", upper(f.Detail), f.Effect)
	}
	if none {
		c.found(name, ok, "no other program listens at its addresses and ports")
	}
}

// blocking is about other programs' rules.
func (c *checks) blocking(ctx context.Context) {
	if c.reality.Blocking == nil || len(c.ports) == 0 {
		return
	}
	const name = "rules of other programs"
	list, within, err := c.reality.Blocking(ctx, c.ports)
	if err != nil {
		c.found(name, unknown, "%v", err)
		return
	}
	if !slices.ContainsFunc(list, func(b Blocking) bool { return !b.ICMP }) {
		not := "tc, eBPF, ebtables and the rules in Pods"
		if within {
			not = "tc, eBPF and ebtables"
		}
		c.found(name, ok, "none that drops what is for the Service or its answers, or keeps it from being tracked, was found in nftables or iptables; %s are not looked at", not)
	}
	for _, b := range list {
		c.rule(name, b)
	}
}

// rule is about one rule of another program.
func (c *checks) rule(name string, b Blocking) {
	severity, drops := note, "may drop"
	if b.Certain {
		severity, drops = problem, "drops"
	}
	if strings.HasSuffix(b.Rule, "reject") {
		drops = either(b.Certain, "rejects", "may reject")
	}
	traffic := "what is for " + b.What
	if b.Answers {
		traffic = "the answers of " + b.What
	}
	whose, admit := "another program", "let its owner admit this traffic"
	if b.Inside {
		b.Place += ", in the network namespace of its Pod"
		whose, admit = "the Pod itself", "see what has put it there: nsenter -t PID -n nft list ruleset, with the PID of a process of the Pod"
	}
	if b.ICMP && !b.Certain {
		return
	}
	if b.ICMP {
		c.diagnose(note, ICMPDropped, admit+" (ICMP, type 3)", "A rule of %s drops the errors by which this node tells others that a packet was too long: \"%s\" in %s. So these go on to send such packets, which get lost.", whose, b.Rule, b.Place)
		return
	}
	c.found(name, severity, "%s: %s", b.Place, b.Rule)
	if b.Unmarked || b.Missing {
		c.changed(b, severity, whose)
		return
	}
	if b.Inside && b.Diverted {
		where := "somewhere else"
		if b.To != 0 {
			where = fmt.Sprintf("to port %d, where nothing listens", b.To)
		}
		c.diagnose(severity, Diverted, "see whether the sidecar that belongs to it runs, as one of a service mesh, or remove the rule",
			"A rule in the Pod sends what comes for %s %s: \"%s\" in %s.", b.What, where, b.Rule, b.Place)
		return
	}
	if o, known := ownerAt(b.Place); known {
		whose, admit = o.name, o.admit
	}
	if b.Untracked {
		does, do := "keeps", "let its owner except this traffic"
		if !b.Certain {
			does, do = "may keep", "nothing, if a program of this node answers there, as the NodeLocal DNS cache does; else "+do
		}
		c.diagnose(severity, Untracked, do, "A rule of %s %s %s from being tracked, so that nothing translates it: \"%s\" in %s.", whose, does, traffic, b.Rule, b.Place)
		return
	}
	if b.Unmasqueraded {
		c.diagnose(severity, Unmasqueraded, "let its owner except what is marked to be masqueraded, or put the rule behind the jump to KUBE-POSTROUTING",
			"A rule of %s ends the chain before what is for %s can be masqueraded: \"%s\" in %s. Endpoints on other nodes answer past this node, and those connections hang.", whose, b.What, b.Rule, b.Place)
		return
	}
	if b.Diverted {
		decides := "decides first"
		if !b.Certain {
			decides = "may decide first, as it has the same priority,"
		}
		if admit != byLeftovers {
			admit = "remove it, or have its owner except this traffic"
		}
		c.diagnose(severity, Diverted, admit, "A rule of %s %s about %s, so that it does not get to the endpoints: \"%s\" in %s.", whose, decides, b.What, b.Rule, b.Place)
		c.about(b.Toward)
		return
	}
	if b.Policy {
		why := "none accepts this"
		if !b.Certain {
			why = "none certainly accepts this, whoever sends it"
		}
		c.diagnose(severity, DroppedByOthers, admit+", unless connections succeed",
			"The policy of %s %s %s: it drops what no rule accepts, and %s.", b.Place, drops, traffic, why)
		return
	}
	c.diagnose(severity, DroppedByOthers, admit,
		"A rule of %s %s %s: \"%s\" in %s.", whose, drops, traffic, b.Rule, b.Place)
}

// changed is about a rule that changes packets in such a way that answers do not come back.
func (c *checks) changed(b Blocking, severity, whose string) {
	can := either(b.Certain, "", "may ")
	if b.Missing {
		c.diagnose(severity, Unmasqueraded, "correct the rule, or have its owner write it anew, as after a change of the node's address",
			"A rule of %s gives what is for %s a source address that this node does not have, so that answers %sgo elsewhere: \"%s\" in %s.", whose, b.What, can, b.Rule, b.Place)
		return
	}
	changes := either(b.Certain, "changes", "may change")
	c.diagnose(severity, Unmasqueraded, "have its owner set some bits alone (--set-xmark VALUE/MASK, --nfmask), without that of nodeproxy (iptables.masqueradeBit, nftables.masqueradeBit)",
		"A rule of %s %s the mark by which what is for %s is to be masqueraded: \"%s\" in %s. Endpoints on other nodes answer past this node, and those connections hang.",
		whose, changes, b.What, b.Rule, b.Place)
}
