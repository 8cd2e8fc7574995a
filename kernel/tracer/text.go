package tracer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
)

var familyNames = map[byte]string{
	unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_INET: "inet", unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_NETDEV: "netdev",
}

func familyName(f byte) string { return cmp.Or(familyNames[f], fmt.Sprint("family ", f)) }

// texts finds how rules read, of each chain once.
type texts struct {
	family   plan.Family
	iptables *xtables.Program // nil where it is missing
	hooks    map[place]map[string]string
	chains   map[place]map[uint64]string
}

// place is a table, or a chain of it.
type place struct {
	family       byte
	table, chain string
}

func newTexts(f plan.Family) *texts {
	t := &texts{family: f, hooks: map[place]map[string]string{}, chains: map[place]map[uint64]string{}}
	t.iptables, _ = xtables.Find(xtables.NFT, f) // Without it there are no rules of iptables, or their numbers must do.
	return t
}

// fill sets the hooks and texts of all steps of a packet.
func (t *texts) fill(p *Packet) error {
	hook := ""
	for i := range p.Steps {
		s := &p.Steps[i]
		hooks, err := t.hooksOf(s)
		if err != nil {
			return err
		}
		if h, base := hooks[s.Chain]; base {
			hook = h
		}
		s.Hook = hook
		if s.Rule != "" {
			continue
		}
		rules, err := t.rulesOf(s)
		if err != nil {
			return err
		}
		s.Rule = cmp.Or(rules[s.handle], fmt.Sprintf("a rule that is gone (handle %d)", s.handle))
	}
	return nil
}

var hookNames = map[uint64]string{unix.NF_INET_PRE_ROUTING: "prerouting", unix.NF_INET_LOCAL_IN: "input", unix.NF_INET_FORWARD: "forward",
	unix.NF_INET_LOCAL_OUT: "output", unix.NF_INET_POST_ROUTING: "postrouting"}

// dump calls each with the attributes of every object of a kind in a table.
func dump(family byte, get uint16, table, chain string, each func(attrs []byte)) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER)
	if err != nil {
		return err
	}
	defer c.Close()
	body := netlink.Buffer{family, 0, 0, 0}.Text(unix.NFTA_RULE_TABLE, table)
	if chain != "" {
		body = body.Text(unix.NFTA_RULE_CHAIN, chain)
	}
	err = c.Dump(netlink.Message{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | get, Body: body}, func(body []byte) error {
		if attrs := body[min(headerLen, len(body)):]; netlink.Text(netlink.Attribute(attrs, unix.NFTA_RULE_TABLE)) == table {
			each(attrs)
		}
		return nil
	})
	if err == nil || errors.Is(err, netlink.ErrInterrupted) || errors.Is(err, unix.ENOENT) { // A chain may be gone, or be written at the moment.
		return nil
	}
	return fmt.Errorf("reading table %s %s of nftables: %w", familyName(family), table, err)
}

// hooksOf returns the hooks of the base chains of a step's table.
func (t *texts) hooksOf(s *Step) (map[string]string, error) {
	at := place{s.family, s.table, ""}
	if known, ok := t.hooks[at]; ok {
		return known, nil
	}
	out := map[string]string{}
	err := dump(s.family, unix.NFT_MSG_GETCHAIN, s.table, "", func(attrs []byte) {
		if hook := netlink.Attribute(attrs, unix.NFTA_CHAIN_HOOK); hook != nil {
			out[netlink.Text(netlink.Attribute(attrs, unix.NFTA_CHAIN_NAME))] = hookNames[netlink.BigEndian(netlink.Attribute(hook, unix.NFTA_HOOK_HOOKNUM))]
		}
	})
	t.hooks[at] = out
	return out, err
}

// rulesOf returns the texts of the rules of a step's chain by their handles.
func (t *texts) rulesOf(s *Step) (map[uint64]string, error) {
	at := place{s.family, s.table, s.Chain}
	if known, ok := t.chains[at]; ok {
		return known, nil
	}
	out := map[uint64]string{}
	var handles []uint64
	err := dump(s.family, unix.NFT_MSG_GETRULE, s.table, s.Chain, func(attrs []byte) {
		if netlink.Text(netlink.Attribute(attrs, unix.NFTA_RULE_CHAIN)) == s.Chain {
			handles = append(handles, netlink.BigEndian(netlink.Attribute(attrs, unix.NFTA_RULE_HANDLE)))
		}
	})
	byNFT := map[uint64]string(nil)
	lines := t.iptablesRules(s)
	for i, h := range handles {
		if len(lines) == len(handles) && !xtables.Unread(lines[i]) {
			out[h] = lines[i]
			continue
		}
		if byNFT == nil {
			byNFT = nftRules(s)
		}
		out[h] = cmp.Or(byNFT[h], fmt.Sprintf("rule %d (handle %d)", i+1, h))
	}
	t.chains[at] = out
	return out, err
}

var (
	iptablesTables  = []string{"raw", "mangle", "nat", "filter", "security"}
	packetCounts    = regexp.MustCompile(`(^| )-c \d+ \d+`)
	handleOfRule    = regexp.MustCompile(` # handle (\d+)$`)
	counterOfRule   = regexp.MustCompile(`counter packets \d+ bytes \d+`)
	nftProgramLimit = 10 * time.Second
)

// iptablesRules returns the rules of a chain as iptables prints them, in order; none if it can't.
func (t *texts) iptablesRules(s *Step) []string {
	if t.iptables == nil || s.family != unix.NFPROTO_IPV4 && s.family != unix.NFPROTO_IPV6 || !slices.Contains(iptablesTables, s.table) {
		return nil
	}
	lines, err := xtables.ListChain(t.iptables, names.Table(s.table), s.Chain)
	if err != nil {
		return nil // It holds rules that only nft can read.
	}
	var out []string
	for _, l := range lines {
		if rule, is := strings.CutPrefix(l, "-A "+s.Chain+" "); is {
			out = append(out, strings.TrimPrefix(packetCounts.ReplaceAllString(rule, ""), " "))
		}
	}
	return out
}

// nftRules returns the rules of a chain as nft prints them, by handle; none where nft is missing.
func nftRules(s *Step) map[uint64]string {
	out := map[uint64]string{}
	ctx, cancel := context.WithTimeout(context.Background(), nftProgramLimit)
	defer cancel()
	text, err := exec.CommandContext(ctx, "nft", "-t", "-a", "list", "chain", familyName(s.family), s.table, s.Chain).Output()
	if err != nil {
		return out
	}
	var rule []string // A rule with a long set of its own has several lines.
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		m := handleOfRule.FindStringSubmatch(line)
		switch {
		case strings.HasSuffix(strings.TrimSpace(handleOfRule.ReplaceAllString(line, "")), "{") && m != nil, strings.HasPrefix(line, "type ") && m == nil:
			rule = nil // the table, the chain, or its hook
			continue
		}
		rule = append(rule, handleOfRule.ReplaceAllString(line, ""))
		if m != nil {
			h, _ := strconv.ParseUint(m[1], 10, 64) // digits, as matched
			out[h] = counterOfRule.ReplaceAllString(strings.Join(rule, " "), "counter")
			rule = nil
		}
	}
	return out
}
