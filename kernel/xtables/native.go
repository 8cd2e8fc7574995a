package xtables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"nodeproxy/kernel/names"
	"nodeproxy/plan"
)

// Anybody may add rules to the tables of the nft variant by nft, and what iptables knows no match or target for (masquerade,
// ct state, log, reject, fib and others) makes its programs refuse the whole table: iptables-save prints a comment in place of it,
// and ends without an error. Each chain for itself can still be listed, unless it is the one with such a rule; and iptables-restore
// writes all of them, but for the removal of single rules: it fails where such a rule comes before. So such a table is read chain by chain, in one run of iptables-restore, which takes "-S CHAIN" among its
// input; of the chains with such rules, the kernel is asked, and from them, rules are removed by their handles.

// NativeRules tells of a table that holds rules which only nft can read.
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

// tellNative tells of native rules, once.
func (t *Program) tellNative(tbl names.Table, chains []string) {
	if slices.Equal(t.told[tbl], chains) {
		return
	}
	if t.told == nil {
		t.told = map[names.Table][]string{}
	}
	t.told[tbl] = chains
	if t.OnNativeRules != nil {
		t.OnNativeRules(NativeRules{t.Family, string(tbl), chains})
	}
}

// listTries is how often a table is listed that changes meanwhile, and mostNative how many chains with native rules are found by
// listing: each costs a run of a program. Of all other chains that are not ours, the kernel is asked then.
const listTries, MostNative = 3, 50

