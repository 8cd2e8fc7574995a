package inspect

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"nodeproxy/plan"
)

// traffic is about counters.
func (c *checks) traffic(ctx context.Context) error {
	all, err := c.reality.Traffic(ctx)
	if err != nil {
		return err
	}
	for _, sp := range c.ports {
		t, known := all[sp.Key]
		if !known {
			continue
		}
		packets := when(t.PacketsIn != plan.NotCounted, fmt.Sprintf(", %s in, %s out", counted(t.PacketsIn, "packet"), counted(t.PacketsOut, "packet")))
		port := when(len(c.ports) > 1, fmt.Sprintf(" (port %q, %s)", sp.Key.Port, sp.Key.Family))
		c.found(ok, "%s%s since the rules were written%s", counted(t.Connections, "connection"), packets, port)
	}
	return nil
}

// forgets is about connections that the kernel forgets soon.
func (c *checks) forgets(after int) {
	if after == 0 || !c.any(func(sp *plan.ServicePort) bool { return sp.Key.Protocol == plan.TCP }) {
		return
	}
	severity := either(after < soon, problem, note)
	c.found(severity, "established connections are forgotten after %d s", after)
	c.diagnose(severity, ForgottenEarly, "see what has lowered it, and restart nodeproxy, or set net.netfilter.nf_conntrack_tcp_timeout_established again",
		"The kernel forgets connections of TCP that are silent for %d s (net.netfilter.nf_conntrack_tcp_timeout_established), which is less than nodeproxy had set: what comes later on them is reset or lost.", after)
}

// soon is the number of seconds within which any connection may be silent.
const soon = 60

// flows is about connections.
func (c *checks) flows(ctx context.Context) error {
	flows, err := c.reality.Flows(ctx, c.ports)
	if err != nil {
		return err
	}
	current := map[netip.AddrPort]bool{}
	for _, sp := range c.ports {
		for _, ep := range sp.All() {
			current[ep.Addr] = true
		}
		for _, ex := range sp.Excluded {
			current[ex.Addr] = true
		}
	}
	endpoints := slices.SortedFunc(maps.Keys(flows), func(a, b netip.AddrPort) int {
		return cmp.Or(cmp.Compare(flows[b].Open, flows[a].Open), a.Compare(b))
	})
	total, stale := 0, 0
	result := ok
	var each, gone []string
	var goneTo []netip.Addr
	for _, a := range endpoints {
		n := flows[a].Open
		total += n
		text := fmt.Sprintf("%d to %s", n, a)
		switch {
		case !a.IsValid():
			text = fmt.Sprintf("%d to no endpoint", n)
		case !current[a]:
			text += ", which is no endpoint"
			stale += n
			gone, goneTo = append(gone, a.String()), append(goneTo, a.Addr())
		}
		if u := flows[a].Unanswered; u > 0 {
			text += fmt.Sprintf(" (%d without an answer)", u)
			result = severer(result, c.unanswered(a, flows[a], current[a]))
		}
		each = append(each, text)
	}
	if total == 0 {
		c.found(ok, "none is open")
		return nil
	}
	if stale > 0 {
		result = severer(result, note)
		family := either(goneTo[0].Is6(), "-f ipv6 ", "")
		c.diagnose(note, StaleConnections, fmt.Sprintf("if clients hang, let them connect anew, or delete what is tracked: conntrack -D %s--reply-src %s", family, goneTo[0]),
			"%s of the Service still %s to what is no longer an endpoint: %s.", counted(stale, "connection"), either(stale == 1, "goes", "go"), some(gone))
		c.about(goneTo...)
	}
	c.found(result, "%d tracked: %s", total, some(each))
	return nil
}

// manyUnanswered is how many connections to an endpoint are not in their first moment by chance, where none of them is answered.
const manyUnanswered = 3

// unanswered is about connections to an endpoint on which nothing has come back, and returns how bad that is: a few may have begun just now, and those to
// what was an endpoint before.
func (c *checks) unanswered(endpoint netip.AddrPort, f Flows, current bool) (severity string) {
	severity = note
	switch {
	case current && f.Unanswered == f.Open && f.Open >= manyUnanswered:
		severity = problem
	case 20*f.Unanswered < f.Open: // As on any busy endpoint.
		return ok
	}
	to, detour := endpoint.String(), ""
	do := "see whether the packets get there, and whether the answers come back to this node: tcpdump -ni any host " + endpoint.Addr().String() + "; such entries stay for two minutes after their cause is gone"
	if !endpoint.IsValid() {
		to, do = "no endpoint", "find out why they are not translated: nodeproxy trace --live"
	}
	for _, from := range f.Clients {
		if c.reality.Detour != nil && detour == "" && endpoint.IsValid() {
			if detour = c.reality.Detour(from, endpoint.Addr()); detour != "" {
				detour = "; " + detour
			}
		}
	}
	c.diagnose(severity, either(detour != "", Detoured, Unanswered), do, // The detour may be the cause.
		"%d of the %d tracked connections to %s %s without an answer, from %s%s.", f.Unanswered, f.Open, to, are(f.Unanswered), some(words(f.Clients, netip.Addr.String)), detour)
	return severity
}

// severer returns the worse of two results.
func severer(a, b string) string {
	order := []string{ok, note, problem}
	if slices.Index(order, b) > slices.Index(order, a) {
		return b
	}
	return a
}

// moreFlows is what to do about that.
const moreFlows = "raise net.netfilter.nf_conntrack_max (--conntrack-max-per-core, --conntrack-min), and see whose flows they are: conntrack -L"

// tracked is about the room for connections, of all programs.
func (c *checks) tracked(context.Context) error {
	t, err := c.reality.Tracked()
	switch {
	case err != nil:
		c.found(unknown, "%v", err)
	case t.full():
		c.found(problem, "the kernel tracks %d flows, and no more than %d", t.Flows, t.Most)
		c.diagnose(problem, TrackingFull, moreFlows, "The kernel may drop new connections of any kind: it tracks %d flows, and no more than %d.", t.Flows, t.Most)
	case t.Most > 0 && t.Flows >= t.Most-t.Most/10:
		c.found(note, "the kernel tracks %d flows, and no more than %d", t.Flows, t.Most)
		c.diagnose(note, TrackingFull, moreFlows, "The kernel has little room for new connections: it tracks %d flows, and no more than %d.", t.Flows, t.Most)
	default:
		c.found(ok, "%d of at most %d flows of all programs", t.Flows, t.Most)
	}
	c.forgets(t.Forgets)
	return nil
}
