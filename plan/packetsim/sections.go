package packetsim

import (
	"fmt"
	"strings"

	"nodeproxy/plan"
)

// sections are the headings in a text for several programs, and what reads the lines under each.
var sections = map[string]func(*Ruleset, string) error{
	"# ipset restore":       (*Ruleset).RestoreSets,
	"# ipvsadm --restore":   (*Ruleset).RestoreServers,
	"# ip -batch":           (*Ruleset).RestoreAddresses,
	"# nftables by netlink": (*Ruleset).RestoreNFT,
	"# iptables-restore":    (*Ruleset).Restore,
	"# ip6tables-restore":   (*Ruleset).Restore,
}

// ParseSections reads a text that has something for each of several programs into an empty machine. A comment line that
// is the program's name and option heads what is for it: "# ipset restore", "# ipvsadm --restore", "# ip -batch",
// "# iptables-restore" and "# ip6tables-restore". The sections are read in their order, and errors count lines from the
// text's beginning.
func ParseSections(f plan.Family, text string) (*Ruleset, error) {
	rs := New(f)
	read := func(*Ruleset, string) error { return nil }
	var section strings.Builder
	flush := func() error {
		err := read(rs, section.String())
		section.Reset()
		return err
	}
	headed := false
	for i, line := range strings.Split(text, "\n") {
		if next := sections[strings.TrimSpace(line)]; next != nil {
			if err := flush(); err != nil {
				return nil, err
			}
			read, headed = next, true
			section.WriteString(strings.Repeat("\n", i+1)) // so that its lines keep their numbers
			continue
		}
		if trimmed := strings.TrimSpace(line); !headed && trimmed != "" && trimmed[0] != '#' {
			return nil, fmt.Errorf("line %d stands before any section: %.300s", i+1, line)
		}
		section.WriteString(line + "\n")
	}
	if err := flush(); err != nil {
		return nil, err
	}
	return rs, nil
}
