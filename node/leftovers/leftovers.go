// Package leftovers removes objects of a kube-proxy that no mode of this program uses: the tables of its nftables mode and its
// accounting objects. The backends remove the objects that both programs use.
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

// Leftover is an object that a kube-proxy has left in the kernel.
type Leftover struct {
	what   string
	remove func() error
}

func (l Leftover) String() string { return l.what }

// Find lists the leftovers in the network namespace of the calling thread. A kernel without nftables or without accounting has none
// of that kind.
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

// Remove removes what Find has found; an object that is gone already is no error. Each table is removed as a whole, so no packet
// meets half of it. Connections that it has translated continue, since the translation is kept with the connection. Remove returns
// what it has removed; the error names each object that remains.
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
