package plan

import "fmt"

// Refusal tells of a ServicePort whose desired state the kernel does not take. All others are programmed: it is a finding about one
// Service, not a failure of the sync.
type Refusal struct {
	Key Key
	// Kept is true if the ServicePort goes on with the endpoints that it had; else it is not proxied.
	Kept bool
	// Err is what the kernel, or the program that writes to it, said.
	Err error
}

// Effect says what happens now, for people.
func (r Refusal) Effect() string {
	if r.Kept {
		return "it keeps the endpoints that it had, and is tried again now and then"
	}
	return "it is not proxied on this node, and is tried again now and then"
}

func (r Refusal) String() string {
	return fmt.Sprintf("the kernel refuses port %q (%s) of Service %s: %v", r.Key.Port, r.Key.Family, r.Key.Service, r.Err)
}
