package common

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strings"

	"nodeproxy/kernel/drift"
	"nodeproxy/kernel/names"
	"nodeproxy/kernel/xtables"
)

// Label finds out which Services the differences of a family's tables belong to, by the comments of rules, and of those that lead to their
// chains. contents are what the tables hold before and after.
func Label(hunks []drift.Hunk, contents ...map[names.Table]xtables.Content) {
	if len(hunks) == 0 {
		return
	}
	owners := map[string]string{}
	for _, content := range contents {
		var found []string
		for _, rules := range content[names.NAT] {
			for _, r := range rules {
				if to := xtables.Target(r); names.OfService(to) && owners[to] == "" {
					if svc := serviceIn(r); svc != "" {
						owners[to] = svc
						found = append(found, to)
					}
				}
			}
		}
		for len(found) > 0 { // Chains without comments belong to the Service whose chain leads to them.
			chain := found[0]
			found = found[1:]
			for _, r := range content[names.NAT][chain] {
				if to := xtables.Target(r); names.OfService(to) && owners[to] == "" {
					owners[to] = owners[chain]
					found = append(found, to)
				}
			}
		}
	}
	for i := range hunks {
		hunks[i].Services = servicesOf(hunks[i], owners)
	}
}

func servicesOf(h drift.Hunk, owners map[string]string) []string {
	_, chain, _ := strings.Cut(h.Object, " ")
	if svc := owners[chain]; svc != "" {
		return []string{svc}
	}
	seen := map[string]bool{}
	h.Differing(func(line string) { seen[cmp.Or(serviceIn(line), owners[xtables.Target(line)])] = true })
	delete(seen, "")
	return slices.Sorted(maps.Keys(seen))
}

// serviceName finds "namespace/name" in a comment, which a port's name may follow.
var serviceName = regexp.MustCompile(`(?:^| )([a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9]*[a-z0-9])?)(?::| |$)`)

// serviceIn returns the Service that a rule's comment names; "" for none.
func serviceIn(rule string) string {
	_, rest, found := strings.Cut(rule, "--comment ")
	if !found {
		return ""
	}
	comment := rest
	if strings.HasPrefix(rest, `"`) {
		comment, _, _ = strings.Cut(rest[1:], `"`)
	} else {
		comment, _, _ = strings.Cut(rest, " ")
	}
	m := serviceName.FindStringSubmatch(comment)
	if m == nil {
		return ""
	}
	return m[1]
}
