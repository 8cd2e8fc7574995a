package inspect

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"nodeproxy/inspect/reality"
)

// listeners is about programs that listen where the Service is.
func (c *checks) listeners(context.Context) error {
	none := true
	for _, f := range c.reality.Listeners() {
		if f.Object != "Service "+c.svc.String() {
			continue
		}
		none = false
		c.found(f.Severity.String(), "%s", f.Detail)
		c.diagnose(f.Severity.String(), PortConflict, "end that program, or give one of the two another port", "%s: %s.", upper(f.Detail), f.Effect)
	}
	if none {
		c.found(ok, "no other program listens at its addresses and ports")
	}
	return nil
}

// blocking is about other programs' rules.
func (c *checks) blocking(ctx context.Context) error {
	list, within, err := c.reality.Blocking(ctx, c.ports)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(list, func(b reality.Blocking) bool { return !b.ICMP }) {
		c.found(ok, "none that drops what is for the Service or its answers, or keeps it from being tracked, was found in nftables or iptables; %s are not looked at",
			either(within, "tc, eBPF and ebtables", "tc, eBPF, ebtables and the rules in Pods"))
	}
	for _, b := range list {
		c.rule(b)
	}
	return nil
}

// rule is about one rule of another program.
func (c *checks) rule(b reality.Blocking) {
	whose, admit := "another program", "let its owner admit this traffic"
	if b.Inside {
		b.Place += ", in the network namespace of its Pod"
		whose, admit = "the Pod itself", "see what has put it there: nsenter -t PID -n nft list ruleset, with the PID of a process of the Pod"
	}
	severity, quote := either(b.Certain, problem, note), fmt.Sprintf("\"%s\" in %s", b.Rule, b.Place)
	if b.ICMP {
		if b.Certain {
			c.diagnose(note, ICMPDropped, admit+" (ICMP, type 3)", "A rule of %s drops the errors by which this node tells others that a packet was too long: %s. So these go on to send such packets, which get lost.", whose, quote)
		}
		return
	}
	c.found(severity, "%s: %s", b.Place, b.Rule)
	if o, known := ownerAt(b.Place); known && !b.Unmarked && !b.Missing {
		whose, admit = o.name, o.admit
	}
	c.concerned(b, severity, whose, admit, quote)
}

// concerned says what a rule means for the Service.
func (c *checks) concerned(b reality.Blocking, severity, whose, admit, quote string) {
	traffic := either(b.Answers, "the answers of ", "what is for ") + b.What
	drops := either(b.Certain, "drops", "may drop")
	if strings.HasSuffix(b.Rule, "reject") {
		drops = either(b.Certain, "rejects", "may reject")
	}
	switch {
	case b.Missing:
		c.diagnose(severity, Unmasqueraded, "correct the rule, or have its owner write it anew, as after a change of the node's address",
			"A rule of %s gives what is for %s a source address that this node does not have, so that answers %sgo elsewhere: %s.",
			whose, b.What, either(b.Certain, "", "may "), quote)
	case b.Unmarked:
		c.diagnose(severity, Unmasqueraded, "have its owner set some bits alone (--set-xmark VALUE/MASK, --nfmask), without that of nodeproxy (iptables.masqueradeBit, nftables.masqueradeBit)",
			"A rule of %s %s the mark by which what is for %s is to be masqueraded: %s. Endpoints on other nodes answer past this node, and those connections hang.",
			whose, either(b.Certain, "changes", "may change"), b.What, quote)
	case b.Inside && b.Diverted:
		where := either(b.To != 0, fmt.Sprintf("to port %d, where nothing listens", b.To), "somewhere else")
		c.diagnose(severity, Diverted, "see whether the sidecar that belongs to it runs, as one of a service mesh, or remove the rule",
			"A rule in the Pod sends what comes for %s %s: %s.", b.What, where, quote)
	case b.Untracked:
		may := when(!b.Certain, "nothing, if a program of this node answers there, as the NodeLocal DNS cache does; else ")
		c.diagnose(severity, Untracked, may+"let its owner except this traffic", "A rule of %s %s %s from being tracked, so that nothing translates it: %s.",
			whose, either(b.Certain, "keeps", "may keep"), traffic, quote)
	case b.Unmasqueraded:
		c.diagnose(severity, Unmasqueraded, "let its owner except what is marked to be masqueraded, or put the rule behind the jump to KUBE-POSTROUTING",
			"A rule of %s ends the chain before what is for %s can be masqueraded: %s. Endpoints on other nodes answer past this node, and those connections hang.", whose, b.What, quote)
	case b.Diverted:
		if admit != byLeftovers {
			admit = "remove it, or have its owner except this traffic"
		}
		c.diagnose(severity, Diverted, admit, "A rule of %s %s about %s, so that it does not get to the endpoints: %s.",
			whose, either(b.Certain, "decides first", "may decide first, as it has the same priority,"), b.What, quote)
		c.about(b.Toward)
	case b.Policy:
		c.diagnose(severity, DroppedByOthers, admit+", unless connections succeed", "The policy of %s %s %s: it drops what no rule accepts, and %s.",
			b.Place, drops, traffic, either(b.Certain, "none accepts this", "none certainly accepts this, whoever sends it"))
	default:
		c.diagnose(severity, DroppedByOthers, admit, "A rule of %s %s %s: %s.", whose, drops, traffic, quote)
	}
}
