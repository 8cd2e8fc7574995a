// Package inspect answers questions about the Services of one node: what is programmed, for whom, and why not otherwise. It reads the
// plan and what is known of the objects, and changes nothing. Its answers are values that can be printed as a table or as JSON.
package inspect

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/proxier"
	"nodeproxy/source"
)

// Node is what answers are made of. Several goroutines may use it.
type Node struct {
	// Mode is the proxy mode.
	Mode string
	// Options and Families are what Desired tells besides what View does.
	Options  any
	Families []plan.Family
	// View calls read with what is known of the objects, as proxier.Proxier.View does.
	View func(read func(*proxier.State))
	// Programmed returns what the kernel was last made equal to; nil if it never was. Programmed itself is nil where nothing is
	// programmed, as for manifests that are only looked at.
	Programmed func() *plan.Snapshot
	// Refused returns the ServicePorts that the kernel refuses; nil for none.
	Refused func() []plan.Refusal
	// Pods returns the Pods of a namespace, and may return others; nil where Pods can't be read.
	Pods func(namespace string) ([]*v1.Pod, error)
	// Self returns what the running nodeproxy knows of itself; nil where none runs.
	Self func() Self
	// Verify compares all that this program holds with what it is made from, or returns a recent result; nil where it can't.
	Verify func(context.Context) source.Verification
	// Support returns more files for a bug report, by name; nil where there are none.
	Support func() map[string]string
	// History has the last syncs; nil where nothing is programmed.
	History *History
	// Machine returns what a packet meets in the mode's rules, which are those for whole, as far as they are for the ServicePorts of
	// near. local reports whether an address is the node's own, as Local does. Trace needs it.
	Machine func(whole, near *plan.Plan, f plan.Family, local func(netip.Addr) bool) (*packetsim.Machine, error)
	// Local returns what reports whether an address is one of the node's, besides those that are only local for the sake of Services. If
	// it is nil, these are the addresses of the Node object.
	Local func() (func(netip.Addr) bool, error)
	// Reality is what Check looks at; nil where the answers are not about a running nodeproxy.
	Reality *Reality
	// ServiceFile returns the manifest that has a Service; "" if none has. It is nil where objects come from elsewhere.
	ServiceFile func(namespace, name string) string
	// OnlyProxied is true where only those Services are known that a proxy may have, as an API server is asked for no others.
	OnlyProxied bool
	// Findings returns what is wrong now besides what View tells, such as with files or with the configuration; nil for nothing.
	Findings func() []source.Finding
}

// The states of a ServicePort.
const (
	// Planned: nothing is programmed, since only manifests or a cluster are looked at.
	Planned = "planned"
	// Programmed: the kernel does what the objects ask for.
	Programmed = "programmed"
	// Pending: a change waits for the next sync.
	Pending = "pending"
	// Refused: the kernel refuses it.
	Refused = "refused"
)

// ServicePort is a port of a Service in one address family, as it is on this node.
type ServicePort struct {
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	Port      string        `json:"port,omitempty"`
	Number    uint16        `json:"number"`
	Protocol  plan.Protocol `json:"protocol"`
	Family    string        `json:"family"`
	// ClusterIPs, LoadBalancerIPs and ExternalIPs are those that it has here: not those that another ServicePort owns.
	ClusterIP       string   `json:"clusterIP,omitempty"`
	LoadBalancerIPs []string `json:"loadBalancerIPs,omitempty"`
	ExternalIPs     []string `json:"externalIPs,omitempty"`
	NodePort        uint16   `json:"nodePort,omitempty"`
	InternalPolicy  string   `json:"internalTrafficPolicy"`
	ExternalPolicy  string   `json:"externalTrafficPolicy,omitempty"`
	// Affinity is the session affinity's timeout in seconds; 0 without affinity.
	Affinity int `json:"sessionAffinityTimeoutSeconds,omitempty"`
	// Usable is the number of endpoints that this node sends to, under either policy, and Total that of all that are known.
	Usable int    `json:"usableEndpoints"`
	Total  int    `json:"totalEndpoints"`
	State  string `json:"state"`
	// Since is when the kernel was made equal to it; zero if it never was.
	Since time.Time `json:"since,omitzero"`
	// Counters are what has gone through it; nil where nothing counts.
	Counters *Counters `json:"counters,omitempty"`
}

