package inspect

import (
	"context"
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
	Namespace   string        `json:"namespace"`
	Name        string        `json:"name"`
	Port        string        `json:"port,omitempty"`
	Protocol    plan.Protocol `json:"protocol"`
	Family      string        `json:"family"`
	Connections int64         `json:"connections"`
	PacketsIn   int64         `json:"packetsIn"`
	PacketsOut  int64         `json:"packetsOut"`
	BytesIn     int64         `json:"bytesIn"`
	BytesOut    int64         `json:"bytesOut"`
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
	keys := make([]plan.Key, 0, len(counters))
	for k := range counters {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, plan.Key.Compare)
	for _, k := range keys {
		t := counters[k]
		out.Ports = append(out.Ports, PortTraffic{
			k.Service.Namespace, k.Service.Name, k.Port, k.Protocol, k.Family.String(), t.Connections, t.PacketsIn, t.PacketsOut, t.BytesIn, t.BytesOut,
		})
	}
	return out, nil
}

// Traffic asks for what Node.Traffic returns.
func (c *Client) Traffic(ctx context.Context) (out *Traffic, err error) {
	return out, c.get(ctx, "traffic", nil, &out)
}
