package ipset

import (
	"testing"

	"nodeproxy/kernel/netlink"
	"nodeproxy/plan"
)

// FuzzSets: whatever the kernel says of sets and entries, reading it ends.
func FuzzSets(f *testing.F) {
	for kind := range setTypes {
		for _, family := range plan.Families {
			s := Set{Name: "a", Type: kind, Family: family, Marks: true}
			f.Add([]byte(setMessage(ipsetCreate, 0, s.Name, func(b netlink.Buffer) netlink.Buffer { return appendCreate(b, s) }).Body))
			for _, e := range samples(kind, family) {
				f.Add([]byte(setMessage(ipsetAdd, 0, s.Name, func(b netlink.Buffer) netlink.Buffer { return appendEntry(b, s, e, 1) }).Body))
			}
		}
	}
	f.Fuzz(func(_ *testing.T, body []byte) {
		actual := parseSet(body)
		_ = explain(&netlink.SubsystemError{Number: ipsetFull, Request: body}).Error()
		for kind := range setTypes {
			for _, family := range plan.Families {
				s := Set{Name: "a", Type: kind, Family: family}
				_ = actual.is(s)
				for _, data := range netlink.Attributes(behindHeader(body)) {
					if e, err := parseEntry(data, s); err == nil {
						_ = e.Text(s)
					}
				}
			}
		}
	})
}