// describe returns the row of a ServicePort, without its state.
func describe(sp *plan.ServicePort) ServicePort {
	k := sp.Key
	out := ServicePort{
		Namespace: k.Service.Namespace, Name: k.Service.Name, Port: k.Port, Protocol: k.Protocol, Family: k.Family.String(),
		InternalPolicy: sp.InternalPolicy.String(), Affinity: int(sp.Affinity / time.Second), Usable: len(sp.All()),
	}
	if sp.HasExternal() {
		out.ExternalPolicy = sp.ExternalPolicy.String()
	}
	for _, f := range sp.Frontends {
		switch f.Kind {
		case plan.ClusterIP:
			out.ClusterIP, out.Number = f.Addr.String(), f.Port
		case plan.LoadBalancerIP:
			out.LoadBalancerIPs, out.Number = append(out.LoadBalancerIPs, f.Addr.String()), f.Port
		case plan.ExternalIP:
			out.ExternalIPs, out.Number = append(out.ExternalIPs, f.Addr.String()), f.Port
		case plan.NodePort:
			out.NodePort = f.Port
		}
	}
	for _, sh := range sp.Shadowed { // It may own none of its frontends.
		if out.Number == 0 && sh.Frontend.Kind != plan.NodePort && sh.Frontend.Kind != plan.HealthCheckNodePort {
			out.Number = sh.Frontend.Port
		}
	}
	if out.Total = out.Usable; len(sp.Excluded) > 0 {
		known := map[netip.AddrPort]struct{}{}
		for _, ep := range sp.All() {
			known[ep.Addr] = struct{}{}
		}
		for _, ex := range sp.Excluded {
			known[ex.Addr] = struct{}{}
		}
		out.Total = len(known)
	}
	return out
}

// ServicePorts returns the ServicePorts of a Service, in order; of all Services of a namespace if its name is empty, and of all namespaces
// if both are.
func (n *Node) ServicePorts(of plan.Service) []ServicePort {
	return slices.AppendSeq([]ServicePort{}, n.servicePorts(of))
}

// servicePorts iterates over what ServicePorts returns.
func (n *Node) servicePorts(of plan.Service) iter.Seq[ServicePort] {
	programmed := n.snapshot()
	var desired []*plan.ServicePort
	n.View(func(s *proxier.State) {
		services := s.Plan().Services
		if of == (plan.Service{}) {
			desired = make([]*plan.ServicePort, 0, len(services))
		}
		for k, sp := range services {
			if (of.Namespace == "" || k.Service.Namespace == of.Namespace) && (of.Name == "" || k.Service.Name == of.Name) {
				desired = append(desired, sp)
			}
		}
	})
	slices.SortFunc(desired, func(a, b *plan.ServicePort) int { return a.Key.Compare(b.Key) })
	refused := n.refused()
	return func(yield func(ServicePort) bool) {
		for _, sp := range desired {
			out := describe(sp)
			if out.State, out.Since = state(sp, programmed, refused); !yield(out) {
				return
			}
		}
	}
}

// snapshot returns what is programmed; nil where nothing is.
func (n *Node) snapshot() *plan.Snapshot {
	if n.Programmed == nil {
		return nil
	}
	if s := n.Programmed(); s != nil {
		return s
	}
	return &plan.Snapshot{}
}

func (n *Node) refused() map[plan.Key]plan.Refusal {
	out := map[plan.Key]plan.Refusal{}
	if n.Refused != nil {
		for _, r := range n.Refused() {
			out[r.Key] = r
		}
	}
	return out
}

// state returns the state of a ServicePort, and since when it has been programmed.
func state(sp *plan.ServicePort, programmed *plan.Snapshot, refused map[plan.Key]plan.Refusal) (string, time.Time) {
	if programmed == nil {
		return Planned, time.Time{}
	}
	if _, ok := refused[sp.Key]; ok {
		return Refused, time.Time{}
	}
	if now, since := programmed.Programmed(sp.Key); now == sp {
		return Programmed, since
	}
	return Pending, time.Time{}
}

// Finding is something that the owner of an object should know.
type Finding struct {
	Severity string `json:"severity"`
	Where    string `json:"where,omitempty"`
	Object   string `json:"object,omitempty"`
	Field    string `json:"field,omitempty"`
	Detail   string `json:"detail"`
	Effect   string `json:"effect,omitempty"`
}

// AllFindings returns what is wrong now: with objects first, then with the node.
func (n *Node) AllFindings() []Finding {
	var list []source.Finding
	n.View(func(s *proxier.State) { list = s.Findings() })
	if n.Refused != nil {
		for _, r := range n.Refused() {
			list = append(list, refusal(r))
		}
	}
	at := map[source.Finding]int{}
	for i, f := range list {
		at[f] = i
	}
	for _, f := range n.otherFindings() {
		nowhere := f
		nowhere.Where = ""
		if i, said := at[nowhere]; said { // It says where, too.
			list[i] = f
		} else {
			list = append(list, f)
		}
	}
	out := make([]Finding, len(list))
	for i, f := range list {
		out[i] = Finding{f.Severity.String(), f.Where, f.Object, f.Field, f.Detail, f.Effect}
	}
	return out
}

func (n *Node) otherFindings() []source.Finding {
	var out []source.Finding
	if n.Findings != nil {
		out = n.Findings()
	}
	var node plan.Node
	primary := false
	n.View(func(s *proxier.State) { node, primary = s.Plan().Node, s.Plan().Settings.NodePortAddresses.Primary })
	if !primary {
		return out
	}
	elsewhere := n.elsewhere()
	for _, f := range plan.Families {
		if ip := node.IP(f); ip.IsValid() && elsewhere(ip) {
			out = append(out, source.Finding{Severity: source.Problem, Object: "Node " + node.Name, Field: "status.addresses",
				Detail: fmt.Sprintf("%s is no address of this machine", ip), Effect: "no node port answers there, and node ports are limited to it (nodePortAddresses)"})
		}
	}
	return out
}

