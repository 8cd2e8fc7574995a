package plan

import "fmt"

// Refusal is a ServicePort whose desired state the kernel refuses. All others are programmed: it is a finding about one Service,
// not a failure of the sync.
type Refusal struct {
	Key Key
	// Kept is true if the ServicePort keeps its former endpoints; otherwise it is not proxied.
	Kept bool
	// Err is the error of the kernel, or of the program that writes to it.
	Err error
}

// Effect describes what happens now.
func (r Refusal) Effect() string {
	if r.Kept {
		return "it keeps its former endpoints, and is retried from time to time"
	}
	return "it is not proxied on this node, and is retried from time to time"
}

func (r Refusal) String() string {
	return fmt.Sprintf("the kernel refuses port %q (%s) of Service %s: %v", r.Key.Port, r.Key.Family, r.Key.Service, r.Err)
}
