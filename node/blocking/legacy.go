package blocking

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
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

// legacyPriorities are the priorities of tables in the hooks that are looked at.
var legacyPriorities = map[string]int32{"raw": -300, "mangle": -150, "filter": 0, "security": 50, "nat": 100}

var legacyHooks = map[string]string{
	"PREROUTING": "prerouting", "INPUT": "input", "FORWARD": "forward", "OUTPUT": "output", "POSTROUTING": "postrouting",
}

// readLegacy reads the tables that the kernel has in the network namespace of the calling thread.
func readLegacy(ctx context.Context, s *sets, variant string) (*legacyRules, error) {
	out := &legacyRules{sets: s, used: variant == "" || variant == legacyVariant, rules: map[nft.ChainID][]judge{}}
	var failed error
	for _, f := range plan.Families {
		name := map[plan.Family]string{plan.IPv4: "ip", plan.IPv6: "ip6"}[f]
		present, err := os.ReadFile("/proc/thread-self/net/" + name + "_tables_names")
		if err != nil { // The kernel has no such tables.
			continue
		}
		for _, table := range strings.Fields(string(present)) {
			if _, is := legacyPriorities[table]; !is {
				continue
			}
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
		if hook := legacyHooks[id.Chain]; hook != "" {
			policy, _, _ := strings.Cut(rest, " ")
			kind, priority := "filter", legacyPriorities[table]
			if table == "nat" {
				if kind = table; hook == "prerouting" || hook == "output" {
					priority = priorityDNAT
				}
			}
			l.bases = append(l.bases, nft.BaseChain{ChainID: id, Type: kind, Hook: hook, Priority: priority, Drops: policy == "DROP"})
		}
	case word == "-A":
		var text string
		id.Chain, text, _ = strings.Cut(rest, " ")
		if l.used && names.IsOurs(names.Table(table), id.Chain) { // There may be very many.
			return
		}
		l.rules[id] = append(l.rules[id], func(p *packet) rule { return judgeText(text, p, l.sets) })
	}
}

// judgeText judges a rule as iptables-save prints it, with the sets that it may ask.
func judgeText(text string, p *packet, s *sets) rule {
	j := textJudgement{judgement: judging(p), sets: s}
	words, err := restore.Words(text)
	if err != nil { // No variant prints that.
		j.unknown("")
		return j.result()
	}
	for len(words) > 0 && j.match != no {
		option := words[0]
		if option == "!" {
			j.invert, words = true, words[1:]
			continue
		}
		n := 1 // It and its arguments, which don't begin with a dash, but for a comment's text.
		for n < len(words) && (option == "--comment" && n == 1 || words[n] != "!" && !strings.HasPrefix(words[n], "-")) {
			n++
		}
		if (option == "-j" || option == "-g") && n > 1 { // All that follows belongs to the target.
			j.target(option, words[1:])
			break
		}
		j.option(option, append(words[1:n:n], "", "")) // So that two are there.
		j.invert, words = false, words[n:]
	}
	return j.result()
}

// textJudgement is a judgement of a rule as iptables-save prints it.
type textJudgement struct {
	judgement
	sets *sets
	// invert says that a "!" stands before the option, and module is the match of which it is.
	invert bool
	module string
}

// option judges an option by its arguments.
func (j *textJudgement) option(option string, arguments []string) {
	argument := arguments[0]
	switch option {
	case "--comment":
	case "-m":
		if j.module = argument; strings.HasSuffix(argument, "limit") { // It may be what drops what is too much.
			j.limited = true
			j.unknown(argument)
		}
	case "--tcp-flags":
		j.inFlags(tcpFlags(argument), tcpFlags(arguments[1]), j.invert)
	case "--match-set":
		var sources []bool
		for _, part := range strings.Split(arguments[1], ",") {
			sources = append(sources, part == "src")
		}
		j.inSet(j.sets, argument, sources, j.invert)
	case "--mark":
		if value, mask, err := restore.ParseMark(argument); err == nil && j.module == "mark" {
			j.inMark(value, mask, j.invert)
		} else {
			j.unknown(j.module + " " + not(j.invert) + argument)
		}
	case "-p":
		j.holds((argument == protocolName(j.packet.protocol) || protocols[argument] == j.packet.protocol) != j.invert, "meta l4proto "+not(j.invert)+argument)
	case "-s", "-d", "--ctorigdst":
		j.within(option, argument)
	case "-i", "-o":
		j.device(option, map[string]string{"-i": j.packet.in, "-o": j.packet.out}[option], argument, j.invert)
	case "--dport", "--dports", "--sport", "--sports", "--ctorigdstport":
		j.ofPorts(option, argument)
	case "--ctstate", "--state":
		j.inState(states(argument), j.invert)
	case "--icmp-type":
		kind, codes := icmpType(argument)
		j.icmp(kind, codes, j.invert)
	case "--dst-type":
		if argument != "LOCAL" {
			j.unknown("")
			return
		}
		j.toType(1<<typeLocal, j.invert)
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
func (j *textJudgement) within(option, text string) {
	to, err := netip.ParsePrefix(text)
	if addr, single := netip.ParseAddr(text); single == nil {
		to, err = xtables.Single(addr), nil
	}
	switch {
	case err != nil:
		j.unknown("")
	case option == "-s":
		j.addresses(j.packet.src, "saddr", to, j.invert)
	case option == "-d":
		j.addresses(j.packet.dst, "daddr", to, j.invert)
	default:
		j.firstTo(to, j.invert)
	}
}

// ofPorts judges an option for ports.
func (j *textJudgement) ofPorts(option, text string) {
	list, ok := portRanges(text)
	switch {
	case !ok, option == "--ctorigdstport" && len(list) != 1:
		j.unknown("")
	case option == "--ctorigdstport":
		j.firstToPort(list[0], j.invert)
	case strings.HasPrefix(option, "--s"):
		j.ports(j.packet.src, "sport", list, j.invert)
	default:
		j.ports(j.packet.dst, "dport", list, j.invert)
	}
}

// target judges what -j or -g has behind it.
func (j *textJudgement) target(option string, words []string) {
	if option == "-g" {
		j.ends = []end{{verdict: "goto", to: words[0]}}
		return
	}
	name, options := words[0], words[1:]
	j.jump(name)
	switch {
	case name == "NOTRACK", name == "CT" && slices.Contains(options, "--notrack"):
		j.ends = []end{{verdict: notrack}}
	case name == "REDIRECT" && len(options) == 2 && options[0] == "--to-ports":
		if list, ok := portRanges(strings.ReplaceAll(options[1], "-", ":")); ok {
			j.ends[0].port = list[0][0]
		}
	case (name == "SNAT" || name == "DNAT") && len(options) > 1 && strings.HasPrefix(options[0], "--to-"):
		if j.ends[0].addr, _ = netip.ParseAddr(options[1]); !j.ends[0].addr.IsValid() { // It may have a port.
			at, _ := netip.ParseAddrPort(options[1])
			j.ends[0].addr = at.Addr()
		}
	case name == "CONNMARK" && slices.Contains(options, "--restore-mark"):
		bits := unmarked.known
		if i := slices.Index(options, "--nfmask"); i >= 0 && i+1 < len(options) {
			if n, err := strconv.ParseUint(options[i+1], 0, 32); err == nil {
				bits = uint32(n)
			}
		}
		j.restoreMark(bits)
	case name == "MARK":
		j.forgetMark(unmarked.known)
		if len(options) == 2 && options[0] == "--set-xmark" {
			if value, mask, err := restore.ParseMark(options[1]); err == nil {
				j.setMark(value, mask)
			}
		}
	}
}

// device adds that the packet comes or leaves by an interface of a name, or of one that begins with what is before a "+".
func (j *judgement) device(option, is, want string, invert bool) {
	text := option + " " + not(invert) + want
	if is == "" {
		j.unknown(text)
		return
	}
	prefix, many := strings.CutSuffix(want, "+")
	j.holds((is == want || many && strings.HasPrefix(is, prefix)) != invert, text)
}

// jump is what -j TARGET does.
func (j *judgement) jump(target string) {
	switch target {
	case "DROP", "REJECT", "ACCEPT", "RETURN":
		j.ends = []end{{verdict: strings.ToLower(target)}}
	case "NFQUEUE", "TPROXY", "SYNPROXY":
		j.ends = []end{{verdict: "accept"}}
	default:
		switch {
		case translating[target]:
			j.ends = []end{{verdict: translates, to: target}}
		case target == "TCPMSS":
			j.clamps = true
		case !nonTerminal[target]:
			j.ends = []end{{verdict: "jump", to: target}}
		}
	}
}

// portRanges reads such as 80,443,8000:8100.
func portRanges(text string) ([]portRange, bool) {
	var out []portRange
	for _, part := range strings.Split(text, ",") {
		first, last, is := strings.Cut(part, ":")
		if !is {
			last = first
		}
		a, errA := strconv.ParseUint(first, 10, 16)
		b, errB := strconv.ParseUint(last, 10, 16)
		if errA != nil || errB != nil {
			return nil, false
		}
		out = append(out, portRange{uint16(a), uint16(b)})
	}
	return out, true
}

// tcpFlags reads such as FIN,SYN,RST,ACK.
func tcpFlags(text string) (out byte) {
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"} {
		if slices.Contains(strings.Split(text, ","), name) || text == "ALL" {
			out |= 1 << i
		}
	}
	return out
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
