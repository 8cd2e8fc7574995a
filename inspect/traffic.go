package inspect

import (
	"context"
	"iter"
	"maps"
	"slices"
	"time"

	"nodeproxy/plan"
)

// Traffic is what has gone through the ServicePorts so far.
type Traffic struct {
	// At is when the counters had been read.
	At   time.Time `json:"at"`
	Mode string    `json:"mode"`
	// Counted is false where the running nodeproxy counts nothing, as in mode iptables without --service-metrics. There are no Ports then.
	Counted bool          `json:"counted"`
	Ports   []PortTraffic `json:"ports"`
}

// PortTraffic is what has gone through a port of a Service in one address family so far, over all its frontends, in to its endpoints and out
// from them. A counter that the mode does not have is -1. Counters only grow, except that they may begin at zero again.
type PortTraffic struct {
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	Port      string        `json:"port,omitempty"`
	Protocol  plan.Protocol `json:"protocol"`
	Family    string        `json:"family"`
	Counters
}

// Traffic reads the counters of all ServicePorts, in order.
func (n *Node) Traffic(ctx context.Context) (*Traffic, error) {
	out := &Traffic{Mode: n.Mode, Ports: []PortTraffic{}}
	if n.Reality == nil || n.Reality.Traffic == nil {
		out.At = time.Now()
		return out, nil
	}
	counters, err := n.Reality.Traffic(ctx)
	if err != nil {
		return nil, err
	}
	out.At, out.Counted = time.Now(), true
	for _, k := range slices.SortedFunc(maps.Keys(counters), plan.Key.Compare) {
		out.Ports = append(out.Ports, PortTraffic{k.Service.Namespace, k.Service.Name, k.Port, k.Protocol, k.Family.String(), countersOf(counters[k])})
	}
	return out, nil
}

// Traffic asks for what Node.Traffic returns.
func (c *Client) Traffic(ctx context.Context) (out *Traffic, err error) {
	return out, c.get(ctx, "traffic", nil, &out)
}

// Counters are what has gone through a ServicePort since its rules were written, over all its frontends: in to its endpoints and out from
// them. What the mode does not count is -1.
type Counters struct {
	Connections int64 `json:"connections"`
	PacketsIn   int64 `json:"packetsIn"`
	PacketsOut  int64 `json:"packetsOut"`
	BytesIn     int64 `json:"bytesIn"`
	BytesOut    int64 `json:"bytesOut"`
}

func countersOf(t plan.Traffic) Counters {
	return Counters{t.Connections, t.PacketsIn, t.PacketsOut, t.BytesIn, t.BytesOut}
}

// countedServicePorts is servicePorts with Counters, where there are any and they can be read in time.
func (n *Node) countedServicePorts(ctx context.Context, of plan.Service) iter.Seq[ServicePort] {
	list := n.servicePorts(of)
	if n.Reality == nil || n.Reality.Traffic == nil {
		return list
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	all, err := n.Reality.Traffic(ctx)
	if err != nil {
		return list
	}
	return func(yield func(ServicePort) bool) {
		for sp := range list {
			if t, found := all[sp.key()]; found {
				sp.Counters = new(countersOf(t))
			}
			if !yield(sp) {
				return
			}
		}
	}
}

// key is the key of the ServicePort.
func (sp *ServicePort) key() plan.Key {
	k := plan.Key{Service: plan.Service{Namespace: sp.Namespace, Name: sp.Name}, Port: sp.Port, Protocol: sp.Protocol, Family: plan.IPv4}
	if sp.Family == plan.IPv6.String() {
		k.Family = plan.IPv6
	}
	return k
}
