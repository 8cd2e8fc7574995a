package xtables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/kernel/netlink"
	"nodeproxy/kernel/nft"
	"nodeproxy/plan"
)

// Anybody may add rules to the tables of the nft variant by nft, and what iptables knows no match or target for (masquerade,
// ct state, log, reject, fib and others) makes its programs refuse the whole table: iptables-save prints a comment in place of it,
// and ends without an error. Each chain for itself can still be listed, unless it is the one with such a rule; and iptables-restore
// writes all of them, but for the removal of single rules: it fails where such a rule comes before. So such a table is read chain by chain, in one run of iptables-restore, which takes "-S CHAIN" among its
// input; of the chains with such rules, the kernel is asked, and from them, rules are removed by their handles.

// NativeRules describes a table that holds rules which only nft can read.
type NativeRules struct {
	Family plan.Family
	Table  string
	// Chains are those with such rules; none, if there are no such rules any more.
	Chains []string
}

// String says what was found, for people.
func (n NativeRules) String() string {
	verb := "hold"
	if len(n.Chains) == 1 {
		verb = "holds"
	}
	return fmt.Sprintf("%s %s rules that only nft can read, so iptables-save shows nothing of the table", chainList(n.Chains), verb)
}

// chainList is such as "chains INPUT and OUTPUT".
func chainList(names []string) string {
	if len(names) == 1 {
		return "chain " + names[0]
	}
	last := len(names) - 1
	return "chains " + strings.Join(names[:last], ", ") + " and " + names[last]
}

// reportNative reports native rules, once.
func (t *Program) reportNative(tbl names.Table, chains []string) {
	t.nativeMu.Lock()
	same := slices.Equal(t.native[tbl], chains)
	if t.native == nil {
		t.native = map[names.Table][]string{}
	}
	t.native[tbl] = chains
	t.nativeMu.Unlock()
	if !same && t.OnNativeRules != nil {
		t.OnNativeRules(NativeRules{t.Family, string(tbl), chains})
	}
}

// listTries is how often a table is listed that changes meanwhile, and mostNative how many chains with native rules are found by
// listing: each costs a run of a program. Of all other chains that are not ours, the kernel is asked then.
const (
	listTries  = 3
	MostNative = 50
)

// saveByChain is Save for a table that iptables-save does not print, or not in time.
func (t *Program) saveByChain(ctx context.Context, tbl names.Table) (Content, error) {
	r, err := t.chainReader(tbl, nil)
	if err != nil {
		return nil, err
	}
	content, err := r.read(ctx, r.names)
	if err != nil {
		return nil, err
	}
	r.end()
	return content, nil
}

// nativeChain is what iptables says of a chain with rules that it can't read.
var nativeChain = regexp.MustCompile("chain `([^']+)' in table `[^']+' is incompatible")

// listByChain lists chains of a table, and returns those with native rules too. With counters, each line of a program is passed on as
// well.
func (t *Program) listByChain(
	ctx context.Context, tbl names.Table, chains []string, known []Content, counters func(line string),
) (Content, []string, error) {
	content := Content{}
	listed := reader{content: content, known: known}
	var native, left, ours []string
	ask := func(name string) error {
		rules, err := NFTRules(t.Family, tbl, name)
		if err == nil && len(rules) == 0 { // Of one that has gone, iptables says the same.
			var there []string
			if there, err = nftChains(t.Family, tbl); err == nil && !slices.Contains(there, name) {
				err = fmt.Errorf("chain %s has been removed", name)
			}
		}
		content[name] = rules
		native = append(native, name)
		return err
	}
	for _, name := range chains {
		if len(name) > names.MaxChainName { // iptables takes no such name.
			if err := ask(name); err != nil {
				return nil, nil, err
			}
		} else if names.IsOurs(tbl, name) {
			ours = append(ours, name)
		} else {
			left = append(left, name)
		}
	}
	// What is not ours comes first: it is there that native rules are to be expected, and each costs another run for what is left.
	left = append(left, ours...)
	for runs := 0; len(left) > 0; runs++ {
		err := t.listChains(ctx, tbl, left, func(line []byte) {
			if listed.add(line); counters != nil {
				counters(string(line))
			}
		}, counters != nil)
		if err == nil {
			break
		}
		i := -1
		if m := nativeChain.FindStringSubmatch(err.Error()); m != nil {
			i = slices.Index(left, m[1])
		}
		if i < 0 || runs > MostNative {
			return nil, nil, err
		}
		if err := ask(left[i]); err != nil {
			return nil, nil, err
		}
		for left = left[i+1:]; runs == MostNative && len(left) > 0 && !names.IsOurs(tbl, left[0]); left = left[1:] {
			if err := ask(left[0]); err != nil {
				return nil, nil, err
			}
		}
	}
	for _, name := range chains {
		if _, listed := content[name]; !listed {
			return nil, nil, fmt.Errorf("%s did not list chain %s", t.RestorePath, name)
		}
	}
	slices.Sort(native)
	return content, native, nil
}

// listChains lists chains in one run. Where one of them can't be listed, those before it are.
func (t *Program) listChains(ctx context.Context, tbl names.Table, names []string, line func([]byte), counters bool) error {
	list := "-S "
	if counters {
		list = "-v -S "
	}
	var in strings.Builder
	in.WriteString("*" + string(tbl) + "\n")
	for _, name := range names {
		in.WriteString(list + name + "\n")
	}
	in.WriteString("COMMIT\n")
	return t.read(ctx, t.RestorePath, in.String(), func(out io.Reader) error { return eachLine(out, line) }, "--noflush")
}

// deletion is a rule to remove from a chain with native rules.
type deletion struct {
	table       names.Table
	chain, rule string
}

