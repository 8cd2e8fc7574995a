// Package leftovers removes what a kube-proxy leaves in the kernel that no mode of this program has: the tables of its mode
// nftables, and its counters of packets. What both have, the backends remove.
package leftovers

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nfacct"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Leftover is something that a kube-proxy has left.
type Leftover struct {
	what string
	// remove removes it.
	remove func() error
}

func (l Leftover) String() string { return l.what }

// Find lists what there is in the network namespace of the calling thread. A kernel without nftables, or without accounting,
// has none of it.
func Find() ([]Leftover, error) {
	var out []Leftover
	for _, f := range plan.Families {
		tables, err := nft.Tables(f)
		if err != nil && !errors.Is(err, nft.ErrAbsent) {
			return nil, fmt.Errorf("listing nftables tables: %w", err)
		}
		if slices.Contains(tables, names.KubeProxy) {
			out = append(out, Leftover{"nftables table " + nft.FamilyName(f) + " " + names.KubeProxy,
				func() error { return nft.DeleteTable(f, names.KubeProxy) }})
		}
	}
	counters, err := nfacct.List()
	if err != nil {
		return out, fmt.Errorf("listing accounting objects: %w", err)
	}
	for _, name := range counters {
		if slices.Contains(names.Counters, name) {
			out = append(out, Leftover{"accounting object " + name, func() error { return nfacct.Delete(name) }})
		}
	}
	return out, nil
}

// Remove removes what Find has found; what is gone already is no error. Each table goes as a whole: no packet meets half of it.
// Connections that it has translated go on, since that is kept with the connection. It returns what it has removed; an error
// names each thing that stays.
func Remove(found []Leftover) ([]Leftover, error) {
	var out []Leftover
	var errs []error
	for _, l := range found {
		switch err := l.remove(); {
		case err == nil:
			out = append(out, l)
		case !errors.Is(err, unix.ENOENT):
			errs = append(errs, fmt.Errorf("%s stays: %w", l, err))
		}
	}
	return out, errors.Join(errs...)
}
