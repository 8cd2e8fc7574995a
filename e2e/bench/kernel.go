package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink/nl"

	"nodeproxy/e2e/harness"
)

// Numbers of nfnetlink that package syscall does not have (linux/netfilter/nfnetlink.h, nf_tables.h).
const (
	nfnlSubsysNFTables = 10
	nftMsgGetGen       = 16
	nftaGenID          = 1
	nlaTypeMask        = 0x3fff
)

// nfgenmsg is the header of every nfnetlink message; all zero suits a request that concerns no family.
type nfgenmsg struct{}

func (nfgenmsg) Len() int          { return 4 }
func (nfgenmsg) Serialize() []byte { return make([]byte, 4) }

// generation is the number of the nf_tables rule set's present generation: each transaction that is committed in the
// namespace raises it by one, whatever it changed.
func generation(n *harness.Netns) (uint32, error) {
	var id uint32
	err := n.Do(func() error {
		req := nl.NewNetlinkRequest(nfnlSubsysNFTables<<8|nftMsgGetGen, 0)
		req.AddData(nfgenmsg{})
		msgs, err := req.Execute(syscall.NETLINK_NETFILTER, 0)
		if err != nil {
			return err
		}
		for _, m := range msgs {
			attrs, err := nl.ParseRouteAttr(m[4:])
			if err != nil {
				return err
			}
			for _, a := range attrs {
				if a.Attr.Type&nlaTypeMask == nftaGenID {
					id = binary.BigEndian.Uint32(a.Value)
					return nil
				}
			}
		}
		return fmt.Errorf("no generation in the answer")
	})
	if err != nil {
		return 0, fmt.Errorf("nf_tables generation of %s: %w", n.Name, err)
	}
	return id, nil
}

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
