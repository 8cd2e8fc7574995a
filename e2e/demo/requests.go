package main

import (
	"fmt"
	"net/netip"
	"slices"

	"nodeproxy/e2e/harness"
	"nodeproxy/plan"
)

func (d *demo) requests() error {
	w := d.world
	for _, q := range []struct {
		from    *harness.Netns
		network string
		service string
		kind    plan.FrontendKind
		family  plan.Family
		want    []string // who may answer; nobody if empty, and the connection is refused
		kept    bool     // whether the server has to see the client's own address
	}{
		{w.Pod("n1c").Netns, "tcp", "shop/web", plan.ClusterIP, plan.IPv4, []string{"n1a", "n2a"}, false},
		{w.Pod("n1c").Netns, "tcp", "shop/web", plan.ClusterIP, plan.IPv6, []string{"n1a", "n2a"}, false},
		{w.Node1().Netns, "tcp", "shop/web", plan.ClusterIP, plan.IPv4, []string{"n1a", "n2a"}, false},
		{w.Client.Netns, "tcp", "shop/web", plan.NodePort, plan.IPv4, []string{"n1a", "n2a"}, false},
		{w.Client.Netns, "tcp", "shop/api", plan.LoadBalancerIP, plan.IPv4, []string{"n1b"}, true},
		{w.Pod("n1c").Netns, "tcp", "shop/api", plan.LoadBalancerIP, plan.IPv4, []string{"n1b", "n2b"}, false},
		{w.Client.Netns, "tcp", "shop/cache", plan.ExternalIP, plan.IPv4, []string{"n1a", "n2a"}, false},
		{w.Pod("n2a").Netns, "udp", "kube-system/kube-dns", plan.ClusterIP, plan.IPv4, []string{"n1c"}, false},
		{w.Pod("n1a").Netns, "tcp", "shop/database", plan.ClusterIP, plan.IPv4, []string{d.db}, false},
		{w.Pod("n1a").Netns, "tcp", "shop/nobody", plan.ClusterIP, plan.IPv4, nil, false},
	} {
		f, err := d.frontend(q.service, q.kind, q.family)
		if err != nil {
			return err
		}
		sources, err := d.ask(q.from, q.network, q.service, f, q.want)
		if err != nil {
			return err
		}
		if q.kept && (len(sources) != 1 || !sources[w.Client.IP4]) {
			return fmt.Errorf("%s to %s: the client's address was not kept", q.from.Name, f)
		}
	}
	return nil
}

// ask sends many requests, prints who answered, and returns the addresses that the servers saw.
func (d *demo) ask(
	from *harness.Netns, network, service string, f plan.Frontend, want []string,
) (map[netip.Addr]bool, error) {
	requests := 40
	if len(want) > 2 { // Then 40 would leave one out once in ten million times.
		requests = 100
	}
	counts, sources, ended := map[string]int{}, map[netip.Addr]bool{}, ""
	for i := 0; i < requests && ended == ""; i++ {
		a := from.Ask(network, netip.AddrPortFrom(f.Addr, f.Port), harness.Patient)
		switch {
		case a.Outcome == harness.Answered:
			counts[a.Server]++
			sources[a.Source] = true
		case len(want) == 0 && a.Outcome == harness.Refused:
			ended = "refused"
		default:
			return nil, fmt.Errorf("%s to %s: %s", from.Name, f, a)
		}
		if !slices.Contains(want, a.Server) && a.Outcome == harness.Answered {
			return nil, fmt.Errorf("%s to %s was answered by %s, which is none of its endpoints", from.Name, f, a.Server)
		}
	}
	out := ended
	for _, name := range want {
		out += fmt.Sprintf("%s %d  ", name, counts[name])
	}
	for s := range sources {
		out += fmt.Sprintf("  seen from %s", s)
	}
	fmt.Printf("   %-6s -> %-21s %-42s %s\n", from.Name, service, f, out)
	switch sticky := service == "shop/cache"; { // the one with session affinity
	case len(want) > 1 && !sticky && (counts[want[0]] == 0 || counts[want[1]] == 0):
		return nil, fmt.Errorf("%s to %s: not one of %d requests went to one of the endpoints", from.Name, f, requests)
	case sticky && len(counts) != 1:
		return nil, fmt.Errorf("%s to %s: one client's requests went to %d endpoints despite affinity", from.Name, f, len(counts))
	}
	return sources, nil
}