// saveByChain is save for a table that iptables-save does not print.
func (t *Program) saveByChain(ctx context.Context, tbl names.Table) (held Content, err error) {
	var native []string
	for range listTries {
		if held, native, err = t.listByChain(ctx, tbl, nil); err == nil {
			t.tellNative(tbl, native)
			return held, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("table %s holds rules that iptables can't read (nft list table %s %s shows them; they belong in a table "+
		"of their own), and listing its chains one by one failed; nothing is changed: %w", tbl, NftFamily(t.Family), tbl, err)
}

func NftFamily(f plan.Family) string {
	if f == plan.IPv6 {
		return "ip6"
	}
	return "ip"
}

// nativeChain is what iptables says of a chain with rules that it can't read.
var nativeChain = regexp.MustCompile("chain `([^']+)' in table `[^']+' is incompatible")

// listByChain lists a table chain by chain, and returns the chains with native rules too. With counters, each line of a program is
// passed on as well.
func (t *Program) listByChain(ctx context.Context, tbl names.Table, counters func(line string)) (Content, []string, error) {
	chains, err := NFTChains(t.Family, tbl)
	if err != nil {
		return nil, nil, err
	}
	// What is not ours comes first: it is there that native rules are to be expected, and each costs another run for what is left.
	slices.SortStableFunc(chains, func(a, b string) int {
		switch ours := names.IsOurs(tbl, a); {
		case ours == names.IsOurs(tbl, b):
			return 0
		case ours:
			return 1
		}
		return -1
	})
	held := Content{}
	var native, left []string
	ask := func(name string) error {
		rules, err := NFTRules(t.Family, tbl, name)
		held[name] = rules
		native = append(native, name)
		return err
	}
	for _, name := range chains {
		if len(name) <= names.MaxChainName {
			left = append(left, name)
		} else if err := ask(name); err != nil { // iptables takes no such name.
			return nil, nil, err
		}
	}
	for runs := 0; len(left) > 0; runs++ {
		err := t.listChains(ctx, tbl, left, func(line string) {
			if held.Add(line); counters != nil {
				counters(line)
			}
		}, counters != nil)
		if err == nil {
			break
		}
		i := -1
		if failed := (*ReadError)(nil); errors.As(err, &failed) {
			if m := nativeChain.FindStringSubmatch(failed.message); m != nil {
				i = slices.Index(left, m[1])
			}
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
		if _, listed := held[name]; !listed {
			return nil, nil, fmt.Errorf("%s did not list chain %s", t.RestorePath, name)
		}
	}
	slices.Sort(native)
	return held, native, nil
}

// listChains lists chains in one run. Where one of them can't be listed, those before it are.
func (t *Program) listChains(ctx context.Context, tbl names.Table, names []string, line func(string), counters bool) error {
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
	return t.read(ctx, t.RestorePath, in.String(), func(out io.Reader) error { return EachLine(out, line) }, "--noflush")
}

// deletion is a rule to remove from a chain with native rules.
type deletion struct {
	table       names.Table
	chain, rule string
}

// deletions splits input for iptables-restore into what that program can do and the removal of rules from chains with native rules,
// as far as is known from the last save.
func (t *Program) deletions(text string) (string, []deletion) {
	native := false
	for _, chains := range t.told {
		native = native || len(chains) > 0
	}
	if !native || !strings.Contains(text, "\n-D ") {
		return text, nil
	}
	var rest strings.Builder
	var out []deletion
	var in names.Table
	for line := range strings.Lines(text) {
		if name, is := strings.CutPrefix(line, "*"); is {
			in = names.Table(strings.TrimSpace(name))
		}
		if body, is := strings.CutPrefix(line, "-D "); is {
			if chain, rule, _ := strings.Cut(strings.TrimSuffix(body, "\n"), " "); slices.Contains(t.told[in], chain) {
				out = append(out, deletion{in, chain, rule})
				continue
			}
		}
		rest.WriteString(line)
	}
	return rest.String(), out
}

// delete removes rules by the handles that the kernel knows them by. One that is gone already is no error.
func (t *Program) delete(list []deletion) error {
	for _, d := range list {
		handle, err := t.handleOf(d)
		if err == nil && handle != 0 {
			err = t.deleteHandle(d, handle)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing %q from chain %s of table %s (%s): %w", d.rule, d.chain, d.table, t.Family, err)
		}
	}
	return nil
}

// handleOf returns the handle of the first rule that reads like one to remove; 0 if there is none.
func (t *Program) handleOf(d deletion) (handle uint64, err error) {
	err = nftDump(t.Family, unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, d.table, d.chain, func(attrs []byte) {
		if handle == 0 && nftRule(attrs) == d.rule {
			handle = ruleHandle(attrs)
		}
	})
	return handle, err
}

func (t *Program) deleteHandle(d deletion, handle uint64) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	tbl := &nftables.Table{Name: string(d.table), Family: nftables.TableFamily(nfProtocol(t.Family))}
	err = c.DelRule(&nftables.Rule{Table: tbl, Chain: &nftables.Chain{Name: d.chain, Table: tbl}, Handle: handle})
	if err != nil {
		return err
	}
	return c.Flush()
}

// nftChains are the chains of a table, as the kernel lists them.
func NFTChains(f plan.Family, t names.Table) ([]string, error) {
	var names []string
	err := nftDump(f, unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_NEWCHAIN, t, "", func(attrs []byte) {
		names = append(names, text0(attribute(attrs, attrChainName)))
	})
	return names, err
}

// nftRules are the rules of a chain, or with an empty name of all chains of a table, each as far as it can be read: whole where all
// that it has is a comment, the state NEW and a target, as the rules have that lead to our chains; else what it leads to.
func NFTRules(f plan.Family, t names.Table, chain string) ([]string, error) {
	var rules []string
	err := nftDump(f, unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, t, chain, func(attrs []byte) {
		rules = append(rules, nftRule(attrs))
	})
	return rules, err
}

// nftDump calls each with the attributes of all that a table, or chain, has of one kind.
func nftDump(f plan.Family, get, kind int, t names.Table, chain string, each func(attrs []byte)) error {
	const subsystem = unix.NFNL_SUBSYS_NFTABLES << 8
	r := nl.NewNetlinkRequest(subsystem|get, unix.NLM_F_DUMP)
	r.AddData(&nl.Nfgenmsg{NfgenFamily: nfProtocol(f), Version: nl.NFNETLINK_V0})
	r.AddData(nl.NewRtAttr(attrTable, nl.ZeroTerminated(string(t))))
	if chain != "" {
		r.AddData(nl.NewRtAttr(attrRuleChain, nl.ZeroTerminated(chain)))
	}
	list, err := r.Execute(unix.NETLINK_NETFILTER, uint16(subsystem|kind))
	if errors.Is(err, unix.ENOENT) { // The table or chain is not there.
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing table %s of nf_tables (%s): %w", t, f, err)
	}
	for _, m := range list {
		attrs := m[min(4, len(m)):] // behind the header
		if text0(attribute(attrs, attrTable)) == string(t) && (chain == "" || text0(attribute(attrs, attrRuleChain)) == chain) {
			each(attrs)
		}
	}
	return nil
}

// The attributes of rules and their expressions, as in linux/netfilter/nf_tables.h and nf_tables_compat.h.
const (
	attrRuleHandle      = 3
	attrRuleExpressions = 4
	attrExprName        = 1
	attrExprData        = 2
	attrMatchName       = 1
	attrMatchRevision   = 2
	attrMatchInfo       = 3
	attrImmediateData   = 2
	attrDataVerdict     = 2
	attrVerdictCode     = 1
	attrVerdictChain    = 2
)

// unreadMark begins what stands for a rule that can't be read. No rule as iptables prints it begins like that.
const UnreadMark = "# rule with handle "

// unread reports whether a rule stands for one that can't be read.
func Unread(rule string) bool { return strings.HasPrefix(rule, UnreadMark) }

// nftRule is the text of a rule, given its attributes.
func nftRule(attrs []byte) string {
	var words []string
	known, target := true, ""
	for _, element := range attributes(attribute(attrs, attrRuleExpressions)) {
		data := attribute(element, attrExprData)
		switch text0(attribute(element, attrExprName)) {
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
	raw := attribute(attrs, attrRuleHandle)
	if len(raw) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(raw)
}

// nftMatch is the text of a match of iptables: of a comment, or of the state NEW; else empty.
func nftMatch(data []byte) string {
	info := attribute(data, attrMatchInfo)
	switch text0(attribute(data, attrMatchName)) {
	case "comment":
		return NewRule().Comment(text0(info)).Text()
	case "conntrack":
		// struct xt_conntrack_mtinfo3: eight addresses, two times, a protocol and four ports come before what is to be matched.
		const flags, stateMask, stateNew, byState = 146, 150, 1 << 3, 1 << 0
		revision := attribute(data, attrMatchRevision)
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
	verdict := attribute(attribute(data, attrImmediateData), attrDataVerdict)
	code := attribute(verdict, attrVerdictCode)
	if len(code) != 4 {
		return ""
	}
	chain := text0(attribute(verdict, attrVerdictChain))
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
