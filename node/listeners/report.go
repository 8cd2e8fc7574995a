package listeners

import (
	"cmp"
	"fmt"
	"slices"

	"nodeproxy/kernel/sockets"
	"nodeproxy/plan"
	"nodeproxy/source"
)

// report reports the conflicts that have begun and ended, in order, and counts the current ones.
func (w *Watcher) report(now map[conflict][]uint32) {
	var begun, ended []conflict
	inodes := map[uint32]bool{}
	for c := range w.found {
		if _, still := now[c]; !still {
			ended = append(ended, c)
		}
	}
	for c, list := range now {
		if _, before := w.found[c]; before {
			continue
		}
		begun = append(begun, c)
		for _, inode := range list {
			inodes[inode] = true
		}
	}
	slices.SortFunc(ended, conflict.compare)
	for _, c := range ended {
		if w.exists(c) {
			w.cfg.Report(c.ended(w.found[c]))
		}
		delete(w.found, c)
	}
	if len(begun) > 0 {
		slices.SortFunc(begun, conflict.compare)
		seen := sockets.Owners(inodes)
		for _, c := range begun {
			who := c.who(now[c], seen)
			w.found[c] = who
			w.cfg.Report(c.finding(who))
		}
	}
	count := 0
	for c := range w.found {
		if !c.deliberate() {
			count++
		}
	}
	w.cfg.Count(count)
}

// exists reports whether the Service still has the frontend of a conflict.
func (w *Watcher) exists(c conflict) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := c.port
	for _, key.Family = range plan.Families {
		if sp := w.index.services.Get(key); sp != nil && sp.Has(c.frontend) {
			return true
		}
	}
	return false
}

func (c conflict) compare(o conflict) int {
	return cmp.Or(
		c.port.Compare(o.port), c.frontend.Compare(o.frontend),
		c.socket.Addr.Compare(o.socket.Addr), cmp.Compare(c.socket.Port, o.socket.Port),
		cmp.Compare(c.socket.where(), o.socket.where()),
	)
}

// who describes the process that owns one of these sockets.
func (c conflict) who(inodes []uint32, seen map[uint32]sockets.Process) string {
	var all []sockets.Process
	for _, inode := range inodes {
		if p, ok := seen[inode]; ok {
			all = append(all, p)
		}
	}
	if len(all) == 0 {
		return "a process that can't be seen from here"
	}
	return slices.MinFunc(all, func(a, b sockets.Process) int { return cmp.Compare(a.PID, b.PID) }).String()
}

// dnsPort is the port on which DNS caches bind cluster IPs.
const dnsPort = 53

// deliberate reports whether a socket looks like that of a program which exempts its packets from Services by rules of its own.
func (c conflict) deliberate() bool {
	return c.frontend.Kind == plan.ClusterIP && c.frontend.Port == dnsPort && !c.socket.Everywhere()
}

func (c conflict) finding(who string) source.Finding {
	f := source.Finding{
		Kind: source.PortConflict, Severity: source.Problem, Object: "Service " + c.port.Service.String(), Field: c.field(),
		Detail: fmt.Sprintf("%s listens at %s, which this Service captures as its %s", who, c.socket.where(), c.frontend),
		Effect: "what is sent there goes to the Service, and not to the process",
	}
	switch {
	case c.frontend.Kind == plan.HealthCheckNodePort:
		f.Detail = fmt.Sprintf("%s listens at %s, which is this Service's %s", who, c.socket.where(), c.frontend)
		f.Effect = "load balancers that ask there for endpoints on this node ask that process"
	case c.deliberate():
		f.Severity = source.Note
		f.Effect = "the process gets what is sent there only if it exempts it from connection tracking, as NodeLocal DNSCache does"
	}
	return f
}

func (c conflict) ended(who string) source.Finding {
	return source.Finding{
		Severity: source.Note, Object: "Service " + c.port.Service.String(), Field: c.field(),
		Detail: fmt.Sprintf("%s no longer listens at %s", who, c.socket.where()),
		Effect: fmt.Sprintf("only the Service is at its %s now", c.frontend),
	}
}

// field returns the path of the field that defines the frontend.
func (c conflict) field() string {
	switch c.frontend.Kind {
	case plan.ClusterIP:
		return "spec.clusterIPs"
	case plan.LoadBalancerIP:
		return "status.loadBalancer.ingress"
	case plan.ExternalIP:
		return "spec.externalIPs"
	case plan.HealthCheckNodePort:
		return "spec.healthCheckNodePort"
	}
	if c.port.Port == "" {
		return "spec.ports[0].nodePort"
	}
	return "spec.ports[" + c.port.Port + "].nodePort"
}
