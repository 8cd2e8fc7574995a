package iptables

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// InvalidDropped returns how many packets KUBE-FORWARD has dropped since connection tracking took them for invalid, in
// both families. It lists that one chain, which takes a few milliseconds whatever the number of Services. The number begins
// at zero again when the chain is written, and is zero before it is there.
func (b *Backend) InvalidDropped() (uint64, error) {
	var sum uint64
	for _, e := range b.engines {
		t, ok := e.tool.(*tool)
		if !ok {
			continue
		}
		rules, err := t.ipt.ListWithCounters(string(tableFilter), chainForward)
		if err != nil {
			// What is said of a chain that does not exist differs from version to version.
			if chains, listErr := t.ipt.ListChains(string(tableFilter)); listErr == nil && !slices.Contains(chains, chainForward) {
				continue
			}
		}
		if err != nil {
			return 0, fmt.Errorf("listing chain %s of %s: %w", chainForward, e.family, err)
		}
		for _, rule := range rules {
			if n, ok := countedDrop(rule); ok {
				sum += n
			}
		}
	}
	return sum, nil
}

// countedDrop reads the number of packets of a rule that drops invalid ones, as in
// "-A KUBE-FORWARD -m conntrack --ctstate INVALID -c 3 156 -j DROP".
func countedDrop(rule string) (uint64, bool) {
	words := strings.Fields(rule)
	if !strings.Contains(rule, " --ctstate INVALID ") || !strings.HasSuffix(rule, " -j DROP") {
		return 0, false
	}
	for i, word := range words {
		if word == "-c" && i+1 < len(words) {
			n, err := strconv.ParseUint(words[i+1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
