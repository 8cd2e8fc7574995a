package blocking

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
	"nodeproxy/plan/packetsim"
	"nodeproxy/plan/packetsim/restore"
)

// legacyRules are the rules of the legacy variant of iptables.
type legacyRules struct {
	sets  *sets
	used  bool // whether this program may have rules among them
	bases []nft.BaseChain
	rules map[nft.ChainID][]judge
}

const legacyVariant = "legacy"

func (*legacyRules) variant() string { return legacyVariant }

func (l *legacyRules) Bases() []nft.BaseChain { return l.bases }

func (l *legacyRules) judges(id nft.ChainID) ([]judge, error) { return l.rules[id], nil }

// readLegacy reads the tables that the kernel has in the network namespace of the calling thread.
func readLegacy(ctx context.Context, s *sets, variant string) (*legacyRules, error) {
	out := &legacyRules{sets: s, used: variant == "" || variant == legacyVariant, rules: map[nft.ChainID][]judge{}}
	var failed error
	for _, f := range plan.Families {
		name := nft.FamilyName(f)
		for _, table := range xtables.LegacyTables(f) {
			// Tables that are not there would be made by this.
			cmd := exec.CommandContext(ctx, name+"tables-legacy-save", "-t", table)
			text, err := cmd.Output()
			if errors.Is(err, exec.ErrNotFound) {
				return out, fmt.Errorf("the kernel has tables of the legacy variant of iptables, and there is no %s to read them", cmd.Args[0])
			}
			if err == nil {
				err = xtables.EachLine(bytes.NewReader(text), func(line string) { out.add(name, table, line) })
			}
			if err != nil && failed == nil {
				failed = fmt.Errorf("reading table %s by %s: %w", table, cmd.Args[0], err)
			}
		}
	}
	if failed != nil && len(out.bases) == 0 {
		return nil, failed
	}
	return out, nil
}

// add adds a line of iptables-save.
func (l *legacyRules) add(family, table, line string) {
	word, rest, _ := strings.Cut(line, " ")
	id := nft.ChainID{Family: family, Table: table}
	switch {
	case strings.HasPrefix(word, ":"):
		id.Chain = word[1:]
		policy, _, _ := strings.Cut(rest, " ")
		if policy == "-" { // No hook calls it.
			return
		}
		b := nft.BaseChain{ChainID: id, Type: "filter", Hook: strings.ToLower(id.Chain), Drops: policy == "DROP"}
		if b.Priority = int32(restore.Priority(table, packetsim.Hook(id.Chain))); table == "nat" {
			b.Type = table
		}
		l.bases = append(l.bases, b)
	case word == "-A":
		var text string
		id.Chain, text, _ = strings.Cut(rest, " ")
		if l.used && names.IsOurs(names.Table(table), id.Chain) { // There may be very many.
			return
		}
		divided := sync.OnceValues(func() ([]restore.Option, error) { return restore.Options(text) }) // Most are never asked for.
		l.rules[id] = append(l.rules[id], func(p *packet) rule {
			options, err := divided()
			j := textJudgement{judgement: judging(p), sets: l.sets}
			if err != nil { // No variant prints that.
				j.unknown("")
			}
			for _, o := range options {
				if j.match == no {
					break
				}
				j.option(o)
			}
			return j.result()
		})
	}
}

// textJudgement is a judgement of a rule as iptables-save prints it.
type textJudgement struct {
	judgement
	sets *sets
	// module is the match of which the next options are.
	module string
}

// option judges an option by its arguments.
func (j *textJudgement) option(o restore.Option) {
	arguments := append(o.Values[:len(o.Values):len(o.Values)], "", "") // So that two are there.
	argument := arguments[0]
	switch o.Name {
	case "--comment":
	case "-m":
		if j.module = argument; strings.HasSuffix(argument, "limit") { // It may be what drops what is too much.
			j.limited = true
			j.unknown(argument)
		}
	case "--tcp-flags":
		mask, set, _ := restore.ParseTCPFlags(o.Values) // The kernel has no others.
		j.masked(j.packet.tcpFlags(), []byte{mask}, []byte{set}, o.Not)
	case "--match-set":
		var sources []bool
		for part := range strings.SplitSeq(arguments[1], ",") {
			sources = append(sources, part == "src")
		}
		j.inSet(j.sets, argument, sources, o.Not)
	case "--mark":
		if value, mask, err := restore.ParseMark(argument); err == nil && j.module == "mark" {
			j.inMark(value, mask, o.Not)
		} else {
			j.unknown(j.module + " " + not(o.Not) + argument)
		}
	case "-p":
		j.holds((argument == protocolName(j.packet.protocol) || protocols[argument] == j.packet.protocol) != o.Not, "meta l4proto "+not(o.Not)+argument)
	case "-s", "-d", "--ctorigdst":
		j.within(o.Name, argument, o.Not)
	case "-i", "-o":
		m, by := maybe, map[string]string{"-i": j.packet.in, "-o": j.packet.out}[o.Name]
		if by != "" {
			m = matches(restore.IsInterface(by, argument))
		}
		j.depends(m, o.Not, o.Name+" "+not(o.Not)+argument)
	case "--dport", "--dports", "--sport", "--sports", "--ctorigdstport":
		j.ofPorts(o.Name, argument, o.Not)
	case "--ctstate", "--state":
		j.inState(states(argument), o.Not)
	case "--icmp-type":
		kind, codes := icmpType(argument)
		j.icmp(kind, codes, o.Not)
	case "--dst-type":
		if argument != "LOCAL" {
			j.unknown("")
			return
		}
		j.toType(1<<typeLocal, o.Not)
	case "-g":
		j.ends = []end{{verdict: "goto", to: argument}}
	case "-j":
		j.target(targetOf(argument, o.Values[min(1, len(o.Values)):]))
	default:
		if limits := strings.HasSuffix(j.module, "limit"); !limits { // Those have several options.
			j.unknown("")
		}
	}
}

