package main

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/e2e/harness"
	"nodeproxy/kernel/netlink"
)

// generation returns the number of the nf_tables rule set's current generation: each transaction that is committed in the
// namespace increments it, whatever it changed.
func generation(n *harness.Netns) (id uint32, err error) {
	err = n.Do(func() error {
		c, err := netlink.Dial(unix.NETLINK_NETFILTER)
		if err != nil {
			return err
		}
		defer c.Close()
		answer, err := c.Ask(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Body: make([]byte, nfgenmsgLen)})
		if err != nil {
			return err
		}
		if value := netlink.Attribute(answer[min(nfgenmsgLen, len(answer)):], unix.NFTA_GEN_ID); len(value) == 4 {
			id = binary.BigEndian.Uint32(value)
			return nil
		}
		return errors.New("no generation in the answer")
	})
	if err != nil {
		return 0, fmt.Errorf("nf_tables generation of %s: %w", n.Name, err)
	}
	return id, nil
}

// nfgenmsgLen is the length of the header of nfnetlink, which is zero in a request that concerns no family.
const nfgenmsgLen = 4

// fingerprint identifies the rules that are in the kernel now, in such a way that a rule which is replaced by an equal
// one changes it: on the nft variant by the rules' handles, on the legacy variant by their packet counters, which
// start again from zero.
func fingerprint(n *harness.Netns, v harness.Variant) ([sha256.Size]byte, error) {
	var text string
	for _, family := range []string{"ip", "ip6"} {
		for _, table := range []string{"nat", "filter"} {
			part, err := listTable(n, v, family, table)
			if err != nil {
				return [sha256.Size]byte{}, err
			}
			text += part
		}
	}
	return sha256.Sum256([]byte(text)), nil
}

func listTable(n *harness.Netns, v harness.Variant, family, table string) (string, error) {
	if v == harness.NFT {
		// Handles, numeric, and stateless: counters may move while nobody writes.
		out, err := n.Output("nft", "-a", "-nn", "-s", "list", "table", family, table)
		if err != nil && strings.Contains(err.Error(), "No such file or directory") {
			return "", nil
		}
		return out, err
	}
	tool := map[string]string{"ip": "iptables", "ip6": "ip6tables"}[family]
	out, err := n.Output(v.Tool(tool)+"-save", "-c", "-t", table)
	var rules []string
	for line := range strings.Lines(out) {
		// Base chains count every packet that passes, and their first rules with them.
		if strings.Contains(line, " -A KUBE-SVC-") || strings.Contains(line, " -A KUBE-SEP-") {
			rules = append(rules, line)
		}
	}
	return strings.Join(rules, ""), err
}

// ruleCount is the number of rules in the nat tables.
func ruleCount(n *harness.Netns, v harness.Variant) (int, error) {
	out, err := n.Output(v.Tool("iptables")+"-save", "-t", "nat")
	return strings.Count(out, "\n-A "), err
}
