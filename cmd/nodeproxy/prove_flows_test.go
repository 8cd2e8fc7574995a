package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"nodeproxy/kernel/conntrack/conntracktest"
	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// worldFlows are the flows of clients that send to UDP frontends again and again, each from a port of its own.
type worldFlows struct {
	kernel conntracktest.Kernel
	// troubled says that reading or removing flows has failed. restarted says that a nodeproxy has begun that knows nothing of frontends
	// which were there before.
	troubled, restarted bool
	// written is when nodeproxy last changed rules, and disturbed when others did.
	written, disturbed time.Time
}

// othersFlows are flows that are none of nodeproxy's: of a pod to another host, by the port number of a node port, and one that others translate.
func othersFlows() (out []conntracktest.Entry) {
	for _, f := range plan.Families {
		pod, outside := address(f, "10.244.1.%d", "fd44::1:%x", 200), address(f, "198.51.100.%d", "2001:db8:51::%x", 7)
		for service := range services {
			out = append(out, conntracktest.Entry{Protocol: netlink.Protocol(plan.UDP), Src: netip.AddrPortFrom(pod, 30000).String(),
				Dst: netip.AddrPortFrom(outside, nodePort(service, 1)).String()})
		}
		out = append(out, conntracktest.Entry{Protocol: netlink.Protocol(plan.UDP), Src: netip.AddrPortFrom(outside, 30000).String(),
			Dst: netip.AddrPortFrom(nodeAddress(f), 51).String(), From: netip.AddrPortFrom(pod, 51).String()})
	}
	return out
}

// flowTime is how long a stale flow may be there after the rules have been written, and repairedFlowTime after others have changed rules, as
// what has begun by those is found by the next full pass.
const (
	flowTime         = time.Second
	repairedFlowTime = repairTime + 35*time.Second
)

// troubleFlows lets something go wrong with connection tracking.
func (w *world) troubleFlows(r *rand.Rand) string {
	k := &w.flows.kernel
	k.Lock()
	defer k.Unlock()
	w.flows.troubled = true
	troubles := []struct {
		name string
		do   func()
	}{
		{"dumps interrupted", func() { k.Interrupted += 1 + r.IntN(3) }},
		{"a dump overrun", func() { k.DumpError = syscall.ENOBUFS }},
		{"an answer lost", func() { k.LostAnswer = syscall.ENOBUFS }},
		{"no socket", func() { k.OpenError = syscall.EMFILE }},
		{"deletions refused", func() {
			k.DeleteError = syscall.EPERM
			time.AfterFunc(time.Duration(r.Int64N(int64(10*time.Second))), func() {
				k.Lock()
				defer k.Unlock()
				k.DeleteError = nil
			})
		}},
	}
	what := troubles[r.IntN(len(troubles))]
	what.do()
	return what.name
}

// calmFlows ends all trouble.
func (w *world) calmFlows() {
	k := &w.flows.kernel
	k.Lock()
	defer k.Unlock()
	k.Interrupted, k.DumpError, k.LostAnswer, k.OpenError, k.DeleteError = 0, nil, nil, nil, nil
}

// talk has each client of a family send a packet, by rules that are locked: it belongs to its flow, or is the first of one.
func (w *world) talk(f plan.Family, rules *packetsim.Machine) {
	k := &w.flows.kernel
	k.Lock()
	defer k.Unlock()
	port := uint16(40000)
	for q := range w.probes(f) {
		port++
		src := netip.AddrPortFrom(q.from, port).String()
		if protocolOf(q.to.Port()) != plan.UDP || slices.ContainsFunc(k.Flows, func(e conntracktest.Entry) bool {
			return e.Src == src && e.Dst == q.to.String()
		}) {
			continue
		}
		outcomes, err := rules.Trace(q.packet(), thisNode)
		if err != nil {
			w.fail("packet %s: %v", q.packet(), err)
			return
		}
		o := outcomes[int(w.draw("outcome "+src, time.Duration(len(outcomes))))]
		if o.Action != packetsim.Accept {
			continue // Connection tracking forgets what is refused.
		}
		e := conntracktest.Entry{Protocol: netlink.Protocol(plan.UDP), Src: src, Dst: q.to.String()}
		if o.DNAT {
			e.From = o.Dst.String()
		}
		k.Flows = append(k.Flows, e)
	}
}

// talkAll has all clients send a packet.
func (w *world) talkAll() {
	w.rules.Lock()
	defer w.rules.Unlock()
	for _, f := range plan.Families {
		rules, err := w.rules.packets(f)
		if err != nil {
			w.fail("%v", err)
			return
		}
		w.talk(f, rules)
	}
}

// holdsFlows looks for stale flows of a family once nodeproxy has had the time to remove them. The rules are locked, and hold what has been
// delivered.
func (w *world) holdsFlows(f plan.Family) {
	recently := min(time.Since(w.last), time.Since(w.flows.written)) < flowTime || time.Since(w.flows.disturbed) < repairedFlowTime
	if w.troubled || w.flows.troubled || recently {
		return
	}
	if why := w.staleFlow(f, w.model(w.got)); why != "" {
		w.fail("it says that it is in sync, but %s", why)
	}
}

// staleFlow returns why a flow is not what the objects ask for; "" if there is none such.
func (w *world) staleFlow(f plan.Family, m model) string {
	k := &w.flows.kernel
	k.Lock()
	defer k.Unlock()
	others := othersFlows()
	for _, e := range others {
		if !slices.Contains(k.Flows, e) {
			return fmt.Sprintf("the flow of others from %s to %s is gone", e.Src, e.Dst)
		}
	}
	for _, e := range k.Flows {
		src, dst := netip.MustParseAddrPort(e.Src), netip.MustParseAddrPort(e.Dst)
		if plan.FamilyOf(dst.Addr()) != f || slices.Contains(others, e) {
			continue
		}
		if err := m.keeps(probe{from: src.Addr(), to: dst}.packet(), e.From, w.flows.restarted); err != nil {
			return fmt.Sprintf("there is a flow from %s to %s whose replies come from %q: %v", e.Src, e.Dst, e.From, err)
		}
	}
	return ""
}

// keeps says why a flow is stale that began with a packet, and whose replies come from an endpoint, or are not translated.
func (m model) keeps(q plan.Packet, from string, restarted bool) error {
	svc, port, _ := m.owner(q)
	switch {
	case svc == nil && (from == "" || restarted):
		return nil
	case svc == nil:
		return errors.New("no Service has that address and port")
	case from == "":
		return fmt.Errorf("it is not translated, and port %s of %s is there", port, svc.Name)
	}
	e, listed := m.endpoints(svc.Name, port, plan.FamilyOf(q.Dst))[netip.MustParseAddrPort(from)]
	local := ptr.Deref(svc.Spec.InternalTrafficPolicy, "") == v1.ServiceInternalTrafficPolicyLocal ||
		svc.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal
	switch {
	case !listed:
		return fmt.Errorf("%s does not list that endpoint", svc.Name)
	case !*e.Conditions.Serving && !local: // Policy Local leaves an endpoint of another node out without saying whether it serves.
		return fmt.Errorf("that endpoint of %s does not serve", svc.Name)
	}
	return nil
}
