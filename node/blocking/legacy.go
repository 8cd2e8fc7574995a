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

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/nft"
	"nodeproxy/kernel/xtables"
	"nodeproxy/plan"
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
	j := judging(p)
	words := split(text)
	next := func(i int) string {
		if i+1 < len(words) {
			return words[i+1]
		}
		return ""
	}
	invert, module := false, ""
	for i := 0; i < len(words) && j.match != no; i++ {
		argument := next(i)
		switch words[i] {
		case "!":
			invert = true
			continue
		case "--comment":
			i++ // It may look like an option.
			continue
		case "-m":
			module = argument
		case "--tcp-flags":
			j.inFlags(tcpFlags(argument), tcpFlags(next(i+1)), invert)
		case "--match-set":
			var sources []bool
			for _, part := range strings.Split(next(i+1), ",") {
				sources = append(sources, part == "src")
			}
			j.inSet(s, argument, sources, invert)
		case "--mark":
			if value, mask, ok := masked(argument); ok && module == "mark" {
				j.inMark(value, mask, invert)
			} else {
				j.unknown(module + " " + not(invert) + argument)
			}
		case "-p":
			j.holds((argument == protocolName(p.protocol)) != invert, "meta l4proto "+not(invert)+argument)
		case "-s", "-d":
			to, err := netip.ParsePrefix(argument)
			if err != nil {
				j.unknown("")
				break
			}
			if words[i] == "-s" {
				j.addresses(p.src, "saddr", to, invert)
			} else {
				j.addresses(p.dst, "daddr", to, invert)
			}
		case "-i", "-o":
			j.device(words[i], map[string]string{"-i": p.in, "-o": p.out}[words[i]], argument, invert)
		case "--dport", "--dports", "--sport", "--sports":
			s, word := p.dst, "dport"
			if strings.HasPrefix(words[i], "--s") {
				s, word = p.src, "sport"
			}
			if list, ok := portRanges(argument); ok {
				j.ports(s, word, list, invert)
			} else {
				j.unknown("")
			}
		case "--ctstate", "--state":
			j.inState(states(argument), invert)
		case "--ctorigdst":
			to, err := netip.ParsePrefix(argument)
			if addr, single := netip.ParseAddr(argument); single == nil {
				to, err = xtables.Single(addr), nil
			}
			if err != nil {
				j.unknown("")
				break
			}
			j.firstTo(to, invert)
		case "--ctorigdstport":
			if list, ok := portRanges(argument); ok && len(list) == 1 {
				j.firstToPort(list[0], invert)
			} else {
				j.unknown("")
			}
		case "--dst-type":
			if argument == "LOCAL" {
				j.toType(1<<typeLocal, invert)
			} else {
				j.unknown("")
			}
		case "-j":
			j.jump(argument)
			if argument == "NOTRACK" || argument == "CT" && slices.Contains(words[i:], "--notrack") {
				j.ends = []end{{verdict: notrack}}
			}
			if argument == "MARK" || argument == "CONNMARK" && slices.Contains(words[i:], "--restore-mark") {
				j.forgetMark()
			}
			if value, mask, ok := masked(words[len(words)-1]); ok && argument == "MARK" && words[len(words)-2] == "--set-xmark" {
				j.setMark(value, mask)
			}
			return j.result() // What follows belongs to the target.
		case "-g":
			j.ends = []end{{"goto", argument}}
			return j.result()
		default: // Its arguments, if any, don't begin with a dash.
			j.unknown("")
		}
		invert = false
		for i+1 < len(words) && words[i+1] != "!" && !strings.HasPrefix(words[i+1], "-") {
			i++
		}
	}
	return j.result()
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
			j.ends = []end{{translates, target}}
		case !nonTerminal[target]:
			j.ends = []end{{"jump", target}}
		}
	}
}

// split splits a rule into words, of which those with blanks are in quotes.
func split(text string) []string {
	var out []string
	var word strings.Builder
	quoted, escaped, begun := false, false, false
	for _, c := range text {
		switch {
		case escaped:
			word.WriteRune(c)
			escaped = false
		case c == '\\':
			escaped = true
		case c == '"':
			quoted, begun = !quoted, true
		case c == ' ' && !quoted:
			if begun {
				out = append(out, word.String())
			}
			word.Reset()
			begun = false
		default:
			word.WriteRune(c)
			begun = true
		}
	}
	if begun {
		out = append(out, word.String())
	}
	return out
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

// masked reads such as 0x1/0xff.
func masked(text string) (value, mask uint32, ok bool) {
	first, last, is := strings.Cut(text, "/")
	if !is {
		last = "0xffffffff"
	}
	a, errA := strconv.ParseUint(first, 0, 32)
	b, errB := strconv.ParseUint(last, 0, 32)
	return uint32(a), uint32(b), errA == nil && errB == nil
}

// states reads such as RELATED,ESTABLISHED.
func states(text string) uint16 {
	mask := uint16(0)
	list := strings.Split(text, ",")
	for name, bit := range map[string]uint16{"INVALID": stateInvalid, "ESTABLISHED": stateEstablished, "NEW": stateNew, "SNAT": stateSNAT, "DNAT": stateDNAT} {
		if slices.Contains(list, name) {
			mask |= bit
		}
	}
	return mask
}
