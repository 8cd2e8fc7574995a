package plan

import "fmt"

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// Contains reports whether a port is in the range.
func (r PortRange) Contains(port uint16) bool { return r.First <= port && port <= r.Last }

func (r PortRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }
