package nftables

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"sort"

	"nodeproxy/plan"
)

// schedule is how a number is chosen among those of a frontend's endpoints.
type schedule uint8

const (
	random schedule = iota
	// bySource and bySourcePort hash the client's address, or that and its port.
	bySource
	bySourcePort
)

// honoured are the schedulers that Services may ask for and get: rr is at random here too, and wrr by weight.
var honoured = []string{"", "rr", "wrr", "sh", "mh"}

// askedFor remembers the schedulers that Services ask for. The engines, which sync one after the other, share it. It may be nil.
type askedFor struct {
	known map[string]bool
	warn  func(string)
}

func (a *askedFor) note(name string) {
	if a != nil && !slices.Contains(honoured, name) && !a.known[name] {
		a.known[name] = true
		a.warn(fmt.Sprintf("mode nftables has no scheduler %q; Services that ask for it get their endpoints at random", name))
	}
}

// scheduleOf returns how a ServicePort chooses endpoints. With affinity, which remembers clients by their address, the client's port is as
// good as chance.
func scheduleOf(sp *plan.ServicePort) schedule {
	switch hash := sp.Scheduler.Name == "sh" || sp.Scheduler.Name == "mh"; {
	case !hash || sp.Scheduler.Ports && sp.Affinity > 0:
		return random
	case sp.Scheduler.Ports:
		return bySourcePort
	}
	return bySource
}

// weighted reports whether a scheduler uses weights in mode ipvs.
func weighted(s plan.Scheduler) bool {
	return slices.Contains([]string{"wrr", "wlc", "lblc", "lblcr", "sh", "sed", "nq", "mh"}, s.Name)
}

func weightOf(ep plan.Endpoint, s plan.Scheduler) uint64 {
	if !weighted(s) {
		return 1
	}
	return max(uint64(ep.Weight), 1)
}

// numbered gives numbers to the endpoints of a ServicePort, each as many as is its share. An endpoint keeps numbers that it has in before
// if possible, unless the numbers are those of a hash, which depend on the endpoints alone, so that all nodes send a client to the same one.
func numbered(before []netip.AddrPort, sp *plan.ServicePort, list []plan.Endpoint) []netip.AddrPort {
	list = usable(sp, list)
	switch most := mostNumbers(sp); {
	case len(list) == 0:
		return nil
	case scheduleOf(sp) != random:
		return consistent(list, sp.Scheduler, most, mostSlots/max(len(sp.Frontends), 1))
	case weighted(sp.Scheduler):
		return placed(before, repeated(list, sp.Scheduler, most))
	}
	return placed(before, addressesOf(list))
}

// mostNumbers is how many numbers a ServicePort has at most.
func mostNumbers(sp *plan.ServicePort) int {
	if sp.Affinity > 0 {
		return maxSticky
	}
	return maxCount
}

// usable returns the endpoints of a ServicePort's list that get numbers.
func usable(sp *plan.ServicePort, list []plan.Endpoint) []plan.Endpoint {
	return list[:min(len(list), mostNumbers(sp))]
}

func addressesOf(list []plan.Endpoint) []netip.AddrPort {
	out := make([]netip.AddrPort, len(list))
	for i, ep := range list {
		out[i] = ep.Addr
	}
	return out
}

// fewParts is how many numbers weights are expressed by at most, if there are few endpoints; if there are more, each has partsEach on average.
const (
	fewParts  = 256
	partsEach = 4
)

// repeated lists each endpoint as often as its weight says: exactly if that is not too many, else about so, and at least once.
func repeated(list []plan.Endpoint, s plan.Scheduler, most int) []netip.AddrPort {
	var divisor, sum uint64
	for _, ep := range list {
		w := weightOf(ep, s)
		sum += w
		for w != 0 {
			divisor, w = w, divisor%w
		}
	}
	parts := min(max(fewParts, partsEach*len(list)), most)
	numbers := func(ep plan.Endpoint, parts int) int {
		w := weightOf(ep, s)
		if sum/divisor <= uint64(parts) {
			return int(w / divisor)
		}
		return int(max(1, w*uint64(parts)/sum))
	}
	total := func(parts int) (n int) {
		for _, ep := range list {
			n += numbers(ep, parts)
		}
		return n
	}
	// Endpoints whose share is less than one number have one all the same, so that all may have more than parts.
	parts = sort.Search(parts, func(n int) bool { return total(n+1) > most })
	var out []netip.AddrPort
	for _, ep := range list {
		out = append(out, slices.Repeat([]netip.AddrPort{ep.Addr}, numbers(ep, parts))...)
	}
	return out
}

// tableSizes are primes. A table has at least slotsEach numbers for each endpoint on average, or in a long one fewEach, as far as there is such a
// table: no endpoint gets more than 1/16 or 1/4 above its share. There are few sizes, as many clients move where another one is needed. The table of
// a single endpoint is a single number.
var tableSizes = []int{251, 1021, 4093, 16381, 65521}

const (
	slotsEach = 16
	fewEach   = 4
	longTable = 10_000 // numbers; writing such a table takes a tenth of a second, and others wait
)

// mostSlots bounds how many numbers the tables of all frontends of a ServicePort have together, as long as each has room for all endpoints.
const mostSlots = 1 << 18

// consistent is a table of consistent hashing, as in "Maglev: A Fast and Reliable Software Network Load Balancer" (NSDI 2016): each
// endpoint goes through all numbers in an order of its own, and the endpoints take turns, as often as their weights say, to take their
// next number that is free. Where one comes or goes, few of the others' numbers change. The table has up to most numbers, and no more than fair
// if that is enough for the endpoints.
func consistent(list []plan.Endpoint, s plan.Scheduler, most, fair int) []netip.AddrPort {
	if len(list) == 1 {
		return []netip.AddrPort{list[0].Addr}
	}
	size := tableSizes[0]
	for _, next := range tableSizes[1:] {
		each := slotsEach
		if size > longTable {
			each = fewEach
		}
		if size < each*len(list) && next <= most && (next <= fair || size < len(list)) {
			size = next
		}
	}
	type turn struct {
		addr           netip.AddrPort
		next, step     int
		weight, target uint64
	}
	turns := make([]turn, min(len(list), size))
	heaviest := uint64(0)
	for i := range turns {
		ep := list[i]
		h := fnv.New64a()
		_, _ = h.Write([]byte(endpointValue(ep.Addr)))
		first, second := mixed(h.Sum64()), mixed(^h.Sum64())
		turns[i] = turn{addr: ep.Addr, next: int(first % uint64(size)), step: 1 + int(second%uint64(size-1)), weight: weightOf(ep, s)}
		heaviest = max(heaviest, turns[i].weight)
	}
	slices.SortFunc(turns, func(a, b turn) int { return a.addr.Compare(b.addr) })
	out, free := make([]netip.AddrPort, size), size
	due := make([][]int, size+1) // whose turn it is in each round; in every round, that of the heaviest
	for i := range turns {
		due[0] = append(due[0], i)
	}
	for round := range due {
		slices.Sort(due[round])
		for _, i := range due[round] {
			t := &turns[i]
			for out[t.next].IsValid() {
				t.next = (t.next + t.step) % size
			}
			out[t.next] = t.addr
			if free--; free == 0 {
				return out
			}
			t.target += heaviest
			if next := max(round+1, int(t.target/t.weight)); next < len(due) {
				due[next] = append(due[next], i)
			}
		}
	}
	return out
}

// mixed spreads a number over all 64 bits (the finalizer of SplitMix64).
func mixed(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}
