package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"nodeproxy/plan"
)

// output runs a command on node1, and prints it if it is to be named.
func (d *demo) output(command string, named bool) (string, error) {
	if named {
		fmt.Printf("   # %s\n", command)
	}
	words := strings.Fields(command)
	return d.world.Node1().Output(words[0], words[1:]...)
}

// show prints and returns those parts that are wanted. There have to be some.
func show(parts []string, wanted func(part string) bool) ([]string, error) {
	shown := slices.DeleteFunc(slices.Clone(parts), func(part string) bool { return !wanted(part) })
	for _, part := range shown {
		fmt.Println("   " + strings.TrimRight(strings.ReplaceAll(part, "\n", "\n   "), " "))
	}
	if len(shown) == 0 {
		return nil, fmt.Errorf("nothing of shop/web in\n%s", strings.Join(parts, "\n"))
	}
	return shown, nil
}

// chains shows what mode iptables has of shop/web.
func (d *demo) chains() error {
	saved, err := d.output("iptables-nft-save -t nat", false)
	if err != nil {
		return err
	}
	var chains []string
	lines := strings.Split(saved, "\n")
	wanted := func(line string) bool {
		words := strings.Fields(line)
		return len(words) > 1 && words[0] == "-A" && (strings.Contains(line, "shop/web:http") || slices.Contains(chains, words[1]))
	}
	for range 2 { // what names the Service, then what that leads to
		for _, line := range lines {
			if !wanted(line) {
				continue
			}
			words := strings.Fields(line)
			if target := words[len(words)-1]; strings.HasPrefix(target, "KUBE-S") || strings.HasPrefix(target, "KUBE-E") {
				chains = append(chains, target)
			}
		}
	}
	shown, err := show(lines, wanted)
	if err == nil && len(shown) < 8 {
		err = fmt.Errorf("only %d rules found in\n%s", len(shown), saved)
	}
	return err
}

// elements shows what mode nftables has of shop/web: its frontends, and their endpoints, which a number tells apart.
func (d *demo) elements() error {
	for _, family := range []string{"ip", "ip6"} {
		frontends, err := d.list(family, "services", func(e string) bool { return strings.Contains(e, `"shop/web:http"`) })
		if err != nil {
			return err
		}
		_, err = d.list(family, "endpoints", func(e string) bool {
			return slices.ContainsFunc(frontends, func(f string) bool {
				frontend, _, _ := strings.Cut(f, " counter ")
				return strings.HasPrefix(e, frontend+" . ")
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// list shows elements of a map.
func (d *demo) list(family, name string, wanted func(element string) bool) ([]string, error) {
	out, err := d.output("nft -s list map "+family+" nodeproxy "+name, true)
	if err != nil {
		return nil, err
	}
	_, list, _ := strings.Cut(out, "elements = {")
	elements := strings.Split(strings.TrimRight(list, "}\t\n "), ",")
	for i, e := range elements {
		elements[i] = strings.TrimSpace(e)
	}
	return show(elements, wanted)
}

// servers shows what mode ipvs has of shop/web.
func (d *demo) servers() error {
	names, err := d.sets() // of its virtual servers, as ipvsadm has them
	if err != nil {
		return err
	}
	for _, family := range plan.Families {
		cluster, err := d.frontend("shop/web", plan.ClusterIP, family)
		if err != nil {
			return err
		}
		names = append(names, netip.AddrPortFrom(cluster.Addr, cluster.Port).String())
	}
	ofWeb := func(part string) bool {
		line, _, _ := strings.Cut(part, "\n")
		return slices.ContainsFunc(strings.Fields(line), func(word string) bool { return slices.Contains(names, word) })
	}
	for _, c := range []struct {
		command string
		want    int // so many parts; 0 is any
		wanted  func(string) bool
	}{
		{"ipvsadm -Ln", 4, ofWeb}, // a cluster IP and a node port in each family
		{"ip addr show kube-ipvs0", 0, func(string) bool { return true }},
		{"ip route show table local type local dev kube-ipvs0", 0, func(string) bool { return true }},
		{"ip -6 route show table local type local dev kube-ipvs0", 0, func(string) bool { return true }},
	} {
		out, err := d.output(c.command, true)
		if err != nil {
			return err
		}
		// A part is a line with the indented ones after it.
		out = strings.ReplaceAll(strings.TrimRight(out, "\n"), "\n ", "\x00 ")
		parts := strings.Split(out, "\n")
		for i, part := range parts {
			parts[i] = strings.ReplaceAll(part, "\x00", "\n")
		}
		shown, err := show(parts, func(part string) bool { return part != "" && c.wanted(part) })
		if err == nil && c.want > 0 && len(shown) != c.want {
			err = fmt.Errorf("%d virtual servers found, want %d: %q", len(shown), c.want, names)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// sets shows the entries of sets for shop/web, and returns the marks of its node port, as numbers that ipvsadm shows.
func (d *demo) sets() (marks []string, err error) {
	for _, name := range []string{
		"KUBE-CLUSTER-IP", "KUBE-6-CLUSTER-IP", "KUBE-NODE-PORT", "KUBE-6-NODE-PORT", "KUBE-LOOP-BACK", "KUBE-6-LOOP-BACK",
	} {
		out, err := d.output("ipset list "+name, true)
		if err != nil {
			return nil, err
		}
		head, members, _ := strings.Cut(out, "Members:\n")
		fmt.Println("   " + strings.Split(head, "\n")[1])
		entries, err := show(strings.Split(strings.TrimSpace(members), "\n"), d.ofWeb)
		if err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
		for _, entry := range entries {
			if _, rest, ok := strings.Cut(entry, " skbmark "); ok {
				text, _, _ := strings.Cut(strings.TrimSpace(rest), "/")
				mark, err := strconv.ParseUint(text, 0, 32)
				if err != nil {
					return nil, fmt.Errorf("set %s: %q: %w", name, entry, err)
				}
				marks = append(marks, strconv.Itoa(int(int32(mark))))
			}
		}
	}
	return marks, nil
}

// ofWeb reports whether an entry of a set belongs to shop/web: by a frontend of its, or by an endpoint.
func (d *demo) ofWeb(entry string) bool {
	words := strings.FieldsFunc(entry, func(r rune) bool { return r == ',' || r == ' ' })
	has := func(addr netip.Addr, port uint16) bool {
		return slices.Contains(words, fmt.Sprintf("tcp:%d", port)) && (!addr.IsValid() || slices.Contains(words, addr.String()))
	}
	for _, family := range plan.Families {
		for _, sp := range d.plan.Sorted(family) {
			if sp.Key.Service.String() != "shop/web" {
				continue
			}
			for _, f := range sp.Frontends {
				if f.Kind == plan.NodePort && has(netip.Addr{}, f.Port) || f.Kind != plan.NodePort && has(f.Addr, f.Port) {
					return true
				}
			}
			for _, ep := range sp.All() {
				if has(ep.Addr.Addr(), ep.Addr.Port()) {
					return true
				}
			}
		}
	}
	return false
}
