// Package leftovers removes what a kube-proxy leaves in the kernel that no mode of this program has: the tables of its mode
// nftables, and its counters of packets. What both have, the backends remove.
package leftovers

import (
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sys/unix"
)

// Leftover is something that a kube-proxy has left.
type Leftover struct {
	what string
	// remove sends the request that removes it.
	remove func(*conn) error
}

func (l Leftover) String() string { return l.what }

// tableName is what kube-proxy calls its nftables tables, one for each family.
const tableName = "kube-proxy"

// counterNames are its accounting objects (nfacct), which rules of its mode iptables count packets with.
var counterNames = []string{"ct_state_invalid_dropped_pkts", "localhost_nps_accepted_pkts"}

// Find lists what there is in the network namespace of the calling thread. A kernel without nftables, or without accounting,
// holds none of it.
func Find() ([]Leftover, error) {
	c, err := dial()
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer c.close()
	tables, err := c.tables()
	if err != nil {
		return nil, fmt.Errorf("listing nftables tables: %w", err)
	}
	var out []Leftover
	for _, t := range tables {
		if t.name == tableName && (t.family == unix.NFPROTO_IPV4 || t.family == unix.NFPROTO_IPV6) {
			out = append(out, Leftover{"nftables table " + t.String(), func(c *conn) error { return c.deleteTable(t) }})
		}
	}
	counters, err := c.counters()
	if err != nil {
		return out, fmt.Errorf("listing accounting objects: %w", err)
	}
	for _, name := range counters {
		if slices.Contains(counterNames, name) {
			out = append(out, Leftover{"accounting object " + name, func(c *conn) error { return c.deleteCounter(name) }})
		}
	}
	return out, nil
}

// Remove removes what Find has found; what is gone already is no error. Each table goes as a whole: no packet meets half of it.
// Connections that it has translated go on, since that is kept with the connection. It returns what it has removed; an error
// names each thing that stays.
func Remove(found []Leftover) ([]Leftover, error) {
	if len(found) == 0 {
		return nil, nil
	}
	c, err := dial()
	if err != nil {
		return nil, err
	}
	defer c.close()
	var out []Leftover
	var errs []error
	for _, l := range found {
		switch err := l.remove(c); {
		case err == nil:
			out = append(out, l)
		case !errors.Is(err, unix.ENOENT):
			errs = append(errs, fmt.Errorf("%s stays: %w", l, err))
		}
	}
	return out, errors.Join(errs...)
}