// deletions splits input for iptables-restore into what that program can do and the removal of rules from chains with native rules,
// as far as is known from the last save.
func (t *Program) deletions(input Input) (Input, []deletion) {
	t.nativeMu.Lock()
	defer t.nativeMu.Unlock()
	native := false
	for _, chains := range t.native {
		native = native || len(chains) > 0
	}
	if !native || !input.contains("-D ") {
		return input, nil
	}
	var rest strings.Builder
	var out []deletion
	var in names.Table
	for raw := range input {
		line := string(raw)
		if name, is := strings.CutPrefix(line, "*"); is {
			in = names.Table(strings.TrimSpace(name))
		}
		if body, is := strings.CutPrefix(line, "-D "); is {
			if chain, rule, _ := strings.Cut(strings.TrimSuffix(body, "\n"), " "); slices.Contains(t.native[in], chain) {
				out = append(out, deletion{in, chain, rule})
				continue
			}
		}
		rest.WriteString(line)
	}
	return Text(rest.String()), out
}

// delete removes rules by the handles that the kernel knows them by. One that is gone already is no error.
func (t *Program) delete(list []deletion) error {
	for _, d := range list {
		handle, err := t.handleOf(d)
		if err == nil && handle != 0 {
			err = nft.DeleteRule(t.Family, string(d.table), d.chain, handle)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing %q from chain %s of table %s (%s): %w", d.rule, d.chain, d.table, t.Family, err)
		}
	}
	return nil
}

// handleOf returns the handle of the first rule that reads like one to remove; 0 if there is none.
func (t *Program) handleOf(d deletion) (uint64, error) {
	handles, err := nft.Rules(t.Family, string(d.table), d.chain, func(attrs []byte) uint64 {
		if nftRule(attrs) == d.rule {
			return ruleHandle(attrs)
		}
		return 0
	})
	return cmp.Or(handles...), err
}

// nftChains returns the chains of a table, as the kernel lists them.
func nftChains(f plan.Family, t names.Table) ([]string, error) { return nft.Chains(f, string(t)) }

// NFTRules returns the rules of a chain, or with an empty name of all chains of a table, each as far as it can be read: completely if
// it consists of a comment, the state NEW and a target, like the rules that lead to our chains; otherwise only its target.
func NFTRules(f plan.Family, t names.Table, chain string) ([]string, error) {
	return nft.Rules(f, string(t), chain, nftRule)
}

// UnreadMark begins what stands for a rule that can't be read. No rule as iptables prints it begins like that.
const UnreadMark = "# rule with handle "

// Unread reports whether a rule stands for one that can't be read.
func Unread(rule string) bool { return strings.HasPrefix(rule, UnreadMark) }

// nftRule is the text of a rule, given its attributes.
func nftRule(attrs []byte) string {
	var words []string
	known, target := true, ""
	for _, element := range netlink.Attributes(netlink.Attribute(attrs, unix.NFTA_RULE_EXPRESSIONS)) {
		data := netlink.Attribute(element, unix.NFTA_EXPR_DATA)
		switch netlink.Text(netlink.Attribute(element, unix.NFTA_EXPR_NAME)) {
		case "counter":
		case "match":
			text := nftMatch(data)
			known = known && text != "" && target == ""
			words = append(words, text)
		case "immediate":
			target = nftVerdict(data)
			known = known && target != ""
		default:
			known = false
		}
	}
	if known && target != "" {
		return strings.Join(append(words, target), " ")
	}
	return strings.TrimSpace(fmt.Sprintf("%s%d %s", UnreadMark, ruleHandle(attrs), target))
}

// ruleHandle is what the kernel knows a rule by; 0 is no rule's.
func ruleHandle(attrs []byte) uint64 {
	raw := netlink.Attribute(attrs, unix.NFTA_RULE_HANDLE)
	if len(raw) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(raw)
}

// nftMatch is the text of a match of iptables: of a comment, or of the state NEW; else empty.
func nftMatch(data []byte) string {
	info := netlink.Attribute(data, unix.NFTA_MATCH_INFO)
	switch netlink.Text(netlink.Attribute(data, unix.NFTA_MATCH_NAME)) {
	case "comment":
		return NewRule().Comment(netlink.Text(info)).Text()
	case "conntrack":
		// struct xt_conntrack_mtinfo3: eight addresses, two times, a protocol and four ports come before what is to be matched.
		const flags, stateMask, stateNew, byState = 146, 150, 1 << 3, 1 << 0
		revision := netlink.Attribute(data, unix.NFTA_MATCH_REV)
		if len(revision) != 4 || binary.BigEndian.Uint32(revision) != 3 || len(info) < stateMask+2 {
			return ""
		}
		word := func(at int) uint16 { return binary.NativeEndian.Uint16(info[at:]) }
		if word(flags) == byState && word(flags+2) == 0 && word(stateMask) == stateNew {
			return "-m conntrack --ctstate NEW"
		}
	}
	return ""
}

// nftVerdict is the text of a verdict; empty if the data is none.
func nftVerdict(data []byte) string {
	const drop, accept, jump, goTo, back = 0, 1, -3, -4, -5
	verdict := netlink.Attribute(netlink.Attribute(data, unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT)
	code := netlink.Attribute(verdict, unix.NFTA_VERDICT_CODE)
	if len(code) != 4 {
		return ""
	}
	chain := netlink.Text(netlink.Attribute(verdict, unix.NFTA_VERDICT_CHAIN))
	switch int32(binary.BigEndian.Uint32(code)) {
	case drop:
		return "-j DROP"
	case accept:
		return "-j ACCEPT"
	case back:
		return "-j RETURN"
	case jump:
		return "-j " + chain
	case goTo:
		return "-g " + chain
	}
	return ""
}