// elsewhere returns what reports whether an address is known not to be one of this machine.
func (n *Node) elsewhere() func(netip.Addr) bool {
	if n.Local != nil {
		if local, err := n.Local(); err == nil {
			return func(a netip.Addr) bool { return !local(a) }
		}
	}
	return func(netip.Addr) bool { return false }
}

func refusal(r plan.Refusal) source.Finding {
	return source.Finding{
		Severity: source.Problem, Object: "Service " + r.Key.Service.String(), Detail: r.String(), Effect: r.Effect(),
	}
}

// UnknownServiceError is returned for a Service of which nothing is known.
type UnknownServiceError struct {
	Service plan.Service
	// Elsewhere are Services with the same name in other namespaces, and Similar those of this namespace with a similar name.
	Elsewhere, Similar []plan.Service
	// Namespaces have a name like that of this one, which has no Service.
	Namespaces []string
	// Partial is set if not all Services are known.
	Partial bool
}

func (e *UnknownServiceError) Error() string {
	s := fmt.Sprintf("no Service %s is proxied here: there is none, or it is headless, an ExternalName, or another proxy's", e.Service)
	if e.Partial {
		s = fmt.Sprintf("no Service %s is known, but %s; see \"nodeproxy get findings\"", e.Service, rulesStay)
	}
	hints := words(slices.Concat(e.Similar, e.Elsewhere), plan.Service.String)
	if len(hints) == 0 && len(e.Namespaces) > 0 {
		s += fmt.Sprintf("; no Service of namespace %s is known", e.Service.Namespace)
		hints = words(e.Namespaces, func(ns string) string { return "namespace " + ns })
	}
	return s + didYouMean(hints)
}

// DidYouMean suggests those of some names that one which is not among them may have been meant to be; "" if there are none.
func DidYouMean(name string, names []string) string {
	hints := only(names, func(n string) bool { return similar(n, name) })
	slices.Sort(hints)
	return didYouMean(slices.Compact(hints))
}

// didYouMean suggests the first few of what may have been meant.
func didYouMean(hints []string) string {
	if len(hints) == 0 {
		return ""
	}
	return "; did you mean " + strings.Join(hints[:min(len(hints), 5)], ", ") + "?"
}

// UnknownPodError is returned for a Pod of which no address is known.
type UnknownPodError struct {
	Namespace, Name string
	// Read is set if Pods can be read, so that there is none.
	Read bool
	// Similar are the Pods that may have been meant, as NAMESPACE/NAME, or namespaces.
	Similar []string
}

func (e *UnknownPodError) Error() string {
	if e.Read {
		return fmt.Sprintf("there is no Pod %s/%s with an address; FROM can also be node, outside or an address", e.Namespace, e.Name) + didYouMean(e.Similar)
	}
	return fmt.Sprintf("no Pod %s/%s is known here, as Pods can't be read; "+
		"FROM can also be node, outside or an address, as \"kubectl -n %[1]s get pod %[2]s -o wide\" shows it", e.Namespace, e.Name) + didYouMean(e.Similar)
}

// describeService returns what is known of a Service, and a plan of its ServicePorts alone, which also comes with an error.
func (n *Node) describeService(svc plan.Service) (*proxier.Description, *plan.Plan, error) {
	var (
		d     *proxier.Description
		found bool
		own   *plan.Plan
		known []plan.Service
	)
	n.View(func(s *proxier.State) {
		own = plan.New(s.Plan().Node, s.Plan().Settings)
		own.Partial = s.Plan().Partial
		if d, found = s.Describe(svc); !found {
			known = s.Services()
		}
	})
	if !found {
		unknown := &UnknownServiceError{Service: svc, Partial: own.Partial}
		namespaces := map[string]bool{}
		for _, o := range known {
			namespaces[o.Namespace] = true
			switch {
			case o.Namespace == svc.Namespace && similar(o.Name, svc.Name):
				unknown.Similar = append(unknown.Similar, o)
			case strings.EqualFold(o.Name, svc.Name):
				unknown.Elsewhere = append(unknown.Elsewhere, o)
			}
		}
		for ns := range namespaces {
			if !namespaces[svc.Namespace] && similar(ns, svc.Namespace) {
				unknown.Namespaces = append(unknown.Namespaces, ns)
			}
		}
		slices.Sort(unknown.Namespaces)
		slices.SortFunc(unknown.Similar, plan.Service.Compare)
		slices.SortFunc(unknown.Elsewhere, plan.Service.Compare)
		return nil, own, unknown
	}
	for _, sp := range d.ServicePorts {
		own.Set(sp)
	}
	return d, own, nil
}

// similar reports whether one name could be a slip of the pen for the other: it has the other's beginning, or two changed letters at
// most.
func similar(a, b string) bool {
	b = strings.ToLower(b)
	if len(b) > len(a)+2 {
		return false
	}
	return len(b) > 2 && strings.HasPrefix(a, b) || len(a) <= len(b)+2 && distance(a, b) <= 2
}

// distance is the Levenshtein distance.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