// icmpType reads a type of ICMP as iptables-save prints it, such as "3", "3/4" or "any", and the range of its codes.
func icmpType(text string) (kind byte, codes [2]byte) {
	first, second, one := strings.Cut(text, "/")
	n, err := strconv.ParseUint(first, 10, 8)
	if err != nil {
		return icmpAny, [2]byte{0, 0xff}
	}
	if code, failed := strconv.ParseUint(second, 10, 8); one && failed == nil {
		return byte(n), [2]byte{byte(code), byte(code)}
	}
	return byte(n), [2]byte{0, 0xff}
}

// protocols are those of tunnels and of errors as iptables-save prints them, by the names of /etc/protocols.
var protocols = map[string]byte{"icmp": unix.IPPROTO_ICMP, "ipencap": unix.IPPROTO_IPIP, "ipip": unix.IPPROTO_IPIP, "gre": unix.IPPROTO_GRE, "ipv6": unix.IPPROTO_IPV6}

// within judges an option for a range of addresses, or a single one.
func (j *textJudgement) within(option, text string, invert bool) {
	switch to, err := restore.ParsePrefix(text); {
	case err != nil:
		j.unknown("")
	case option == "-s":
		j.addresses(false, to, invert)
	case option == "-d":
		j.addresses(true, to, invert)
	default:
		j.firstTo(to, invert)
	}
}

// ofPorts judges an option for ports, such as 80,443,8000:8100.
func (j *textJudgement) ofPorts(option, text string, invert bool) {
	var list []plan.PortRange
	for part := range strings.SplitSeq(text, ",") {
		r, err := restore.ParsePorts(part)
		if err != nil {
			j.unknown("")
			return
		}
		list = append(list, r)
	}
	switch {
	case option == "--ctorigdstport" && len(list) != 1:
		j.unknown("")
	case option == "--ctorigdstport":
		j.firstToPort(list[0], invert)
	case strings.HasPrefix(option, "--s"):
		j.ports(j.packet.src, "sport", list, invert)
	default:
		j.ports(j.packet.dst, "dport", list, invert)
	}
}

// targetOf reads a target and its options.
func targetOf(name string, options []string) target {
	t := target{name: name, other: end{verdict: "jump", to: name}}
	option := func(name string) (value string) { // It begins with that name, and the value is behind it.
		if i := slices.IndexFunc(options, func(o string) bool { return strings.HasPrefix(o, name) }); i >= 0 && i+1 < len(options) {
			value = options[i+1]
		}
		return value
	}
	switch name {
	case "CT":
		t.notrack = slices.Contains(options, "--notrack")
	case "REDIRECT":
		first, _, _ := strings.Cut(option("--to-ports"), "-")
		if r, err := restore.ParsePorts(first); err == nil {
			t.port = r.First
		}
	case "SNAT", "DNAT":
		to := option("--to-")
		t.addr, _ = netip.ParseAddr(to)
		if at, err := netip.ParseAddrPort(to); err == nil {
			t.addr = at.Addr()
		}
	case "CONNMARK":
		if slices.Contains(options, "--restore-mark") {
			t.restores = unmarked.known
			if n, err := strconv.ParseUint(option("--nfmask"), 0, 32); err == nil {
				t.restores = uint32(n)
			}
		}
	case "MARK":
		if value, mask, err := restore.ParseMark(option("--set-xmark")); err == nil {
			t.clears, t.inverts = mask, value
		} else {
			t.forgets = true
		}
	}
	return t
}

// states reads such as RELATED,ESTABLISHED.
func states(text string) uint16 {
	mask := uint16(0)
	list := strings.Split(text, ",")
	for name, bit := range map[string]uint16{"INVALID": stateInvalid, "ESTABLISHED": stateEstablished, "RELATED": stateRelated, "NEW": stateNew, "SNAT": stateSNAT, "DNAT": stateDNAT} {
		if slices.Contains(list, name) {
			mask |= bit
		}
	}
	return mask
}
