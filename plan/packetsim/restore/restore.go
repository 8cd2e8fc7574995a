// Package restore reads the texts from which programs restore the state of the kernel into a packetsim.Machine.
//
// There is a front end for each text: IPTables for iptables-restore, Sets for ipset restore, Servers for ipvsadm --restore, Addresses
// for ip -batch, Diversions for the nftables table by which mode ipvs makes single ports local. Each refuses what its program or
// the kernel would refuse, and adds to what is in the Machine. The texts that the programs save are the same.
package restore

import (
	"fmt"
	"strings"

	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
)

// Parse returns a machine that has nothing but the rules of a text for iptables-restore.
func Parse(f plan.Family, text string) (*packetsim.Machine, error) {
	m := packetsim.New(f)
	return m, IPTables(m, text)
}

// sections are the headings in a text for several programs, and what reads the lines under each.
var sections = map[string]func(*packetsim.Machine, string) error{
	"# ipset restore":       Sets,
	"# ipvsadm --restore":   Servers,
	"# ip -batch":           Addresses,
	"# nftables by netlink": Diversions,
	"# iptables-restore":    IPTables,
	"# ip6tables-restore":   IPTables,
}

// ParseSections returns a machine that has what is in a text for several programs. A comment line that is the program's name and
// option heads what is for it: "# ipset restore", "# ipvsadm --restore", "# ip -batch", "# nftables by netlink", "# iptables-restore"
// and "# ip6tables-restore". The sections are read in their order, and errors count lines from the text's beginning.
func ParseSections(f plan.Family, text string) (*packetsim.Machine, error) {
	m := packetsim.New(f)
	var read func(*packetsim.Machine, string) error
	lines := strings.Split(text, "\n")
	first := 0 // of the section
	flush := func(end int) error {
		if read == nil {
			return nil
		}
		// Empty lines in front keep the numbers of the lines.
		return read(m, strings.Repeat("\n", first)+strings.Join(lines[first:end], "\n"))
	}
	for i, line := range lines {
		line = strings.TrimSpace(line)
		if next := sections[line]; next != nil {
			if err := flush(i); err != nil {
				return nil, err
			}
			read, first = next, i+1
		} else if read == nil && line != "" && line[0] != '#' {
			return nil, fmt.Errorf("line %d stands before any section: %.300s", i+1, line)
		}
	}
	return m, flush(len(lines))
}
