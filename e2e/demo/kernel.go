package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// chains shows what mode iptables has of shop/web.
func (d *demo) chains() error {
	saved, err := d.world.Node1().Output("iptables-nft-save", "-t", "nat")
	if err != nil {
		return err
	}
	var chains []string
	lines := strings.Split(saved, "\n")
	for i := 0; i < 2; i++ { // what names the Service, then what that leads to
		for _, line := range lines {
			words := strings.Fields(line)
			if len(words) < 2 || words[0] != "-A" {
				continue
			}
			if strings.Contains(line, "shop/web:http") || slices.Contains(chains, words[1]) {
				if target := words[len(words)-1]; strings.HasPrefix(target, "KUBE-S") || strings.HasPrefix(target, "KUBE-E") {
					chains = append(chains, target)
				}
			}
		}
	}
	shown := 0
	for _, line := range lines {
		words := strings.Fields(line)
		if len(words) > 1 && words[0] == "-A" && (strings.Contains(line, "shop/web:http") || slices.Contains(chains, words[1])) {
			fmt.Println("   " + line)
			shown++
		}
	}
	if shown < 8 {
		return fmt.Errorf("only %d rules found in\n%s", shown, saved)
	}
	return nil
}

// elements shows what mode nftables has of shop/web: its frontends, and their endpoints, which a number tells apart.
func (d *demo) elements() error {
	for _, family := range []string{"ip", "ip6"} {
		frontends, err := d.list(family, "services", func(e string) bool { return strings.Contains(e, `"shop/web:http"`) })
		if err != nil {
			return err
		}
		for i, e := range frontends {
			frontends[i], _, _ = strings.Cut(e, " counter ")
		}
		_, err = d.list(family, "endpoints", func(e string) bool {
			return slices.ContainsFunc(frontends, func(f string) bool { return strings.HasPrefix(e, f+" . ") })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// list prints and returns those elements of a map that are wanted. There have to be some.
func (d *demo) list(family, name string, wanted func(element string) bool) ([]string, error) {
	command := []string{"nft", "-s", "list", "map", family, "nodeproxy", name}
	out, err := d.world.Node1().Output(command[0], command[1:]...)
	if err != nil {
		return nil, err
	}
	fmt.Printf("   # %s\n", strings.Join(command, " "))
	_, list, _ := strings.Cut(out, "elements = {")
	var elements []string
	for _, e := range strings.Split(strings.TrimRight(list, "}\t\n "), ",") {
		if e = strings.TrimSpace(e); wanted(e) {
			fmt.Println("   " + e)
			elements = append(elements, e)
		}
	}
	if len(elements) == 0 {
		err = fmt.Errorf("map %s of table %s nodeproxy has nothing of shop/web:\n%s", name, family, out)
	}
	return elements, err
}

// servers shows what mode ipvs has of shop/web.
func (d *demo) servers() error {
	marks, err := d.sets()
	if err != nil {
		return err
	}
	var names []string // as ipvsadm has them
	for _, family := range plan.Families {
		cluster, err := d.frontend("shop/web", plan.ClusterIP, family)
		if err != nil {
			return err
		}
		names = append(names, netip.AddrPortFrom(cluster.Addr, cluster.Port).String())
	}
	for _, mark := range marks {
		names = append(names, strconv.Itoa(int(int32(mark))))
	}
	shown, err := d.print("ipvsadm -Ln", func(lines []string) bool {
		return slices.ContainsFunc(strings.Fields(lines[0]), func(word string) bool { return slices.Contains(names, word) })
	})
	if want := 4; err == nil && shown != want { // a cluster IP and a node port in each family
		err = fmt.Errorf("%d virtual servers found, want %d: %q", shown, want, names)
	}
	if err != nil {
		return err
	}
	for _, command := range []string{
		"ip addr show kube-ipvs0", "ip route show table local type local dev kube-ipvs0",
		"ip -6 route show table local type local dev kube-ipvs0",
	} {
		shown, err := d.print(command, func([]string) bool { return true })
		if err == nil && shown == 0 {
			err = fmt.Errorf("%s shows nothing", command)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sets prints the entries of sets for shop/web, and returns the marks of its node port.
func (d *demo) sets() ([]uint32, error) {
	var marks []uint32
	for _, name := range []string{
		"KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-NODE-PORT", "KUBE-6-NODE-PORT", "KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK",
	} {
		out, err := d.world.Node1().Output("ipset", "list", name)
		if err != nil {
			return nil, err
		}
		head, members, _ := strings.Cut(out, "Members:\n")
		fmt.Printf("   # ipset list %s\n   %s\n", name, strings.Split(head, "\n")[1])
		shown := 0
		for _, line := range strings.Split(strings.TrimSpace(members), "\n") {
			if !d.ofWeb(line) {
				continue
			}
			fmt.Println("   " + line)
			shown++
			if _, rest, ok := strings.Cut(line, " skbmark "); ok {
				text, _, _ := strings.Cut(strings.TrimSpace(rest), "/")
				mark, err := strconv.ParseUint(text, 0, 32)
				if err != nil {
					return nil, fmt.Errorf("set %s: %q: %w", name, line, err)
				}
				if !slices.Contains(marks, uint32(mark)) {
					marks = append(marks, uint32(mark))
				}
			}
		}
		if shown == 0 {
			return nil, fmt.Errorf("set %s has nothing of shop/web:\n%s", name, out)
		}
	}
	return marks, nil
}

// ofWeb reports whether an entry of a set belongs to shop/web: by a frontend of its, or by an endpoint.
func (d *demo) ofWeb(entry string) bool {
	words := strings.FieldsFunc(entry, func(r rune) bool { return r == ',' || r == ' ' })
	for _, family := range plan.Families {
		for _, sp := range d.plan.Sorted(family) {
			if sp.Key.Service.String() != "shop/web" {
				continue
			}
			for _, f := range sp.Frontends {
				port := fmt.Sprintf("tcp:%d", f.Port)
				if slices.Contains(words, port) && (f.Kind == plan.NodePort || slices.Contains(words, f.Addr.String())) {
					return true
				}
			}
			for _, ep := range sp.All() {
				if slices.Contains(words, ep.Addr.Addr().String()) && slices.Contains(words, fmt.Sprintf("tcp:%d", ep.Addr.Port())) {
					return true
				}
			}
		}
	}
	return false
}

// print runs a command on node1 and prints those parts of its output, each a line with the indented ones after it, that are
// wanted. It returns how many.
func (d *demo) print(command string, wanted func(lines []string) bool) (int, error) {
	words := strings.Fields(command)
	out, err := d.world.Node1().Output(words[0], words[1:]...)
	if err != nil {
		return 0, err
	}
	var parts [][]string
	for _, line := range strings.Split(strings.TrimRight(out, "\n"), "\n") {
		if strings.HasPrefix(line, " ") && len(parts) > 0 {
			parts[len(parts)-1] = append(parts[len(parts)-1], line)
		} else if line != "" {
			parts = append(parts, []string{line})
		}
	}
	fmt.Printf("   # %s\n", command)
	shown := 0
	for _, lines := range parts {
		if wanted(lines) {
			fmt.Println("   " + strings.TrimRight(strings.Join(lines, "\n   "), " "))
			shown++
		}
	}
	return shown, nil
}
